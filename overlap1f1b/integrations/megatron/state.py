"""State that Megatron-Core keeps on its modules for the forward that runs: it must travel with a suspended forward.

1. :data:`KEPT` names the attributes, class by class, with the reason for each.
2. :class:`ModuleState` takes them off the modules when a forward is left, and puts them back when it goes on.

Everything else that a forward changes is meant to stay, such as counts that are added up over microbatches
(``local_tokens_per_expert`` of the router, the trackers of logged losses), or is the same for all microbatches.
"""

from __future__ import annotations

import hashlib
import sys
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overlap1f1b.engine.run.replaced import ABSENT, Replacement, put
from overlap1f1b.integrations.megatron.config import class_names

RANDOM = "megatron.core.tensor_parallel.random"
STATES = "states_"
MARK = "hidden_shape"
REPLAYED = "recorded_topk_idx"

KEPT: dict[str, dict[str, str]] = {
    "MoEAlltoAllTokenDispatcher": {
        "hidden_shape": "shape of the layer's input, for its output",
        "hidden_shape_before_permute": "number of tokens, for the sum of their rows",
        "probs": "gives the dtype of the sum over ranks along the experts' tp",
        "routing_map": "which tokens the rows that come back belong to",
        "reversed_local_input_permutation_mapping": "order of these rows",
        "tokens_per_expert": "sizes of the experts' inputs, read behind the dispatch",
        "num_out_tokens": "number of rows that are sent",
        "input_splits": "rows to each rank, read again by the combine",
        "output_splits": "rows from each rank, read again by the combine",
        "output_splits_tp": "rows of each rank along the experts' tp",
        "num_global_tokens_per_local_expert": "sizes of the chunks that are sorted by expert, and back",
        "capacity": "rows of an expert, if they are padded",
        "d2h_event": "end of the copies of these sizes to the host",
        "batch_invariant_inverse_permutation_mapping": "order of the rows, after 0.16",
    },
    "MoEAllGatherTokenDispatcher": {
        "hidden_shape": "shape of the layer's input, for its output",
        "hidden_shape_before_permute": "number of gathered tokens",
        "routing_map": "routing of the gathered tokens",
        "local_map": "routing to this rank's experts",
        "local_probs": "gives the dtype of the sum over ranks",
        "reversed_local_input_permutation_mapping": "order of the rows",
    },
    "MoEFlexTokenDispatcher": {
        "hidden_shape": "shape of the layer's input, for its output",
    },
    "_DeepepManager": {
        "token_indices": "experts of each token",
        "token_probs": "weights of each token",
        "handle": "DeepEP's record of the dispatch, which the combine reads",
        "tokens_per_expert": "sizes of the experts' inputs",
        "dispatched_indices": "experts of each received token",
        "dispatched_probs": "weights of each received token",
        "dispatched_routing_map": "routing of the received tokens",
        "hidden_shape_before_permute": "number of received tokens",
        "reversed_mapping_for_combine": "order of the rows",
        "pad_offsets": "padding of each expert's rows, which the combine removes, after 0.16",
    },
    "_HybridEPManager": {
        "routing_map": "experts of each token",
        "token_probs": "weights of each token",
        "capacity": "rows of an expert, if they are padded",
        "num_permuted_tokens": "number of received rows, which the combine reads",
        "tokens_per_expert": "sizes of the experts' inputs",
        "dispatched_probs": "weights of each received row",
        "handle": "HybridEP's record of the dispatch, which the combine reads",
        "pad_multiple": "padding of the dispatch, which the combine reads",
        "_original_num_tokens": "number of tokens, for the combine's result, after 0.16",
        "_padded_num_tokens": "the same with padding, after 0.16",
    },
    "SharedExpertMLP": {
        "cached_fc1_input": "with moe_shared_expert_overlap: made before the dispatch, read behind it",
        "cached_fc2_input": "with moe_shared_expert_overlap: made before the combine, read behind it",
        "cached_fc2_output": "with moe_shared_expert_overlap: between its parts",
        "cached_output": "with moe_shared_expert_overlap: between its parts",
        "gate_score": "with moe_shared_expert_overlap: made before the dispatch, read behind the combine",
        "_overlap_state": "with moe_shared_expert_overlap: the part that is next, after 0.16",
    },
    "TransformerLayer": {
        "input_layernorm_checkpoint": "with recompute of norms: frees its output behind the attention",
        "pre_mlp_norm_checkpoint": "with recompute of norms: frees its output behind the combine",
        "_input_layernorm_checkpoint_active": "whether the attention's norm is recomputed, after 0.16",
        "attn_norm_manager": "offloads the input of the attention's norm behind the attention, after 0.16",
        "mlp_norm_manager": "offloads the input of the experts' norm behind the combine, after 0.16",
    },
    "GroupedMLP": {
        "activation_checkpoint": "with recompute of moe_act: held for its memory only, it is read before the combine",
    },
    "TEGroupedMLP": {
        "activation_checkpoint": "with recompute of moe_act: held for its memory only, it is read before the combine",
    },
    "MLASelfAttention": {
        "qkv_up_checkpoint": "with recompute of mla_up_proj: frees its output behind the attention",
    },
    "TransformerBlock": {
        "input_tensor": "input of a later stage: read before the first exchange, held for its memory only",
    },
    "RouterReplay": {
        "recorded_topk_idx": "with moe_enable_routing_replay: choice of this microbatch",
        "target_topk_idx": "with moe_enable_routing_replay: choice that this microbatch must repeat",
    },
    "CudaRNGStatesTracker": {
        STATES: "states of the streams of random numbers; fork() writes into this dictionary",
        "_current_state_name": "the stream in use: with sequence_parallel all layers run inside fork()",
    },
    RANDOM: {
        "IS_CHECKPOINTING": "set while a recomputed part runs",
    },
}
"""For each class of Megatron-Core 0.16, and as far as read of later ones (or a module, by its whole name):
its attributes, and what they are for."""

HELD = ("token_dispatcher", "_comm_manager", "router_replay")
"""Attributes of modules, and of the objects in them, whose objects are no modules but are named in :data:`KEPT`."""


class Place(NamedTuple):
    """Attributes of one object that a forward sets for itself."""

    attributes: dict[str, Any]  # all of the object
    names: tuple[str, ...]
    base: tuple[Any, ...]  # their values while no forward runs; :data:`ABSENT` for one that is then missing

    def take(self, changes: list[Replacement]) -> None:
        """Put back the base; append what differed from it to ``changes``."""
        attributes, names, base = self
        now = [attributes.get(name, ABSENT) for name in names]
        if all(map(is_, now, base)):
            return
        for name, value, before in zip(names, now, base, strict=True):
            if value is not before:
                changes.append((attributes, name, value))
                put(attributes, name, before)


class Layer(NamedTuple):
    """The places of a layer of experts. Its dispatcher comes first, and sets ``hidden_shape`` as the layer begins."""

    places: tuple[Place, ...]
    mark: Any  # hidden_shape while no forward runs

    def begun(self) -> bool:
        return self.places[0].attributes.get(MARK, ABSENT) is not self.mark


class Carried(NamedTuple):
    """State that a suspended forward has left on the modules."""

    changes: list[Replacement]  # attributes that it has set
    layers: list[Layer]  # in which it is suspended
    states: dict[str, Any] | None  # of the tracker's streams of random numbers


class ModuleState:
    """The attributes of :data:`KEPT` in a model in which several forwards are suspended at once.

    >>> state = ModuleState(model)
    >>> state.begin(seed=7)      # before a forward begins
    >>> carried = state.leave()  # where it is suspended: the modules are as if no forward ran
    >>> state.enter(carried)     # before it goes on

    A forward that has ended is left, too; what it has left on the modules is then dropped. So is what it has left on
    a layer when a later layer begins: a suspended forward keeps alive the state of one layer. A call compares one
    attribute of each layer (about 0.1 µs) and looks closely at the layers in which the forward is.

    Args:
        model: A model of Megatron-Core, which may be wrapped. Every forward begins with the attributes that it has
            now; they stay alive.
    """

    def __init__(self, model: nn.Module) -> None:
        random: Any = sys.modules.get(RANDOM)
        self._tracker: Any = None if random is None else random.get_cuda_rng_tracker()
        self._outside: dict[str, Any] | None = None  # states of the streams while no forward runs
        self._open: list[Layer] = []
        self._layers: list[Layer] = []
        outside, *layers = _by_layer(model)
        self._common = [place for held in (random, self._tracker, *outside) for place in _places(held)]
        for modules in layers:
            places = [place for module in modules for place in _places(module)]
            self._common += [place for place in places if REPLAYED in place.names]  # read when the forward has ended
            places = [place for place in places if REPLAYED not in place.names]
            dispatchers = [place for place in places if MARK in place.names]
            if len(dispatchers) != 1:
                self._common += places
                continue
            (dispatcher,) = dispatchers
            ordered = (dispatcher, *(place for place in places if place is not dispatcher))
            self._layers.append(Layer(ordered, dispatcher.base[dispatcher.names.index(MARK)]))

    def begin(self, seed: int | None) -> None:
        """Prepare for a new forward, whose streams of the tracker follow from the present ones and from a seed.

        The seed is another for every microbatch and step; None leaves the streams where they are.
        """
        states = self._states()
        if states is not None and seed is not None:
            states = {name: _reseeded(state, seed) for name, state in states.items()}
        self.enter(Carried([], [], None if states is None else dict(states)))

    def leave(self) -> Carried:
        """Take off what the running forward has set, and put back what every forward begins with."""
        changes: list[Replacement] = []
        for place in self._common:
            place.take(changes)
        begun = [layer for layer in self._layers if layer.begun() and not any(layer is known for known in self._open)]
        for layer in self._open if begun else ():  # they have ended
            self._clear(layer)
        left = begun or self._open
        for layer in left:
            for place in layer.places:
                place.take(changes)
        states, outside = self._states(), self._outside
        if outside is not None:
            self._tracker.states_, self._outside = outside, None
        self._open = []
        return Carried(changes, left, states)

    def enter(self, carried: Carried) -> None:
        """Put back what :meth:`leave` has taken."""
        for layer in self._layers:  # a recomputation in a backward may have set them
            if layer.begun():
                self._clear(layer)
        for change in carried.changes:
            put(*change)
        self._open = carried.layers
        if carried.states is not None:
            self._outside, self._tracker.states_ = self._states(), carried.states

    def _clear(self, layer: Layer) -> None:
        for place in layer.places:
            place.take([])

    def _states(self) -> dict[str, Any] | None:
        return None if self._tracker is None else getattr(self._tracker, STATES, None)


def _by_layer(model: nn.Module) -> list[list[nn.Module]]:
    """Return the modules outside of transformer layers, then those of each layer; nested ones are of the innermost."""
    found: list[list[nn.Module]] = [[]]
    known: set[nn.Module] = set()

    def visit(module: nn.Module, modules: list[nn.Module]) -> None:
        if module in known:
            return
        known.add(module)
        if "TransformerLayer" in class_names(module):
            modules = []
            found.append(modules)
        modules.append(module)
        for child in module.children():
            visit(child, modules)

    visit(model, found[0])
    return found


def _places(held: Any) -> list[Place]:
    """Return the places of an object and of objects that it holds, if :data:`KEPT` names their class or a base."""
    if held is None:
        return []
    kinds = [held.__name__] if isinstance(held, ModuleType) else class_names(held)
    attributes = held.__dict__
    names = tuple(name for kind in kinds for name in KEPT.get(kind, ()) if name != STATES)
    found = [Place(attributes, names, tuple(attributes.get(name, ABSENT) for name in names))] if names else []
    return found + [place for name in HELD for place in _places(attributes.get(name))]


def _reseeded(state: Any, seed: int) -> Any:
    """Return the state of another stream, which follows from the state and the seed."""
    if not isinstance(state, Tensor):  # the generator of a graph, which is refused in other ways
        return state
    digest = hashlib.blake2b(state.numpy().tobytes() + seed.to_bytes(16, "big", signed=True), digest_size=7).digest()
    number = int.from_bytes(digest, "big")
    if state.numel() == 16:  # of CUDA: a seed and an offset, 8 bytes each
        return torch.tensor([number, 0], dtype=torch.int64, device="cpu").view(torch.uint8)
    return torch.Generator().manual_seed(number).get_state()
