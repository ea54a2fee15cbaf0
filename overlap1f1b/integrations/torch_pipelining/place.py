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
from overlap1f1b.transport.exchange import Exchange


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
    """A microbatch between its forward and its last weight gradient."""

    microbatch: Microbatch
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # leaves: the loss is computed from them; () before its forward has ended


class Place:
    """One of torch's stages with its blocks in the engine."""

    def __init__(self, stage: PipelineStage, exchange: Exchange) -> None:
        self.stage = stage
        module = stage.submod
        listed = type(module).forward is nn.Sequential.forward or isinstance(module, nn.ModuleList)
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        self.whole = None if listed and not hooked else _Whole(module)
        blocks = [self.whole] if self.whole else [block for block in module._modules.values() if block is not None]
        self.engine = Stage(blocks, exchange, number=stage.stage_index)
        kinds = [type(module).__name__] if self.whole else self.engine.names
        self.engine.names = [f"stage {stage.stage_index}: {kind}" for kind in kinds]
        self.carriers = [m for m in module.modules() if isinstance(m, AuxiliaryCarrier)]
        self.trains = any(p.requires_grad for p in module.parameters())
        self.runs: dict[int, _Run] = {}

    def begin_forward(self, index: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Microbatch:
        stage = self.stage
        inputs = tuple(args if stage.is_first else stage._retrieve_recv_activations(index))
        self._validate("forward inputs", "inputs", inputs)
        if not inputs or not all(isinstance(value, Tensor) for value in inputs):
            what = ", ".join(type(value).__name__ for value in inputs) or "nothing"
            raise ValueError(f"stage {stage.stage_index} is given {what}; allowed: one tensor or several")
        if kwargs and not self.whole:
            raise ValueError(
                f"stage {stage.stage_index} is a list of blocks and is given {', '.join(kwargs)}; "
                "allowed: keyword arguments for a single module"
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(kwargs)):
            raise ValueError(
                f"stage {stage.stage_index} is given keyword arguments that require a gradient; "
                "allowed: ones that do not"
            )
        if self.whole:
            self.whole.kwargs = kwargs
        grad = stage.has_backward and (self.trains or any(x.requires_grad for x in inputs))
        microbatch = self.engine.microbatch(inputs, index=index, loss_scale=self._loss_scale(), seed=None, grad=grad)
        self.runs[index] = _Run(microbatch, inputs, ())
        return microbatch

    def end_forward(self, index: int, *, save: bool) -> Tensor | tuple[Tensor, ...]:
        stage, microbatch = self.stage, self.runs[index].microbatch
        assert microbatch.outputs is not None
        outputs, microbatch.outputs = microbatch.outputs, None
        if stage.is_last and save:
            stage.output_chunks.append(_one(tuple(output.detach() for output in outputs)))
        if microbatch.grad:
            for output, requires in zip(outputs, microbatch.differentiable, strict=True):
                output.requires_grad_(requires)
            self.runs[index] = self.runs[index]._replace(outputs=outputs)
        else:
            del self.runs[index]
        stage.fwd_cache[index] = (outputs, [])  # what SEND_F sends
        if not stage.is_last:
            self._validate("forward outputs", "outputs", outputs)
        return _one(outputs)

    def begin_backward(
        self, index: int, loss: Tensor | None
    ) -> tuple[Microbatch | None, tuple[Tensor | None, ...] | None]:
        del self.stage.fwd_cache[index]
        if index not in self.runs:  # nothing in it requires a gradient
            return None, None
        microbatch, _, outputs = self.runs[index]
        if self.stage.is_last:
            assert loss is not None
            loss.backward()
            grads = tuple(output.grad for output in outputs)
        else:
            grads = self.stage._retrieve_recv_grads(index)
            self._validate("backward input (output_grads)", "output_grads", grads)
        self.runs[index] = self.runs[index]._replace(outputs=())
        return microbatch, tuple(
            (torch.zeros_like(output) if grad is None else grad) if output.requires_grad else None
            for output, grad in zip(outputs, grads, strict=True)
        )

    def end_backward(self, index: int, *, ends: bool) -> None:
        grads: tuple[Tensor | None, ...] = (None,) * len(self.stage.args_recv_info[index])
        if index in self.runs:
            microbatch, inputs, _ = self.runs[index]
            grads = tuple(map(_laid_out, microbatch.input_grads, inputs))
            microbatch.input_grads = ()
            if ends:
                del self.runs[index]
        self.stage.bwd_cache[index] = grads
        if not self.stage.is_first:
            self._validate("backward output (input_grads)", "input_grads", grads)

    def finish_weights(self, index: int) -> None:
        if index in self.runs:
            self.runs.pop(index).microbatch.accumulate_weights()

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
    """A stage's module as one block, given the keyword arguments of the microbatch that runs forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.kwargs: dict[str, Any] = {}

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(*inputs, **self.kwargs)


def _one(values: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return values[0] if len(values) == 1 else values


def _laid_out(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """As plain autograd leaves it on a leaf: a gradient that is a view or expanded could not be sent."""
    if grad is None or grad.stride() == like.stride():
        return grad
    return torch.empty_like(like).copy_(grad)
