"""`overlap1f1b report` inside this process."""

from __future__ import annotations

from tests.cli.inside import Verb

report = Verb("report")
content, refused = report.content, report.refused
