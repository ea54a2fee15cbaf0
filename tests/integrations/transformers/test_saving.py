"""What is saved is what was trained, as transformers sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from overlap1f1b.engine import Engine
from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.plan import NodeCosts
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.ranks import Ranks

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, reduce=2, send=1)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("deepseek_v3", {}),
]


def _trained(rank: int, size: int, name: str, options: dict[str, Any], folder: Path) -> dict[str, tuple[Tensor, int]]:
    """Trains over stages and expert ranks and saves; every tensor of this rank, and which part of the whole it is."""
    pp = 2 if size > 1 else 1
    mesh = init_device_mesh("cpu", (pp, size // pp), mesh_dim_names=("pp", "ep"))
    program = build_schedule("combined_1f1b", ranks=pp, microbatches=2)
    stages = split_model(tiny.build(name, **options), program, mesh)
    engine = Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn, costs=COSTS, timeout=30)
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    loss, steps = 1.0, 0
    while loss >= 0.04 and steps < 60:
        tokens, labels = tiny.batch(4)  # one batch, again and again
        loss = engine.mean_loss(engine.step(tokens, target=labels))
        steps += 1
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05
    stages.save_pretrained(folder)
    part = mesh["ep"].get_local_rank()
    return {label: (value.clone(), part) for label, value in stages.state_dict().items()}


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])
def test_one_batch_is_learned_and_saved(ranks4: Ranks, name: str, options: dict[str, Any], tmp_path: Path) -> None:
    held = ranks4.run(_trained, name, options, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = loaded.state_dict()
    assert {label for part in held for label in part} == state.keys()
    for part in held:
        for label, (value, rank) in part.items():
            whole = state[label] if ".experts." not in label else state[label].chunk(2)[rank]
            assert torch.equal(value, whole), label
    tokens, labels = tiny.batch(4)
    assert float(loaded(tokens, labels=labels, use_cache=False).loss.detach()) < 0.05


def test_an_earlier_save_is_replaced(tmp_path: Path) -> None:
    """Tied inside the one stage; the configurations are those that transformers writes."""
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
