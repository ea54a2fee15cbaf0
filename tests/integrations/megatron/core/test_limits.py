"""Arguments of Megatron-Core's functions; a step of a real model in which a rank fails, and rebuilt models."""

import re
from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatch
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import get_forward_backward_func
from overlap1f1b.integrations.megatron.chunk import SHARDS
from overlap1f1b.integrations.megatron.config import Config
from overlap1f1b.integrations.megatron.forward_backward import COMBINED_NO_PIPELINING, SCHEDULES, ForwardBackward
from tests.integrations.megatron.core import flex, models, shim
from tests.integrations.megatron.core.cases import DEEPEP
from tests.integrations.megatron.core.steps import one_step
from tests.ranks import Ranks, over

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@over(2)
def test_functions_take_what_megatrons_take(rank: int, size: int) -> None:
    """Whatever callers may pass, in the same way."""
    shim.apply()
    from megatron.core.pipeline_parallel import schedules

    pairs: list[tuple[Callable[..., object], Callable[..., object]]] = [
        (schedules.get_forward_backward_func, get_forward_backward_func),
        *((getattr(schedules, name), ForwardBackward.__call__) for name in SCHEDULES if name.startswith("forward")),
    ]
    scales = {name for name in vars(models.config_of(layers=1)) if name.endswith("_scale_func")}
    lines = sorted(scales - {field.name for field in fields(Config)})
    for theirs, ours in pairs:
        given, own = signature(theirs).parameters, dict(signature(ours).parameters)
        own.pop("self", None)
        lines += [f"{theirs.__name__}({name})" for name in given if name not in own]
        lines += [
            f"{theirs.__name__}({name}): {one.kind.name}, {one.default}"
            for name, one in given.items()
            if name in own and (own[name].kind, own[name].default) != (one.kind, one.default)
        ]
        positional = [name for name, one in given.items() if one.kind is not one.KEYWORD_ONLY]
        lines += [f"{theirs.__name__}: {positional}"] * (list(own)[: len(positional)] != positional)
    assert not lines, lines


@over(2)
def test_every_field_about_experts_overlap_and_recompute_has_a_row(rank: int, size: int) -> None:
    """On the page that leads from Megatron-Core's flags to ours."""
    shim.apply()
    from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
    from megatron.core.transformer import TransformerConfig

    assert MegatronFSDP.__name__ in SHARDS
    page = (Path(__file__).parents[4] / "docs" / "coming-from.md").read_text()
    table = page.partition("## From Megatron flags")[2].partition("\n## ")[0]
    named = {token.lstrip("-").split()[0].replace("-", "_") for token in re.findall(r"`([^`]+)`", table)}
    families = re.compile(
        "moe|overlap|recompute|expert|wgrad|offload|cuda_graph|mtp_|dispatch|p2p|deallocate|stash|mhc"
    )
    asked = [field.name for field in fields(TransformerConfig) if families.search(field.name)]
    problems = [field for field in asked if not any(fnmatch(field, pattern) for pattern in named)]
    assert not problems, problems


def _failure(rank: int, size: int) -> str:
    """Return the message of a step that fails on rank 0, while rank 1 waits in a collective of a layer."""
    shim.apply()
    with models.init_parallel(ep=size):
        (chunk,) = models.build(models.config_of(layers=1, ep=size))
        function = get_forward_backward_func(schedule=COMBINED_NO_PIPELINING, options=EngineOptions(timeout=2))
        with pytest.raises((OSError, RuntimeError)) as caught:
            one_step(function, chunk, 2, fails=rank == 0)
        dist.barrier()  # till then rank 0 stays, and closes no connection
        return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_the_limit_holds_in_collectives_of_layers(kept: dict[int, Ranks]) -> None:
    mine, others = kept[2].run(_failure, timeout=40)
    assert "no disk" in mine
    assert "Timed out waiting 2000ms" in others
    assert "the first to fail: rank ep 0 failed at dense.f[0] m0" in others


def _bare_later(rank: int, size: int) -> str:
    """Return the message of a step without gradients in its layers, after steps with them."""
    shim.apply()
    flex.apply()
    with models.init_parallel(ep=size):
        (chunk,) = models.build(models.config_of(layers=1, ep=size, **DEEPEP))
        function = get_forward_backward_func(schedule=COMBINED_NO_PIPELINING, options=EngineOptions(timeout=10))
        for _ in range(2):
            one_step(function, chunk, 2)
        whole, chunk.forward = chunk.forward, torch.no_grad()(chunk.forward)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            one_step(function, chunk, 2)
        chunk.forward = whole
        return str(caught.value)


@over(2)
def test_a_library_whose_buffers_microbatches_share_is_refused(rank: int, size: int) -> None:
    """NCCL EP; our exchange takes its place."""
    shim.apply()
    flex.apply()
    with models.init_parallel(ep=size):
        (chunk,) = models.build(models.config_of(layers=1, ep=size, **DEEPEP))
        chunk.config.moe_flex_dispatcher_backend = "ncclep"
        function = get_forward_backward_func(schedule=COMBINED_NO_PIPELINING, options=EngineOptions(timeout=10))
        said = r"^moe_flex_dispatcher_backend='ncclep' with dispatcher='own'; allowed: deepep, hybridep$"
        with pytest.raises(ValueError, match=said):
            one_step(function, chunk, 2)
        one_step(get_forward_backward_func(schedule=COMBINED_NO_PIPELINING, dispatcher="rows"), chunk, 2)


def test_a_library_exchanges_without_a_gradient_later(kept: dict[int, Ranks]) -> None:
    messages = kept[2].run(_bare_later)
    assert any("exchanges rows by a library without a gradient, and with one in the first" in text for text in messages)
