"""Each rank reads its part of a folder of weights; what is saved is what was trained, as transformers sees it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import safetensors
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


from transformers import AutoModelForCausalLM

from overlap1f1b.checkpoint.tensors import plain_values
from overlap1f1b.integrations.transformers import SplitModel, split_model
from overlap1f1b.schedule import Program, build_schedule
from tests import products
from tests.integrations.transformers import tiny
from tests.integrations.transformers.loops import same_weights
from tests.ranks import Ranks, over
from tests.tiers import first, wide

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {}),
]
IDS = ["mixtral", "mixtral tied", "qwen3_moe", "deepseek_v3", "gpt_oss"]


class Slice:
    """A tensor of a file that notes how many bytes are read of it."""

    def __init__(self, own: Any, read: list[int]) -> None:
        self.own, self.read, self.get_shape = own, read, own.get_shape

    def __getitem__(self, rows: Any) -> Tensor:
        value: Tensor = self.own[rows]
        self.read.append(value.nbytes)
        return value


def opened(read: list[int]) -> Callable[..., Any]:
    """Return what stands in for safetensors' ``safe_open`` and notes in ``read`` what is read."""
    own = safetensors.safe_open

    @contextmanager
    def opens(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with own(*args, **kwargs) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda key: Slice(file.get_slice(key), read))

    return opens


def on_meta(folder: Path, program: Program, mesh: Any = None) -> SplitModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.transformers.AutoConfig.from_pretrained(folder))
    return split_model(model, program, mesh)


def _loaded(rank: int, size: int, folders: list[Path]) -> list[tuple[list[Tensor], int, int]]:
    """Return, for each folder, the losses over stages and expert ranks, and the bytes that were read and are held."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    program = build_schedule("combined_1f1b", ranks=2, microbatches=2)
    results = []
    for folder in folders:
        stages = on_meta(folder, program, mesh)
        read: list[int] = []
        with patch.object(safetensors, "safe_open", opened(read)):
            stages.load_pretrained(folder)
        losses = list(tiny.engine(stages, program, mesh).evaluate(*tiny.batch(4)).losses)
        held = {value.data_ptr(): value.nbytes for value in stages.state_dict().values()}
        results.append((losses, sum(read), sum(held.values())))
    return results


def test_each_rank_reads_its_part(ranks4: Ranks, tmp_path: Path) -> None:
    """Folders have one file, as transformers writes them, or several; below all models on one rank."""
    expected, folders = [], []
    for index, (name, options) in enumerate(MODELS[1::2]):
        model = tiny.build(name, **options)
        folders.append(tmp_path / str(index))
        model.save_pretrained(folders[-1], max_shard_size="20KB" if index % 2 else "1GB")
        expected.append(tiny.own_gradients(model, {"input_ids": (batch := tiny.batch(4))[0]}, batch[1], 2)[0])
    for rank, results in enumerate(ranks4.run(_loaded, folders)):
        for (losses, read, held), own, name in zip(results, expected, IDS[1::2], strict=True):
            assert read == held, name
            if rank > 1:  # the last stage
                torch.testing.assert_close(losses, own, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "options"), first(MODELS, ("mixtral", {})), ids=IDS)
def test_logits_are_those_of_from_pretrained(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Folders that transformers saved are loaded, and transformers loads ours, with equal files and bits."""
    model = tiny.build(name, **options).eval()
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=1, chunks=2)
    model.save_pretrained(tmp_path / "own")
    stages = on_meta(tmp_path / "own", program)
    stages.load_pretrained(tmp_path / "own")
    stages.eval().save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens, labels = tiny.batch(4)
    engine = tiny.engine(stages, program)
    ((_, logits),) = engine.evaluate(tokens, target=labels, return_outputs=True).outputs
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        assert torch.equal(logits, expected)
        assert torch.equal(again(tokens, use_cache=False).logits, expected)
    same_weights(tmp_path / "ours", tmp_path / "own", 0.0)


def test_the_layout_of_the_modules_is_read_too(tmp_path: Path) -> None:
    """Existing weights are overwritten in place."""
    model = tiny.build("mixtral", tie_word_embeddings=True)
    model.config.save_pretrained(tmp_path)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    program = build_schedule("dualpipev", ranks=1, microbatches=2)
    stages = split_model(tiny.build("mixtral", seed=4, tie_word_embeddings=True), program)
    before = list(stages.parameters())
    stages.load_pretrained(tmp_path)
    assert all(one is other for one, other in zip(stages.parameters(), before, strict=True))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in stages.state_dict().items())


def test_folders_without(tmp_path: Path) -> None:
    stages = split_model(tiny.build("mixtral"), build_schedule("sequential", microbatches=1))

    def refusal() -> str:
        with pytest.raises(ValueError, match=r"allowed|looked for") as caught:
            stages.load_pretrained(tmp_path)
        return str(caught.value)

    looked = "looked for model.safetensors.index.json or model.safetensors; found neither"
    assert refusal() == f"{tmp_path}: {looked}"
    state = dict(tiny.build("mixtral").state_dict())
    norm = state.pop("model.norm.weight")
    save_file(state, tmp_path / "model.safetensors")
    assert refusal().startswith(f"{tmp_path} has nothing for model.norm.weight; allowed:")
    save_file({**state, "model.norm.weight": norm[1:].clone()}, tmp_path / "model.safetensors")
    assert refusal() == f"{tmp_path} has model.norm.weight of shape [31] for this rank; allowed: [32]"
    index = {"weight_map": dict.fromkeys((*state, "model.norm.weight"), "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    looked = "looked for part.safetensors, which model.safetensors.index.json names; found none"
    assert refusal() == f"{tmp_path}: {looked}"


SAVED: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    *wide(("qwen3_moe", {}), ("deepseek_v3", {})),
]


def _trained(rank: int, size: int, name: str, options: dict[str, Any], folder: Path) -> dict[str, tuple[Tensor, int]]:
    """Train over stages and expert ranks, and save; return this rank's tensors, each with its rank along "ep"."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    program = build_schedule("combined_1f1b", ranks=2, microbatches=2)
    stages = split_model(tiny.build(name, **options), program, mesh)
    engine = tiny.engine(stages, program, mesh)
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    tokens, labels = tiny.batch(4)  # one batch, again and again
    for _ in range(2):
        engine.step(tokens, target=labels)
        optimizer.step()
        optimizer.zero_grad()
    stages.save_pretrained(folder)
    part = mesh["ep"].get_local_rank()
    return {label: (value.clone(), part) for label, value in stages.state_dict().items()}


@pytest.mark.parametrize(("name", "options"), SAVED, ids=["mixtral", "qwen3_moe", "deepseek_v3"])
def test_what_was_trained_is_saved(ranks4: Ranks, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    held = ranks4.run(_trained, name, options, tmp_path)
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert {label for part in held for label in part} == state.keys()
    for part in held:
        for label, (value, rank) in part.items():
            whole = state[label] if ".experts." not in label else state[label].chunk(2)[rank]
            assert torch.equal(value, whole), label


@pytest.mark.parametrize("kind", products.KINDS)
@over(2)
def test_weights_of_another_class_are_saved_as_values_and_read(rank: int, size: int, kind: str, tmp_path: Path) -> None:
    """A model that was converted with values writes a folder, and one without values reads it and keeps its classes."""
    mesh, program = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), build_schedule("1f1b", microbatches=2)
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = tiny.build("mixtral", num_hidden_layers=2)
        products.convert(model.model.layers, products.KINDS[kind])
        stages = split_model(model, program, mesh)
        if device == "cpu":
            stages.save_pretrained(tmp_path)
        else:
            stages.load_pretrained(tmp_path)
        dist.barrier()
        assert {type(p).__name__.lower() for p in stages.parameters() if p.dim() == 3} == {kind}, device
        read, plain = AutoModelForCausalLM.from_pretrained(tmp_path), tiny.build("mixtral", num_hidden_layers=2)
        expected = plain.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in read.state_dict().items())
        for name, parameter in stages.named_parameters():
            whole = dict(plain.named_parameters())[name]
            mine = whole.chunk(size)[rank] if parameter.dim() == 3 else whole
            assert torch.equal(plain_values(parameter.detach(), name), mine), name


@over(2)
def test_a_model_of_which_a_rank_has_a_part_is_not_saved(rank: int, size: int, tmp_path: Path) -> None:
    """Its folder would lack experts, which from_pretrained then draws anew."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model = tiny.build("mixtral")
    split_model(model, build_schedule("sequential", microbatches=2), mesh)
    for name, call in (("save_pretrained", lambda: model.save_pretrained(tmp_path)), ("state_dict", model.state_dict)):
        with pytest.raises(ValueError, match=rf"^{name} of a model of which a rank has a part; allowed: "):
            call()
    assert not [*tmp_path.iterdir()]


@over(2)
def test_a_model_of_which_a_rank_has_a_stage_is_not_called(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    model = tiny.build("mixtral")
    split_model(model, build_schedule("1f1b", ranks=size, microbatches=2), mesh)
    tokens = tiny.batch(1)[0]
    for call, name in (
        (lambda: model.generate(tokens), "MixtralForCausalLM.generate"),
        (lambda: model(tokens), "Embedding" if rank else "MixtralDecoderLayer"),
    ):
        with pytest.raises(ValueError, match=f"^a call of {name}, for which other ranks have the weights; allowed: "):
            call()


@over(2)
def test_a_rank_that_cannot_write_leaves_no_other_waiting(rank: int, size: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    stages = split_model(tiny.build("mixtral"), build_schedule("combined_1f1b", ranks=size, microbatches=2), mesh)
    (tmp_path / "model-00002-of-00002.safetensors").mkdir(exist_ok=True)
    with pytest.raises(OSError, match=rf"^{tmp_path} cannot be written: rank pp 1: "):
        stages.save_pretrained(tmp_path)


def test_an_earlier_save_is_replaced(tmp_path: Path) -> None:
    """The one stage holds both ends of a tie; the configurations equal transformers' own."""
    options = {"tie_word_embeddings": True}
    model = tiny.build("mixtral", **options).to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=0.5)
    model.save_pretrained(tmp_path / "own")
    ours = tmp_path / "ours"
    for shard in ("1GB", "20KB"):  # one file, and more than are written
        tiny.build("mixtral", seed=4, **options).save_pretrained(ours, max_shard_size=shard)
        split_model(model, build_schedule("sequential", microbatches=1)).save_pretrained(ours)
        loaded = AutoModelForCausalLM.from_pretrained(ours)
        assert all(torch.equal(value, model.state_dict()[label]) for label, value in loaded.state_dict().items())
        assert [path.name for path in ours.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    for file in ("config.json", "generation_config.json"):
        assert (ours / file).read_text() == (tmp_path / "own" / file).read_text()
