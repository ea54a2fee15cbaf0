"""One of torch's pipeline stages, its compute played by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from overlap1f1b.engine import Microbatch, Stage
from overlap1f1b.moe.auxiliary import AuxiliaryCarrier
from overlap1f1b.moe.exchange import Exchange


def checked(stage: object) -> PipelineStage:
    """The stage, if the engine can run it; else a ``ValueError`` that says why not."""
    name = f"stage {getattr(stage, 'stage_index', '?')}"
    if not isinstance(stage, PipelineStage):
        raise ValueError(f"{name} is a {type(stage).__name__}; allowed: torch.distributed.pipelining.PipelineStage")
    if stage.dw_builder is not None:
        raise ValueError(f"{name} has a dw_builder; allowed: none, the engine computes weight gradients apart itself")
    wrapped = [m for m in stage.submod.modules() if isinstance(m, DistributedDataParallel | FSDPModule)]
    if wrapped:
        kind = "DistributedDataParallel" if isinstance(wrapped[0], DistributedDataParallel) else "FSDP"
        raise ValueError(f"{name} holds a module under {kind}; allowed: plain modules, reduced after the step")
    if any(isinstance(parameter, DTensor) for parameter in stage.submod.parameters()):
        raise ValueError(f"{name} has DTensor parameters; allowed: plain tensors")
    return stage


class _Run(NamedTuple):
    """A microbatch in the engine, and what torch's runtime sees of it."""

    microbatch: Microbatch
    inputs: Tensor
    output: list[Tensor]  # once it has run forward


class Place:
    """One of torch's stages with its blocks in the engine.

    ``position`` among the rank's stages: exchanges in flight are told apart by their microbatches' indices.
    """

    def __init__(self, stage: PipelineStage, exchange: Exchange, position: int, positions: int) -> None:
        self.stage, self.position, self.positions = stage, position, positions
        module = stage.submod
        listed = type(module).forward is nn.Sequential.forward or isinstance(module, nn.ModuleList)
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        self.whole = None if listed and not hooked else _Whole(module)
        self.engine = Stage([self.whole] if self.whole else list(module.children()), exchange)
        self.carriers = [m for m in module.modules() if isinstance(m, AuxiliaryCarrier)]
        self.trains = any(p.requires_grad for p in module.parameters())
        self.runs: dict[int, _Run] = {}

    def begin_forward(self, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Microbatch:
        stage = self.stage
        inputs = args if stage.is_first else stage._retrieve_recv_activations(index)
        self._validate("forward inputs", "inputs", inputs)
        x, *others = inputs or (None,)
        if not isinstance(x, Tensor) or (others and not (self.whole and stage.is_first)):
            what = ", ".join(type(value).__name__ for value in inputs) or "nothing"
            raise ValueError(f"stage {stage.stage_index} is given {what}; allowed: one tensor")
        if kwargs and not self.whole:
            raise ValueError(
                f"stage {stage.stage_index} is a list of blocks and is given {', '.join(kwargs)}; "
                "allowed: keyword arguments for a single module"
            )
        if self.whole:
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves([others, kwargs])):
                raise ValueError(
                    f"stage {stage.stage_index} is given arguments that require a gradient; "
                    "allowed: besides the first only ones that do not"
                )
            self.whole.args, self.whole.kwargs = tuple(others), kwargs
        grad = stage.has_backward and (self.trains or x.requires_grad)
        microbatch = self.engine.microbatch(
            x, index=index * self.positions + self.position, loss_scale=self._loss_scale(), seed=None, grad=grad
        )
        self.runs[index] = _Run(microbatch, x, [])
        return microbatch

    def end_forward(self, index: int, *, save: bool) -> Tensor:
        stage, run = self.stage, self.runs[index]
        assert run.microbatch.output is not None
        output = run.microbatch.output.detach().requires_grad_(run.microbatch.grad)
        if stage.is_last and save:
            stage.output_chunks.append(output.detach())
        stage.fwd_cache[index] = ((output,), [])  # what SEND_F sends
        if not stage.is_last:
            self._validate("forward outputs", "outputs", (output,))
        if run.microbatch.grad:
            run.output.append(output)
        else:
            self._leave(index)
        return output

    def begin_backward(self, index: int, loss: Tensor | None) -> tuple[Microbatch | None, Tensor | None]:
        del self.stage.fwd_cache[index]
        if index not in self.runs:  # nothing in it requires a gradient
            return None, None
        microbatch, _, (output,) = self.runs[index]
        if self.stage.is_last:
            assert loss is not None
            loss.backward()
            grad, output.grad = output.grad, None
        else:
            grads = self.stage._retrieve_recv_grads(index)
            self._validate("backward input (output_grads)", "output_grads", grads)
            (grad,) = grads
        return microbatch, torch.zeros_like(output) if grad is None else grad

    def end_backward(self, index: int, *, ends: bool) -> None:
        grad = None
        if index in self.runs:
            microbatch, inputs, _ = self.runs[index]
            grad = microbatch.input_grad
            # As plain autograd leaves it on a leaf: a gradient that is a view or expanded could not be sent.
            if grad is not None and grad.stride() != inputs.stride():
                grad = torch.empty_like(inputs).copy_(grad)
        self.stage.bwd_cache[index] = (grad,)
        if not self.stage.is_first:
            self._validate("backward output (input_grads)", "input_grads", (grad,))
        if ends:
            self._leave(index)

    def finish_weights(self, index: int) -> None:
        if index in self.runs:
            self.runs[index].microbatch.accumulate_weights()
            self._leave(index)

    def _leave(self, index: int) -> None:
        self.runs.pop(index, None)

    def _loss_scale(self) -> float:
        """That of the stage's auxiliary losses, as the user has set it."""
        scales = {carrier.loss_scale for carrier in self.carriers} or {1.0}
        if len(scales) > 1:
            raise ValueError(
                f"stage {self.stage.stage_index} has auxiliary losses of scales {sorted(scales)}; allowed: one scale"
            )
        return scales.pop()

    def _validate(self, what: str, attribute: str, tensors: Sequence[Tensor | None]) -> None:
        """Torch's own check, which it makes where TORCH_DISTRIBUTED_DEBUG is DETAIL."""
        if getattr(self.stage, "_runtime_validate", False):
            expected = getattr(self.stage._stage_meta, attribute)
            self.stage._validate_stage_tensors(f"Stage {self.stage.stage_index} {what}", expected, tuple(tensors))


class _Whole(nn.Module):
    """A stage's module as one block, given the other arguments of the microbatch that runs forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Any:
        return self.module(x, *self.args, **self.kwargs)
