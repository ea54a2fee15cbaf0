"""A long run in short: nothing that a rank holds grows."""

from pathlib import Path

import pytest

from tests.ranks import run
from tests.soak import soaked


@pytest.mark.wide
def test_nothing_grows(tmp_path: Path) -> None:
    for windows in run(soaked, 2, 300, str(tmp_path), timeout=300):
        first, last = windows[3], windows[-1]
        assert (last.files, last.threads) == (first.files, first.threads), windows
        assert last.megabytes < first.megabytes + 8, windows
