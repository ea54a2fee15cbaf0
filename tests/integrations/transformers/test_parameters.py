"""Parameters that a rank gets in place of the model's: marks and hooks that users have put on these, and optimizers."""

import copy
import io
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.schedule import build_schedule
from tests import products
from tests.integrations.transformers import tiny
from tests.integrations.transformers.test_adapters import adapted
from tests.integrations.transformers.test_split import _OneOf, problems_of
from tests.ranks import over
from tests.tiers import wide

NEEDS_PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
STAGES, EXPERTS = build_schedule("1f1b", ranks=2, microbatches=2), build_schedule("1f1b", microbatches=2)


def _double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def hooked(device: str = "cpu") -> Any:
    """Return a model whose head is its embedding, of which the last rows train, twice as fast."""
    with torch.device(device):
        model = tiny.build("mixtral", num_hidden_layers=2, tie_word_embeddings=True)
    weight, mask = model.get_input_embeddings().weight, (torch.arange(tiny.V) > 9)[:, None]
    weight.register_hook(lambda grad: grad * mask)
    weight.register_post_accumulate_grad_hook(_double)
    weight.lr_scale = 0.5
    return model


def saved(folder: Path, **options: Any) -> None:
    """Let the first rank write the weights."""
    if dist.get_rank() == 0:
        tiny.build("mixtral", num_hidden_layers=2, **options).save_pretrained(folder)
    dist.barrier()


@pytest.mark.parametrize("device", ["cpu", *wide("meta")])
@over(2)
def test_a_copy_of_a_tied_weight_has_its_marks_and_hooks(rank: int, size: int, device: str, tmp_path: Path) -> None:
    """Each stage's part of the gradient passes the hooks, also of weights that were read from a folder."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    stages = split_model(hooked(device), STAGES, mesh)
    if device == "meta":
        saved(tmp_path, tie_word_embeddings=True)
        stages.load_pretrained(tmp_path)
    tokens, labels = tiny.batch(4)
    _, expected = tiny.own_gradients(hooked(), {"input_ids": tokens}, labels, 2)
    assert not expected["lm_head.weight"][:10].any()
    tiny.engine(stages, STAGES, mesh).step(tokens, target=labels)
    marked = [name for name, p in stages.named_parameters() if hasattr(p, "lr_scale")]
    assert marked == ["lm_head.weight" if rank else "model.embed_tokens.weight"]
    problems = problems_of(stages, expected, 1e-6)
    assert not problems, problems


@pytest.mark.parametrize("kind", products.KINDS)
@over(2)
def test_a_rank_part_of_a_weight_has_its_class(rank: int, size: int, kind: str) -> None:
    """And so its products, and no values of the whole weight."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))

    def model() -> Any:
        made = tiny.build("mixtral", double=True, num_hidden_layers=2)
        products.convert(made.model.layers, products.KINDS[kind])
        made.set_experts_implementation("grouped_mm")
        return made

    batches = [tiny.batch(4, seed=r) for r in range(size)]
    tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    _, expected = tiny.own_gradients(model(), {"input_ids": tokens}, labels, 4)
    stages = split_model(model(), EXPERTS, mesh)
    tiny.engine(stages, EXPERTS, mesh).step(batches[rank][0], target=batches[rank][1])
    problems = problems_of(stages, expected, 1e-12)
    assert not problems, problems


def test_handles_of_hooks_remove_them_everywhere() -> None:
    model = hooked()
    handle = model.lm_head.weight.register_hook(lambda grad: grad)
    stages = split_model(model, STAGES, _OneOf(1))  # type: ignore[arg-type]
    weight: Any = dict(stages.named_parameters())["lm_head.weight"]
    assert len(weight._backward_hooks) == 2
    handle.remove()
    assert len(weight._backward_hooks) == 1


def marked(lora: bool, register: str | None = None) -> Any:
    """Return a model whose experts have a mark, and perhaps a hook."""
    model = adapted("mixtral", "everything", 2) if lora else tiny.build("mixtral", num_hidden_layers=2)
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.requires_grad:
            parameter.lr_scale = 0.5
            if register is not None:
                getattr(parameter, register)(lambda grad: None)
    return model


@pytest.mark.parametrize("lora", [False, *wide(pytest.param(True, marks=NEEDS_PEFT))])
@over(2)
def test_parts_of_experts_have_their_marks(rank: int, size: int, lora: bool) -> None:
    stages = split_model(marked(lora), EXPERTS, init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))
    found, own = [name for name, p in stages.named_parameters() if hasattr(p, "lr_scale")], ".lora_" if lora else ""
    assert found == [name for name in stages.state_dict() if ".experts." in name and own in name], found
    assert len(found) == (8 if lora else 4)


@pytest.mark.parametrize("register", ["register_hook", *wide("register_post_accumulate_grad_hook")])
@pytest.mark.parametrize("lora", [False, *wide(pytest.param(True, marks=NEEDS_PEFT))])
@over(2)
def test_hooks_of_divided_experts_are_refused(rank: int, size: int, lora: bool, register: str) -> None:
    name, shapes = "model.layers.0.mlp.experts.gate_up_proj", ("[4, 48, 32]", "[2, 48, 32]")
    if lora:
        name = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.default.weight"
        shapes = ("[24, 32]", "[12, 32]")
    expected = (
        f"{name} has a gradient hook for its shape {shapes[0]}, and a rank gets a part {shapes[1]}; "
        "allowed: a hook on the part, registered after split_model"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        split_model(marked(lora, register), EXPERTS, init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)))


def _clamp(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


@over(2)
def test_hooks_of_parts_run_once_for_each_microbatch(rank: int, size: int) -> None:
    tokens, labels = tiny.batch(4)  # the same on both ranks
    plain = tiny.build("mixtral", num_hidden_layers=2)
    _clamp(plain)
    _, expected = tiny.own_gradients(plain, {"input_ids": tokens}, labels, 2)
    most = max(float(grad.abs().max()) for name, grad in expected.items() if ".experts." in name)
    assert most == pytest.approx(2e-3)  # of two microbatches
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    stages = split_model(tiny.build("mixtral", num_hidden_layers=2), EXPERTS, mesh)
    _clamp(stages)
    tiny.engine(stages, EXPERTS, mesh).step(tokens, target=labels)
    problems = problems_of(stages, expected, 1e-5)
    assert not problems, problems


REFUSED = (
    r"^(model|lm_head)\.\S+ of the whole model, of which this rank has no gradient, in an optimizer; allowed: param"
)
OPTIMIZED: dict[str, Callable[[Any], Any]] = {
    "whole": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "groups": lambda model: [{"params": model.lm_head.parameters()}, {"params": model.model.layers.parameters()}],
    "layer": lambda model: model.model.layers[0].parameters(),
}


@pytest.mark.parametrize("case", OPTIMIZED)
def test_optimizers_of_parameters_elsewhere_are_refused(case: str) -> None:
    """They would train until the first checkpoint."""
    model = tiny.build("mixtral", num_hidden_layers=2)
    stages = split_model(model, STAGES, _OneOf(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=REFUSED) as caught:
        torch.optim.AdamW(OPTIMIZED[case](model))
    assert "\n" not in str(caught.value)
    torch.optim.AdamW(stages.parameters())
    torch.optim.AdamW(p for p in model.parameters() if not p.is_meta)


@pytest.mark.parametrize(("dimension", "meta"), [("pp", False), *wide(("ep", False), ("ep", True))])
@over(2)
def test_optimizers_that_are_made_too_early_are_refused(
    rank: int, size: int, dimension: str, meta: bool, tmp_path: Path
) -> None:
    """Before the split, or before the weights are read: they would step parameters that the model has no more."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(dimension,))
    saved(tmp_path)
    with torch.device("meta" if meta else "cpu"):
        model = tiny.build("mixtral", num_hidden_layers=2)
    optimizer = torch.optim.SGD(model.parameters())
    program = STAGES if dimension == "pp" else EXPERTS
    stages = split_model(model, program, mesh)
    if meta:
        optimizer = torch.optim.SGD(stages.parameters())
        stages.load_pretrained(tmp_path)
    tiny.engine(stages, program, mesh).step(*tiny.batch(4))
    with pytest.raises(ValueError, match=REFUSED) as caught:
        optimizer.step()
    assert "\n" not in str(caught.value), caught.value


def test_a_model_with_parameters_elsewhere_is_copied_and_pickled() -> None:
    model = tiny.build("mixtral", num_hidden_layers=2)
    split_model(model, STAGES, _OneOf(0))  # type: ignore[arg-type]
    names = [name for name, p in model.named_parameters() if p.is_meta]
    assert [name for name, p in copy.deepcopy(model).named_parameters() if p.is_meta] == names
    torch.save(model, io.BytesIO())
