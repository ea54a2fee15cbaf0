"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it.

    Args:
        name: What was looked at.
        status: ``fail`` where training cannot work or nothing can be hidden; ``warn`` where something may not work.
        value: As measured.
        advice: Empty where there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    advice: str = ""
