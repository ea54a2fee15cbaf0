"""Models of the transformers library for ``train`` and ``bench``."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from overlap1f1b.integrations.transformers.split import Part, split_model
from overlap1f1b.moe import use_kernels
from overlap1f1b.running.options import RunOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.schedule import Program

BYTES = 256


class HfModel(Part):
    """This rank's part of a randomly initialised model, in one module with the parameter names of the whole model."""

    def __init__(self, options: RunOptions, rank: Rank, program: Program) -> None:
        assert options.hf_config is not None
        config = _config(options.hf_config)
        torch.manual_seed(options.seed)  # the same weights on all ranks
        model = _model(config, options.hf_config).to(rank.device)
        total = sum(p.numel() for p in model.parameters())
        super().__init__(split_model(model, program, rank.mesh))
        self.total = total
        self.description = f"{type(model).__name__}, {config.num_hidden_layers} layers"
        self.identity = {"hf_config": hashlib.sha256(config.to_json_string().encode()).hexdigest()}
        use_kernels(self, options.kernels)


def _config(name: str) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(f"--hf-config {name} needs transformers; pip install transformers") from None
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).strip().splitlines()[0]
        if not Path(name).exists():
            why = f"no such file or folder; as a name: {why}"
        raise ValueError(f"--hf-config {name}: {why}; allowed: a name, a folder or a config.json") from None
    config = config.get_text_config()
    if (size := getattr(config, "vocab_size", 0)) < BYTES:
        raise ValueError(f"--hf-config {name}: a vocabulary of {size}; allowed: {BYTES} or more, for bytes")
    return config


def _model(config: Any, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"--hf-config {Path(name)}: {why}; allowed: the configuration of a causal LM") from None
