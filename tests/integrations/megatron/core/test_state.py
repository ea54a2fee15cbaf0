"""Forwards of Megatron-Core's modules that are all open at once, and keep on them what the engine learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import cycle
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from overlap1f1b.engine.run.attributes import ModuleAttributes
from overlap1f1b.engine.run.random import RandomStream
from overlap1f1b.integrations.megatron.chunk import Chunk
from tests.integrations.megatron.core import cases, flex, models, shim
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

OPTIONS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "alltoall, many options": {
        **cases.AUX, **cases.BIAS, **cases.Z_LOSS, **cases.SHARED, "moe_input_jitter_eps": 0.1, "num_moe_experts": 8,
    },
    "alltoall, one expert a rank, capacity": {**cases.ONE_A_RANK, "moe_expert_capacity_factor": 1.0},
    "alltoall, overlapped, global aux loss": {
        **cases.OVERLAPPED, **cases.AUX, "moe_router_load_balancing_type": "global_aux_loss",
        "moe_shared_expert_gate": True,
    },
    "alltoall, routing is replayed, dropout": {
        "moe_enable_routing_replay": True, "hidden_dropout": 0.2, "attention_dropout": 0.2,
    },
    "alltoall, MTP, padded": {**cases.MTP, **cases.PADDED, "moe_layer_freq": [0, 1]},
    "alltoall, norms recomputed": {**cases.SHARED, **cases.selective("layernorm", "core_attn")},
    "alltoall, MoE layers recomputed": cases.selective("moe"),
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "DeepEP": cases.DEEPEP,
    "HybridEP": cases.HYBRIDEP,
    "HybridEP, padded": {**cases.HYBRIDEP, **cases.PADDED, "moe_expert_capacity_factor": 2.0},
}  # fmt: skip


@contextmanager
def _calling(before: Callable[[], object]) -> Iterator[None]:
    """Call a function before every collective of a dispatcher."""
    from megatron.core.transformer.moe import token_dispatcher

    names = ("gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region")
    with ExitStack() as patched:
        for owner, name in [(dist, "all_to_all_single"), *((token_dispatcher, name) for name in names)]:
            patched.enter_context(patch.object(owner, name, _after(before, getattr(owner, name))))
        yield


def _after(before: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        before()
        return function(*args, **more)

    return call


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**{name: value for name, value in batch.items() if name != "seed"}).mean()


MICROBATCHES = 3


class Suspended(greenlet):
    """A forward that is left before each exchange."""

    parent: greenlet

    def __init__(self, model: nn.Module, batch: dict[str, Any], seed: int) -> None:
        super().__init__(lambda: _loss(model, batch))
        self.stream = RandomStream(seed, (torch.default_generator,))
        self.carried: Any = None


def _leave() -> None:
    forward = getcurrent()
    if isinstance(forward, Suspended):
        grad = torch.is_grad_enabled()  # a switch does not carry it
        torch.set_grad_enabled(True)
        forward.parent.switch()
        torch.set_grad_enabled(grad)


def _apart(model: nn.Module, batches: list[dict[str, Any]], state: ModuleAttributes) -> list[float]:
    """Run forwards and backwards one after the other, and learn what they change; return the losses."""
    found = []
    for seed, batch in enumerate(batches):
        with RandomStream(seed, (torch.default_generator,)), _calling(state.look):
            state.begin(seed)
            loss = _loss(model, batch)
            state.leave(ended=True)
        loss.backward()
        found.append(float(loss.detach()))
    return found


def _at_once(model: nn.Module, batches: list[dict[str, Any]], state: ModuleAttributes) -> list[float]:
    """Open all forwards at once; run each backward as soon as its forward ends, while others are suspended."""
    forwards = [Suspended(model, batch, seed) for seed, batch in enumerate(batches)]
    found: dict[int, float] = {}
    while len(found) < len(batches):
        for seed, forward in enumerate(forwards):
            if seed in found:
                continue
            with forward.stream, _calling(_leave):
                state.begin(seed) if forward.carried is None else state.enter(forward.carried)
                loss = forward.switch()
                forward.carried = state.leave(ended=forward.dead)
            if forward.dead:
                loss.backward()
                found[seed] = float(loss.detach())
    return [found[seed] for seed in range(len(batches))]


def _problems(rank: int, size: int, option: str, tp: int) -> list[str]:
    shim.apply()
    flex.apply()
    with models.init_parallel(ep=2, tp=tp):
        (model,) = models.build(models.config_of(layers=2, ep=2, tp=tp, **OPTIONS[option]))
        models.fork(model)
        chunk = Chunk(model, stage=0, last=True, exchanges=True)
        state, batches, found = ModuleAttributes(chunk, chunk.state), models.batches(MICROBATCHES, 1), list[Any]()
        for function in (_apart, _at_once):
            for buffer in model.buffers():
                buffer.zero_()
            model.zero_grad()
            found.append((function(model, batches, state), models.grads([model])))
            state.learning = False
    (losses, grads), (own_losses, own_grads) = found
    problems = [] if losses == own_losses else [f"losses {losses}, {own_losses}"]
    return problems + models.compared(grads, own_grads)[:3]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "tp"), list(zip(OPTIONS, cycle((2, 1)), strict=False)))
def test_forwards_that_are_all_open_at_once_are_as_alone(
    megatron: Callable[[int], Ranks], option: str, tp: int
) -> None:
    assert megatron(2).run(_problems, option, tp) == [[], []]
