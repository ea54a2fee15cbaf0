"""Blocks replayed as device graphs: on a GPU by its own, on a CPU by a tape; gradients are the same to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b import Engine, build_schedule
from overlap1f1b.cut import graphs
from overlap1f1b.cut.graphs import Graphs
from overlap1f1b.engine import EngineOptions
from overlap1f1b.moe import MoE, MoEConfig, MoETransformer, RouterConfig
from tests.engines import COSTS, make
from tests.tape import Tape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = MoEConfig(
    vocabulary=32, layers=2, hidden=16, heads=2, experts=4, top_k=2, intermediate=8, shared_intermediate=8, sequence=9,
    aux_coefficient=0.01, z_coefficient=0.001,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def tape() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(DEVICE != "cpu")  # there it needs CUBLAS_WORKSPACE_CONFIG=:4096:8
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(graphs, "GraphCapture", Tape)
        yield
    torch.use_deterministic_algorithms(before)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class Pair:
    """Two engines over copies of a model, one with device graphs."""

    def __init__(self, build: Callable[[], Any], schedule: str = "combined_1f1b") -> None:
        self.models = [build().to(DEVICE) for _ in range(2)]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.engines = []
        for model in self.models:
            program = build_schedule(schedule, microbatches=3)
            self.engines.append(make(model, program, loss_fn=loss_fn, costs=COSTS, tries=0))
        self.engine = self.engines[1]
        self.step(compare=False)  # it is settled
        self.begin()

    def begin(self) -> None:
        """Let no block have graphs yet."""
        for stage in self.engine.stages.values():
            stage.graphs = Graphs(stage, stage.blocks, stage.device)
        self.engine.tuner.graphs = True
        self.engine.tuner._captured.clear()

    @property
    def graphs(self) -> Graphs:
        (stage,) = self.engine.stages.values()
        assert stage.graphs is not None
        return stage.graphs

    def step(self, *, compare: bool = True, **options: Any) -> None:
        x = torch.randint(32, (6, 10), device=DEVICE)
        results = []
        for engine, model in zip(self.engines, self.models, strict=True):
            model.zero_grad()
            torch.manual_seed(1)
            results.append(engine.step(x[:, :-1], target=x[:, 1:], **options))
        if not compare:
            return
        assert all(map(torch.equal, results[0].losses, results[1].losses))
        for (name, one), other in zip(self.models[0].named_parameters(), self.models[1].parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad), name
        for (name, one), other in zip(self.models[0].named_buffers(), self.models[1].buffers(), strict=True):
            assert torch.equal(one, other), name

    def train(self) -> None:
        for model in self.models:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad)


@pytest.fixture(scope="module")
def whole() -> Pair:
    return Pair(lambda: MoETransformer(CONFIG))


@pytest.fixture
def pair(whole: Pair) -> Pair:
    whole.begin()
    return whole


@pytest.mark.parametrize("schedule", ["combined_1f1b", "zb_h1"])
def test_steps_are_equal_to_the_bit_and_every_block_is_replayed(schedule: str) -> None:
    pair = Pair(lambda: MoETransformer(CONFIG), schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            pair.step()
            pair.train()
    assert not pair.graphs.unfit
    assert pair.graphs.bytes > 0
    slots = 3 if schedule == "combined_1f1b" else 1  # as many as microbatches are open
    assert set(pair.graphs._captured) == {(block, slot) for block in (1, 2) for slot in range(slots)}


def test_what_has_changed_is_captured_anew(pair: Pair) -> None:
    pair.step()
    pair.step(loss_scale=4.0)  # auxiliary losses have another scale
    pair.step(microbatches=2)
    pair.step(microbatches=6)
    for model in pair.models:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model.layer1.attention_norm.weight.requires_grad_(False)
        model.layer1.attention_norm.weight.grad = None
    x = torch.randint(32, (6, 10), device=DEVICE)
    grads = []
    for engine, model in zip(pair.engines, pair.models, strict=True):
        model.zero_grad()
        engine.step(x[:, :-1], target=x[:, 1:])
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
        model.requires_grad_(True)
    assert all(map(torch.equal, *grads))


class Strange(nn.Module):
    """A block of experts that does something of its own."""

    def __init__(self, own: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.own, self.norm = own, nn.LayerNorm(16)
        self.moe = MoE(16, 8, RouterConfig(experts=4, top_k=2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.moe(self.own(self, self.norm(x)))
        if self.own is leaves:
            self.last = x.detach()
        return x


def nothing(block: Any, x: Tensor) -> Tensor:
    return x


def counts(block: Any, x: Tensor) -> Tensor:
    block.calls += 1
    return x


def reads(block: Any, x: Tensor) -> Tensor:
    return x * 2 if float(x.detach().sum()) > 1e9 else x


def draws(block: Any, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5)


def leaves(block: Any, x: Tensor) -> Tensor:
    return x


class Twice(nn.Module):
    """A block that calls two modules of experts, and uses a tensor before, between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), *(MoE(16, 8, RouterConfig(4, 2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        z = h * 2 + self.first(h).tanh() * h
        return x + self.second(z) + h.sin() * z + h


def hooked() -> nn.Module:
    block = Strange(nothing)
    block.norm.register_forward_hook(lambda module, args, out: out * 2)
    return block


@pytest.mark.parametrize(
    ("strange", "reason"),
    [
        (lambda: Strange(counts), "its forward sets what others find"),
        (lambda: Strange(leaves), "its forward sets attribute 'last'"),
        (lambda: Strange(reads), "the host waits for the device in aten._local_scalar_dense.default"),
        (lambda: Strange(draws), "it draws random numbers"),
        (Twice, "it calls experts more than once"),
        (hooked, "norm has hooks"),
    ],
)
def test_a_block_that_cannot_be_captured_runs_as_before(strange: Callable[[], nn.Module], reason: str) -> None:
    pair = Pair(lambda: nn.Sequential(nn.Embedding(32, 16), strange(), Strange(nothing), nn.Linear(16, 32)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.step()
        pair.step()
    told = [str(one.message) for one in caught if "without device graphs" in str(one.message)]
    assert len(told) == 1
    assert f"block 1 ({type(pair.models[0][1]).__name__})" in told[0]
    assert reason in told[0]
    assert list(pair.graphs.unfit) == [1]
    assert {block for block, _ in pair.graphs._captured} == {2}


def test_autocast_and_modes_are_captured_anew(pair: Pair) -> None:
    pair.step()
    with torch.autocast(DEVICE, torch.bfloat16):
        pair.step()
    pair.step()
    for model in pair.models:
        model.eval()  # routers count and add losses in training alone
    pair.step()  # whether blocks draw in this mode is not known yet
    pair.step()
    for model in pair.models:
        model.train()
    pair.step()
    assert not pair.graphs.unfit
    assert {block for block, _ in pair.graphs._captured} == {1, 2}


def test_a_difference_is_told_and_graphs_are_left(pair: Pair) -> None:
    replay = graphs._Replay.forward

    def wrong(ctx: Any, part: Any, stage: Any, *tensors: Tensor) -> Any:
        results = replay(ctx, part, stage, *tensors)
        return tuple(r * 2 if r.is_floating_point() else r for r in results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs._Replay, "forward", staticmethod(wrong))
        with pytest.warns(UserWarning, match="graphs=True is not used"):
            pair.step()
        pair.step()
    assert not pair.engine.tuner.graphs


def test_a_cpu_has_no_device_graphs() -> None:
    program = build_schedule("combined_1f1b", microbatches=2)
    engine = Engine(MoETransformer(CONFIG), program, loss_fn=loss_fn, options=EngineOptions(graphs=True))
    assert all(stage.graphs is None for stage in engine.stages.values())
    with pytest.raises(ValueError, match="graphs='auto'; allowed: True or False"):
        EngineOptions(graphs="auto")  # type: ignore[arg-type]
