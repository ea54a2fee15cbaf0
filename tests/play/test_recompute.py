"""What is dropped and computed again: the same gradients, the same exchanges, less memory."""

import gc
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from overlap1f1b.learn.memory import peak_bytes
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.moe.experts import WeightsIn
from overlap1f1b.plan import RECOMPUTES, Overlap, Recompute
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import build_exchange
from overlap1f1b.transport.suspension import Stack
from tests import models
from tests.engine.test_engine import Delayed, step
from tests.engines import COSTS, make
from tests.pauses import pauses
from tests.play.plain import batch, engine_of
from tests.play.test_crossing import Block as Layers
from tests.play.test_crossing import Exchanging
from tests.ranks import Ranks, over
from tests.tiers import wide
from tests.transport.test_suspension import CONTEXTS, Wrapped

MODES: list[Recompute] = ["experts", "attention", "block"]
PROGRAMS = ["sequential", "combined_1f1b", "zb_h1"]
OVERLAPS: list[Overlap] = ["serial", "pairs", 1, 3]


def gradients(
    mode: Recompute, name: str = "combined_1f1b", overlap: Overlap = 3, microbatches: int = 3, **options: Any
) -> dict[str, Tensor]:
    model = models.build(**options)
    program = build_schedule(name, microbatches=microbatches)
    torch.manual_seed(2)
    step(model, program, overlap, models.batch(microbatches), recompute=mode, verify=False)
    return models.gradients(model)


@pytest.mark.parametrize(("expert_calls", "microbatches"), [(1, 3), (1, 1), pytest.param(2, 4, marks=pytest.mark.wide)])
def test_gradients_and_dropout_are_those_without(expert_calls: int, microbatches: int) -> None:
    """Uneven routing, an expert without tokens, a dense block and tied weights are in every case.

    Every program meets every overlap, and both meet every mode.
    """
    options: dict[str, Any] = {"expert_calls": expert_calls, "microbatches": microbatches, "dropout": 0.3, "tied": True}
    expected = gradients("none", "sequential", "serial", **options)
    for (first, name), (second, overlap) in product(enumerate(PROGRAMS), enumerate(OVERLAPS)):
        mode = MODES[(first + second + microbatches) % 3]
        assert not models.equal(gradients(mode, name, overlap, **options), expected), (name, overlap, mode)


class Checkpointed(models.Block):
    """Calls its experts inside a checkpoint."""

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return checkpoint(experts, tokens, indices, weights, use_reentrant=False)


class Changing(models.Block):
    """Changes what its experts return, of which a copy is kept where the block is computed again."""

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = experts(tokens, indices, weights)
        y += tokens
        return y


AROUND = {name: type("Block", (Wrapped,), {"context": staticmethod(context)}) for name, context in CONTEXTS.items()}
AROUND |= {"checkpoint": Checkpointed, "changed": Changing}


@pytest.mark.parametrize(
    ("name", "weights_in"),
    [
        *((name, "combine") for name in ("all", "no_grad", "checkpoint", "changed")),
        ("changed", "activation"),
        *(pytest.param(name, "combine", marks=pytest.mark.wide) for name in ("autocast", "modes")),  # "all" has both
    ],
)
def test_a_context_around_experts_is_entered_again(name: str, weights_in: WeightsIn) -> None:
    """A checkpoint around them is part of what is computed again."""
    block = AROUND[name]
    expected = gradients("none", block=models.Block if block is Checkpointed else block, weights_in=weights_in)
    for mode in MODES:
        assert not models.equal(gradients(mode, block=block, weights_in=weights_in), expected), mode


def test_hooks_fire_once_a_microbatch() -> None:
    class Hooked(models.Block):
        grads: list[Tensor]

        def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            y = experts(tokens, indices, weights) * 1.0
            y.register_hook(self.grads.append)
            return y

    Hooked.grads = []
    model, fired = models.build(block=Hooked), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    step(model, build_schedule("combined_1f1b", microbatches=3), 3, models.batch(3), recompute="block", verify=False)
    assert len(Hooked.grads) == 2 * 3  # blocks and microbatches
    assert {name: fired.count(name) for name in fired} == {name: 3 for name, _ in model.named_parameters()}


class Inner(nn.Module):
    """Keeps weak references to what is inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inside: list[Any] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(y() is not None for y in self.inside))
        y = self.first(x)
        self.inside.append(weakref.ref(y))
        return self.second(y)


@pytest.mark.parametrize(("mode", "kept"), [("none", 1), *wide(("experts", 1), ("attention", 0), ("block", 0))])
def test_what_is_inside_a_block_goes_with_its_forward(mode: Recompute, kept: int) -> None:
    inner, data = Inner(), torch.randn(10, 4)
    program = build_schedule("afab", microbatches=5)
    engine = make([inner], program, loss_fn=lambda y, _: y.sum(), costs=COSTS, recompute=mode)
    engine.step(data, target=data)
    assert inner.alive[:5] == [kept * earlier for earlier in range(5)]
    assert len(inner.alive) == 5  # what recomputation adds to a list is taken back


@pytest.mark.parametrize("weights_in", ["combine", "activation"])
def test_only_what_exchanges_brought_is_kept(weights_in: WeightsIn) -> None:
    """What one microbatch more holds until its backward: inputs of blocks, rows received and their sums, one of each
    for a token, though it has chosen four experts."""
    tokens, hidden, layers = 64, 128, 2  # of which the numbers of experts and places are a small part

    def peak(microbatches: int) -> int:
        sizes = {"layers": layers, "hidden": hidden, "intermediate": 64, "sequence": tokens, "top_k": 4}
        model = MoETransformer(MoEConfig(**sizes, weights_in=weights_in))
        program = build_schedule("afab", microbatches=microbatches)
        engine = make(model, program, overlap="serial", costs=COSTS, recompute="block", verify=False)
        data = torch.randint(256, (2, microbatches, tokens), generator=torch.Generator().manual_seed(1))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return peak_bytes(torch.device("cpu"), lambda: engine.step(data[0], target=data[1]))

    rows = layers * 3 + 1  # the last is the head's input
    assert rows <= (peak(4) - peak(3)) / (4 * tokens * hidden) < rows + 1


def test_what_is_recomputed_is_measured_and_evaluation_has_none_of_it() -> None:
    data, model = models.batch(3), models.build()
    engine = make(model, build_schedule("combined_1f1b", microbatches=3), recompute="block")
    for _ in range(3):
        engine.step(data[0], target=data[1])
    measured = {key[0] for key, cost in engine.costs.by_node.items() if key[0] in RECOMPUTES and cost > 0}  # type: ignore[operator]
    assert measured == RECOMPUTES
    before = models.gradients(model)
    losses = engine.evaluate(data[0], target=data[1]).losses
    plain = [models.loss_fn(model(x), y) for x, y in zip(data[0].chunk(3), data[1].chunk(3), strict=True)]
    assert torch.equal(torch.stack(losses), torch.stack(plain))
    assert not models.equal(models.gradients(model), before)


def test_a_forward_that_does_something_else_the_second_time_is_refused_by_name() -> None:
    class Fickle(models.Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x) if type(self).calls < 3 else x * 1.0

    model = models.build(block=Fickle)
    with pytest.raises(ValueError, match=r"block \d \(Fickle\) exchanges other rows when it is recomputed; allowed"):
        step(model, build_schedule("sequential", microbatches=2), 1, models.batch(2), recompute="attention")
    gc.collect()
    assert not [g for g in gc.get_objects() if type(g) is Stack and not g.dead and g]
    with pytest.raises(ValueError, match=r"recompute='all'; allowed: none, experts, attention, block"):
        make(model, build_schedule("sequential", microbatches=2), recompute="all")  # type: ignore[arg-type]


class Wrong(nn.Module):
    """Does to an activation what a dropped one does not bear."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.calls = nn.Linear(4, 4), what, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x).exp()
        if self.what == "repeats nothing" and self.calls == 2:
            y = y[:1]
        z = y.sin()
        if self.what == "in place":
            y.mul_(2)
        if self.what == "a gradient":
            return z + torch.autograd.grad(z.sum(), y, retain_graph=True)[0]
        return z


WRONG = {
    "in place": r"block 0 \(Wrong\) changes in place a tensor of \[2, 4\] that its backward needs; allowed: a copy",
    "a gradient": "a block calls torch.autograd.grad for activations that it drops and computes again; allowed: ",
    "repeats nothing": r"block 0 \(Wrong\) computes something else when a part of it is computed again; allowed: ",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_dropped_activation_does_not_bear_is_refused_in_one_line(what: str) -> None:
    program, data = build_schedule("sequential", microbatches=1), torch.randn(2, 4)
    engine = make([Wrong(what)], program, loss_fn=lambda y, _: y.sum(), costs=COSTS, recompute="block", verify=False)
    with pytest.raises((ValueError, RuntimeError), match=f"^{WRONG[what]}"):
        engine.step(data, target=data)


# ------------------------------------------------------------------------------------------------------- several ranks


def test_experts_that_change_their_rows_in_place() -> None:
    """They are given rows of their own: a second forward begins with those that were received."""

    def found(change: Callable[[Tensor], Tensor], mode: Recompute) -> dict[str, Tensor]:
        model = models.build()
        for experts in (m for m in model.modules() if isinstance(m, GroupedExperts)):
            vars(experts)["compute"] = lambda rows, counts, own=experts.compute: own(change(rows).tanh(), counts)
        program = build_schedule("combined_1f1b", microbatches=3)
        step(model, program, 3, models.batch(3), recompute=mode, verify=False)
        return models.gradients(model)

    expected = found(lambda rows: rows * 0.5, "none")
    for mode in ("none", *MODES):
        assert not models.equal(found(lambda rows: rows.mul_(0.5), mode), expected), mode


def changes_what_came(s: Layers, x: Tensor, ex: Exchanging, where: str) -> Tensor:
    there = ex(s.a(x).tanh())
    if where == "there":
        there.mul_(2)
    back = ex(s.b(there).tanh())
    if where == "back":
        back.mul_(2)
    return s.c(back.tanh()) + x


def _what_came(rank: int, size: int) -> dict[tuple[str, str], str]:
    mesh, told, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), {}, batch(rank)
    for mode, where in product(MODES, ("", "there", "back")):
        model = nn.Sequential(Layers(mesh.get_group("ep"), partial(changes_what_came, where=where)))
        engine = engine_of(model, mesh, recompute=mode, timeout=10, verify=False)
        try:
            for _ in range(2):  # its exchanges are known from the second step on
                engine.step(data[0], target=data[1])
            told[mode, where] = ""
        except (ValueError, RuntimeError) as error:
            told[mode, where] = str(error).splitlines()[0]
    return told


def test_what_exchanges_brought_may_not_change_in_place_where_it_is_needed_again(ranks2: Ranks) -> None:
    every = ranks2.run(_what_came)
    for mode, where in every[0]:
        told = [found[mode, where] for found in every]
        if where and mode in ("attention", "block"):
            wanted = "block 0 (Block) changes in place what an exchange has brought, with recompute="
            assert any(line.startswith(wanted) and line.endswith("; allowed: a copy") for line in told)
        else:
            assert told == ["", ""]


class Failing(models.Block):
    """Raises behind its experts, in the second microbatch."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls += 1
        if self.calls == 2:
            raise KeyError("the model's own")
        return y


@pytest.mark.parametrize("mode", ["attention", "experts", "block"])
def test_a_failed_step_leaves_no_hooks_behind(mode: Recompute) -> None:
    engine = make(
        models.build(block=Failing), build_schedule("combined_1f1b", microbatches=4), costs=COSTS, recompute=mode
    )
    with pytest.raises(KeyError, match="the model's own"):
        engine.step(*models.batch(4))
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


class Counted(Delayed):
    """Counts what is exchanged, in a step of random delays."""

    counted = 0

    def rows(self, *args: Any) -> Any:
        self.counted += 1
        return super().rows(*args)

    def counts(self, *args: Any) -> Any:
        self.counted += 1
        return super().counts(*args)


@pytest.mark.parametrize(
    ("name", "overlap", "expert_calls"), [("combined_1f1b", 3, 2), *wide(("sequential", "serial", 1))]
)
@over(2)
def test_two_ranks_exchange_nothing_twice(rank: int, size: int, name: Any, overlap: Overlap, expert_calls: int) -> None:
    """Modes against none: gradients, losses and the number of exchanges."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, data, problems = mesh.get_group("ep"), models.batch(3, seed=rank), []
    program = build_schedule(name, microbatches=3)
    expected: tuple[dict[str, Tensor], list[float], int] | None = None
    for mode in ("none", *MODES):
        model = models.build(group, layers=2, expert_calls=expert_calls, dropout=0.2)
        exchange = Counted(build_exchange(group), seed=rank)
        torch.manual_seed(7)
        options: dict[str, Any] = {"mesh": mesh, "exchange": exchange, "timeout": 20, "verify": False}
        with pauses(rank) if mode != "none" else nullcontext():
            _, result = step(model, program, overlap, data, recompute=mode, **options)
        found = models.gradients(model), [float(x) for x in result.losses], exchange.counted
        expected = expected or found
        problems += [f"{mode}: {parameter}" for parameter in models.equal(found[0], expected[0])]
        if found[1:] != expected[1:]:
            problems.append(f"{mode}: losses or exchanges {found[1:]}, not {expected[1:]}")
    assert not problems, problems


class TwoOutputs(models.Block):
    """Passes on what it has made before its experts, too."""

    def forward(self, x: Tensor) -> Any:
        early = self.mix(self.norm(x))
        tokens = early.reshape(-1, models.H)
        y = self.around(self.experts[0], tokens, *self.choose(tokens, self.gates[0](tokens)))
        return x + self.post[0](y).view_as(x), early * 2.0


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        return x + early.tanh()


@pytest.mark.parametrize("mode", ["none", *MODES])
def test_an_output_from_before_the_experts(mode: Recompute) -> None:
    def build() -> nn.Sequential:
        whole = models.build(layers=1, block=TwoOutputs)
        return nn.Sequential(whole[0], whole[1], TwoInputs(), whole[3])

    data = models.batch(3)
    plain, model = build(), build()
    for x, y in zip(data[0].chunk(3), data[1].chunk(3), strict=True):
        (models.loss_fn(plain[3](plain[2](*plain[1](plain[0](x)))), y) / 3).backward()
    step(model, build_schedule("combined_1f1b", microbatches=3), 3, data, recompute=mode)
    assert not models.equal(models.gradients(model), models.gradients(plain))


class Buffered(models.Block):
    """Batch norm, a mean that the output uses, a number of calls, and experts that count theirs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batch_norm = spectral_norm(nn.BatchNorm1d(models.H))
        self.register_buffer("mean", torch.zeros(models.H))
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("table", torch.ones(1000))
        for experts in self.experts:
            experts.register_buffer("calls", torch.ones(1))
            compute = experts.compute
            experts.compute = lambda *args, e=experts, c=compute: c(*args) * e.calls.add_(1).clone()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.batch_norm(x.mT).mT) + self.mean * self.calls.clone()
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 1))
        return y


@pytest.mark.parametrize("mode", MODES)
def test_buffers_have_the_values_of_the_first_time_and_change_once(mode: Recompute) -> None:
    plain, model = (models.build(block=Buffered, expert_calls=2) for _ in range(2))
    engine = make(model, build_schedule("combined_1f1b", microbatches=3), recompute=mode, costs=COSTS, verify=False)
    for number, trains in enumerate((False, True, True)):
        plain[1].train(trains)
        model[1].train(trains)
        data = models.batch(3, seed=number)
        models.plain_gradients(plain, *data, 3)
        engine.step(data[0], target=data[1])
        assert not models.equal(models.gradients(model), models.gradients(plain)), number
        assert not models.equal(dict(model.named_buffers()), dict(plain.named_buffers())), number
    held = {name for _, name, _ in engine.stages[0].inside[1].buffers.copies()}
    assert "table" not in held
    assert "mean" in held


class Counting(models.Block):
    """Counts its calls in attributes before the experts and behind them, and in an entry of a dictionary."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.before, self.behind, self.entries = 0, torch.zeros(()), {"calls": 0}
        self.list, self.several, self.tensor, self.array = (
            [0],
            [torch.zeros(()), {"calls": 0}],
            torch.zeros(1),
            np.zeros(1),
        )
        self.log: dict[str, deque[int]] = {"calls": deque(maxlen=100)}
        self.same = self.list  # by another name

    def forward(self, x: Tensor) -> Tensor:
        self.before, self.entries["calls"] = self.before + 1, self.entries["calls"] + 1
        self.same[0] += 1
        self.several[0] += 1  # type: ignore[operator]
        self.several[1]["calls"] += 1  # type: ignore[index]
        y = super().forward(x)
        self.behind = self.behind + 1
        self.tensor += 1
        self.array += 1
        self.log["calls"].append(len(self.log["calls"]))
        return y

    @property
    def counts(self) -> list[float]:
        """All numbers of calls."""
        here = [self.before, self.behind, self.entries["calls"], self.list[0], *self.tensor, *self.array]
        return [float(count) for count in (*here, self.several[0], self.several[1]["calls"], len(self.log["calls"]))]  # type: ignore[index]


@pytest.mark.parametrize("mode", MODES)
def test_counters_count_a_microbatch_once(mode: Recompute) -> None:
    model = models.build(block=Counting, expert_calls=2)
    engine = make(model, build_schedule("combined_1f1b", microbatches=3), recompute=mode, verify=False)
    block, data = model[1], models.batch(3)
    for number in range(1, 5):
        engine.step(data[0], target=data[1])
        assert block.counts == [3 * number] * 9
        assert list(block.log["calls"]) == list(range(3 * number))
