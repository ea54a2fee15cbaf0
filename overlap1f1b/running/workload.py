"""The models that train and bench share, and what their results say of the workload."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap1f1b import __version__
from overlap1f1b.engine import LossFunction
from overlap1f1b.engine.stages import Model
from overlap1f1b.integrations.transformers.experts import find
from overlap1f1b.integrations.transformers.split import RankModule, split_model
from overlap1f1b.moe import Experts, use_kernels
from overlap1f1b.running.launch import cores
from overlap1f1b.running.options import RunOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.schedule import Program
from overlap1f1b.schedule.values import counted, shortened
from overlap1f1b.transport import devices

BYTES = 256
HUB_LIMIT_S = 5.0
"""Within this time a hub of models must answer; without an answer, files that it has sent before are read."""


def model_config(options: RunOptions) -> MoEConfig:
    """Return the configuration of the byte-level model."""
    return MoEConfig(
        **asdict(options.model),
        sequence=options.sequence,
        weights_in=options.weights_in,
        precision=None if options.precision == "weights" else options.precision,
        kernels=options.kernels,
    )


class ByteModel(MoETransformer):
    """The byte-level model of the options, with this rank's experts."""

    def __init__(self, options: RunOptions, rank: Rank) -> None:
        super().__init__(model_config(options), group=rank.group, seed=options.seed, device=rank.device)
        sizes = options.model
        experts = {p for m in self.modules() if isinstance(m, Experts) for p in m.parameters()}
        self.total = sum(p.numel() * (options.ep if p in experts else 1) for p in self.parameters())
        each = f"{counted(sizes.layers, 'layer')}, {counted(sizes.experts, 'expert')}, {sizes.top_k} for a byte"
        eight = ", in eight bits" if options.precision == "fp8" else ""
        on_cpu = ", multiplied in float32 on a CPU" if eight and rank.device.type == "cpu" else ""
        self.description = each + eight + on_cpu
        self.identity = asdict(sizes)


class HfModel(RankModule):
    """This rank's part of a randomly initialised model, in one module with the parameter names of the whole model."""

    def __init__(self, options: RunOptions, rank: Rank, program: Program) -> None:
        assert options.hf_config is not None
        config, kind = _hf_config(options.hf_config)
        torch.manual_seed(options.seed)  # the same weights on all ranks
        model = kind.from_config(config, dtype=torch.float32).to(rank.device)
        config = model.config
        total = sum(p.numel() for p in model.parameters())
        super().__init__(split_model(model, program, rank.mesh))
        self.total = total
        self.description = f"{type(model).__name__}, {counted(config.num_hidden_layers, 'layer')}"
        self.identity = {"hf_config": hashlib.sha256(config.to_json_string().encode()).hexdigest()}
        use_kernels(self, options.kernels)


def _hf_config(name: str) -> tuple[Any, Any]:
    """Return a configuration, by a name, a folder or a file, and what makes models of it, if it has experts."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(f"--hf-config {name} needs transformers; pip install transformers") from None
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=not (Path(name).exists() or _hub_answers()))
    except Exception as error:  # of any kind: values are checked by several libraries
        why = " ".join(str(error).split("\n\n")[0].split()).rstrip(".") or type(error).__name__
        if not Path(name).exists():
            why = f"no such file or folder; as a name: {why}"
        raise ValueError(f"--hf-config {name}: {why}; allowed: a name, a folder or a config.json") from None
    config = config.get_text_config()
    if (size := getattr(config, "vocab_size", 0)) < BYTES:
        raise ValueError(f"--hf-config {name}: a vocabulary of {size}; allowed: {BYTES} or more, for bytes")
    try:
        with torch.device("meta"):  # no time and no memory for a model that is refused
            empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # of any kind: a layer of these sizes cannot be made
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"--hf-config {name}: {shortened(why)}; allowed: the configuration of a causal LM") from None
    try:
        find(empty)
    except ValueError as error:
        raise ValueError(f"--hf-config {name}: {error}") from None
    return config, AutoModelForCausalLM


def _hub_answers() -> bool:
    """Return whether the hub of models answers at once: its own client tries for up to a minute."""
    from huggingface_hub import get_session
    from huggingface_hub.constants import ENDPOINT

    try:
        get_session().head(ENDPOINT, timeout=HUB_LIMIT_S)
    except Exception:  # of any of the libraries that its client has been built on
        return False
    return True


def build(
    options: RunOptions, rank: Rank, program: Program
) -> tuple[ByteModel | HfModel, Model, LossFunction, list[float] | None]:
    """Return a module with this rank's parameters, the model for the engine, its loss and its blocks' relative costs.

    The parameters' values depend on the options alone. The module also has ``total``, the number of parameters on all
    ranks; ``description``, its sizes in words; and ``identity``, the options that a resumed run must share.
    """
    if options.hf_config is not None:
        whole = HfModel(options, rank, program)
        return whole, whole.split, whole.split.loss_fn, None
    model = ByteModel(options, rank)
    return model, model, loss_fn, [0.0, *[1.0] * options.model.layers, 0.0]  # embedding and head take little time


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte, of ``logits [B, S, V]`` and ``target [B, S]``."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def fed(options: RunOptions, rank: Rank, inputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return input and target for the engine, ``[B, S]`` each; a model of transformers shifts the labels itself."""
    inputs, target = inputs.to(rank.device), target.to(rank.device)
    if options.hf_config is not None:
        inputs = target = torch.cat([inputs, target[:, -1:]], dim=1)
    return inputs, target


def workload(options: RunOptions, *names: str) -> dict[str, Any]:
    """Return the JSON of the model's sizes and of the named options."""
    sizes = asdict(options.model) if options.hf_config is None else {"hf_config": options.hf_config}
    return sizes | {name: getattr(options, name) for name in names}


def environment(rank: Rank) -> dict[str, object]:
    """Return versions and sizes that figures depend on; nothing that names the machine."""
    return {
        "overlap1f1b": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu" if (gpu := devices.gpu_of(rank.device)) is None else gpu.get_device_name(rank.device),
        "cores": cores(),
        "threads_per_rank": torch.get_num_threads(),
        "ranks": rank.size,
    }
