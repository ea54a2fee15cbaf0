"""What ``overlap1f1b doctor`` takes."""

from __future__ import annotations

from dataclasses import dataclass

from overlap1f1b.cli.options import LONGEST
from overlap1f1b.cli.output import check_json
from overlap1f1b.transport.limits import DOCTOR_LIMIT_S


@dataclass(frozen=True)
class DoctorOptions:
    """Look for what could keep exchanges from being hidden here: one line a finding, and what to do about it.

    The exit status is 1 where something fails, 0 otherwise. For example

      overlap1f1b doctor

      overlap1f1b doctor --json -                          # for scripts
    """

    timeout: float = DOCTOR_LIMIT_S
    """Seconds that two local ranks are given to measure the link between them."""
    json: str | None = None
    """File for the findings as JSON, or - for standard output."""


def check_doctor(options: DoctorOptions) -> None:
    """Raises ``ValueError`` for options that nothing can be done with."""
    if not 0 < options.timeout <= LONGEST:
        raise ValueError(f"--timeout {options.timeout}; allowed: more than 0, at most {LONGEST}")
    if options.json is not None:
        check_json(options.json)
