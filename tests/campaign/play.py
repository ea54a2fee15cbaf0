"""A case on the ranks that it asks for."""

import torch

from tests.campaign import combined, dualpipe, engine, hidden, pipelining
from tests.campaign.draw import Case, Hidden

_PLAYS = {
    "engine": engine.play,
    "combined": combined.play,
    "dualpipe": dualpipe.play,
    "pipelining": pipelining.play,
    "hidden": hidden.play,
}


def play(rank: int, size: int, case: Case | Hidden) -> list[str]:
    """Return the problems of a case on this rank."""
    torch.set_default_dtype(torch.float64 if isinstance(case, Case) and case.double else torch.float32)
    try:
        return _PLAYS[case.kind](rank, size, case)
    finally:
        torch.set_default_dtype(torch.float32)
