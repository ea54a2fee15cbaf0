"""A model chunk as one block of a stage: the user's forward step, cut wherever the model exchanges rows."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cut.blocks import MicrobatchBlock, device_of
from overlap1f1b.cut.replacement import Replacement, replaced
from overlap1f1b.engine import Microbatch
from overlap1f1b.integrations.megatron import layers
from overlap1f1b.integrations.megatron.config import (
    OWN,
    RANDOM,
    ROWS,
    SUSPENDED,
    TRACKER,
    attribute_of,
    check_options,
    class_names,
)
from overlap1f1b.integrations.megatron.step import ChunkStep, inside, logged
from overlap1f1b.integrations.rows import Dispatcher, MegatronExperts
from overlap1f1b.moe import Experts
from overlap1f1b.play.install import Installation
from overlap1f1b.transport.suspension import Forward

SHARDS = {"FSDPModule": "FSDP2", "MegatronFSDP": "Megatron-FSDP", "FsdpModule": "Megatron-FSDP"}
"""Classes of modules whose parameters are gathered, and their gradients summed, in whole backwards."""


class Chunk(MicrobatchBlock):
    """The forwards of one model chunk, a module with ``set_input_tensor``, which may be wrapped.

    The ``last`` computes the loss; with ``exchanges`` several ranks share the experts. MoE layers of Megatron-Core's
    own may suspend it if it ``suspends``.
    """

    passes_last_input = False
    """Whether its last input (in a decoder: the encoder's output) is appended to its output."""
    step: ChunkStep
    """The call that is played."""
    installed: Installation
    """The stage in that call, from its first forward on."""

    def __init__(
        self, model: nn.Module, stage: int, *, last: bool, exchanges: bool, dispatcher: Dispatcher = "own"
    ) -> None:
        super().__init__()
        self.set_input_tensor = attribute_of(model, "set_input_tensor")
        if self.set_input_tensor is None:
            raise ValueError(
                f"a model chunk of type {type(model).__name__} without set_input_tensor; allowed: one with this method"
            )
        self.model, self.last = model, last
        self.device = device_of([model]) or torch.device("cpu")
        self.name = f"chunk of stage {stage} ({type(model).__name__})"
        kinds = {name for module in model.modules() for name in class_names(module)}
        for kind in kinds.intersection(SHARDS):
            raise ValueError(
                f"{self.name} under {SHARDS[kind]}; allowed: Megatron-Core's DistributedDataParallel, "
                "or a finalize_model_grads_func that sums gradients"
            )
        rows = exchanges and dispatcher == "rows"
        self.experts: Any = nn.ModuleList(
            MegatronExperts(layer) for layer in model.modules() if rows and "MoELayer" in class_names(layer)
        )
        self._dispatchers = layers.dispatchers_of(model) if exchanges and not self.experts else []
        self.suspends = bool(self._dispatchers or self.experts)
        random: Any = sys.modules.get(RANDOM) if exchanges else None
        self.tracker = random and getattr(random, TRACKER)()  # here the engine finds what else its file keeps
        self.state = TrackerStreams(self.tracker) if self.suspends and hasattr(self.tracker, "states_") else None
        self._overlapped, self._linears = layers.overlapped_of(model), layers.linears_of(model)
        self._delayed = layers.delayed_of(model)
        self.apart = [layer.weight for layer in self._linears]
        self.delays = bool(self._delayed)
        if self.suspends or self.delays or any(isinstance(module, Experts) for module in model.modules()):
            check_options(model, SUSPENDED)
        for where, found in ((OWN, self._dispatchers), (ROWS, self.experts)):
            if found:
                check_options(model, where)

    @contextmanager
    def stepping(self, step: ChunkStep) -> Iterator[None]:
        """Use a step's arguments inside the context, and let MoE layers of Megatron-Core's own be suspended."""
        self.step = step
        changes = chain(
            layers.exchanging(self._dispatchers),
            *(experts.replacing() for experts in self.experts),
            layers.on_one_stream(self._overlapped, self.device),
            (layers.deferring(layer, lambda: self.installed) for layer in self._linears),
            (layers.delaying(layer, lambda: self.installed) for layer in self._delayed),
            self._checkpoint(),
        )
        try:
            with replaced(changes):
                yield
        finally:  # nothing of a step lives behind it
            vars(self).pop("step")
            vars(self).pop("installed", None)

    def _checkpoint(self) -> Iterator[Replacement]:
        """Yield what lets Megatron-Core's checkpoint exchange nothing twice, in forwards that are suspended."""
        random, package = sys.modules.get(RANDOM), sys.modules.get(RANDOM.rpartition(".")[0])
        if not self.suspends or random is None or package is None:
            return
        plain, tables = package.checkpoint, list(logged())

        def checkpoint(function: Callable[..., Any], distribute: bool, *args: Any) -> Any:
            forward = Forward.running()
            part = None if forward is None else forward.handlers.checkpoint
            if part is None or not torch.is_grad_enabled():
                return plain(function, distribute, *args)
            with part(function, args, nullcontext(), Repeating(random, tables)):
                return function(*args)

        yield vars(package), "checkpoint", checkpoint

    def forward(self, *inputs: Tensor | None, microbatch: Microbatch | None = None) -> Any:
        """Call the user's forward step for a microbatch; return the chunk's output tensors or its loss."""
        step = self.step
        assert microbatch is not None
        assert step.begun == microbatch.index, "a plan begins the microbatches of a stage in their order"
        step.begun += 1
        self.installed = microbatch.installed
        mark = attribute_of(self.model, "set_is_first_microbatch")
        if microbatch.index == 0 and step.marks_first and mark is not None:
            mark()
        self.set_input_tensor(list(inputs) if inputs else [None])
        config = step.losses.config
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


class Repeating:
    """Context of a second forward: random numbers as at its first one, and losses that are logged once in tables."""

    def __init__(self, random: Any, tables: Sequence[dict[str, Any]]) -> None:
        self._random, self._tables = random, tables
        self._states = random._get_all_rng_states()

    def __enter__(self) -> None:
        self._outside = self._random._get_all_rng_states()
        self._random._set_all_rng_states(*self._states)
        each = (one for table in self._tables for held in inside(table) for one in held.values())
        self._logged = [(t, t.clone()) for t in each if isinstance(t, Tensor) and t.is_floating_point()]

    def __exit__(self, *_: object) -> None:
        self._random._set_all_rng_states(*self._outside)
        for tensor, before in self._logged:
            tensor.copy_(before)


class TrackerStreams:
    """The streams of Megatron-Core's tracker: each forward has its own ones, also while it is suspended.

    It implements :class:`~overlap1f1b.cut.blocks.CarriedState`. The tracker's ``fork()`` writes into the
    dictionary of their states. What a forward keeps elsewhere, such as on a dispatcher, the engine learns.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker
        self._outside: dict[str, Any] = {}  # states while no forward runs

    def begin(self, seed: int) -> None:
        """Let the streams of a new forward follow from the present ones and from a seed of its microbatch and step."""
        self.enter({key: _reseeded(state, seed) for key, state in self._tracker.states_.items()})

    def leave(self) -> dict[str, Any]:
        """Return the states of the running forward, and put back what was there before."""
        states: dict[str, Any] = self._tracker.states_
        self._tracker.states_ = self._outside
        return states

    def enter(self, states: dict[str, Any]) -> None:
        """Put on the states of a forward."""
        self._outside, self._tracker.states_ = self._tracker.states_, states


def _reseeded(state: Any, seed: int) -> Any:
    """Return the state of another stream, which follows from the state and the seed."""
    if not isinstance(state, Tensor):  # the generator of a graph, which is refused in other ways
        return state
    digest = hashlib.blake2b(state.numpy().tobytes() + seed.to_bytes(16, "big", signed=True), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    if state.numel() == 16:  # of a GPU: a seed and an offset, 8 bytes each
        return torch.tensor([number, 0], dtype=torch.int64, device="cpu").view(torch.uint8)
    return torch.Generator().manual_seed(number).get_state()
