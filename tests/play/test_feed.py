"""Batches, feeds, and the microbatches that are made of them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine, Feed, Stage
from overlap1f1b.play.feed import Microbatches, feed_batch, split_batch
from overlap1f1b.play.install import Installation
from overlap1f1b.play.microbatch import is_absent
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport.mesh import Mesh
from tests import models
from tests.engines import make
from tests.ranks import over

X = torch.arange(12.0).view(6, 2)


def test_a_batch_is_split_along_its_first_dimension() -> None:
    one, two = split_batch(X, 3, "inputs"), split_batch((X, X + 1), 2, "inputs")
    assert [one(index)[0].tolist() for index in range(3)] == [part.tolist() for part in X.chunk(3)]
    assert [[t.tolist() for t in two(index)] for index in range(2)] == [
        [a.tolist(), (a + 1).tolist()] for a in X.chunk(2)
    ]
    assert one(0)[0].data_ptr() == X.data_ptr()  # nothing is copied


def test_a_list_has_an_entry_a_microbatch_of_any_size() -> None:
    part = split_batch([X[:1], (X[1:4], X[:2])], 2, "inputs")
    assert [[len(t) for t in part(index)] for index in range(2)] == [[1], [3, 2]]


def test_inputs_that_have_names_come_in_their_order_and_may_be_absent() -> None:
    ids, mask = split_batch({"mask": None, "ids": X}, 2, "inputs", ("ids", "mask"))(1)
    assert ids.tolist() == X[3:].tolist()
    assert is_absent(mask)


def test_a_loss_of_outputs_alone_has_no_target() -> None:
    assert split_batch((), 2, "target")(1) == ()
    with pytest.raises(ValueError, match=r"no target on a rank .*; allowed: this rank's batch, or \(\) for a loss of"):
        split_batch(None, 2, "target")


@pytest.mark.parametrize(
    ("batch", "names", "message"),
    [
        (None, (), "no inputs on a rank that needs them"),
        (X, (), "inputs: a batch of 6 cannot be split into 4 microbatches; allowed: a multiple of 4"),
        (torch.tensor(1.0), (), "^inputs: a single number; allowed: a batch of 4 rows, or a multiple$"),
        (torch.empty(4, 2, device="meta"), (), "inputs on the meta device; allowed: tensors with values"),
        (X[:0], (), "^inputs: a batch of 0 cannot be split into 4 microbatches; allowed: a multiple of 4 above 0$"),
        (X.tolist(), (), "^inputs of type list; allowed: a tensor, a tuple of tensors, a list of either$"),
        ([X], (), "inputs: 1 microbatches for a program of 4"),
        ({"ids": X}, (), "inputs of type dict; allowed: a tensor, a tuple of tensors, a list of either"),
        ((X, None), (), "inputs of type tuple of Tensor, NoneType"),
        ((), (), "inputs: no tensor; allowed: at least one"),
        ({"ids": X}, ("ids", "mask"), "inputs named ids; allowed: exactly ids, mask"),
        ({"ids": None, "mask": None}, ("ids", "mask"), "inputs: no tensor; allowed: at least one"),
        ({"ids": 3, "mask": None}, ("ids", "mask"), "inputs: ids of type int; allowed: a tensor"),
    ],
)
def test_batches_that_cannot_be_split_are_named(batch: Any, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(batch, 4, "inputs", names)


def test_a_target_has_rows_for_those_of_the_inputs() -> None:
    """Else a loss that broadcasts would take any."""
    stages, program = {0: Stage([nn.Linear(2, 2)])}, build_schedule("sequential", microbatches=2)
    for rows, allowed in ((4, True), (8, True), (2, False), (6, False)):
        with (
            nullcontext()
            if allowed
            else pytest.raises(
                ValueError, match=f"target: a batch of {rows} beside inputs of 4; allowed: 4, or a multiple"
            )
        ):
            feed_batch(stages, program, Mesh(None), torch.rand(4, 2), torch.rand(rows, 2), loss_fn=models.loss_fn)


def test_shares_are_of_microbatches_or_of_tokens() -> None:
    stages, program = {0: Stage([nn.Linear(2, 2)])}, build_schedule("sequential", microbatches=3)

    def feed(count: Any) -> Feed:
        options: dict[str, Any] = {"loss_fn": models.loss_fn, "count_tokens": count}
        return feed_batch(stages, program, Mesh(None), X, X[:, :1], **options)

    even = feed(None)
    assert even.shares == dict.fromkeys(range(3), 1 / 3)
    assert even.aux_scale == 1 / 3
    uneven = feed(lambda target: int(target.sum() > 2) * 4)  # the first microbatch counts for nothing
    assert uneven.shares == {0: 0, 1: 0.5, 2: 0.5}
    assert uneven.arguments_of(0, 1)["loss_grad"] == 0.5
    assert uneven.arguments_of(0, 0)["loss_fn"] is not models.loss_fn  # undefined, a mean over nothing
    assert uneven.arguments_of(0, 0)["loss_fn"](torch.ones(2, requires_grad=True)).item() == 0


def test_microbatches_are_made_when_they_are_first_needed_and_know_their_neighbours() -> None:
    program = build_schedule("interleaved_1f1b", ranks=1, chunks=2, microbatches=2)
    stages = {number: Stage([nn.Linear(2, 2)], number=number) for number in range(2)}
    asked: list[tuple[int, int]] = []

    def arguments_of(stage: int, microbatch: int) -> dict[str, Any]:
        asked.append((stage, microbatch))
        return {"inputs": X} if stage == 0 else {"loss_fn": models.loss_fn}

    made = Microbatches(
        {n: Installation(one) for n, one in stages.items()},
        program,
        0,
        Feed(arguments_of, {0: 0.5, 1: 0.5}, None),
        seed=0,
        grad=True,
        loss_scale=1.0,
    )
    assert not made
    first, second = made.begin((0, 1)), made.begin((1, 1))
    assert (first.transfers.beside, second.transfers.beside) == ({Kind.I: second}, {Kind.F: first})
    assert asked == [(0, 1), (1, 1)]
    assert made.of_stage(1) == [second]


def test_a_feed_plays_losses_of_its_own() -> None:
    """An engine without a loss: each microbatch brings its own, unscaled."""
    model, (inputs, target) = models.build(), models.batch(3)
    losses, expected = [], {}
    for index, (x, y) in enumerate(zip(inputs.chunk(3), target.chunk(3), strict=True)):
        loss = models.loss_fn(model(x), y) * (index + 1)
        loss.backward()
        losses.append(loss.item())
    expected = models.gradients(model)
    model.zero_grad()

    def arguments_of(stage: int, microbatch: int) -> dict[str, Any]:
        def loss_fn(logits: Tensor) -> Tensor:
            return models.loss_fn(logits, target.chunk(3)[microbatch]) * (microbatch + 1)

        return {"inputs": inputs.chunk(3)[microbatch], "loss_fn": loss_fn, "return_outputs": True}

    engine = Engine(model, build_schedule("combined_1f1b", microbatches=3))
    played = engine.play(lambda: Feed(arguments_of, dict.fromkeys(range(3), 1.0), None))
    assert [loss.item() for loss in played.result.losses] == losses
    assert not models.equal(models.gradients(model), expected)
    assert [m.returned.kept[0].shape for m in played.microbatches.of_stage(0)] == [(2, 7, models.V)] * 3
    model.zero_grad()
    engine.play(lambda: Feed(arguments_of, dict.fromkeys(range(3), 1.0), aux_scale=1.0), loss_scale=4.0)
    assert not models.equal({name: grad / 4 for name, grad in models.gradients(model).items()}, expected)
    with pytest.raises(ValueError, match="no loss_fn on a rank with the last stage"):
        engine.step(inputs, target=target)


@over(2)
def test_the_loss_is_needed_where_the_last_stage_is(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program, (inputs, target) = build_schedule("1f1b", ranks=2, microbatches=2), models.batch(2)
    engine = make(models.build(), program, mesh=mesh, loss_fn=models.loss_fn if rank else None, timeout=20)
    engine.step(inputs, target=target)
    assert any(p.grad is not None for p in engine.parameters())


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (None, "a feed of type NoneType; allowed: a Feed"),
        (Feed(lambda stage, microbatch: {}, {}, None), r"a feed without shares of microbatches \[0, 1\]"),
        (Feed(lambda stage, microbatch: {}, {0: 1.0, 1: 1.0}, None), "a feed gives microbatch 0 no inputs"),
        (Feed(lambda stage, microbatch: {"inputs": X}, {0: 1.0, 1: 1.0}, None), "a feed gives microbatch 0 no loss_fn"),
        (Feed(lambda stage, microbatch: {"input": X}, {0: 1.0, 1: 1.0}, None), "a feed gives input; allowed: inputs, "),
    ],
)
def test_feeds_that_lack_something_are_refused(feed: Any, message: str) -> None:
    engine = Engine(nn.Sequential(nn.Linear(2, 2)), build_schedule("sequential", microbatches=2))
    with pytest.raises(ValueError, match=message):
        engine.play(lambda: feed)
