"""Models with adapters: what is refused of them, with PEFT's and with modules of the same structure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from overlap1f1b.engine import Engine
from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.integrations.transformers.adapters import adapter_in
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.ranks import Ranks


class LowRank(nn.Module):
    """A Linear with a low-rank product beside it, as PEFT lays it out."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class AroundExperts(nn.Module):
    """Experts with low-rank products for all of them."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(32, 8, bias=False)

    def forward(self, *args: Any) -> Any:
        return self.base_layer(*args)


class Added(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


def linear(model: Any) -> Any:
    attention = model.model.layers[1].self_attn
    attention.q_proj = LowRank(attention.q_proj)
    return model


def experts(model: Any) -> Any:
    mlp = model.model.layers[1].mlp
    mlp.experts = AroundExperts(AroundExperts(mlp.experts))
    return model


def parametrized(model: Any) -> Any:
    module = model.model.layers[1].mlp.experts
    nn.utils.parametrize.register_parametrization(module, "down_proj", Added(module.down_proj))
    return model


def peft_linear(model: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1], **options)
    )


def peft_inside(model: Any) -> Any:
    return peft_linear(model).base_model.model


def peft_experts(model: Any) -> Any:
    peft_linear(model, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    return model


ADAPTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "stand-in": (linear, "model.layers.1.self_attn.q_proj (LowRank)"),
    "experts": (experts, "model.layers.1.mlp.experts (AroundExperts)"),
    "parametrized": (parametrized, "model.layers.1.mlp.experts (ParametrizedMixtralExperts)"),
    "peft": (peft_linear, "the model (PeftModel)"),
    "peft inside": (peft_inside, "model.layers.1.self_attn.q_proj (Linear)"),
    "peft experts": (peft_experts, "model.layers.0.mlp.experts (ParamWrapper)"),
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_are_not_saved(kind: str, tmp_path: Path) -> None:
    adapt, name = ADAPTED[kind]
    stages = split_model(adapt(tiny.build("mixtral")), build_schedule("sequential", microbatches=1))
    if kind == "peft experts":
        name = next(n for n, m in stages.model.named_modules() if type(m).__module__.startswith("peft.")) + " ("
    with pytest.raises(ValueError, match="is an adapter") as caught:
        stages.save_pretrained(tmp_path / "saved")
    assert str(caught.value).startswith(name)
    assert str(caught.value).endswith(
        " is an adapter, and the folder would hold neither an adapter nor a model; allowed: adapters that are merged "
        "first, or state_dict() of each rank"
    )
    assert not (tmp_path / "saved").exists()


def _save(rank: int, size: int, folder: Path) -> str:
    """Every rank raises, also the one whose stage has no adapter."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    stages = split_model(linear(tiny.build("mixtral")), build_schedule("1f1b", ranks=size, microbatches=2), mesh)
    with pytest.raises(ValueError, match="is an adapter") as caught:
        stages.save_pretrained(folder)
    return str(caught.value).split(" is ", maxsplit=1)[0]


def test_all_ranks_refuse_to_save(ranks2: Ranks, tmp_path: Path) -> None:
    assert ranks2.run(_save, tmp_path) == ["model.layers.1.self_attn.q_proj (LowRank)"] * 2


def test_a_merged_model_is_saved(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = peft_linear(tiny.build("mixtral")).merge_and_unload()
    assert adapter_in(model) is None
    split_model(model, build_schedule("sequential", microbatches=1)).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


SHARED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "experts": (experts, "model.layers.1.mlp.experts (AroundExperts)"),
    "parametrized": (parametrized, "model.layers.1.mlp.experts (ParametrizedMixtralExperts)"),
    "peft experts": (peft_experts, "model.layers.0.mlp.experts (ParamWrapper)"),
}


def _adopted(rank: int, size: int, kind: str) -> str:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)) if size > 1 else None
    model = SHARED[kind][0](tiny.build("mixtral"))
    with pytest.raises(ValueError, match="adapter") as caught:
        split_model(model, build_schedule("1f1b", microbatches=2), mesh, grouped=True)
    return str(caught.value)


@pytest.mark.parametrize("kind", SHARED)
def test_adapters_of_shared_experts_are_refused(ranks2: Ranks, kind: str) -> None:
    if "peft" in kind:
        pytest.importorskip("peft")
    message = (
        f"{SHARED[kind][1]} is an adapter of experts, whose weights are not divided by experts and which the engine "
        "would not call; allowed: adapters of other layers, or merged into the experts"
    )
    assert [*ranks2.run(_adopted, kind), _adopted(0, 1, kind)] == [message] * 3


def _trained(rank: int, size: int) -> list[float]:
    """Adapters of attention train beside shared experts."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    program = build_schedule("combined_1f1b", microbatches=2)
    stages = split_model(linear(tiny.build("mixtral")), program, mesh)
    engine = Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn, costs=tiny.COSTS, timeout=30)
    tokens, labels = tiny.batch(4)
    engine.step(tokens, target=labels)
    return [float(p.grad.norm()) for name, p in stages.named_parameters() if "lora_" in name and p.grad is not None]


def test_adapters_of_other_layers_train_beside_shared_experts(ranks2: Ranks) -> None:
    for norms in ranks2.run(_trained):
        assert len(norms) == 2
        assert min(norms) > 0
