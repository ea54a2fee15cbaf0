"""What ties an engine to other ranks: groups, lanes, sums of gradients, and the guard of its calls.

All communicators are made here, in one order on all ranks, and end with :meth:`Connection.close`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.cut.options import EngineOptions
from overlap1f1b.engine.agreement import described, structure
from overlap1f1b.engine.capacity import CapacityOverflowError
from overlap1f1b.engine.stages import Model, stages_of, tensor_mesh_of
from overlap1f1b.moe.router import Router
from overlap1f1b.plan import Op
from overlap1f1b.reduce.fsdp import Gathers, ShardedReducer
from overlap1f1b.reduce.links import Links, lanes_of
from overlap1f1b.reduce.reduction import Reduction
from overlap1f1b.reduce.sums import Reducer
from overlap1f1b.reduce.tensor import TensorGradients
from overlap1f1b.reduce.ties import TiedReduction, ties_in
from overlap1f1b.schedule import Kind, Program
from overlap1f1b.transport.boundary import Boundary
from overlap1f1b.transport.communicators import Communicators
from overlap1f1b.transport.devices import watch_of
from overlap1f1b.transport.exchange import Exchange
from overlap1f1b.transport.failures import DifferentCallsError, LostRankError
from overlap1f1b.transport.groups import Group
from overlap1f1b.transport.host import HostMemory
from overlap1f1b.transport.lanes import Lane
from overlap1f1b.transport.limits import CLOSE_S, LATE_CALL_S
from overlap1f1b.transport.mesh import DATA, DIMENSIONS, Comparison, Mesh, check_ranks
from overlap1f1b.transport.suspension import Forward

Failing = type[BaseException] | tuple[type[BaseException], ...]


Call = Literal[
    "step", "evaluate", "mean_loss", "clip_gradients", "save_checkpoint", "load_checkpoint", "close", "another call"
]
_CALLS = get_args(Call)
_RANKS = 2**20  # more than there are
_NO_FACTS: Mapping[str, float] = MappingProxyType({})


class Connection:
    """The stages of a rank by their numbers, and its links to other ranks.

    Its communicators end when ``owner`` is dropped. ``sharding`` is what FSDP2 holds of the stages, ``tied`` sums
    parameters that several share, ``boundary`` has the transfers between them, ``links`` is all that a step needs.

    Raises:
        ValueError: What was given does not fit, or differs between ranks.
        LostRankError: Another rank failed, or did not come within the limit.
    """

    def __init__(
        self,
        owner: object,
        model: Model,
        program: Program,
        mesh: DeviceMesh | None,
        options: EngineOptions,
        exchange: Exchange | None,
    ) -> None:
        self.mesh = Mesh(mesh, options.limit, options.experts_over)
        self._communicators = Communicators(owner, self.mesh, options.device, exchange)
        self._failed = self._closed = self._entered = False
        self._calls = 0  # that all ranks have made
        with self._reporting("in the construction of its Engine"):
            placement, mesh_ = program.placement, self.mesh
            # 1. All ranks were given the same options.
            shared = None if exchange is None else type(exchange).__name__
            mesh_.agree(
                {"program": described(program), "exchange": shared}
                | options.facts
                | {"experts_over": mesh_.experts_over}
            )
            # 2. Groups of ranks: for exchanges, and for sums of gradients over ranks that hold the same stages.
            check_ranks(program, mesh_.devices)
            rank = mesh_.rank("pp")
            self.exchange = self._communicators.make_exchange()
            replicas = sorted({r for _, stage in placement.places(rank) for r in placement.replicas(stage)})
            dense, experts = (
                mesh_.new_group(purpose, pp=replicas, over=over, ctas=options.device.sums) if options.reduce else None
                for purpose, over in (("reduce", DATA), ("reduce experts", mesh_.expert_copies))
            )
            # 3. The stages of this rank, the same on all ranks that hold them.
            self.stages, self.sharding = stages_of(
                model,
                placement,
                mesh_,
                self.exchange,
                options,
                reduce_dense=dense is not None,
                reduce_experts=experts is not None,
                gathers=options.memory is not None and len(replicas) == 1,  # others play other plans
            )
            self.sharding.limit(options.limit)
            if self.sharding.groups and not options.reduce:
                raise ValueError("reduce=False over FSDP2; allowed: set_requires_gradient_sync(False) on its modules")
            mesh_.agree(structure(self.stages))
            # 4. Transfers between stages, and sums of gradients.
            self.device = next(iter(self.stages.values())).device
            watch = watch_of(self.device)
            stamp = watch and watch.stamp
            self._communicators.use(self.device)
            self.boundary = Boundary(
                mesh_,
                placement,
                device=self.device,
                dynamic=options.dynamic_shapes,
                tensor_mesh=tensor_mesh_of(self.stages.values(), mesh_),
            )
            failures = mesh_.failures
            reduces = Lane("reduce", failures, background=mesh_.on_gloo, stamp=stamp, abort=mesh_.own.abort)
            shards = Lane("shards", failures, background=watch is None, stamp=stamp, abort=self.sharding.abort)
            tied = model.items() if options.reduce and isinstance(model, Mapping) else ()
            self.tied = TiedReduction({number: ties_in(stage) for number, stage in tied}, placement, mesh_)
            lanes, host = lanes_of(self.exchange, failures, watch), None
            if options.offload:
                host = HostMemory(self.device, options.host_link, options.offload_threshold)
                for op, kind in ((Op.OFFLOAD, Kind.F), (Op.FETCH, Kind.I)):
                    lanes[op, kind] = Lane(op.value, failures, background=False, stamp=stamp)
            # Weight gradients keep the places that a program, or the search of an order, has given them. Ranks of a
            # tensor or context group run collectives inside blocks, so they keep one order.
            self.links = Links(
                failures,
                self.exchange,
                lanes,
                rank=rank,
                first_replica=replicas[0],
                boundary=self.boundary,
                reductions=self._reductions(dense, experts, reduces, shards, replicas),
                gathers=Gathers(self.sharding, shards, self.device) if self.sharding.of_block else None,
                host=host,
                watch=watch,
                settle=self._communicators.settle,
                fills=not (program.splits(rank) or program.search_seconds > 0 or mesh_.inner),
                capacity=options.capacity,
                adds_to_main=experts is None and options.capacity is None,
                carveout=self.exchange.sms if options.device.carveout else 0,
            )
            self.lanes = [*dict.fromkeys(lanes.values()), *self.boundary.lanes, reduces, shards]
            # 5. Loads of routers are summed over all ranks that hold them, where gradients of their gates are, too.
            modules = (m for stage in self.stages.values() for block in stage.blocks for m in block.modules())
            routers, self._holders = [m for m in modules if isinstance(m, Router)], dense
            if routers and (dense is None or mesh_.group("tp") is not None):
                self._holders = mesh_.new_group("routers", pp=replicas, over=DIMENSIONS[1:], ctas=options.device.sums)
            for router in routers:
                router.share(self.add_up)
            self._communicators.warm_up()

    def _reductions(
        self, dense: Group | None, experts: Group | None, reduces: Lane, shards: Lane, replicas: list[int]
    ) -> list[Reduction]:
        """Return FSDP2's reduction for the parameters that it holds, and the engine's own for all others."""
        sharded: ShardedReducer | None = None
        if self.sharding.groups:
            if len(replicas) > 1:  # these play other plans
                self.sharding.gather_at_once()
            ranks, copies = (self.mesh.ranks(pp=replicas, over=over) for over in (DATA, self.mesh.expert_copies))
            with self.sharding.gathered():
                sharded = ShardedReducer(self.sharding, self.stages, shards, ranks=ranks, expert_ranks=copies)
        tensors = TensorGradients(self.stages, self.mesh, sharded)
        apart = frozenset[torch.nn.Parameter]() if sharded is None else sharded.parameters
        plain = Reducer(self.stages, dense, experts, reduces, apart=apart)
        # Tied parameters are the first to be set aside, so they are summed last; tensor groups sum before other ranks.
        found: list[Reduction] = [one for one in (self.tied, tensors) if one.reduces]
        found += [] if sharded is None else [sharded]
        return found + ([plain] if plain.reduces else [])

    def add_up(self, load: torch.Tensor) -> None:
        """Add up what a router has counted, in place, over all ranks that hold it; all of them must call this."""
        if self._holders is None:
            return
        if self._closed:
            raise RuntimeError("update_correction_bias after its engine was closed; allowed: group=…, or a new engine")
        with self._reporting("in update_correction_bias"):
            self._holders.allreduce([load]).wait()

    def settle(self) -> None:
        """Wait until no sum or gather is in flight, nor anything on the device: groups can do something else."""
        for reduction in self.links.reductions:
            reduction.settle()
        if self.links.gathers is not None:
            self.links.gathers.settle()
        self._communicators.settle(lambda: "what was launched before a barrier has not ended on the device")

    @contextmanager
    def guarded(
        self, call: Call, of: Failing = BaseException, *, place: str = "", facts: Mapping[str, float] = _NO_FACTS
    ) -> Iterator[Comparison]:
        """Guard a call that all ranks make; failures ``of`` these kinds end the engine, after others it can go on.

        Ranks compare which call it is, and up to four numbers of it, ``facts``. In a step they go on meanwhile: a rank
        that has made another call ends the step. After a failure in the body, put earlier gradients back, end the waits
        of all other ranks, and this engine. Messages say ``place``, where in the call this rank is.

        RuntimeError if the engine has failed before, or is in a step, or ranks have made different calls.
        """
        if self._closed:
            raise RuntimeError("this engine is closed; allowed: a new one, on all ranks")
        if self._failed:
            raise RuntimeError("this engine failed before; allowed: a new one, on all ranks")
        # A block would take the exchanges and parameters of another engine's step for its own.
        if self._entered or Forward.running() is not None:
            raise RuntimeError("an engine is used inside a block or a loss of a step; allowed: between steps")
        self._entered = True
        of = (*(of if isinstance(of, tuple) else (of,)), DifferentCallsError)
        try:
            with self._reporting(place or f"in {call}", of), self._communicators.watched():
                comparison = self._compared(call, facts)
                if call != "step":
                    with self._naming(call):
                        self._check(comparison)
                yield comparison
                if call == "step":
                    self._check(comparison)
        except CapacityOverflowError:  # on all ranks, after everything was played
            raise
        except of:
            self.boundary.forget()
            if self.links.gathers is not None:
                self.links.gathers.forget()
            for reduction in self.links.reductions:
                reduction.restore()
            raise
        finally:
            self._entered = False

    def _compared(self, call: Call, facts: Mapping[str, float]) -> Comparison:
        self._calls += 1
        limit = timedelta(seconds=CLOSE_S) if call == "close" else None
        return self.mesh.compared({"call": _CALLS.index(call) * _RANKS + self.mesh.number, **facts}, limit)

    @contextmanager
    def _naming(self, call: Call) -> Iterator[None]:
        """Name a call that waits for other ranks: in a warning when it is late, and in the error at its limit."""
        name = f"call {self._calls} of the engine, {call} on {self.mesh.label}"
        waits = f"{name}, waits for the other ranks since {LATE_CALL_S:g} s; allowed: the same call on all ranks"
        late = Timer(LATE_CALL_S, lambda: warnings.warn(waits, stacklevel=1))
        late.daemon = True
        if self.mesh.several and call != "close":  # which waits no longer than that
            late.start()
        try:
            yield
        except LostRankError as error:
            raise LostRankError(f"{name}, which all ranks must make, met no other: {error}") from error
        finally:
            late.cancel()

    def _check(self, comparison: Comparison) -> None:
        """Raise a DifferentCallsError, which names both, if ranks have made different calls."""
        least, most = (divmod(int(number), _RANKS) for number in comparison.extremes("call"))
        if least[0] != most[0]:
            one, other = (f"{_CALLS[call]} on {self.mesh.labels[rank]}" for call, rank in (least, most))
            raise DifferentCallsError(
                f"call {self._calls} of the engine is {one} and {other}; allowed: the same call on all ranks, also of "
                "mean_loss, clip_gradients and evaluate, while what one rank alone may do is print"
            )

    @contextmanager
    def _reporting(self, where: str, of: Failing = BaseException) -> Iterator[None]:
        """Tell the other ranks of a failure in the body, and end their waits."""
        failures = self.mesh.failures
        try:
            yield
        except CapacityOverflowError:
            raise
        except of as error:
            self._failed = self.mesh.several
            failures.tell(error, f"{self.mesh.label} failed {failures.place or where}")
            if self._failed:
                self._communicators.abort()
            failures.explain(error)
            raise

    def _part(self) -> None:
        """Meet the other ranks before connections end; ranks that have ended, or come late, are not missed."""
        try:
            with self.guarded("close", DifferentCallsError) as comparison:
                comparison.differ()  # ranks of other lines have met, too
        except LostRankError as error:
            self._failed = True  # whoever comes later has nobody to wait for
            if self.mesh.failures.read(wait=True) is not None:
                self.mesh.failures.explain(error)
                raise

    def close(self, *, failed: bool = False, before: Callable[[], None] = lambda: None) -> None:
        """Release communicators and threads; all ranks must call this, unless this one has ``failed``.

        ``before`` waits for work in the background; its errors are those of an engine that has failed before.
        """
        self._failed |= failed and self.mesh.several  # the other ranks may not come here
        if self._closed:
            return
        failed = self._failed
        try:
            before()
            if not failed:
                self._part()
        except (OSError, RuntimeError):
            if not failed:
                raise
        finally:
            self._closed = True
            try:
                self._communicators.close(failed=self._failed)
            finally:
                for lane in self.lanes:
                    lane.close()
                self.boundary.close()
                if self.links.host is not None:
                    self.links.host.close()
