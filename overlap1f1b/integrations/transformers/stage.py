"""Stages of a causal LM: its own layers, called with the arguments from its own forward."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.engine import Microbatch, MicrobatchBlock
from overlap1f1b.integrations.transformers.adapters import second_factors
from overlap1f1b.integrations.transformers.shell import Call, Returned, Shell
from overlap1f1b.play.microbatch import OptionalTensors

_ROUTED: ContextVar[list[Tensor] | None] = ContextVar("router logits of the running layer", default=None)


@dataclass(frozen=True, eq=False)
class StageRange:
    """The layers ``start`` to ``end`` of a stage, and the model around them; shared by the stage's blocks.

    ``inputs`` are names of the model's arguments, in the order of the step's inputs.
    """

    shell: Shell
    start: int
    end: int
    inputs: tuple[str, ...]

    def named(self, inputs: OptionalTensors) -> dict[str, Tensor]:
        """Return the step's inputs that are not None, by name."""
        if len(inputs) != len(self.inputs):
            raise ValueError(f"{len(inputs)} inputs; allowed: {len(self.inputs)}, {', '.join(self.inputs)}")
        if inputs[0] is None:
            raise ValueError(f"{self.inputs[0]} is None; allowed: a tensor, only other inputs may be left out")
        return {name: value for name, value in zip(self.inputs, inputs, strict=True) if value is not None}

    def begin(
        self, inputs: OptionalTensors, microbatch: Microbatch, hidden: Tensor | None
    ) -> tuple[Tensor, list[Call]]:
        """Return the hidden states before a layer, and the calls of the layers, which the stage's blocks share.

        Without ``hidden`` run the embedding. A recomputation needs hidden states with a graph of their own.
        """
        if hidden is None or self not in microbatch.memo:
            first, microbatch.memo[self] = self.shell.begin(self.named(inputs), self.end - 1, hidden)
            hidden = first if hidden is None else hidden
        return hidden, microbatch.memo[self]


class LossOfModel:
    """A ``loss_fn`` that calls the model by itself: the last layer hands it the rest of the model.

    ``compute`` maps the inputs of the model by name and ``finish`` to a scalar; ``finish(arguments by name)`` runs the
    model's own forward after its last layer, with any arguments beside the inputs, and returns what the model returns.
    """

    def __init__(self, compute: Callable[[Mapping[str, Tensor], Callable[[Mapping[str, Any]], Any]], Tensor]) -> None:
        self.compute = compute

    def __call__(self, loss: Tensor) -> Tensor:
        """Return the loss, which the last layer has computed."""
        return loss


class Layer(MicrobatchBlock):
    """A block of a stage: a decoder layer. The first also runs the embedding, the last also norm, head and loss.

    It takes and returns ``(hidden [B, S, H], *inputs of the model or None, *values that layers hand on beside hidden
    states or None, *router logits [T, E] of earlier layers)``.
    The first block of the model takes only the model's inputs. The last returns ``(loss, logits [B, S, V])`` if there
    is a target, else ``(logits,)``; with a :class:`LossOfModel` its loss alone. Between stages, router logits are one
    tensor ``[layers, T, E]``.
    """

    def __init__(self, part: StageRange, number: int) -> None:
        super().__init__()
        shell = part.shell
        self.input_names = part.inputs
        self.part, self.number, self.layer = part, number, shell.layers[number]
        self.is_last = number == len(shell.layers) - 1
        # The modules of the model around its layers that this block calls.
        self.beside = nn.ModuleList(shell.before.values() if number == 0 else ())
        self.beside.extend(shell.after.values() if self.is_last else ())
        if getattr(shell.config, "output_router_logits", False):
            for router, index in shell.routers(number):
                router.register_forward_hook(partial(_record, index))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the decoder layer: the model's own forward around it runs with stand-ins for layers."""
        self.layer.compile(*args, **kwargs)

    def forward(self, *inputs: Any, microbatch: Microbatch) -> OptionalTensors:
        part, known, hidden = self.part, len(self.part.inputs), None
        # 1. The hidden states, and the arguments that the model's own forward gives this layer.
        routed: tuple[Tensor, ...] = ()
        values: dict[Returned, Tensor | None] = {}
        passing = inputs
        if self.number > 0:
            carried = part.shell.carried[self.number - 1]
            hidden, passing, rest = inputs[0], inputs[1 : known + 1], inputs[known + 1 :]
            values, routed = dict(zip(carried, rest, strict=False)), rest[len(carried) :]
            if self.number == part.start and routed:
                routed = routed[0].unbind()
        hidden, calls = part.begin(passing, microbatch, hidden)
        call = calls[self.number].filled(values)
        # 2. The layer.
        here: list[Tensor] = []
        token = _ROUTED.set(here)
        try:
            result = self.layer(hidden, *call.args, **call.kwargs)
        finally:
            _ROUTED.reset(token)
        returned = result if part.shell.returned > 1 and isinstance(result, tuple) else (result,)
        if len(returned) != part.shell.returned or not all(isinstance(v, Tensor | None) for v in returned):
            found = ", ".join(type(value).__name__ for value in returned)
            raise ValueError(
                f"layer {self.number} ({type(self.layer).__name__}) returns {found}; "
                f"allowed: {'tensors or None' if part.shell.returned > 1 else 'a tensor'}"
            )
        hidden = returned[0]
        values |= {Returned(self.number, index): value for index, value in enumerate(returned)}
        passed = [values[value] for value in part.shell.carried[self.number]]
        routed = (*routed, *here)
        # 3. The outputs for the next layer or stage, or the model's own.
        if self.number < part.end - 1:
            return (hidden, *passing, *passed, *routed)
        microbatch.memo.pop(part, None)
        if not self.is_last:
            return (hidden, *passing, *passed, *([torch.stack(routed)] if routed else []))
        loss_fn = microbatch.objective.loss_fn
        if isinstance(loss_fn, LossOfModel):
            named = part.named(passing)
            return (loss_fn.compute(named, lambda arguments: part.shell.finish(arguments, hidden, routed)),)
        labels = microbatch.target[0] if microbatch.target else None
        output = part.shell.finish(part.named(passing) | ({} if labels is None else {"labels": labels}), hidden, routed)
        return (*(() if labels is None else (output.loss,)), output.logits)


class LanguageModelStage(nn.Module):
    """The part of a causal LM that one stage holds; its parameters have the same names as in the model."""

    part: StageRange
    blocks: list[Layer]  # the modules that the engine plays
    kept: dict[str, nn.Module]  # the model's modules that the stage holds, by their names in the model
    tied: dict[str, nn.Parameter]  # that another stage also holds, by their names there
    columns: dict[str, int]  # number of this rank's experts in second factors of LoRA [out, r·E], by name

    def __init__(self, part: StageRange, tied: dict[str, nn.Parameter]) -> None:
        super().__init__()
        shell, numbers = part.shell, range(part.start, part.end)
        kept = {f"{shell.prefix}.{number}": shell.layers[number] for number in numbers}
        kept = {**(shell.before if 0 in numbers else {}), **kept}
        kept |= shell.after if part.end == len(shell.layers) else {}
        # Not by assignment: a model may have modules of these names, which are registered here.
        self.__dict__ |= {"part": part, "kept": kept, "tied": tied}
        self.hang(self)
        self.__dict__ |= {"blocks": [Layer(part, number) for number in numbers], "columns": second_factors(self)}

    def hang(self, root: nn.Module) -> None:
        """Register the modules of this stage in another module, by their names in the model."""
        for name, module in self.kept.items():
            *path, last = name.split(".")
            parent = root
            for label in path:
                if label not in parent._modules:
                    parent.add_module(label, nn.Module())
                parent = parent.get_submodule(label)
            parent.add_module(last, module)


def _record(index: int, module: nn.Module, args: Any, output: Any) -> None:
    """Collect router logits in a forward hook; they have this index if a module returns a tuple."""
    if (here := _ROUTED.get()) is not None:
        here.append(output[index] if isinstance(output, tuple) else output)
