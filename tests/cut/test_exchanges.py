"""Blocks that exchange rows by themselves, in whatever way: cut and hidden without a change, equal to a plain loop."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd as imported
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.cut.declaration import Arrived
from overlap1f1b.engine import Engine, declare
from overlap1f1b.learn.discovery import Seen, Shown, matched
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.plan import Op
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import exchange
from overlap1f1b.transport.exchange import build_exchange
from tests import models
from tests.all_to_all import Own, any_sizes
from tests.engine.test_engine import Delayed
from tests.play.plain import HIDDEN, MICROBATCHES, ROWS, STEPS, batch, compare, engine_of, loss_fn
from tests.play.test_crossing import Block as Layers
from tests.ranks import Ranks, over
from tests.tiers import wide

EXPERTS = 4
Way = Callable[[Tensor, Sequence[int], Sequence[int], Any], Tensor]


own = Own.apply


class InParts(torch.autograd.Function):
    """An all-to-all by a tensor for each rank, as in spmd_types."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, receive: Any, send: Any) -> Tensor:
        ctx.group, ctx.receive, ctx.send = group, receive, send
        brought = [rows.new_empty((size, *rows.shape[1:])) for size in receive]
        dist.all_to_all(brought, [part.contiguous() for part in rows.split(send)], group=group)
        return torch.cat(brought)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return InParts.apply(grads[0], ctx.group, ctx.send, ctx.receive), None, None, None


class WithHandle(torch.autograd.Function):
    """An all-to-all that returns its handle beside the rows, as in MegaBlocks and OLMo-core."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: Any, send: Any, group: Any, later: bool) -> Any:
        ctx.group, ctx.receive, ctx.send = group, receive, send
        brought = rows.new_empty((sum(receive), *rows.shape[1:]))
        return brought, dist.all_to_all_single(brought, rows, receive, send, group=group, async_op=later)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = grads[0].new_empty((sum(ctx.send), *grads[0].shape[1:]))
        dist.all_to_all_single(back, grads[0].contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return back, None, None, None, None


class Functional(torch.autograd.Function):
    """An all-to-all by torch's functional one, and by the name of its group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: Any, send: Any, group: str) -> Any:
        ctx.given = receive, send, group
        return funcol.all_to_all_single(rows, receive, send, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        receive, send, group = ctx.given
        back = funcol.all_to_all_single(grads[0].contiguous(), send, receive, group)
        return funcol.wait_tensor(back), None, None, None  # type: ignore[no-untyped-call]


declare(InParts, tensor=0, receive=2, send=3, group=1)
declare(WithHandle, tensor=0, receive=1, send=2, group=3, async_op=4)
declare(Functional, tensor=0, receive=1, send=2, group=3)


def awaited(rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Tensor:
    brought, handle = WithHandle.apply(rows, receive, send, group, True)  # type: ignore[no-untyped-call]
    handle.wait()
    assert rows.is_cuda or handle.is_completed()  # on CUDA a wait only orders streams
    return brought  # type: ignore[no-any-return]


def returned(rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Tensor:
    output = rows.new_empty((sum(receive), *rows.shape[1:]))
    return dist_nn.all_to_all_single(output, rows, list(receive), list(send), group=group)


def by_keywords(rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Tensor:
    operation = torch.ops._c10d_functional_autograd.all_to_all_single
    sent = operation(input=rows, output_split_sizes=receive, input_split_sizes=send, group_name=group.group_name)
    return funcol.wait_tensor(sent)


KEPT = "a Function whose apply has another name"
WAYS: dict[str, Way] = {
    "functional, by keywords": by_keywords,
    "functional": lambda *given: funcol.all_to_all_single_autograd(*given),  # noqa: PLW0108 - looked up at the call
    "functional, imported by name": imported,
    "torch.distributed.nn": returned,
    "a Function of its own": lambda rows, receive, send, group: Own.apply(group, rows, receive, send),
    KEPT: lambda rows, receive, send, group: own(group, rows, receive, send),
    "a Function by a tensor for each rank": lambda rows, receive, send, group: InParts.apply(
        rows, group, receive, send
    ),
    "a Function with a handle": awaited,
    "a Function with None": lambda rows, receive, send, group: WithHandle.apply(rows, receive, send, group, False)[0],
    "a Function of the functional one": lambda rows, receive, send, group: Functional.apply(
        rows, receive, send, group.group_name
    ),
    "exchange": lambda rows, receive, send, group: exchange(rows, send, receive, group),
}


class Block(nn.Module):
    """Norm, router, rows to their experts' ranks and back; a shared expert is computed in between."""

    def __init__(self, group: dist.ProcessGroup, way: str, *, probabilities: bool = False) -> None:
        super().__init__()
        self.group, self.way, self.probabilities = group, WAYS[way], probabilities
        self.norm, self.router, self.shared = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, EXPERTS),
            nn.Linear(HIDDEN, HIDDEN),
        )
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS // group.size()))

    def forward(self, x: Tensor) -> Tensor:
        ranks, local = self.group.size(), len(self.experts)
        h = self.norm(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)  # a framework's own, on its own group
        by_rank = arriving.view(ranks, -1)
        send, receive = counts.view(ranks, -1).sum(1).tolist(), by_rank.sum(1).tolist()
        rows = h[order // 2]
        if self.probabilities:
            rows, routed = exchange((rows, weights.flatten()[order]), send, receive, self.group)
        else:
            rows, routed = self.way(rows, receive, send, self.group), None
        shared = self.shared(h)
        parts = rows.split(by_rank.flatten().tolist())
        mixed = [torch.cat([parts[r * local + e] for r in range(ranks)]) for e in range(local)]
        made = [F.gelu(expert(part)) for expert, part in zip(self.experts, mixed, strict=True)]
        split = [part.split(by_rank[:, e].tolist()) for e, part in enumerate(made)]
        rows = torch.cat([split[e][r] for r in range(ranks) for e in range(local)])
        if routed is not None:
            rows = rows * routed[:, None]
        back = self.way(rows, send, receive, self.group)
        y = torch.zeros_like(back).index_copy(0, order, back).view(len(x), 2, HIDDEN)
        if routed is None:
            y = y * weights[..., None]
        return x + y.sum(1) + shared


class Several(nn.Module):
    """Two layers, a head and a loss that changes what it has saved in place: all of it one block."""

    def __init__(self, group: dist.ProcessGroup, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(group, way) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.scale)  # used in several segments
        return InPlace.apply(x.sum(-1, keepdim=True) + x)


class InPlace(torch.autograd.Function):
    """The exponential, whose backward changes what the forward has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = (x * 0.1).exp()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        y.data.mul_(grads[0]).mul_(0.1)
        return y.clone()


def build(group: dist.ProcessGroup, ways: Sequence[str], kind: str) -> nn.Sequential:
    if kind == "one block":
        return nn.Sequential(Several(group, ways[0]))
    blocks = [Block(group, way, probabilities=kind == "probabilities") for way in ways]
    return nn.Sequential(*blocks, nn.Linear(HIDDEN, HIDDEN))


NAMES = [*WAYS, "functional"]  # an even number
CASES: list[tuple[Sequence[str], str, Any, Any]] = [
    *[(pair, "blocks", 3, "none") for pair in zip(NAMES[::2], NAMES[1::2], strict=True)],
    (("exchange",) * 2, "probabilities", 3, "block"),
    (("a Function of its own",) * 2, "one block", 3, "none"),
    (("functional",) * 2, "one block", 2, "attention"),
    (("exchange",) * 2, "one block", "pairs", "block"),
    (("exchange",) * 2, "one block", "serial", "none"),
    (("exchange",) * 2, "blocks", 3, "experts"),
]
"""Ways of two blocks, or of two layers of one."""


@pytest.mark.parametrize("cases", [CASES[:-4], *wide(CASES[-4:])], ids=["ways", "options"])
@over(2, timeout=120)
def test_two_ranks(rank: int, size: int, cases: list[tuple[Sequence[str], str, Any, Any]]) -> None:
    """Bit by bit, three steps of each case; and exchanges are nodes of the plan from the second step on."""
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    for ways, kind, overlap, recompute in cases:
        # From torch 2.14 on it is called directly: its exchange is not hidden.
        seen = [way for way in ways if way != KEPT or torch.__version__ < "2.14"]
        with any_sizes():
            problems += compare(
                f"{' and '.join(ways)}, {kind}, {overlap}, recompute {recompute}",
                lambda ways=ways, kind=kind: build(mesh.get_group("ep"), ways, kind),  # type: ignore[misc]
                mesh,
                exchanges=2 * 2 * len(seen) * MICROBATCHES,
                overlap=overlap,
                recompute=recompute,
            )
    assert not problems, problems


def test_a_handle_orders_the_stream_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may take rows on a side stream of its own, which it orders by the handle alone."""
    compute, side = MagicMock(), MagicMock()
    gpu = SimpleNamespace(current_stream=lambda device: compute)
    monkeypatch.setattr(devices, "KINDS", {"cuda": gpu})
    handle = Arrived(torch.device("cuda", 0))
    gpu.current_stream = lambda device: side
    assert handle.wait()
    side.wait_stream.assert_called_once_with(compute)


def seen(send: list[int], receive: list[int], dimensions: int = 2) -> Seen:
    return Seen(send, receive, ((torch.float32, dimensions),))


def found_in(microbatches: list[list[Seen]]) -> list[tuple[Op, int]]:
    shown = Shown.common(map(Shown.by, microbatches))
    return [(exchange.op, exchange.back_of) for exchange in matched(shown, "block 2")]


def test_an_exchange_by_swapped_sizes_takes_rows_back() -> None:
    there, back, other = seen([1, 2], [3, 4]), seen([3, 4], [1, 2]), seen([2, 2], [3, 5])
    assert found_in([[there, back, there, other, back]] * 2) == [
        (Op.DISPATCH, -1), (Op.COMBINE, 0), (Op.DISPATCH, -1), (Op.DISPATCH, -1), (Op.COMBINE, 2)
    ]  # fmt: skip
    assert found_in([[there, back], [there, other]]) == [(Op.DISPATCH, -1)] * 2


@pytest.mark.parametrize("other", [[seen([1], [1])] * 2, [seen([1], [1], 3)], []])
def test_microbatches_with_different_exchanges_are_refused(other: list[Seen]) -> None:
    with pytest.raises(ValueError, match=r"^block 2 exchanges rows .* allowed: the same in each microbatch, on all"):
        found_in([[seen([1], [1])], other])


@over(2, timeout=60)
def test_sizes_that_are_symmetric_by_chance_on_one_rank_tell_nothing(rank: int, size: int) -> None:
    """Rank 0 alone sends the second time as it has received the first time, by chance."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group = mesh.get_group("ep")

    def by_chance(s: Layers, y: Tensor, _: Any) -> Tensor:
        for table in ([[2, 4], [3, 3]], [[2, 3], [4, 1]]):
            send = table[rank]
            y = exchange(s.a(y)[: sum(send)] * 2, send, [row[rank] for row in table], group)
        return torch.cat([y, y])[:ROWS]

    build, exchanges = lambda: nn.Sequential(Layers(group, by_chance)), 2 * 2 * MICROBATCHES
    problems = compare("by chance", build, mesh, exchanges=exchanges, verify=True)
    assert not problems, problems  # the engine finds no difference, too


class Changing(nn.Module):
    """Exchanges something else in the second step than in the first."""

    def __init__(self, group: dist.ProcessGroup, change: str) -> None:
        super().__init__()
        self.group, self.change, self.calls, self.linear = group, change, 0, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        change, sizes = self.change if self.calls >= 2 else "", [3, 1] if self.group.rank() == 0 else [1, 3]
        self.calls += 1
        back = [2, 2] if change == "sizes" else sizes
        y = exchange(self.linear(x), sizes, sizes, self.group)
        if change == "fewer":
            return y
        y = exchange(y.double() if change == "dtype" else y, back, back, self.group).float()
        return exchange(y, None, None, self.group) if change == "more" else y


CHANGES = {
    "sizes": "exchange 1 of block 0 (Changing) sends [2, 2] and receives [2, 2]; allowed: ",
    "dtype": "exchange 1 of block 0 (Changing) has tensors of dtypes and dimensions [(torch.float64, 2)]; ",
    "more": "block 0 (Changing) exchanges rows more than 2 times; allowed: 2 times, as in the first step, on all",
    "fewer": "block 0 (Changing) exchanges rows 1 times; allowed: 2 times, as in the first step, on all ranks",
}


def _changing(rank: int, size: int) -> list[str]:
    """Return the first line of the second step's error, of two microbatches of four rows."""
    mesh, told, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str](), torch.randn(2, 8, HIDDEN)
    program = build_schedule("sequential", microbatches=2)
    for change in CHANGES:
        engine = engine_of(nn.Sequential(Changing(mesh.get_group("ep"), change)), mesh, program=program, timeout=10)
        engine.step(data[0], target=data[1])
        with pytest.raises((ValueError, RuntimeError)) as caught:
            engine.step(data[0], target=data[1])
        told.append(str(caught.value).splitlines()[0])
    return told


def test_exchanges_that_change_between_steps_are_named(ranks2: Ranks) -> None:
    every = zip(*ranks2.run(_changing, timeout=60), strict=True)
    for message, lines in zip(CHANGES.values(), every, strict=True):
        assert any(line.startswith(message) for line in lines), lines


@over(2, timeout=60)
def test_tensors_of_any_strides_travel_together(rank: int, size: int) -> None:
    """One column of the weights travels beside the rows, in which nothing may be; the first gradient is expanded."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group = mesh.get_group("ep")

    def together(s: Layers, x: Tensor, room: int) -> Tensor:
        h, weights = s.a(x), s.b(x).softmax(-1)
        rows, weight = exchange((h[:, :room], weights[:, 0]), None, None, group)
        back = exchange(rows.tanh(), None, None, group)
        return x * weight.sum() + F.pad(back, (0, HIDDEN - room)) + h

    problems = []
    for room in (HIDDEN, 0):
        body = lambda s, x, _, room=room: together(s, x, room)  # noqa: E731
        build = lambda body=body: nn.Sequential(Layers(group, body), Layers(group, body))  # noqa: E731
        problems += compare(f"room {room}", build, mesh, exchanges=2 * 2 * 2 * MICROBATCHES)
    assert not problems, problems


class Padded(nn.Module):
    """Sends rows ``[E, C, H]`` with room for C rows of each expert; C follows the tokens of the microbatch."""

    def __init__(self, group: dist.ProcessGroup, way: str, widens: bool) -> None:
        super().__init__()
        self.group, self.way, self.widens = group, way, widens
        self.norm, self.experts = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN if widens else HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).view(2, len(x) // 2, HIDDEN)
        rows = self.experts(WAYS[self.way](rows, [1, 1], [1, 1], self.group)).tanh()
        out = WAYS[self.way](rows, [1, 1], [1, 1], self.group).reshape(len(x), -1)
        return x + out[:, :HIDDEN] * out[:, -HIDDEN:]


@pytest.mark.parametrize("way", ["functional", *wide("torch.distributed.nn", "a Function of its own", "exchange")])
@over(2, timeout=60)
def test_rows_of_another_shape_in_each_microbatch(rank: int, size: int, way: str) -> None:
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    torch.manual_seed(7)
    for widens in (False, True):
        plain, model = [nn.Sequential(*(Padded(mesh.get_group(), way, widens) for _ in range(2))) for _ in range(2)]
        model.load_state_dict(plain.state_dict())
        delayed = Delayed(build_exchange(dist.new_group(list(range(size)))), seed=rank)
        engine = engine_of(model, mesh, exchange=delayed, overlap=3)
        # Microbatches of one length in the first step, then of several; or of several from the start.
        for step, lengths in enumerate(((6, 6, 6), (4, 8, 2), (2, 2, 10)) if way == "exchange" else ((6, 2, 4),) * 3):
            batches = [torch.randn(2, n, HIDDEN, generator=torch.Generator().manual_seed(rank)) for n in lengths]
            model.zero_grad()
            plain.zero_grad()
            for x, y in batches:
                (loss_fn(plain(x), y) / (MICROBATCHES * size)).backward()
            engine.step([x for x, _ in batches], target=[y for _, y in batches])
            found = models.equal(models.gradients(model), models.gradients(plain))
            problems += [f"{way}, widens {widens}, step {step}: {worst}" for worst in found]
        exchanged = [node for node in engine.plan.ranks[0] if node.op in (Op.DISPATCH, Op.COMBINE)]
        problems += [f"{len(exchanged)} exchanges"] * (len(exchanged) != 2 * 2 * 2 * MICROBATCHES)
    assert not problems, problems


@pytest.mark.wide
@over(4, timeout=120)
def test_two_stages_of_two_ranks(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    group, stage, data = mesh.get_group("ep"), mesh.get_local_rank("pp"), batch(mesh.get_local_rank("ep"))

    def build() -> nn.Sequential:
        torch.manual_seed(7)
        ways = ("exchange", "functional", "a Function of its own", "exchange")
        return nn.Sequential(*(Block(group, way) for way in ways))

    _, whole = models.plain_gradients(build(), *data, MICROBATCHES, 1 / 2, loss_fn)
    expected, problems = {name: grad for name, grad in whole.items() if int(name[0]) // 2 == stage}, list[str]()
    for schedule, overlap in (("combined_1f1b", 3), ("zb_h1", 2)):
        model = build()
        program = build_schedule(schedule, ranks=2, microbatches=MICROBATCHES)  # type: ignore[arg-type]
        engine = engine_of(model, mesh, program=program, overlap=overlap, timeout=30)
        for step in range(STEPS):
            model.zero_grad()
            engine.step(data[0], target=data[1])
            found = models.gradients(model)
            wrong = models.equal(expected, {name: found[name] for name in expected})
            problems += [f"{schedule} {overlap}, step {step}: {name}" for name in wrong]
        exchanged = [node for node in engine.plan.ranks[stage] if node.op in (Op.DISPATCH, Op.COMBINE)]
        problems += [f"{schedule}: {len(exchanged)} exchanges"] * (len(exchanged) != 2 * 2 * 2 * MICROBATCHES)
    assert not problems, problems


class Hidden(nn.Module):
    """A block with our own Experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, EXPERTS), GroupedExperts(EXPERTS, HIDDEN, 8, group=group)
        self.experts.reset_parameters(torch.Generator().manual_seed(1), std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, indices, weights)


@over(2, timeout=120)
def test_beside_experts_and_over_two_stages_of_a_rank(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group = mesh.get_group("ep")
    problems = compare(
        "behind Experts", lambda: nn.Sequential(Hidden(group), Block(group, "exchange"), Hidden(group)), mesh
    )
    problems += compare(
        "two stages of one rank",
        lambda: nn.Sequential(Block(group, "a Function of its own"), Block(group, "functional")),
        mesh,
        exchanges=2 * 2 * 2 * MICROBATCHES,
        program=build_schedule("combined_1f1b", ranks=1, microbatches=MICROBATCHES, chunks=2),
    )
    assert not problems, problems


@over(2, timeout=60)
def test_plans_may_be_given_before_the_first_step(rank: int, size: int) -> None:
    """Plans of an engine are given to others before their first step: cut, not cut, and cut elsewhere."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group = mesh.get_group("ep")

    def engine(**options: Any) -> Engine:
        torch.manual_seed(7)
        return engine_of(nn.Sequential(Block(group, "exchange"), nn.Linear(HIDDEN, HIDDEN)), mesh, **options)

    first, data = engine(overlap="pairs"), batch(rank)
    uncut = first.plan
    for _ in range(2):
        first.step(data[0], target=data[1])
    cut = first.plan
    by_option, later, plain = engine(plan=cut), engine(), engine()
    later.plan, plain.plan = cut, uncut
    for one, wanted in ((by_option, cut), (later, cut), (plain, uncut)):
        for _ in range(2):
            one.step(data[0], target=data[1])
        assert one.plan.fingerprint == wanted.fingerprint
    elsewhere = engine_of(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Block(group, "exchange")), mesh, plan=cut)
    with pytest.raises(ValueError, match=r"^a plan of .* for other blocks.*; allowed: one of"):
        elsewhere.step(data[0], target=data[1])
