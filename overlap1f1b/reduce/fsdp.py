"""Keep parameters of torch's FSDP2 gathered during a step, and have FSDP2 sum their gradients when the plan says so.

``fully_shard`` and ``replicate`` gather a module's parameters in its forward and reduce their gradients in its
backward, by hooks that expect one microbatch at a time, backward after forward. The engine keeps several microbatches
open in each module, and cuts their backwards into parts. So while it plays, the hooks only cast for mixed precision;
:class:`ShardedReducer` starts the reductions. Parameters stay gathered, or, under a limit of memory, are gathered and
released by nodes of the plan, see :class:`Gathers`.

This file reads private attributes of torch: FSDP2 has no public calls for it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, share_comm_ctx
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from overlap1f1b.cut.blocks import options_of
from overlap1f1b.cut.stage import Stage
from overlap1f1b.plan import Node, Op
from overlap1f1b.reduce.reduction import BlockKey, Reduction
from overlap1f1b.schedule import Kind
from overlap1f1b.transport import devices
from overlap1f1b.transport.exchange import Transfer
from overlap1f1b.transport.groups import abort, limit
from overlap1f1b.transport.lanes import Flight, Lane
from overlap1f1b.transport.mesh import lines_of
from overlap1f1b.transport.streams import DeviceStream, ThreadMark
from overlap1f1b.transport.versions import release

ParameterGroup = Any  # torch's FSDPParamGroup, which is not public
_PASSIVE_CASTS = (2, 13)  # from this torch on, FSDP2's hooks cast in the state that the engine keeps them in

AHEAD = 2
"""Gathers ahead of the module that runs."""
BUFFERS = 2
"""Inputs of reductions under way: compute waits for the one before the last."""


class Sharding:
    """The parameters that FSDP2 holds of one or more models, perhaps none.

    >>> sharding = Sharding(model, ranks=range(size))
    >>> with sharding.gathered():
    ...     stage = Stage(model, exchange)  # sees whole parameters, the same objects in every step

    Parameters stay gathered from the first node of a step to the last, whatever ``reshard_after_forward`` is, unless
    nodes gather those of their block. Modules are gathered in one order, each at most :attr:`ahead` before its first
    forward. All share one communication context, that is FSDP2's streams, and two buffers for reductions, so that
    compute does not wait for the one before.

    Models have the same order on all ranks that hold them. ``ranks`` are the engine's, by their numbers in the default
    group; those ``sharing`` the experts may slice these as DTensors, those of the ``tensor`` group any parameter.

    Raises:
        ValueError: A parameter is a DTensor over other ranks than FSDP2's and its tensor group's; FSDP2 was applied to
            a module around the blocks that is not given; or with mixed precision, and torch is older than 2.13.

    Attributes:
        ahead: Gathers under way or not copied yet, beside the running module's; None for all at once. Ranks that gather
            together must then reach their modules in the same order.
        sliced: Sharded parameters that are sliced over the ranks that share the experts, too.
    """

    def __init__(
        self,
        *models: nn.Module | Sequence[nn.Module],
        ranks: Collection[int],
        sharing: Collection[int] = (),
        tensor: Collection[int] = (),
    ) -> None:
        tops = [m for model in models for m in ([model] if isinstance(model, nn.Module) else model)]
        roots = [root for top in tops for root in _outermost(top)]
        self._roots = _by_state(roots)
        self._modules = _by_state(m for root in roots for m in root.modules() if isinstance(m, FSDPModule))
        self._uncalled = {id(model) for model in models}
        self.groups: list[ParameterGroup] = [group for m in self._modules for group in _groups(m)]
        self._whole, self._handles = self._modules, list[Any]()
        """Modules that stay gathered for a step, and the gathers that were started for them."""
        self.of_block: dict[BlockKey, list[FSDPModule]] = {}
        """Modules inside one block each, whose parameters nodes may gather."""
        self._changes = ExitStack()
        """Hooks and settings while parameters are gathered."""
        self.ahead: int | None = AHEAD
        for root in self._roots:
            _state(root)._lazy_init()
        # Each root has a context with three streams of high priority; torch has 32, and then gives them out again.
        share_comm_ctx(self._modules)
        self._ranks, self._sharing, self._tensor = set(ranks), set(sharing), set(tensor)
        held = {id(p.sharded_param): group for group in self.groups for p in group.fsdp_params}
        self.sliced: set[Tensor] = {
            parameter
            for top in tops
            for path, module in top.named_modules()
            for label, parameter in module.named_parameters(path, recurse=False)
            if isinstance(parameter, DTensor)
            and self._is_sliced(parameter, held.get(id(parameter)), module, f"{label} of {type(top).__name__}")
        }
        casts = any(held.mp_policy.param_dtype is not None for group in self.groups for held in group.fsdp_params)
        if casts and release(torch.__version__) < _PASSIVE_CASTS:
            raise ValueError(f"FSDP2 with param_dtype on torch {torch.__version__}; allowed: torch 2.13 or newer")

    def _is_sliced(self, parameter: DTensor, group: ParameterGroup | None, module: nn.Module, name: str) -> bool:
        """Return whether the ranks that share the experts have slices of a DTensor.

        Ranks of a tensor group may share experts, too: only a dimension's name, "ep" or one that begins so, as "ep_tp",
        tells these slices from other layers'. ValueError if FSDP2, the tensor group and the experts do not have parts
        over one.
        """
        mesh, held, sliced = parameter.device_mesh, set(_ranks_of(group)), False
        foreign, beyond = list[str](), list[str]()
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        dimensions = zip(names, lines_of(mesh), parameter.placements, strict=True)
        for at, (dimension, line, placement) in enumerate(dimensions):
            what, over = f"{repr(dimension) if dimension else f'dimension {at}'} of ranks {line}", set(line)
            of_experts = dimension.split("_")[0] == "ep"
            if not over <= self._ranks:  # they have other engines, which measure other costs and plan otherwise
                foreign.append(what)
            if of_experts and placement.is_shard() and over == self._sharing and not over <= held:
                sliced = True
            elif not over <= held and (of_experts or over != self._tensor):
                beyond.append(what)
        if not foreign and beyond and group is None and getattr(module, "_is_fsdp_managed_module", False):
            raise ValueError(
                f"parameter {name} is sharded by a module around the blocks; "
                "allowed: that module itself given as the model, or as a stage; or fully_shard on each block"
            )
        if foreign or beyond:
            raise ValueError(
                f"parameter {name} is a DTensor over {', '.join(foreign or beyond)}, which is not FSDP2's over the "
                f"engine's ranks {sorted(self._ranks)}; allowed: FSDP2 over these ranks, tensor parallelism over the "
                "mesh's dimension 'tp', experts over its 'ep'"
            )
        if sliced and isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(
                f"parameter {name} is split over the ranks that share the experts, as by parallelize_module; "
                "allowed: such layers over the mesh's dimension 'tp', stacked experts over 'ep'"
            )
        return sliced

    @cached_property
    def holders(self) -> set[nn.Module]:
        """Modules whose parameters FSDP2 replaces by others, and whose gradients it sums."""
        infos = [parameter._module_info for group in self.groups for parameter in group.fsdp_params]
        return {module for info in infos for module in (info.module, *info.shared_modules)}

    @property
    def process_groups(self) -> set[dist.ProcessGroup]:
        """Groups of FSDP2's collectives, which are the user's."""
        meshes = [group.mesh_info for group in self.groups]
        kinds = ("shard", "replicate", "reduce_scatter")
        found = (getattr(mesh, f"{kind}_process_group", None) for mesh in meshes for kind in kinds)
        return {group for group in found if group is not None}

    def limit(self, timeout: timedelta) -> None:
        """Set the limit of FSDP2's waits, which torch takes from the process group."""
        for group in self.process_groups:
            limit(group, timeout)

    def abort(self) -> None:
        """End FSDP2's collectives on gloo when the process ends; the groups are the user's."""
        for group in self.process_groups:
            abort(group)

    def divide(self, stages: Mapping[int, Sequence[nn.Module]]) -> None:
        """Let nodes gather what lies inside a single one of these blocks, given by stage."""
        blocks = {(n, at): block for n, stage in stages.items() for at, block in enumerate(stage)}
        inside = {place: set(block.modules()) for place, block in blocks.items()}
        # Their weight gradients are computed with the parameters, at any time.
        whole = {p for p, held in inside.items() if options_of(blocks[p]).delays or any(map(is_parametrized, held))}
        for module in self._modules:
            called = _state(module)._modules
            places = [place for place, held in inside.items() if not held.isdisjoint(called)]
            if len(places) == 1 and places[0] not in whole and inside[places[0]].issuperset(called):
                self.of_block.setdefault(places[0], []).append(module)

    def gather_at_once(self) -> None:
        """Gather all modules at the start of a step: ranks that gather together play other plans."""
        self.ahead = None

    def gather(self, by_nodes: Collection[BlockKey] = ()) -> None:
        """Start to gather parameters in order, and keep FSDP2's hooks still; forwards wait for their own.

        Nodes gather those of the blocks ``by_nodes``; then all others start at once, as nodes may use their groups.
        """
        apart = {id(module) for place in by_nodes for module in self.of_block[place]}
        self._whole, self._handles = [m for m in self._modules if id(m) not in apart], []
        self._set_buffers()
        self._reach(len(self._whole) if by_nodes else 0)
        for module in self._modules:
            # Else the end of a forward would reshard parameters that a suspended forward needs, and the end of a
            # backward would reduce incomplete gradients.
            _state(module)._training_state = TrainingState.PRE_BACKWARD
        for number, module in enumerate(self._whole):
            for called in _state(module)._modules:
                hook = called.register_forward_pre_hook(partial(self._reach, number), prepend=True)
                self._changes.enter_context(hook)
            if id(module) in self._uncalled:  # the engine calls its blocks alone
                self._reach(number)
                self._handles[number].wait()

    def _reach(self, number: int, *_: Any) -> None:
        """Start the gathers up to a module's, and the next few; a hook of the module, before FSDP2's own."""
        last = len(self._whole) if self.ahead is None else number + 1 + self.ahead
        for module in self._whole[len(self._handles) : last]:
            self._handles.append(module.unshard(async_op=True))  # one by one: a later one may fail

    def gather_rest(self) -> None:
        """Start all gathers that no forward has asked for, before something else uses their groups."""
        self._reach(len(self._whole))

    def wait(self) -> None:
        """Wait until all parameters are gathered, but those that nodes gather."""
        for number in range(len(self._whole)):
            self._reach(number)
            self._handles[number].wait()

    def _set_buffers(self) -> None:
        """Let FSDP2 keep several inputs of reductions; torch 2.11 keeps one."""
        for module in self._modules[:1]:
            context = _state(module)._comm_ctx
            before = getattr(context, "reduce_scatter_max_input_buffers", None)
            # Buffers of symmetric memory, or of the user's own, are not to be multiplied.
            if before is not None and all(type(g._reduce_scatter_comm) is DefaultReduceScatter for g in self.groups):
                _set(self._changes, context, "reduce_scatter_max_input_buffers", max(before, BUFFERS))

    def release(self) -> None:
        """Free the gathered parameters and give the modules back to FSDP2."""
        self.wait()  # FSDP2 would take an unfinished gathering for the next one
        self._handles = []
        self._changes.close()
        for module in self._modules:
            for group in _groups(module):  # a node's gather that a step that failed has left never ends on other ranks
                group._all_gather_result = None
            module.reshard()
            _state(module)._training_state = TrainingState.IDLE

    @contextmanager
    def gathered(self, by_nodes: Collection[BlockKey] = ()) -> Iterator[None]:
        """Run the body with all parameters whole, but those of blocks that nodes gather."""
        self.gather(by_nodes)
        try:
            self.wait()
            yield
        finally:
            self.release()

    def finalize(self) -> None:
        """End FSDP2's backward: on a GPU, the current stream waits for the reductions."""
        for root in self._roots:
            # torch 2.15 asks who ends the backward, and would have asked in its own pre-backward hook.
            _state(root)._state_ctx.manual_backward_finalization_active = False
            _state(root)._root_post_backward_final_callback()

    def unreduced(self) -> Iterator[tuple[Any, str]]:
        """Yield where gradients wait for their sum over ranks: objects, and names of their attributes."""
        for group in self.groups:
            yield group, "_partial_reduce_output"
            for held in group.fsdp_params:
                yield held, "unsharded_accumulated_grad"
                if hasattr(held, "_unsharded_param"):
                    yield held._unsharded_param, "grad"

    def forget(self) -> None:
        """Drop gradients that were not reduced."""
        for owner, attribute in self.unreduced():
            if attribute != "_partial_reduce_output":  # earlier steps'
                setattr(owner, attribute, None)


def _ranks_of(group: ParameterGroup | None) -> list[int]:
    return [] if group is None else list(group.mesh_info.mesh.mesh.flatten().tolist())


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _groups(module: FSDPModule) -> list[ParameterGroup]:
    state = _state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 has at most one a module.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _by_state(modules: Iterable[FSDPModule]) -> list[FSDPModule]:
    """Return the first module of each state: after ``fully_shard([a, b])`` two modules share one."""
    first: dict[int, FSDPModule] = {}
    for module in modules:
        first.setdefault(id(_state(module)), module)
    return list(first.values())


def _outermost(module: nn.Module) -> Iterator[Any]:
    if isinstance(module, FSDPModule):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


# The engine scales losses by the number of ranks; FSDP2 by default divides by the ranks of each mesh.
_SETTINGS = {"gradient_divide_factor": 1.0, "force_sum_reduction_for_comms": True, "reshard_after_backward": False}


class Gathers:
    """Gathers and releases of blocks inside a step, on the lane of the reductions, which may use the same groups.

    The lane gathers into a buffer; the first computation that needs the parameters copies them out of it. A release
    frees them; autograd has saved their storages, which the next gather fills again.
    """

    def __init__(self, sharding: Sharding, lane: Lane, device: torch.device) -> None:
        self.sharding, self.lane = sharding, lane
        self._stream = None if devices.gpu_of(device) is None else DeviceStream(device, priority=0)
        self._coming: dict[BlockKey, Flight[None]] = {}

    def launch(self, node: Node) -> Flight[None]:
        """Start the gather of a node."""
        groups, coming = self._groups(node), self._coming

        def gather() -> None:
            for group in groups if coming is self._coming else ():  # else the step has failed since
                group.unshard(async_op=True)
            for group in groups:
                if (work := getattr(group._all_gather_result, "all_gather_work", None)) is not None:
                    work.wait()

        def post() -> Transfer[None]:
            return (
                _Blocking(None, job=gather) if self._stream is None else Transfer(None, mark=self._stream.run(gather))
            )

        flight = coming[node.stage, node.block] = self.lane.launch(node, post)
        return flight

    def coming(self, node: Node) -> Flight[None] | None:
        """Return the gather that a node of compute has to wait for; None if there is none."""
        return None if node.kind is Kind.W else self._coming.get((node.stage, node.block))

    def take(self, node: Node) -> None:
        """Wait for the parameters of a node's block."""
        self._coming.pop((node.stage, node.block)).wait()
        for group in self._groups(node):
            buffer = getattr(group._all_gather_result, "all_gather_output", None)
            group.wait_for_unshard()
            if buffer is not None and self._stream is None:  # gloo's thread lets go of it a little later
                buffer.untyped_storage().resize_(0)

    def release(self, node: Node) -> None:
        """Free the parameters of a node's block."""
        for group in self._groups(node):
            group.reshard()

    def _groups(self, node: Node) -> list[ParameterGroup]:
        return [group for module in self.sharding.of_block[node.stage, node.block] for group in _groups(module)]

    def settle(self) -> None:
        """Wait until no gather is under way."""
        for flight in self._coming.values():
            flight.settle()

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._coming = {}


class ShardedReducer(Reduction):
    """One reduction a parameter group of FSDP2, launched when the last contribution of all its blocks is in.

    FSDP2 adds the sum to the sharded ``.grad``, which may hold earlier steps. Gradients are sums over ranks, whatever
    divide factor was set. After ``set_requires_gradient_sync(False)`` they stay on their rank.

    ``ranks`` hold the same parameters outside the experts, ``expert_ranks`` the same experts, by their numbers in the
    default group. The parameters must be gathered, as when the stages were made.

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
        super().__init__()
        self.sharding, self.lane = sharding, lane
        places: dict[nn.Parameter, set[BlockKey]] = {}
        experts: set[nn.Parameter] = set()
        for number, stage in stages.items():
            for block in range(len(stage.blocks)):
                held = stage.expert_parameters_of(block)
                experts.update(held)
                for parameter in (*stage.dense_parameters[block], *held):
                    places.setdefault(parameter, set()).add((number, block))
        self._places: list[tuple[ParameterGroup, set[BlockKey]]] = []
        self.parameters: set[nn.Parameter] = set()
        """Parameters that FSDP2 reduces, gathered."""
        self._beside: dict[nn.Parameter, Any] = {}  # states of parameters whose gradients FSDP2 sums beside ``.grad``
        for group in sharding.groups:
            parameters = [p for held in group.fsdp_params if (p := held.unsharded_param) in places]
            experts.update(held.unsharded_param for held in group.fsdp_params if held.sharded_param in sharding.sliced)
            self.parameters.update(parameters)
            self._beside.update({held.unsharded_param: held for held in group.fsdp_params if _sums_beside(held)})
            if parameters:
                self._places.append((group, {place for p in parameters for place in places[p]}))
            for expert in {parameter in experts for parameter in parameters}:
                over, allowed = sorted(_ranks_of(group)), sorted(expert_ranks if expert else ranks)
                if over != allowed:
                    names = ", ".join(type(module).__name__ for module in group.modules)
                    raise ValueError(
                        f"FSDP2 holds {'experts' if expert else 'parameters outside the experts'} of {names} over "
                        f"ranks {over}; allowed: {allowed}, whose gradients they sum"
                    )
        self._order: list[tuple[ParameterGroup, set[BlockKey]]] = []  # of the launches to come, last first
        self._ready: set[BlockKey] = set()
        self._changes = ExitStack()
        """Hooks and settings while a step lasts."""
        self._begun = False

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this step's gradient of any parameter, wherever it is summed."""
        held = self._beside.get(parameter)
        beside: Tensor | None = None if held is None else held.unsharded_accumulated_grad
        return parameter.grad if beside is None else beside

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Replace this step's gradient of any parameter."""
        held = self._beside.get(parameter)
        if held is None or grad.dtype == parameter.dtype:  # FSDP2 keeps nothing beside ``.grad`` in its own dtype
            parameter.grad = grad
        else:
            held.unsharded_accumulated_grad = grad

    def begin(self, order: Sequence[Node]) -> None:
        # Gather the parameters, and take FSDP2's settings over for the step; FSDP2 adds to earlier gradients itself.
        self._begun, self._flights, self._ready = True, [], set()
        at = {(node.stage, node.block): index for index, node in enumerate(order) if node.op is Op.REDUCE}

        self._order = sorted(self._places, key=lambda entry: max(at.get(place, len(order)) for place in entry[1]))[::-1]
        for group, _ in self._places:
            for name, value in _SETTINGS.items():
                _set(self._changes, group, name, value)
            for held in group.fsdp_params:
                if _sums_beside(held) and held._unsharded_param.requires_grad:
                    hook = held._unsharded_param.register_post_accumulate_grad_hook(partial(_accumulate, held))
                    self._changes.enter_context(hook)
        self.sharding.gather(gathered_in(order))

    def launch(self, node: Node) -> list[Flight[None]]:
        # Reductions that this block completes, and reductions that waited for their turn behind them.
        self._ready.add((node.stage, node.block))
        self.sharding.gather_rest()
        launched = []
        while self._order and self._order[-1][1] <= self._ready:
            launched.append(self._start(node, self._order.pop()[0]))
        return launched

    def _start(self, node: Node, group: ParameterGroup) -> Flight[None]:
        """Start the reduction of a group; a parameter without a gradient gets one of zeros."""
        for held in group.fsdp_params:
            parameter = held.unsharded_param
            if parameter.requires_grad and parameter.grad is None and held.unsharded_accumulated_grad is None:
                # No token of this rank reached it; another rank's may have, and all ranks must reduce the same.
                if _sums_beside(held):
                    held.unsharded_accumulated_grad = torch.zeros_like(parameter, dtype=held.reduce_dtype)
                else:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)

        def post() -> Transfer[None]:
            if self.lane.background:
                return _Blocking(None, job=group.post_backward)
            group.post_backward()
            return Transfer(None)

        flight = self.lane.launch(node, post)
        self._flights.append(flight)
        return flight

    def finish(self) -> None:
        """Start the reductions that have no node (over one rank), wait for all, and give the modules back to FSDP2."""
        while self._order:
            group, places = self._order.pop()
            stage, block = max(places)
            self._start(Node(Op.REDUCE, Kind.W, 0, block, stage=stage), group)
        for flight in self._flights:
            flight.wait()
        self.sharding.finalize()
        self._give_back()

    def restore(self) -> None:
        """Drop the gradients of a step that failed."""
        if self._begun:
            self.sharding.forget()
            with suppress(RuntimeError):  # a lost rank answers no gathering; the step's own error counts
                self._give_back()

    def _give_back(self) -> None:
        self._changes.close()
        self._flights, self._order, self._begun = [], [], False
        self.sharding.release()


@dataclass(slots=True)
class _Blocking(Transfer[None]):
    """A collective of FSDP2 on gloo, which blocks its thread: the lane's."""

    job: Callable[[], None] = lambda: None

    def receive(self, timeout: timedelta | None = None) -> None:
        self.mark = mark = ThreadMark()  # behind other collectives of the lane it begins later than it departs
        mark.begin()
        self.job()
        mark.reach()


def gathered_in(nodes: Iterable[Node]) -> set[BlockKey]:
    """Return the blocks whose parameters nodes gather."""
    return {(node.stage, node.block) for node in nodes if node.op is Op.GATHER}


def _sums_beside(held: Any) -> bool:
    """Return whether FSDP2 sums microbatches beside ``.grad``, in the dtype in which it sums ranks.

    From torch 2.15 on, ``.grad`` itself has that dtype.
    """
    return held.reduce_dtype is not None and hasattr(held, "accumulate_unsharded_grad_if_needed")


def _accumulate(held: Any, _: Tensor) -> None:
    held.accumulate_unsharded_grad_if_needed()
    held.to_accumulated_grad_if_needed()


def _set(changes: ExitStack, target: Any, name: str, value: object) -> None:
    changes.callback(setattr, target, name, getattr(target, name))
    setattr(target, name, value)
