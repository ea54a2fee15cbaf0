"""Names with options of their own."""

import pytest

from overlap1f1b.cli.plan.command import parse
from overlap1f1b.simulation.search import Candidate


@pytest.mark.parametrize(
    ("text", "candidate"),
    [
        ("1f1b", Candidate("1f1b")),
        ("combined_1f1b:chunks=2", Candidate("combined_1f1b", {"chunks": 2})),
        ("1f1b: extra-warmup = 2", Candidate("1f1b", {"extra_warmup": 2})),
        ("zb_h1:chunks=3,group_size=8", Candidate("zb_h1", {"chunks": 3, "group_size": 8})),
        ("1f1b:overlap=pairs", Candidate("1f1b", overlap="pairs")),
        ("1f1b:overlap=2", Candidate("1f1b", overlap=2)),
    ],
)
def test_parse(text: str, candidate: Candidate) -> None:
    assert parse(text) == candidate
    assert parse(str(candidate)) == candidate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1b:chunks", "'chunks'; allowed: chunks=NUMBER"),
        ("1f1b:chunks=two", "'chunks=two'; allowed: chunks=NUMBER"),
        ("1f1b:ranks=2", "'ranks=2'; allowed: chunks=NUMBER"),
        ("1f1b:overlap=most", "overlap='most'; allowed: serial"),
        ("1f1b:overlap=0", "overlap='0'; allowed: serial"),
        ("1f1b:chunks=2,,", ": an option is missing; allowed: "),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        parse(text)
    assert message in str(error.value)
