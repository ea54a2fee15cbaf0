"""``python -m overlap1f1b``, and what the installed command calls."""

import signal
import sys


def run() -> int:
    """The command line, quiet when Ctrl-C comes while it is still being imported; returns the exit status."""
    try:
        from overlap1f1b.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(run())
