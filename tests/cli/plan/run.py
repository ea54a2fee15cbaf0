"""`overlap1f1b plan` inside this process."""

from __future__ import annotations

from pathlib import Path

from tests.cli.inside import Verb

plan = Verb("plan")
content, refused = plan.content, plan.refused
ROOT = Path(__file__).parents[3]
