"""transformers' own expert parallelism over the exchange of this library."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from overlap1f1b.integrations.transformers import register
from tests.integrations.transformers import tiny
from tests.ranks import Ranks


def _gradients(rank: int, size: int, folder: Path) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Logits and gradients of a model that ``from_pretrained`` spreads, by who brings its experts their tokens."""
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "ACCELERATE_USE_CPU": "1"}
    register()
    found = {}
    for name in ("overlap1f1b", "all_to_all"):
        config = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation=name)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        tokens, labels = tiny.batch(4, seed=rank)
        if rank == 1:  # one token alone: an expert rank that gets nothing
            tokens, labels = tokens[:1, :3], labels[:1, :3]
        output = model(tokens, labels=labels, use_cache=False)
        output.loss.backward()
        grads = {label: p.grad.full_tensor() for label, p in model.named_parameters() if p.grad is not None}
        found[name] = (output.logits.detach(), grads)
    return found


def test_gradients_are_those_of_transformers_own(ranks2: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23")
    pytest.importorskip("accelerate")
    own = tiny.build("qwen3_moe")
    own.save_pretrained(tmp_path)
    expected: dict[str, Tensor] = {}
    for rank, found in enumerate(ranks2.run(_gradients, tmp_path)):
        (logits, grads), (their_logits, their_grads) = found["overlap1f1b"], found["all_to_all"]
        tokens, labels = tiny.batch(4, seed=rank)
        if rank == 1:
            tokens, labels = tokens[:1, :3], labels[:1, :3]
        torch.testing.assert_close(logits, own(tokens, use_cache=False).logits.detach())
        torch.testing.assert_close(logits, their_logits)
        assert grads.keys() == their_grads.keys()
        for label, grad in grads.items():
            assert tiny.difference(grad, their_grads[label]) < 1e-5, label
        (own(tokens, labels=labels, use_cache=False).loss / 2).backward()
        expected = grads
    for label, grad in tiny.gradients(own).items():
        if label in expected and ".experts." not in label:
            assert tiny.difference(expected[label], grad) < 1e-5, label


def test_before_5_23(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(ValueError, match=r"^transformers 5\.\S+ has no EPImplementationInterface; allowed: 5\.23 or"):
        register()
