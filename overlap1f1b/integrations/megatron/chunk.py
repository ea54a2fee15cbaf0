"""A model chunk as one block of a stage: the user's forward step, cut wherever the model exchanges rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.microbatch import Microbatch
from overlap1f1b.engine.run.model import MicrobatchBlock
from overlap1f1b.engine.run.replaced import Replacement, replaced
from overlap1f1b.engine.run.stage import Stage
from overlap1f1b.integrations.megatron.config import OWN, ROWS, SUSPENDED, attribute_of, check_options, class_names
from overlap1f1b.integrations.megatron.dispatchers import dispatchers_of, exchanging, on_one_stream, overlapped_of
from overlap1f1b.integrations.megatron.state import RANDOM, Repeating, TrackerStreams, tracker
from overlap1f1b.integrations.megatron.step import ChunkStep, logged
from overlap1f1b.integrations.megatron.weights import delayed_of, delaying, leaving, linears_of
from overlap1f1b.integrations.rows import Dispatcher, MegatronExperts
from overlap1f1b.moe import Experts
from overlap1f1b.transport.suspend import Forward

SHARDS = {"FSDPModule": "FSDP2", "MegatronFSDP": "Megatron-FSDP", "FsdpModule": "Megatron-FSDP"}
"""Classes of modules whose parameters are gathered, and their gradients summed, in whole backwards."""


class Chunk(MicrobatchBlock):
    """The forwards of one model chunk, a module with ``set_input_tensor``, which may be wrapped.

    The ``last`` computes the loss; with ``exchanges`` several ranks share the experts.
    ``passes_last_input`` appends its last input (in a decoder: the encoder's output) to its output. MoE layers of
    Megatron-Core's own may suspend it if it ``suspends``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int,
        last: bool,
        exchanges: bool,
        dispatcher: Dispatcher = "own",
        passes_last_input: bool = False,
    ) -> None:
        super().__init__()
        self.set_input_tensor = attribute_of(model, "set_input_tensor")
        if self.set_input_tensor is None:
            raise ValueError(
                f"a model chunk of type {type(model).__name__} without set_input_tensor; allowed: one with this method"
            )
        self.model, self.last, self.passes_last_input = model, last, passes_last_input
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.name = f"chunk of stage {stage} ({type(model).__name__})"
        kinds = {name for module in model.modules() for name in class_names(module)}
        for kind in kinds.intersection(SHARDS):
            raise ValueError(
                f"{self.name} under {SHARDS[kind]}; allowed: Megatron-Core's DistributedDataParallel, "
                "or a finalize_model_grads_func that sums gradients"
            )
        self.step: ChunkStep | None = None
        rows = exchanges and dispatcher == "rows"
        layers: list[Any] = [layer for layer in model.modules() if rows and "MoELayer" in class_names(layer)]
        self.experts: Any = nn.ModuleList(map(MegatronExperts, layers))
        self._dispatchers = dispatchers_of(model) if exchanges and not layers else []
        self.suspends = bool(self._dispatchers or layers)
        self.tracker = tracker() if exchanges else None  # here the engine finds what else its file keeps
        self.state = TrackerStreams(self.tracker) if self.suspends and self.tracker is not None else None
        self._overlapped = overlapped_of(model)
        self._linears = linears_of(model)
        self.apart = [layer.weight for layer in self._linears]
        self._delayed = delayed_of(model)
        self.delays = bool(self._delayed)
        self._stage: Stage | None = None
        if self.suspends or self.delays or any(isinstance(module, Experts) for module in model.modules()):
            check_options(model, SUSPENDED)
        for where, found in ((OWN, self._dispatchers), (ROWS, layers)):
            if found:
                check_options(model, where)

    @contextmanager
    def stepping(self, step: ChunkStep) -> Iterator[None]:
        """Use a step's arguments inside the context, and let MoE layers of Megatron-Core's own be suspended."""
        changed = (
            exchanging(self._dispatchers),
            *(experts.replacing() for experts in self.experts),
            on_one_stream(self._overlapped, self.device),
            leaving(self._linears, self._in_force),
            delaying(self._delayed, self._in_force),
            self._checkpoint(),
        )
        self.step = step
        try:
            with replaced(chain.from_iterable(changed)):
                yield
        finally:
            self.step = None

    def _checkpoint(self) -> Iterator[Replacement]:
        """Yield what lets Megatron-Core's checkpoint exchange nothing twice, in forwards that are suspended."""
        random, package = sys.modules.get(RANDOM), sys.modules.get(RANDOM.rpartition(".")[0])
        if not self.suspends or random is None or package is None:
            return
        plain, tables = package.checkpoint, list(logged())

        def checkpoint(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
            forward = Forward.running()
            if forward is None or forward.again is None or not torch.is_grad_enabled():
                return plain(function, distribute, *args)
            with forward.again(function, args, nullcontext(), Repeating(random, tables)):
                return function(*args)

        yield vars(package), "checkpoint", checkpoint

    def _in_force(self) -> Stage:
        assert self._stage is not None
        return self._stage

    def forward(self, *inputs: Tensor | None, microbatch: Microbatch | None = None) -> Any:
        """Call the user's forward step for a microbatch; return the chunk's output tensors or its loss."""
        step = self.step
        assert step is not None
        assert microbatch is not None
        assert step.begun == microbatch.index, "a plan begins the microbatches of a stage in their order"
        step.begun += 1
        self._stage = microbatch.stage
        mark = attribute_of(self.model, "set_is_first_microbatch")
        if microbatch.index == 0 and step.marks_first and mark is not None:
            mark()
        self.set_input_tensor(list(inputs) if inputs else [None])
        config = step.config
        with torch.autocast(self.device.type, config.autocast_dtype) if config.enable_autocast else nullcontext():
            try:
                output, loss_func = step.forward_step_func(step.data_iterator, self.model)
            except StopIteration:
                raise ValueError(
                    f"the data iterator of {self.name} ends before microbatch {microbatch.index}; "
                    f"allowed: one that gives {step.losses.microbatches} or more"
                ) from None
            if self.last:
                return step.losses.loss_of(microbatch.index, output, loss_func)
        outputs = tuple(output) if isinstance(output, list | tuple) else (output,)
        return (*outputs, inputs[-1]) if self.passes_last_input else outputs
