"""Streams of random numbers."""

import torch
from torch import Tensor, nn

from overlap1f1b import build_schedule
from overlap1f1b.cut.random import Draws, generators_of
from overlap1f1b.play.random import RandomStream
from tests import models
from tests.engines import COSTS, make

CPU = generators_of(torch.device("cpu"))


def draw(stream: RandomStream) -> list[float]:
    with stream:
        return torch.rand(3).tolist()


def test_the_generators_go_on_as_if_no_stream_had_drawn() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2).tolist()
    torch.manual_seed(1)
    draw(RandomStream(5, CPU))
    assert torch.rand(2).tolist() == expected


def test_a_block_that_does_not_draw_leaves_the_generators_alone() -> None:
    stage = [nn.Linear(2, 2), nn.Dropout()]
    draws, stream = Draws(stage, CPU), RandomStream(5, CPU)
    for block, drawn in ((0, 0), (1, 3)):
        with draws.within(block, stream, always=False):
            torch.rand(drawn)
        draws.forwarded(block)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with draws.within(0, stream, always=False):
        assert torch.equal(torch.get_rng_state(), before)
    with draws.within(1, stream, always=False):
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_block_does_in_evaluation_says_nothing_of_training() -> None:
    dropout = nn.Dropout()
    draws, stream = Draws([dropout], CPU), RandomStream(5, CPU)
    for _ in range(2):
        dropout.train(not dropout.training)  # first evaluation, then training
        torch.manual_seed(1)
        before = torch.get_rng_state()
        with draws.within(0, stream, always=False):
            dropout(torch.ones(4))
        draws.forwarded(0)
        assert torch.equal(torch.get_rng_state(), before)


class LateNoise(nn.Module):
    """Adds noise once ``on``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.on = nn.Linear(width, width), False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + torch.rand_like(y) if self.on else y


def test_a_block_that_begins_to_draw_has_its_streams_from_the_next_step_on() -> None:
    found = []
    for overlap in ("serial", 3):
        torch.manual_seed(0)
        noises = [LateNoise(models.H), LateNoise(models.V)]
        embedding, *rest = models.build()
        model = nn.Sequential(embedding, noises[0], *rest, noises[1])
        engine = make(model, build_schedule("combined_1f1b", microbatches=4), overlap=overlap, costs=COSTS)
        inputs, target = models.batch(4)
        for step in range(3):
            for noise in noises:
                noise.on = step > 0
            torch.manual_seed(step)
            model.zero_grad()
            result = engine.step(inputs, target=target)
        found.append(models.gradients(model) | {"losses": torch.stack(result.losses)})
    assert not models.equal(*found)
