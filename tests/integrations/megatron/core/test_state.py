"""State of Megatron-Core's modules: its table is complete, and forwards that are all open at once do not mix it up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import cycle
from operator import is_
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from overlap1f1b.engine.run.random import RandomStream
from overlap1f1b.integrations.megatron.state import HELD, KEPT, ModuleState
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

STAYING = {
    "MoEAlltoAllTokenDispatcher.cuda_sync_point": "the same for all microbatches after the first",
    "TopKRouter.input_jitter": "made by the first microbatch, without a state",
    "RouterReplay.replay_backward_list": "a queue, in the order of microbatches",
    "TopKRouter.ga_steps": "counts of all microbatches",
    "TopKRouter.global_tokens_per_expert": "counts of all microbatches",
    "megatron.core.transformer.moe.moe_logging._MOE_METRICS_TRACKER": "logged losses of all microbatches, after 0.16",
    "megatron.core.transformer.moe.fused_a2a._buffer": "of the library, one for all microbatches",
    "megatron.core.transformer.moe.fused_a2a._hybrid_ep_buffer": "of the library, one for all microbatches",
    "megatron.core.transformer.moe.token_dispatcher.gather_from_sequence_parallel_region": "this test",
    "megatron.core.transformer.moe.token_dispatcher.reduce_scatter_to_sequence_parallel_region": "this test",
    "megatron.core.tensor_parallel.random._share_storage_ext": "an extension, compiled once, after 0.16",
    "megatron.core.tensor_parallel.layers.__warningregistry__": "warnings that were shown",
    "megatron.core.tensor_parallel.mappings.__warningregistry__": "warnings that were shown",
}
"""What a forward changes for good, with the reason why it need not travel."""
NAMED = {name for names in KEPT.values() for name in names}
ALLOWED = {f"{kind}.{name}" for kind, names in KEPT.items() for name in names} | STAYING.keys()


def _watched(model: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the attributes of modules, of objects of Megatron-Core that they hold, and of its Python modules."""
    from megatron.core.tensor_parallel import random

    known: set[int] = set()
    waiting: list[Any] = [random.get_cuda_rng_tracker(), *model.modules()]
    while waiting:
        held = waiting.pop()
        kind = type(held)
        if id(held) in known or not kind.__module__.startswith(("megatron.", "torch.nn.modules.")):
            continue
        known.add(id(held))
        attributes = held.__dict__
        yield kind.__name__, attributes
        for inner in ("_buffers", "_parameters"):
            yield kind.__name__, attributes.get(inner, {})
        held_here = {name: value for name, value in attributes.items() if not name.startswith("_") or name in HELD}
        waiting += [
            value
            for name, value in held_here.items()
            if hasattr(value, "__dict__") and not type(value).__name__.endswith("Config") and name not in NAMED
        ]
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            yield name, module.__dict__


def _snapshot(model: nn.Module) -> dict[tuple[int, str, str], Any]:
    """Return all values, and copies of what dictionaries and lists on objects hold."""
    found = {}
    for kind, attributes in _watched(model):
        for name, value in attributes.items():
            contents: list[Any] = []
            if not kind.startswith("megatron.") and isinstance(value, dict | list) and not name.startswith("_"):
                contents = list(value.values() if isinstance(value, dict) else value)
            found[id(attributes), kind, name] = [value, *contents]
    return found


def _changed(before: dict[Any, list[Any]], now: dict[Any, list[Any]]) -> set[str]:
    names = set()
    for key, values in now.items():
        old = before.get(key, [])
        if len(old) != len(values) or not all(map(is_, old, values)):
            names.add(f"{key[1]}.{key[2]}")
    return names


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


def _unnamed(model: nn.Module) -> list[str]:
    """Return what forwards change before an exchange, but neither table names."""
    start, at_calls = _snapshot(model), list[set[str]]()
    with _calling(lambda: at_calls.append(_changed(start, _snapshot(model)))):
        for batch in models.batches(2, 1):
            _loss(model, batch)
    return sorted(set().union(*at_calls) - ALLOWED) if at_calls else ["no exchange"]


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


def _apart(model: nn.Module, batches: list[dict[str, Any]], state: ModuleState) -> list[float]:
    """Run forwards and backwards one after the other; return the losses."""
    found = []
    for seed, batch in enumerate(batches):
        with RandomStream(seed, (torch.default_generator,)):
            state.begin(seed)
            loss = _loss(model, batch)
            state.leave()
        loss.backward()
        found.append(float(loss.detach()))
    return found


def _at_once(model: nn.Module, batches: list[dict[str, Any]], state: ModuleState) -> list[float]:
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
                forward.carried = state.leave()
            if forward.dead:
                loss.backward()
                found[seed] = float(loss.detach())
    return [found[seed] for seed in range(len(batches))]


def _mixed_up(model: nn.Module) -> list[str]:
    """Return what differs between forwards that are all open at once and those that run one after the other."""
    state, batches = ModuleState(model), models.batches(MICROBATCHES, 1)
    start, found = _snapshot(model), []
    for function in (_apart, _at_once):
        for buffer in model.buffers():
            buffer.zero_()
        model.zero_grad()
        found.append((function(model, batches, state), models.grads([model])))
        state.enter(state.leave())  # takes off what recomputations have left
        state.leave()
    names = _changed(start, _snapshot(model)) - STAYING.keys() - {"CudaRNGStatesTracker.states_"}
    (losses, grads), (own_losses, own_grads) = found
    problems = [f"{name} stays" for name in sorted(names)]
    problems += [] if losses == own_losses else [f"losses {losses}, {own_losses}"]
    return problems + models.compared(grads, own_grads)[:3]


def _problems(rank: int, size: int, option: str, tp: int) -> tuple[list[str], list[str]]:
    shim.apply()
    flex.apply()
    with models.init_parallel(ep=2, tp=tp):
        mixed_up, unnamed = (
            check(models.build(models.config_of(layers=2, ep=2, tp=tp, **OPTIONS[option]))[0])
            for check in (_mixed_up, _unnamed)
        )
    return mixed_up, unnamed


@pytest.mark.slow
@pytest.mark.parametrize(("option", "tp"), list(zip(OPTIONS, cycle((2, 1)), strict=False)))
def test_forwards_are_all_open_at_once_and_all_that_they_change_is_named(
    megatron: Callable[[int], Ranks], option: str, tp: int
) -> None:
    assert megatron(2).run(_problems, option, tp) == [([], [])] * 2
