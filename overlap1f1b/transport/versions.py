"""The releases of torch that the project runs on. The module does not load torch."""

import re
from importlib.metadata import PackageNotFoundError, version

TORCH = ("2.11", "2.16")
"""The first release that the tests run on, and the first one that they do not."""


def check_torch() -> None:
    """Raise ``ValueError`` if torch is installed in a release that the tests do not run on.

    Floors that read private attributes of torch call this before they import them.
    """
    try:
        found = version("torch")
    except PackageNotFoundError:  # a build without metadata
        return
    first, beyond = TORCH
    if not release(first) <= release(found) < release(beyond):
        raise ValueError(f"torch {found}; allowed: {first} to before {beyond}")


def release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, without a suffix."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
