"""Models with compiled parts: gradients and plans are those of the model without, and what does nothing says so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.ranks import Ranks

BACKEND = "aot_eager"


def attention(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.compile(backend=BACKEND)
    return model


def in_place(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def wrapped(model: Any, every: int = 1) -> Any:
    layers = model.model.layers
    for number in range(0, len(layers), every):
        layers[number] = torch.compile(layers[number], backend=BACKEND)
    return model


def one_wrapped_one_in_place(model: Any) -> Any:
    model.model.layers[1].compile(backend=BACKEND)
    return wrapped(model, 2)


def whole(model: Any) -> Any:
    model.compile(backend=BACKEND)
    return model


def whole_wrapped(model: Any) -> Any:
    return torch.compile(model, backend=BACKEND)


WAYS: dict[str, Callable[[Any], Any]] = {
    "attention": attention,
    "layers": one_wrapped_one_in_place,
    "model": whole_wrapped,  # which becomes a model that is compiled in place
}


def _compared(rank: int, size: int, way: str, name: str) -> tuple[float, bool, list[str], int]:
    """Return the worst gradient, whether plans are equal, names that differ, and the number of compiled graphs."""
    from torch._dynamo.utils import counters

    mesh, data = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), tiny.batch(6, seed=rank)
    found: list[dict[str, Tensor]] = []
    plans = []
    for change in (lambda model: model, WAYS[way]):
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        counters.clear()
        program = build_schedule("combined_1f1b", microbatches=3)
        stages = split_model(change(tiny.build(name, num_hidden_layers=2)), program, mesh)
        engine = tiny.engine(stages, program, mesh, recompute="block", timeout=100)
        for _ in range(2):
            for parameter in stages.parameters():
                parameter.grad = None
            engine.step(data[0], target=data[1])
        found.append({label: p.grad for label, p in stages.named_parameters() if p.grad is not None})
        plans.append(engine.plan.ranks)
    plain, compiled = found
    names = sorted(plain.keys() ^ compiled.keys())
    worst = max(tiny.difference(compiled[label], grad) for label, grad in plain.items()) if not names else 1.0
    return worst, plans[0] == plans[1], names, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("way", "name"), [("attention", "mixtral"), ("model", "mixtral"), ("layers", "deepseek_v3")])
def test_gradients_and_plans_are_those_without(ranks2: Ranks, way: str, name: str) -> None:
    """The last has a dense layer and shared experts."""
    for worst, planned, names, graphs in ranks2.run(_compared, way, name, timeout=200):
        assert (names, planned) == ([], True)
        assert worst <= 1e-5
        assert graphs > 0


def _graphs(layers: int, blocks: bool = False) -> tuple[int, dict[str, Tensor]]:
    """Return the number of compiled graphs and the gradients; ``blocks`` are compiled behind the split."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    counters.clear()
    program, model = build_schedule("combined_1f1b", microbatches=2), tiny.build("mixtral", num_hidden_layers=layers)
    stages = split_model(model if blocks else in_place(model), program, grouped=True)
    for block in stages[0].blocks if blocks else ():
        block.compile(backend=BACKEND)
    engine = tiny.engine(stages, program)
    tokens, labels = tiny.batch(4)
    for _ in range(2):
        engine.step(tokens, target=labels)
    return counters["stats"]["unique_graphs"], {n: p.grad for n, p in stages.named_parameters() if p.grad is not None}


def test_layers_share_their_graphs() -> None:
    """A graph a layer would soon reach torch's limit, and run eagerly from there."""
    assert _graphs(3)[0] == _graphs(2)[0]


def test_compiled_blocks_are_compiled_layers() -> None:
    """The model's own forward is around the first layer and the last."""
    (graphs, grads), (found, same) = _graphs(2), _graphs(2, blocks=True)
    assert found == graphs > 0
    assert grads.keys() == same.keys()
    assert all(torch.equal(grad, same[name]) for name, grad in grads.items())


def test_a_model_of_wrapped_layers_is_saved_under_its_own_names(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = wrapped(tiny.build("mixtral"))
    split_model(model, build_schedule("sequential", microbatches=1)).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    expected = tiny.build("mixtral").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in expected.items())


def test_a_compilation_that_does_nothing_says_so() -> None:
    model = tiny.build("mixtral")
    model.model.layers[1].mlp.experts.compile(backend=BACKEND)
    message = re.escape(
        "torch.compile of model.layers.1.mlp.experts does nothing: ranks share the experts, and their call leaves the "
        "graph; allowed: layer.compile() of the layers around them"
    )
    with pytest.warns(UserWarning, match=message):
        split_model(model, build_schedule("sequential", microbatches=1), grouped=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = whole(tiny.build("mixtral"))
        split_model(model, build_schedule("sequential", microbatches=1), grouped=True)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    assert model._compiled_call_impl is None
