"""A rank reads its part of pretrained weights, and the model is then the one that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from overlap1f1b.engine import Engine
from overlap1f1b.integrations.transformers import SplitModel, split_model
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import Program, build_schedule
from tests.integrations.transformers import tiny
from tests.ranks import Ranks

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("deepseek_v3", {}),
    ("gpt_oss", {}),
]
IDS = ["mixtral", "mixtral tied", "qwen3_moe", "deepseek_v3", "gpt_oss"]


class Reader:
    """Stands in for safetensors' ``safe_open`` and counts the bytes that are read, by tensor."""

    read: dict[str, int]

    def __init__(self) -> None:
        self.read = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reader, opened = self, self.own(*args, **kwargs)

        class File:
            def __enter__(self) -> Any:
                opened.__enter__()
                return self

            def __exit__(self, *error: Any) -> Any:
                return opened.__exit__(*error)

            def keys(self) -> Any:
                return opened.keys()

            def get_slice(self, key: str) -> Any:
                return Slice(key, opened.get_slice(key))

        class Slice:
            def __init__(self, key: str, own: Any) -> None:
                self.key, self.own = key, own
                self.get_shape = own.get_shape

            def __getitem__(self, rows: Any) -> Tensor:
                value: Tensor = self.own[rows]
                reader.read[self.key] = reader.read.get(self.key, 0) + value.nbytes
                return value

        return File()

    own = staticmethod(safetensors.safe_open)


def on_meta(folder: Path, program: Program, mesh: Any = None) -> SplitModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny.transformers.AutoConfig.from_pretrained(folder))
    return split_model(model, program, mesh)


def _loaded(rank: int, size: int, folders: list[Path]) -> list[tuple[list[Tensor], int, int]]:
    """Losses over stages and expert ranks of what was read, and how many bytes were read and are held."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    program = build_schedule("combined_1f1b", ranks=2, microbatches=2)
    results = []
    for folder in folders:
        stages = on_meta(folder, program, mesh)
        safetensors.safe_open = reader = Reader()  # type: ignore[misc, assignment]
        try:
            stages.load_pretrained(folder)
        finally:
            safetensors.safe_open = Reader.own  # type: ignore[misc]
        tokens, labels = tiny.batch(4)
        engine = Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn, costs=COSTS, timeout=30)
        losses = list(engine.evaluate(tokens, target=labels).losses)
        held = {value.data_ptr(): value.nbytes for value in stages.state_dict().values()}
        results.append((losses, sum(reader.read.values()), sum(held.values())))
    return results


@pytest.mark.slow
def test_each_rank_reads_its_part(ranks4: Ranks, tmp_path: Path) -> None:
    """Of folders with one file, as transformers writes them, and with several."""
    expected = []
    folders = []
    for index, (name, options) in enumerate(MODELS):
        model = tiny.build(name, **options)
        folders.append(tmp_path / str(index))
        model.save_pretrained(folders[-1], max_shard_size="20KB" if index % 2 else "1GB")
        expected.append(tiny.own_gradients(model, {"input_ids": (batch := tiny.batch(4))[0]}, batch[1], 2)[0])
    for rank, results in enumerate(ranks4.run(_loaded, folders)):
        for (losses, read, held), own, name in zip(results, expected, IDS, strict=True):
            assert read == held, name
            if rank > 1:  # the last stage
                torch.testing.assert_close(losses, own, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "options"), MODELS, ids=IDS)
def test_logits_are_those_of_from_pretrained(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """What transformers saved we load, and what we saved it loads, to the same files and the same bits."""
    model = tiny.build(name, **options).eval()
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=2, chunks=2)
    model.save_pretrained(tmp_path / "own")
    stages = on_meta(tmp_path / "own", program)
    stages.load_pretrained(tmp_path / "own")
    stages.eval().save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens, _ = tiny.batch(4)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        handed: Any = (tokens,)
        for stage in stages.values():
            handed = stage(*handed)
        assert torch.equal(handed[0], expected)
        assert torch.equal(again(tokens, use_cache=False).logits, expected)
    own = load_file(tmp_path / "own" / "model.safetensors")
    ours = {k: t for file in sorted((tmp_path / "ours").glob("*.safetensors")) for k, t in load_file(file).items()}
    assert own.keys() == ours.keys()
    assert all(torch.equal(own[key], ours[key]) for key in own)


def test_the_layout_of_the_modules_is_read_too(tmp_path: Path) -> None:
    """And weights that are there already are overwritten in place."""
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
    program = build_schedule("sequential", microbatches=1)
    stages = split_model(tiny.build("mixtral"), program)

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
