"""Streams of random numbers."""

from __future__ import annotations

import torch

from overlap1f1b.engine.run.random import RandomStream, generators_of

CPU = generators_of(torch.device("cpu"))


def draw(stream: RandomStream) -> list[float]:
    with stream:
        return torch.rand(3).tolist()


def test_streams_are_not_changed_by_what_runs_between() -> None:
    def numbers(*, between: bool) -> list[list[float]]:
        torch.manual_seed(1)
        a, b = RandomStream(5, CPU), RandomStream(6, CPU)
        found = []
        for stream in (a, b, a):
            found.append(draw(stream))
            if between:
                torch.rand(7)
        return found

    assert numbers(between=True) == numbers(between=False)
    first, other, second = numbers(between=False)
    assert len({tuple(first), tuple(other), tuple(second)}) == 3


def test_the_generators_go_on_as_if_no_stream_had_drawn() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2).tolist()
    torch.manual_seed(1)
    draw(RandomStream(5, CPU))
    assert torch.rand(2).tolist() == expected


def test_a_stream_repeats_itself() -> None:
    for seed in (5, None):
        stream = RandomStream(seed, CPU)
        draw(stream)
        twin = stream.again()
        assert draw(twin) == draw(stream)
