"""Has torch's FSDP2 sum gradients over ranks, group by group, when the plan says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from overlap1f1b.engine.lanes import Flight, Lane
from overlap1f1b.engine.reducer import BlockPlace
from overlap1f1b.engine.sharding import ParameterGroup, Sharding
from overlap1f1b.engine.stage import Stage
from overlap1f1b.moe.exchange import Transfer
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import Kind

# The engine scales losses by the number of ranks; FSDP2 by default divides by those of each mesh.
_SETTINGS = {"gradient_divide_factor": 1.0, "force_sum_reduction_for_comms": True, "reshard_after_backward": False}


class ShardedReducer:
    """One reduction a parameter group of FSDP2, launched when the last contribution of all its blocks is in.

    FSDP2 adds what it reduced to the sharded ``.grad``, which may hold earlier steps. Gradients are sums over ranks, no
    matter what divide factor was set. After ``set_requires_gradient_sync(False)`` they stay with their rank.

    Args:
        sharding: Of the models of all stages, gathered when the stages were made.
        stages: Those of this rank, by number.
        lane: Where reductions travel.
        ranks: Those whose gradients a parameter outside the experts sums, by their numbers in the default group.
        expert_ranks: The same of an expert's.

    Raises:
        ValueError: FSDP2 was applied over other ranks.
    """

    def __init__(
        self,
        sharding: Sharding,
        stages: Mapping[int, Stage],
        lane: Lane,
        *,
        ranks: Sequence[int],
        expert_ranks: Sequence[int],
    ) -> None:
        self.sharding, self.lane = sharding, lane
        places: dict[nn.Parameter, set[BlockPlace]] = {}
        experts: set[nn.Parameter] = set()
        for number, stage in stages.items():
            for block in range(len(stage.blocks)):
                held = stage.expert_parameters_of(block)
                experts.update(held)
                for parameter in (*stage.block_parameters[block], *held):
                    places.setdefault(parameter, set()).add((number, block))
        self._places: list[tuple[ParameterGroup, set[BlockPlace]]] = []
        self.parameters: set[nn.Parameter] = set()
        """What FSDP2 reduces, as it is while gathered."""
        for group in sharding.groups:
            parameters = [p for held in group.fsdp_params if (p := held.unsharded_param) in places]
            self.parameters.update(parameters)
            if parameters:
                self._places.append((group, {place for p in parameters for place in places[p]}))
            for parameter in parameters:
                _check_ranks(group, expert_ranks if parameter in experts else ranks, parameter in experts)
        self._order: list[tuple[ParameterGroup, set[BlockPlace]]] = []  # of the launches to come, the last first
        self._ready: set[BlockPlace] = set()
        self._flights: list[Flight[None]] = []
        self._settings: list[tuple[ParameterGroup, dict[str, Any]]] = []
        self._hooks: list[RemovableHandle] = []
        self._begun = False

    def begin(self, order: Sequence[Node]) -> None:
        """Gathers the parameters and takes over the groups.

        Args:
            order: Plan of one of the ranks that sum together: all of them launch the reductions in its order.
        """
        self._begun, self._flights, self._ready = True, [], set()
        at = {(node.stage, node.block): index for index, node in enumerate(order) if node.op is Op.REDUCE}

        def complete(entry: tuple[ParameterGroup, set[BlockPlace]]) -> int:
            return max(at.get(place, len(order)) for place in entry[1])

        self._order = sorted(self._places, key=complete)[::-1]
        for group, _ in self._places:
            self._settings.append((group, {name: getattr(group, name) for name in _SETTINGS}))
            _set(group, _SETTINGS)
            for held in group.fsdp_params:
                if held.reduce_dtype is not None:  # FSDP2 sums microbatches in the dtype in which it sums ranks
                    hook = _accumulating(held)
                    self._hooks.append(held._unsharded_param.register_post_accumulate_grad_hook(hook))
        self.sharding.gather()

    def launch(self, node: Node) -> list[Flight[None]]:
        """Starts the reductions of the groups that are complete with this block, and of those whose turn was after."""
        self._ready.add((node.stage, node.block))
        launched = []
        while self._order and self._order[-1][1] <= self._ready:
            launched.append(self._start(node, self._order.pop()[0]))
        return launched

    def _start(self, node: Node, group: ParameterGroup) -> Flight[None]:
        for held in group.fsdp_params:
            parameter = held.unsharded_param
            if parameter.requires_grad and parameter.grad is None and held.unsharded_accumulated_grad is None:
                # No token of this rank came by; another rank's may have, and all must reduce the same.
                if held.reduce_dtype is None:
                    parameter.grad = torch.zeros_like(parameter)
                else:
                    held.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=held.reduce_dtype)

        def post() -> Transfer[None]:
            if self.lane.background:
                return _Held(None, reduce=group.post_backward)
            group.post_backward()
            return Transfer(None)

        flight = self.lane.launch(node, post)
        self._flights.append(flight)
        return flight

    def settle(self) -> None:
        """Waits until nothing is under way."""
        for flight in self._flights:
            flight.drained(self.lane.timeout.total_seconds())

    def finish(self) -> None:
        """Waits for all reductions, also those over one rank, which no node has launched; the modules are FSDP2's."""
        while self._order:
            group, places = self._order.pop()
            stage, block = max(places)
            self._start(Node(Op.REDUCE, Kind.W, 0, block, stage=stage), group)
        for flight in self._flights:
            flight.wait()
        self.sharding.finalize()
        self._give_back()

    def restore(self) -> None:
        """After a step that failed: its gradients are dropped."""
        if self._begun:
            self.sharding.forget()
            with suppress(RuntimeError):  # a rank that is gone cannot be gathered from; the step's own error counts
                self._give_back()

    def _give_back(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for group, settings in self._settings:
            _set(group, settings)
        self._hooks, self._settings, self._flights, self._order, self._begun = [], [], [], [], False
        self.sharding.release()


@dataclass(frozen=True)
class _Held(Transfer[None]):
    """On gloo FSDP2's reductions hold up their thread: so that of the lane."""

    reduce: Callable[[], None] = lambda: None

    def receive(self, timeout: timedelta | None = None) -> None:
        self.reduce()


def _accumulating(held: Any) -> Callable[[Tensor], None]:
    def accumulate(parameter: Tensor) -> None:
        held.accumulate_unsharded_grad_if_needed()
        held.to_accumulated_grad_if_needed()

    return accumulate


def _set(group: ParameterGroup, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        setattr(group, name, value)


def _check_ranks(group: ParameterGroup, ranks: Sequence[int], expert: bool) -> None:
    over = sorted(group.mesh_info.mesh.mesh.flatten().tolist())
    if over != sorted(ranks):
        what = "experts" if expert else "parameters outside the experts"
        raise ValueError(
            f"FSDP2 holds {what} of {', '.join(type(m).__name__ for m in group.modules)} over ranks {over}; allowed: "
            f"{sorted(ranks)}, whose gradients they sum"
        )
