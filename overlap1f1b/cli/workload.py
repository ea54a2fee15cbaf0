"""The model and the text that train and bench share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap1f1b.cli.launch import cores
from overlap1f1b.cli.options import RunOptions
from overlap1f1b.cli.ranks import Rank
from overlap1f1b.cli.text import Corpus
from overlap1f1b.moe import MoEConfig, MoETransformer


def model_config(options: RunOptions) -> MoEConfig:
    """Return the configuration of the byte-level model."""
    model = options.model
    sigmoid = model.router == "sigmoid"
    return MoEConfig(
        vocabulary=256,
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        experts=model.experts,
        top_k=model.top_k,
        intermediate=model.intermediate,
        shared_intermediate=model.shared_intermediate,
        dense_layers=model.dense_layers,
        dense_intermediate=model.top_k * model.intermediate,
        sequence=options.sequence,
        dropout=model.dropout,
        score=model.router,
        aux_coefficient=0.0 if sigmoid else 0.01,
        weights_in=options.weights_in,
        kernels=options.kernels,
    )


def build_model(options: RunOptions, rank: Rank) -> MoETransformer:
    """Return the model of this rank; its values depend on the options alone."""
    return MoETransformer(model_config(options), group=rank.group, seed=options.seed, device=rank.device)


def block_weights(options: RunOptions) -> list[float]:
    """Return the relative costs of the model's blocks: embedding and head take little time."""
    return [0.0, *[1.0] * options.model.layers, 0.0]


def load_corpus(options: RunOptions) -> Corpus:
    """Read the text that the options name."""
    return Corpus.load(options.text, sequence=options.sequence)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte, of ``logits [B, S, V]`` and ``target [B, S]``."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def environment(rank: Rank) -> dict[str, object]:
    """Return versions and sizes that figures depend on; nothing that names the machine."""
    import platform

    from overlap1f1b import __version__

    return {
        "overlap1f1b": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "cpu",
        "cores": cores(),
        "threads_per_rank": torch.get_num_threads(),
        "ranks": rank.size,
    }
