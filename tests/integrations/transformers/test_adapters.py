"""Models with adapters: PEFT's LoRA against PEFT on one process, what is saved of it, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
from transformers import AutoModelForCausalLM

from overlap1f1b.checkpoint import consolidate, save_checkpoint
from overlap1f1b.integrations.transformers import OverlapArguments, split_model
from overlap1f1b.integrations.transformers.adapters import adapter_in
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import loops, tiny
from tests.ranks import Ranks, over
from tests.tiers import first, wide


class Added(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


def parametrized(model: Any) -> Any:
    module = model.model.layers[1].mlp.experts
    nn.utils.parametrize.register_parametrization(module, "down_proj", Added(module.down_proj))
    return model


def peft_linear(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1]))


def peft_inside(model: Any) -> Any:
    return peft_linear(model).base_model.model


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "parametrized": (parametrized, "model.layers.1.mlp.experts (ParametrizedMixtralExperts)"),
    "peft inside": (peft_inside, "model.layers.1.self_attn.q_proj (Linear)"),
}


@over(2)
def test_adapters_that_nobody_can_write_are_not_saved(rank: int, size: int, tmp_path: Path) -> None:
    """The rank whose stage has no adapter refuses, too."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    for adapt, name in REFUSED.values():
        stages = split_model(adapt(tiny.build("mixtral")), build_schedule("1f1b", ranks=size, microbatches=2), mesh)
        with pytest.raises(ValueError, match="is an adapter") as caught:
            stages.save_pretrained(tmp_path / "saved")
        assert str(caught.value) == (
            f"{name} is an adapter, and the folder would hold neither an adapter nor a model; allowed: PEFT's model "
            "around it, adapters that are merged first, or state_dict() of each rank"
        )
        assert not (tmp_path / "saved").exists()


def test_a_merged_model_is_saved(tmp_path: Path) -> None:
    model = peft_linear(tiny.build("mixtral")).merge_and_unload()
    assert adapter_in(model) is None
    split_model(model, build_schedule("sequential", microbatches=1)).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def _refused(rank: int, size: int, method: str) -> str:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)) if size > 1 else None
    model = tiny.build("gpt_oss" if method == "bias" else "mixtral")
    config: dict[str, Callable[[], Any]] = {
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, task_type="CAUSAL_LM"),
        "whole experts": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]),
        "bias": lambda: peft.LoraConfig(target_modules=[], target_parameters=["experts.down_proj_bias"]),
    }
    adapted = parametrized(model) if method == "parametrized" else peft.get_peft_model(model, config[method]())
    with pytest.raises(ValueError, match="allowed") as caught:
        split_model(adapted, build_schedule("1f1b", microbatches=2), mesh, grouped=mesh is None or None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


METHODS = {
    "parametrized": f"{REFUSED['parametrized'][1]} is an adapter that changes the call of experts; allowed: LoRA of "
    "their stacked parameters (target_parameters), adapters of other layers, or merged into the experts",
    "prompt": "peft_type='PROMPT_TUNING' changes the call of the whole model",
    "adalora": "peft_type='ADALORA' changes the call of the whole model",
    "whole experts": "mlp.experts (ModulesToSaveWrapper) is an adapter that changes the call of experts",
    "bias": "down_proj_bias of shape [4, 32], whose factors have no part for each of 4 experts",
}


def test_adapters_that_cannot_be_honoured(ranks2: Ranks) -> None:
    """On one rank, too, where experts are replaced."""
    for method, message in METHODS.items():
        assert all(message in text for text in ranks2.run(_refused, method))
    assert _refused(0, 1, "parametrized") == METHODS["parametrized"]


# --------------------------------------------------------------------------------------------------------- PEFT's LoRA

TARGETS: dict[str, dict[str, Any]] = {
    "everything": {
        "target_modules": "all-linear",
        "target_parameters": ["gate.weight", "router.weight", "experts.gate_up_proj", "experts.down_proj"],
    },
    "experts": {"target_modules": [], "target_parameters": ["experts.down_proj"], "use_rslora": True},
    "dora": {"target_modules": ["o_proj"], "use_dora": True},
    "ends": {"target_modules": ["o_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    "last": {"target_modules": ["o_proj"], "layers_to_transform": [3]},
    "tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [5, 9]},  # of an embedding that is the head
}


def adapted(name: str, targets: str, layers: int = 4) -> Any:
    """Return PEFT's model with factors that are not zero, the same every time."""
    model = tiny.build(name, num_hidden_layers=layers, tie_word_embeddings=targets == "tokens")
    torch.manual_seed(11)
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "task_type": "CAUSAL_LM", **TARGETS[targets]}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def part(name: str, value: Tensor, found: Tensor, rank: int, ranks: int, experts: int = 4) -> Tensor:
    """Return a rank's part of a gradient of the whole model."""
    if value.shape == found.shape:
        return value
    if ".lora_B." in name:  # columns: rank by rank, in each the experts
        return value.unflatten(1, (-1, experts)).chunk(ranks, 2)[rank].flatten(1)
    return value.chunk(ranks)[rank]


def of_peft(name: str, targets: str, ranks: int) -> dict[str, Tensor | None]:
    """Return the gradients of PEFT on one process, of the data of that many ranks."""
    plain = adapted(name, targets)
    for seed in range(ranks):
        tokens, labels = tiny.batch(4, seed=seed)
        tiny.own_gradients(plain, {"input_ids": tokens}, labels, 4, 1 / ranks)
    return {label: p.grad for label, p in plain.named_parameters(remove_duplicate=False)}


def _gradients(
    rank: int,
    size: int,
    name: str,
    targets: str,
    pp: int,
    schedule: str,
    grouped: bool | None,
    options: dict[str, Any],
    expected: dict[str, Tensor | None],
) -> tuple[float, list[str], list[Node]]:
    """Return the worst gradient, parameters with a gradient that they should not have, and the plan's nodes."""
    mesh = init_device_mesh("cpu", (pp, size // pp), mesh_dim_names=("pp", "ep"))
    at, ranks = mesh.get_local_rank("ep"), size // pp
    program = build_schedule(schedule, ranks=pp, microbatches=4)
    stages = split_model(adapted(name, targets), program, mesh, grouped=grouped)
    engine = tiny.engine(stages, program, mesh, **{"timeout": 60, **options})
    engine.step(*tiny.batch(4, seed=at))
    worst, wrong = 0.0, []
    for label, parameter in stages.named_parameters():
        whole, grad = expected[label], parameter.grad
        if (whole is None) != (grad is None):
            wrong.append(label)
        elif whole is not None and grad is not None:
            worst = max(worst, tiny.difference(grad, part(label, whole, grad, at, ranks)))
    return worst, wrong, list(engine.plan.ranks[mesh.get_local_rank("pp")])


@pytest.mark.parametrize("targets", first(TARGETS, "everything"))
def test_gradients_are_those_of_peft(ranks4: Ranks, targets: str) -> None:
    summed, expected = set(), of_peft("mixtral", targets, 2)
    found = ranks4.run(_gradients, "mixtral", targets, 2, "1f1b", None, {}, expected, timeout=120)
    for worst, wrong, nodes in found:
        assert worst <= 1e-5
        assert wrong == []
        names = {node.name for node in nodes}
        assert "experts.b" in names
        assert "experts.w" not in names  # the base is frozen; LoRA's factors come with experts.b
        summed |= {(node.stage, node.block) for node in nodes if node.op is Op.REDUCE}
    # Sums over "ep" are of blocks with factors outside their experts alone; those of experts are on one rank.
    assert summed == SUMMED.get(targets, {(0, 0), (0, 1), (1, 0), (1, 1)})


SUMMED: dict[str, set[tuple[int, int]]] = {"experts": set(), "last": {(1, 1)}}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "pp", "schedule", "grouped", "options"),
    [
        ("deepseek_v3", 2, "dualpipev", None, {"recompute": "block"}),
        ("gpt_oss", 1, "combined_1f1b", None, {}),  # transposed weights, one expert a rank
        ("qwen3_moe", 1, "zb_h1", False, {"parts": 2}),
        ("qwen3_moe", 2, "combined_1f1b", True, {"parts": 2, "recompute": "experts"}),
    ],
)
def test_models_ranks_and_options(
    ranks4: Ranks, name: str, pp: int, schedule: str, grouped: bool | None, options: dict[str, Any]
) -> None:
    expected = of_peft(name, "everything", 4 // pp)
    found = ranks4.run(_gradients, name, "everything", pp, schedule, grouped, options, expected, timeout=120)
    assert max(worst for worst, _, _ in found) <= 1e-5
    assert [wrong for _, wrong, _ in found] == [[]] * 4


@over(2)
def test_an_export_has_the_factors_as_peft_has_them(rank: int, size: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    program = build_schedule("sequential", microbatches=2)
    stages = split_model(adapted("mixtral", "experts"), program, mesh)
    engine = tiny.engine(stages, program, mesh, timeout=60)
    trained = [p for p in stages.parameters() if p.requires_grad]
    save_checkpoint(engine, tmp_path / "saved", 1, torch.optim.SGD(trained))
    if rank:
        return
    found = load_file(consolidate(tmp_path / "saved", tmp_path / "exported") / "model.safetensors")
    wanted = adapted("mixtral", "experts").state_dict()
    assert any(".lora_B." in name for name in wanted)
    problems = [name for name in wanted if name not in found or not torch.equal(found[name], wanted[name])]
    assert not problems, problems


def _saved(rank: int, size: int, targets: str, folder: Path) -> bool:
    """Save, change the adapters, load; return whether they are again as they were."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep"))
    stages = split_model(adapted("mixtral", targets), build_schedule("1f1b", ranks=2, microbatches=2), mesh)
    stages.save_pretrained(folder)
    before = {name: p.detach().clone() for name, p in stages.named_parameters()}
    with torch.no_grad():
        for parameter in stages.parameters():
            parameter.add_(float(parameter.requires_grad))
    stages.load_pretrained(folder)
    return all(torch.equal(before[name], p) for name, p in stages.named_parameters())


@pytest.mark.parametrize("targets", ["everything", *wide("dora", "ends", "tokens")])
def test_peft_opens_what_was_saved(ranks4: Ranks, tmp_path: Path, targets: str) -> None:
    model = adapted("mixtral", targets)
    model.save_pretrained(tmp_path / "own")
    assert ranks4.run(_saved, targets, tmp_path / "ours") == [True] * 4
    names = {path.name for path in (tmp_path / "own").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("own", "ours")]
    for config in configs:
        for name in ("target_modules", "target_parameters"):  # PEFT keeps sets
            config[name] = sorted(config[name] or ())
    assert configs[0] == configs[1]
    base = tiny.build("mixtral", tie_word_embeddings=targets == "tokens")
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "ours").state_dict()
    assert all(torch.equal(value, opened[name]) for name, value in model.state_dict().items())


def _tied(**options: Any) -> Any:
    """Return PEFT's model whose adapter of the embedding is the head's, too."""
    torch.manual_seed(11)
    options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options
    config = peft.LoraConfig(ensure_weight_tying=True, **options)
    return peft.get_peft_model(tiny.build("mixtral", tie_word_embeddings=True), config)


TIED: dict[str, dict[str, Any]] = {
    "modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "factors": {"target_modules": ["q_proj", "embed_tokens"]},
    "factors of rank 1": {"target_modules": ["q_proj", "embed_tokens"], "r": 1},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
}


@pytest.mark.parametrize("kind", first(TIED, "modules"))
def test_tied_adapters_are_saved(kind: str, tmp_path: Path) -> None:
    """PEFT writes a tied tensor under both names, and asks for both."""
    model = _tied(**TIED[kind])
    model.save_pretrained(tmp_path / "own")
    split_model(model, build_schedule("sequential", microbatches=1)).save_pretrained(tmp_path / "ours")
    own, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "ours"))
    assert own.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) for name, value in own.items())


def test_adapters_with_one_memory_in_two_stages_are_refused() -> None:
    """PEFT ties LoRA's factors as a tensor and its transpose: over two stages they went apart."""
    with pytest.raises(ValueError, match="allowed") as caught:
        split_model(_tied(**TIED["factors"]), build_schedule("interleaved_1f1b", microbatches=2, chunks=2))
    assert str(caught.value).endswith(
        "lm_head.lora_A.default.weight belongs to stages 0 and 1; allowed: shared inside a stage, or one parameter of "
        "two modules, before and after the layers"
    )


def test_an_adapter_of_other_targets_is_refused(tmp_path: Path) -> None:
    adapted("mixtral", "last").save_pretrained(tmp_path)
    stages = split_model(adapted("mixtral", "everything"), build_schedule("sequential", microbatches=1))
    with pytest.raises(ValueError, match=r"has nothing for .*; allowed: an adapter of the same targets"):
        stages.load_pretrained(tmp_path)


def test_adapters_that_transformers_has_added_are_saved(tmp_path: Path) -> None:
    model = tiny.build("mixtral")
    try:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    except ValueError as error:  # transformers 5.24 adds none by PEFT before 0.22
        pytest.skip(str(error))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    split_model(model, build_schedule("sequential", microbatches=1)).save_pretrained(tmp_path)
    opened = tiny.build("mixtral")
    opened.load_adapter(str(tmp_path))
    assert all(torch.equal(value, expected[name]) for name, value in opened.state_dict().items())


# ------------------------------------------------------------------------------------------------- on the meta device


def on_meta(name: str, targets: str, layers: int = 4, **options: Any) -> Any:
    """Return PEFT's model without memory, as :func:`adapted` without its values."""
    with torch.device("meta"):
        model = tiny.build(name, num_hidden_layers=layers)
    options = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", **TARGETS[targets], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def _read(rank: int, size: int, name: str, targets: str, folder: Path) -> list[str]:
    """Return the tensors that are others than in a whole model that was split."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep"))
    program = build_schedule("1f1b", ranks=2, microbatches=2)
    wanted = split_model(adapted(name, targets), program, mesh).state_dict()
    model = on_meta(name, targets)
    if targets == "ends":  # PEFT reads some of the adapter, and leaves the rest on the meta device
        options = {"is_trainable": True, "low_cpu_mem_usage": True}
        model = peft.PeftModel.from_pretrained(model.unload(), folder / "adapter", **options)
        assert {p.is_meta for p in model.parameters()} == {True, False}
    stages = split_model(model, program, mesh)
    for part in ("base", "adapter"):
        stages.load_pretrained(folder / part)
    found = stages.state_dict()
    assert found.keys() == wanted.keys()
    trained = [p.requires_grad for p in stages.parameters()]
    assert any(trained)
    assert not all(trained)
    return [label for label, value in wanted.items() if not torch.equal(found[label], value)]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("mixtral", "dora"),
        *wide(("mixtral", "ends"), *((name, "everything") for name in ("qwen3_moe", "deepseek_v3", "gpt_oss"))),
    ],
)
def test_a_base_and_an_adapter_are_read_from_their_folders(
    ranks4: Ranks, name: str, targets: str, tmp_path: Path
) -> None:
    tiny.build(name).save_pretrained(tmp_path / "base")
    adapted(name, targets).save_pretrained(tmp_path / "adapter")
    assert ranks4.run(_read, name, targets, tmp_path) == [[]] * 4


def _begun(rank: int, size: int, targets: str, folder: Path, seed: int, start: Any) -> dict[str, Tensor]:
    """Return the whole factors with which new adapters begin."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "ep")) if size > 1 else None
    program = build_schedule("1f1b", ranks=min(size, 2), microbatches=2)
    stages = split_model(on_meta("mixtral", targets, init_lora_weights=start), program, mesh)
    torch.manual_seed(seed)
    torch.rand(rank)  # what was drawn before does not count
    stages.load_pretrained(folder)
    stages.save_pretrained(folder / f"adapter {size} {seed}")
    return load_file(folder / f"adapter {size} {seed}" / "adapter_model.safetensors")


@pytest.mark.parametrize(("targets", "start"), [("everything", "gaussian"), *wide(("ends", True))])
def test_new_adapters_begin_alike_on_any_layout(ranks4: Ranks, targets: str, start: Any, tmp_path: Path) -> None:
    """As PEFT begins them: the first factors are drawn, the second ones are zero."""
    model = tiny.build("mixtral")
    model.save_pretrained(tmp_path)
    own = peft.get_peft_model(model, on_meta("mixtral", targets, init_lora_weights=start).peft_config["default"])
    own.save_pretrained(tmp_path / "own")
    theirs = load_file(tmp_path / "own" / "adapter_model.safetensors")
    four = ranks4.run(_begun, targets, tmp_path, 5, start)[0]
    one, other = (_begun(0, 1, targets, tmp_path, seed, start) for seed in (5, 6))
    assert four.keys() == one.keys() == theirs.keys()
    for name, value in one.items():
        assert torch.equal(value, four[name]), name
        assert value.shape == theirs[name].shape
        if "lora_" not in name:
            assert torch.equal(value, theirs[name])  # a copy of the base
        elif float(theirs[name].abs().max()) == 0:
            assert float(value.abs().max()) == 0
        else:
            assert not torch.equal(value, other[name])
            assert float(value.std()) == pytest.approx(float(theirs[name].std()), rel=0.5)


# -------------------------------------------------------------------------------------------------------------- Trainer


@pytest.mark.parametrize(("targets", "pp"), [("everything", 1), *wide(("tokens", 2))])
def test_the_trainer_trains_saves_and_resumes_adapters(
    kept: dict[int, Ranks], targets: str, pp: int, tmp_path: Path
) -> None:
    arguments = {**loops.EVALUATES, "save_strategy": "steps", "save_steps": 2}
    model = {"model_init": partial(adapted, "mixtral", targets, 2)}
    layout = OverlapArguments(pp=pp, ep=2)
    spec = loops.Spec(tmp_path, None, arguments=arguments, trainer=model, accumulation=2, layout=layout)
    loops.as_plain(spec, kept[2 * pp], 2)
    loops.same_weights(tmp_path, tmp_path / "plain")
    # The middle of it, on one process: the layout of experts' factors differs.
    checkpoint = tmp_path / "checkpoint-2"
    assert not list(checkpoint.glob("model*.safetensors"))
    again = replace(spec, folder=tmp_path / "again", accumulation=4, layout=OverlapArguments(), resume=str(checkpoint))
    loops.alone(again)
    loops.same_weights(tmp_path / "again", tmp_path / "plain")


def _ends(build: Callable[..., Any]) -> Any:
    model = build("mixtral", "ends", 2)
    torch.manual_seed(7)  # the order of the rows follows
    return model


def _new(targets: str) -> Any:
    return on_meta("mixtral", targets, 2)


def test_the_trainer_reads_a_base_and_an_adapter(ranks2: Ranks, tmp_path: Path) -> None:
    tiny.build("mixtral", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    _ends(adapted).save_pretrained(tmp_path / "adapter")
    model = {"model_init": partial(_ends, adapted)}
    spec = loops.Spec(tmp_path, None, arguments=loops.EVALUATES, steps=2, trainer=model)
    plain = loops.plain(spec)
    folders = {"pretrained": str(tmp_path / "base"), "adapter": str(tmp_path / "adapter")}
    parts = replace(spec, layout=OverlapArguments(pp=2, **folders), trainer={"model_init": partial(_ends, on_meta)})
    loops.same_logs(ranks2.run(loops.train, parts), loops.history(plain))
    loops.same_weights(tmp_path, tmp_path / "plain")


def test_the_trainer_begins_adapters_on_the_meta_device(ranks2: Ranks, tmp_path: Path) -> None:
    """With the losses of one rank; what PEFT would compute from the base is refused."""
    tiny.build("mixtral", num_hidden_layers=2).save_pretrained(tmp_path / "base")
    layout = OverlapArguments(pretrained=str(tmp_path / "base"))
    spec = loops.Spec(tmp_path, None, steps=2, trainer={"model_init": partial(_new, "everything")}, layout=layout)
    expected = loops.history(loops.alone(spec))
    loops.same_logs(ranks2.run(loops.train, replace(spec, layout=replace(layout, pp=2))), expected)
    with pytest.raises(ValueError, match=r"lora_magnitude.* has no values .*; allowed: adapter= a folder") as caught:
        replace(spec, trainer={"model_init": partial(_new, "dora")}).build()
    assert "\n" not in str(caught.value)
