"""One call of a forward-backward function: losses, scales of attached losses, and when gradients are reduced."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from overlap1f1b.integrations.megatron.config import Config, NoSync, Sync, each
from overlap1f1b.plan import Node, Place, Resource
from overlap1f1b.play.observers import Observer
from overlap1f1b.schedule import Kind


class AttachedLoss(NamedTuple):
    """A class of Megatron-Core that attaches a loss to activations and keeps its gradient's scale as an attribute."""

    module: str  # behind "megatron.core.transformer."
    name: str
    used: str  # field of the config that is set if the model has such losses
    own_scale: str | None = None  # field of the config with a scale for them, used in place of ``grad_scale_func``
    by_sequence: bool = True  # whether each rank along "cp" computes a part of the loss
    takes_scale: str | None = None  # field of the config with a function that takes the scale in the class's place


MOE_LOSS = AttachedLoss("moe.moe_utils", "MoEAuxLossAutoScaler", "num_moe_experts", "moe_grad_scale_func")
ATTACHED_LOSSES = (
    MOE_LOSS,
    AttachedLoss(
        "multi_token_prediction", "MTPLossAutoScaler", "mtp_num_layers", "mtp_grad_scale_func", by_sequence=False
    ),
    AttachedLoss(
        "experimental_attention_variant.dsa",
        "DSAIndexerLossAutoScaler",
        "experimental_attention_variant",
        takes_scale="experimental_attention_variant_loss_scale_func",
    ),
)
_SCALE = "main_loss_backward_scale"


class Losses:
    """The losses of a step, divided as Megatron-Core divides them, and the reports of the user's ``loss_func``.

    ``loss_func`` returns one of these:

    - ``(loss, report)``: the loss is divided by the microbatches and multiplied by the context-parallel ranks ``cp``.
    - ``(loss_sum, tokens, report)``: the sum is divided by the microbatch's tokens and by the microbatches. With
      ``calculate_per_token_loss`` it is not divided; ``finalize_model_grads_func`` receives the step's tokens.
    - any value, if non-loss data is collected.
    """

    def __init__(
        self, config: Config, microbatches: int, cp: int, device: torch.device, *, training: bool, collect: bool
    ) -> None:
        self.config, self.microbatches, self.cp = config, microbatches, cp
        self.training, self.collect = training, collect
        self.tokens = torch.zeros((), dtype=torch.int, device=device)
        self._reports: dict[int, Any] = {}

    @property
    def reports(self) -> list[Any]:
        """One report for each microbatch that ended on this rank, in order."""
        return [self._reports[microbatch] for microbatch in sorted(self._reports)]

    def loss_of(self, microbatch: int, output: Any, loss_func: Any) -> Tensor:
        """Return the scalar from which the microbatch's backward starts; zero if there is no backward."""
        if loss_func is None:
            self._reports[microbatch] = loss = output
        elif self.collect:
            self._reports[microbatch], loss = loss_func(output, non_loss_data=True), output
        else:
            loss, self._reports[microbatch] = self._divided(loss_func(output))
        if not self.training:
            return torch.zeros(())
        scale = self.config.grad_scale_func
        return loss if scale is None else scale(loss)

    def _divided(self, returned: Any) -> tuple[Tensor, Any]:
        """Return a microbatch's part of the loss, by its own tokens or as a sum, and its report."""
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            what = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
            raise ValueError(f"loss_func returns {what}; allowed: (loss, report) or (loss_sum, tokens, report)")
        if len(returned) == 2:
            loss, report = returned
            return loss * self.cp / self.microbatches, report
        loss, tokens, report = returned
        tokens = torch.as_tensor(tokens, device=self.tokens.device).detach()
        self.tokens += tokens.to(self.tokens.dtype).reshape(())
        if not self.config.calculate_per_token_loss:
            loss = loss / tokens.clamp(min=1) / self.microbatches
        return loss, report

    def scale_of(self, attached: AttachedLoss) -> Tensor:
        """Return the gradient ``[1]`` of an attached loss: the main loss's scale, unless the config gives another."""
        ones, config = torch.ones(1, device=self.tokens.device), self.config
        own = None if attached.own_scale is None else getattr(config, attached.own_scale)
        factor = own() if own is not None else ones if config.grad_scale_func is None else config.grad_scale_func(ones)
        scale = torch.as_tensor(factor, device=ones.device)
        if config.calculate_per_token_loss:
            return scale
        return (scale * self.cp if attached.by_sequence else scale) / self.microbatches

    @contextmanager
    def scaling_attached(self) -> Iterator[None]:
        """Set the scales of Megatron-Core's attached losses inside the context, and put back the old ones after it.

        Classes that no module has imported are skipped. What a function of the config has set stays.
        """
        with ExitStack() as before:
            for attached in ATTACHED_LOSSES:
                take = None if attached.takes_scale is None else getattr(self.config, attached.takes_scale)
                if take is not None:
                    take(self.scale_of(attached))
                    continue
                held = getattr(sys.modules.get(f"megatron.core.transformer.{attached.module}"), attached.name, None)
                if held is not None and getattr(self.config, attached.used) is not None:
                    before.callback(setattr, held, _SCALE, getattr(held, _SCALE))
                    # set_loss_scale is not used: it may write into the tensor that is set now.
                    setattr(held, _SCALE, self.scale_of(attached))
            yield


def logged() -> Iterator[dict[str, Any]]:
    """Yield tables of losses and random numbers: Megatron-Core's globals and class attributes named "…tracker"."""
    for name, module in list(sys.modules.items()):
        held = list(vars(module).items()) if name.startswith("megatron.core") else []
        held += [entry for _, kind in held if isinstance(kind, type) for entry in vars(kind).items()]
        for label, tracker in held:
            if label.lower().endswith("tracker") and not callable(tracker):
                make = getattr(module, f"get{label.lower()}", None)  # later releases make it in the first forward
                made = make() if tracker is None and make is not None else tracker
                table = made if isinstance(made, dict) else getattr(made, "__dict__", None)
                if isinstance(table, dict):
                    yield table


def inside(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a table and what it holds: further tables, and the attributes of entries, dataclasses in later releases."""
    yield table
    for entry in table.values():
        held = vars(entry) if is_dataclass(entry) else entry
        if isinstance(held, dict):
            yield from inside(held)


@dataclass
class ChunkStep:
    """The arguments of one call that a chunk needs, and how many of its microbatches have begun.

    In a step that is compared, ``before`` has the attributes of the data iterator at the step's begin.
    """

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    losses: Losses
    marks_first: bool
    begun: int = 0
    before: Mapping[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a play of the step: a step that is compared with a serial one is played several times."""
        self.begun = 0
        self.losses.tokens.zero_()
        if self.before:
            vars(self.data_iterator).update(self.before)


class Rewound(Iterator[Any]):
    """A data iterator, with all its attributes, whose items can be read again from the first one on, as copies."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._items, self.at = iterator, list[Any](), 0

    @classmethod
    def of(cls, iterators: Sequence[Any]) -> list[Any]:
        """Return what reads from these iterators; what is none, such as slime's, stays: attributes say where it is."""
        made = {id(one): cls(one) if hasattr(one, "__next__") else one for one in iterators}
        return [made[id(one)] for one in iterators]

    def __next__(self) -> Any:
        if self.at == len(self._items):
            self._items.append(next(self._iterator))
        self.at += 1
        return deepcopy(self._items[self.at - 1])

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._iterator, name)


class GradientSync(Observer):
    """A switch that lets a data-parallel wrapper reduce gradients only with the last microbatch of each chunk.

    This holds for any order of nodes. ``no_sync_func`` is active in the context, except while gradients of a last
    microbatch are added. With ``grad_sync_func`` it stays active then too, and ``grad_sync_func`` is called for a chunk
    as soon as its gradients are complete, while the rest of the step continues.
    """

    def __init__(self, config: Config, models: dict[int, nn.Module], nodes: Sequence[Node], last: int) -> None:
        self.last, self.models = last, models
        no_sync, grad_sync = config.no_sync_func, config.grad_sync_func
        self._no_sync: list[NoSync] = [] if no_sync is None else each(no_sync, 1)
        syncs: list[Sync] = [] if grad_sync is None else each(grad_sync, len(models))
        self._grad_sync = dict(zip(models, syncs, strict=True)) if syncs else {}
        backward = [node for node in nodes if node.resource is Resource.COMPUTE and node.kind is not Kind.F]
        self._ends = {node.stage: node for node in backward}
        self._held = ExitStack()
        # Whether there is anything to switch; without it weight gradients may run early.
        self.acts = self.keeps_order = self.by_node = bool(self._no_sync or self._grad_sync)

    def __enter__(self) -> Self:
        self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def ready(self, node: Node, received: Mapping[Place, Any]) -> None:
        """Allow reductions in a compute node, if it adds gradients of the last microbatch."""
        if self._adds_last(node) and not self._grad_sync:
            self._held.close()

    def after(self, node: Node) -> None:
        """Allow none any more; reduce the gradients of a chunk if they are complete."""
        if not self._adds_last(node):
            return
        if self._grad_sync and node == self._ends[node.stage]:
            self._held.close()
            self._grad_sync[node.stage](self.models[node.stage].parameters())
        self._hold()

    def _adds_last(self, node: Node) -> bool:
        return node.resource is Resource.COMPUTE and node.kind is not Kind.F and node.microbatch == self.last

    def _hold(self) -> None:
        self._held.close()
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())
