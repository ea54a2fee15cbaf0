"""``python -m overlap1f1b``."""

import sys

from overlap1f1b.cli.main import main

sys.exit(main())
