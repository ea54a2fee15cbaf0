"""The schedule that torchtitan's trainer and validator call: ``step`` and ``eval`` of an engine over model parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from overlap1f1b.engine import Engine, Feed, StepResult
from overlap1f1b.engine.run.microbatch import Microbatch
from overlap1f1b.engine.run.model import MicrobatchBlock
from overlap1f1b.engine.run.replaced import replaced
from overlap1f1b.schedule import Program

Arguments = Sequence[Mapping[str, Any]]


class Schedule:
    """A pipeline schedule as torchtitan calls it, played by an engine; made by :func:`pipelining_fn`.

    The engine is made at the first call, when torchtitan has given the parts their weights.

    Args:
        parts: Parts of the model that this rank holds, by the number of their stage.
        program: Schedule of the step.
        loss_fn: torchtitan's, ``(prediction, labels, **loss_kwargs) → (loss, metrics)``.
        make_engine: Makes the engine over the stages of this rank.

    Attributes:
        result: Result of the last call; ``result.overlap.hidden_fraction`` says how much of the exchange was hidden.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        program: Program,
        loss_fn: Callable[..., Any],
        make_engine: Callable[[Mapping[int, list[nn.Module]]], Engine],
    ) -> None:
        self.program, self.loss_fn = program, loss_fn
        self.result: StepResult | None = None
        self._parts = {number: Part(module) for number, module in parts.items()}
        self._last = program.placement.stages - 1
        self._make_engine = make_engine
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine. All ranks must come to its first use, when the weights are there."""
        if self._engine is None:
            stages: dict[int, list[nn.Module]] = {number: [part] for number, part in self._parts.items()}
            head = self._head()
            if head is not None and self._last in self._parts:
                self._parts[self._last].whole = (head,)
                stages[self._last].append(LossWithHead())
            self._engine = self._make_engine(stages)
        return self._engine

    def step(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]] | None = None,
        kwarg_mbs: Arguments | None = None,
        target_mbs: Sequence[Tensor] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
        grad: bool = True,
    ) -> Tensor | None:
        """Run forwards and backwards of all microbatches; add the gradients of the sum of their losses to ``.grad``.

        Each list has an entry a microbatch.

        Args:
            arg_mbs: Positional arguments of the first stage, on the rank that holds it.
            kwarg_mbs: Keyword arguments of every stage, such as positions and the masks that follow from them.
            target_mbs: Labels, on the rank with the last stage.
            losses: Is filled with the loss of each microbatch there.
            loss_kwargs: Keyword arguments of the loss, such as the number of tokens that count.
            return_outputs: Whether to return the outputs of the last stage, ``[B, …]``, on the rank that holds it.
            grad: Whether backwards follow.

        Raises:
            ValueError: Another number of microbatches than the program has, or a list that a stage needs is missing.
            RuntimeError: Another rank failed, or did not answer within the limit.
        """
        needed: dict[str, Sequence[Any] | None] = {"kwarg_mbs": kwarg_mbs} if kwarg_mbs is not None else {}
        needed |= {"arg_mbs": arg_mbs} if 0 in self._parts else {}
        needed |= {"target_mbs": target_mbs} if self._last in self._parts else {}
        count = self.program.microbatches

        def feed() -> Feed:
            for name, given in needed.items():
                if given is None:
                    raise ValueError(f"no {name} on a rank that needs them; allowed: a list of {count}")
                if len(given) != count:
                    raise ValueError(
                        f"{name} of {len(given)} microbatches; allowed: {count}, which is "
                        "training.local_batch_size / parallelism.pipeline_parallel_microbatch_size"
                    )

            def positions(index: int) -> dict[str, Any]:
                # On one pipeline rank torchtitan's trainer gives them to the loss.
                held = kwarg_mbs[index] if kwarg_mbs and grad and self._last == 0 else {}
                return {name: held[name] for name in ("positions",) if name in held}

            def given_to(stage: int, index: int) -> dict[str, Any]:
                arguments: dict[str, Any] = {}
                if stage == 0 and arg_mbs is not None:
                    arguments["inputs"] = arg_mbs[index]
                if stage == self._last and target_mbs is not None:
                    arguments |= {
                        "target": target_mbs[index],
                        "loss_fn": partial(self._loss, {**positions(index), **(loss_kwargs or {})}),
                        "keep_outputs": return_outputs,
                    }
                return arguments

            return Feed(given_to, dict.fromkeys(range(count), 1.0), auxiliary=None)

        engine = self.engine
        try:
            for part in self._parts.values():
                part.arguments = kwarg_mbs or [{}] * count
            with self._head_gathered():
                self.result = engine.play(feed, grad=grad).result
        finally:
            for part in self._parts.values():
                part.arguments = ()
        if losses is not None:
            losses[:] = self.result.losses
        outputs = [output for output in self.result.outputs if isinstance(output, Tensor)]
        return torch.cat(outputs) if outputs else None

    def eval(self, **arguments: Any) -> Tensor | None:
        """Run the forwards alone, without gradients; with the arguments of :meth:`step`."""
        return self.step(**arguments, grad=False)

    def _loss(self, loss_kwargs: Mapping[str, Any], *given: Tensor) -> Tensor:
        *outputs, labels = given
        prediction: Any = outputs[0] if len(outputs) == 1 else outputs
        loss, _ = self.loss_fn(prediction, labels, **loss_kwargs)
        assert isinstance(loss, Tensor)
        return loss

    def _head(self) -> nn.Module | None:
        """Return the head that the loss calls by itself, and whose backward it runs, as torchtitan's chunked loss."""
        head = getattr(self.loss_fn, "lm_head", None)
        return head if isinstance(head, nn.Module) else None

    def _head_gathered(self) -> AbstractContextManager[None]:
        """Keep the head's weights gathered, and the norm's: the loss of one open microbatch would free them for all."""
        head = self._head()  # what replaces it is no FSDPModule
        return replaced([(vars(self.loss_fn), "lm_head", head.__call__)] if isinstance(head, FSDPModule) else [])


class Part(MicrobatchBlock):
    """A part of a torchtitan model as one block of a stage, called with the keyword arguments of its microbatch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.arguments: Arguments = ()

    def forward(self, *inputs: Tensor, microbatch: Microbatch | None = None) -> Any:
        """Call the part for a microbatch; several outputs, as of multi-token prediction, become a tuple."""
        assert microbatch is not None
        returned = self.module(*inputs, **self.arguments[microbatch.index])
        return tuple(returned) if isinstance(returned, list) else returned


class LossWithHead(MicrobatchBlock):
    """The block of a loss that calls the model's head by itself: behind the part, it runs once."""

    keeps = True

    def forward(self, *outputs: Tensor, microbatch: Microbatch | None = None) -> tuple[Tensor, ...]:
        """Return what the loss is given."""
        return outputs
