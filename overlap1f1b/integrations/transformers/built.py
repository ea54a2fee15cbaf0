"""This rank's part of a trainer's model, and the engine that plays it."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.engine import Engine
from overlap1f1b.integrations.transformers.adapters import base_of
from overlap1f1b.integrations.transformers.arguments import OverlapArguments
from overlap1f1b.integrations.transformers.split import Part, split_model
from overlap1f1b.schedule import Program

INPUTS = ("input_ids", "attention_mask", "position_ids")
"""Columns of a batch that layers read; others than these are for the loss."""


class BuiltModel:
    """This rank's part of a model, and the engine that plays it.

    Attributes:
        given: The whole model, whose layers elsewhere are on the device "meta".
        parameters: Number of the whole model's parameters without embeddings.
        names: Inputs of the model that its layers read.
        stages: The stages of this rank.
        module: Module of this rank's parameters, by their names in the whole model.
        loss_rank: The first pipeline rank that computes losses, from which a subclass's log entries come.
        pipe: The pipe whose microbatches end there.
        ahead: Batches of an evaluation that are played together.

    Args:
        keeps: Whether the last layer, which runs the code of the loss, keeps its activations under any ``recompute``.
    """

    def __init__(
        self,
        model: Any,
        program: Program,
        mesh: DeviceMesh | None,
        parallel: OverlapArguments,
        device: torch.device,
        *,
        keeps: bool,
    ) -> None:
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ValueError(f"a {type(model).__name__} that from_pretrained has sharded; allowed: a whole model")
        self.given = model
        self.parameters = model.num_parameters(exclude_embeddings=True)
        known = signature(type(base_of(model)).forward).parameters  # PEFT's model passes most on by **kwargs
        self.names = tuple(name for name in INPUTS if name == INPUTS[0] or name in known)
        self.stages = split_model(model, program, mesh, inputs=self.names)
        for stage in self.stages.values():
            stage.blocks[-1].keeps = keeps and stage.blocks[-1].is_last
        if any(p.is_meta for p in self.stages.parameters()):
            if parallel.pretrained is None:
                raise ValueError("a model on the meta device; allowed: with pretrained= a folder of its weights")
            self.stages.load_pretrained(parallel.pretrained, device)
        if parallel.adapter is not None:
            self.stages.load_pretrained(parallel.adapter, device)
        unfilled = [name for name, p in self.stages.named_parameters() if p.is_meta]
        if unfilled:
            raise ValueError(
                f"{unfilled[0]} has no values on the meta device; allowed: adapter= a folder of the adapter, or LoRA "
                "that begins without its base (init_lora_weights=True or gaussian)"
            )
        model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        self.module = Part(self.stages)
        placement, last = program.placement, program.placement.stages - 1
        self.loss_rank = placement.replicas(last)[0]
        self.pipe = next(pipe for pipe, stage in placement.places(self.loss_rank) if stage == last)
        self.ahead = len(program.microbatches_of(self.pipe))
        self.engine = Engine(self.stages, program, mesh=mesh, options=parallel.options)
