"""Models with compiled parts: gradients and plans are those of the model without; what is cut may not be compiled."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.ranks import over
from tests.tiers import wide

BACKEND = "aot_eager"
TRACED = "eager"
"""Backend where graphs are counted: it takes a third of the time."""


def attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.compile(backend=BACKEND)
    return model


def in_place(model: Any, backend: str = BACKEND) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


WAYS: dict[str, Callable[[Any], Any]] = {"attention": attention, "layers": in_place}


@pytest.mark.parametrize(("way", "name"), [("attention", "mixtral"), *wide(("layers", "deepseek_v3"))])
@over(2, timeout=200)
def test_gradients_and_plans_are_those_without(rank: int, size: int, way: str, name: str) -> None:
    """The last has a dense layer and shared experts."""
    from torch._dynamo.utils import counters

    mesh, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), tiny.batch(4, seed=rank)
    found: list[dict[str, Tensor]] = []
    plans = []
    for change in (lambda model: model, WAYS[way]):
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        counters.clear()
        program = build_schedule("combined_1f1b", microbatches=2)
        stages = split_model(change(tiny.build(name, num_hidden_layers=2)), program, mesh)
        engine = tiny.engine(stages, program, mesh, recompute="block", timeout=100)
        for _ in range(2):
            for parameter in stages.parameters():
                parameter.grad = None
            engine.step(data[0], target=data[1])
        found.append({label: p.grad for label, p in stages.named_parameters() if p.grad is not None})
        plans.append(engine.plan.ranks)
    plain, compiled = found
    assert plain.keys() == compiled.keys()
    assert max(tiny.difference(compiled[label], grad) for label, grad in plain.items()) <= 1e-5
    assert plans[0] == plans[1]
    assert counters["stats"]["unique_graphs"] > 0


def _graphs(layers: int, blocks: bool = False) -> tuple[int, dict[str, Tensor]]:
    """Return the number of compiled graphs and the gradients; ``blocks`` are compiled behind the split."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    counters.clear()
    program, model = build_schedule("combined_1f1b", microbatches=2), tiny.build("mixtral", num_hidden_layers=layers)
    stages = split_model(model if blocks else in_place(model, TRACED), program, grouped=True)
    for block in stages[0].blocks if blocks else ():
        block.compile(backend=TRACED)
    engine = tiny.engine(stages, program)
    tokens, labels = tiny.batch(4)
    for _ in range(2):
        engine.step(tokens, target=labels)
    return counters["stats"]["unique_graphs"], {n: p.grad for n, p in stages.named_parameters() if p.grad is not None}


def test_layers_share_their_graphs() -> None:
    """A graph a layer would soon reach torch's limit, and run eagerly from there.

    Compiled blocks are compiled layers: the model's own forward is around the first and the last.
    """
    (graphs, grads), (found, same) = _graphs(2), _graphs(2, blocks=True)
    assert _graphs(3)[0] == found == graphs > 0
    assert grads.keys() == same.keys()
    assert all(torch.equal(grad, same[name]) for name, grad in grads.items())


def _wrapped_layer(model: Any) -> Any:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend=BACKEND)
    return model


def _inner(name: str) -> Callable[[Any], Any]:
    def compiled(model: Any) -> Any:
        model.get_submodule(name).compile(backend=BACKEND)
        return model

    return compiled


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wrapped": (lambda model: torch.compile(model, backend=BACKEND), "OptimizedModule"),
    "whole": (_inner(""), "MixtralForCausalLM"),
    "body": (_inner("model"), "model"),
    "wrapped layer": (_wrapped_layer, "model.layers.1"),
    "experts": (_inner("model.layers.1.mlp.experts"), "model.layers.1.mlp.experts"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_cut_may_not_be_compiled(what: str) -> None:
    change, named = REFUSED[what]
    with pytest.raises(
        ValueError, match=rf"^torch\.compile of {re.escape(named)}; allowed: layer\.compile\(\) of each"
    ):
        split_model(change(tiny.build("mixtral")), build_schedule("sequential", microbatches=1))
