"""One block for one microbatch, cut at its exchanges.

A block's forward is an ordinary ``nn.Module.forward``, which every exchange suspends: ``S0 E0 S1 E1 … SK``, segments
and exchanges in turns. The backward goes the same way in reverse. Contract: every compute node runs one segment and
nothing else, no two segments share a graph, each graph is walked once, and gradients are those of one backward of
everything, to the bit.

    forward    run on from the rows that the exchange before brought, to the next exchange or to the end
               keep only the edges of what is sent: where its gradients will enter
    backward   begin at the gradients of what the segment has sent, and of what later segments used of it
               walk the segment's graph once
               hand on the gradients of received rows to the exchange before, others to the segments that made them
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from overlap1f1b.cut.bits import storage_of
from overlap1f1b.cut.blocks import MicrobatchBlock
from overlap1f1b.cut.edges import edge_of, is_walked_often, nodes_behind
from overlap1f1b.moe.route import Route
from overlap1f1b.plan import Op, Place
from overlap1f1b.plan.turn import Stretch
from overlap1f1b.play.crossing import CrossingMode, Lookout, eager
from overlap1f1b.play.gradients import Gradients, Root, WeightQueue, accumulate
from overlap1f1b.play.install import Installation
from overlap1f1b.play.microbatch import Microbatch, Phase, Tensors, absent, check_call, is_absent, name_call
from overlap1f1b.play.observers import ExpertCall
from overlap1f1b.play.offload import BlockOffload, Kept
from overlap1f1b.play.recompute import DroppedPart, Recomputation
from overlap1f1b.play.segment import NOTHING_ENTERED, Crossing, Layout, LibraryExchange, Segment, Sent, Use
from overlap1f1b.play.values import PlaceValues
from overlap1f1b.transport.calls import ExchangeCall, LibrarySplits, Splits, uncut
from overlap1f1b.transport.suspension import OUTSIDE, Forward, Handlers

WALKED = "backward through the graph a second time"
"""In torch's error of a graph that has been freed."""
HOOKED = "don't yet support saved tensor hooks"
"""In torch's error of a transform under hooks, the engine's or a caller's."""

_REQUIRES_GRAD = attrgetter("requires_grad")

Reached = list[ExchangeCall] | Tensors
"""Result of running a forward on: its next exchanges, or its outputs."""


class BlockRun:
    """The nodes of one block for one microbatch, in the order of the plan's chains; or a stretch that begins with it.

    :meth:`run_forward` and :meth:`run_backward` are the compute nodes; ``received`` are the rows of the exchange
    before. Which node is which method: ``Player._compute``. Exchange nodes start in
    :mod:`overlap1f1b.play.posting`.
    """

    forward: Forward | None = None  # on a stack of its own; None if nothing suspends it, and after its end
    mode: CrossingMode | None = None  # shows what may enter a segment, where something may
    carried: PlaceValues | None = None  # what the forward takes along while it is suspended
    recomputation: Recomputation | None = None  # parts of the forward that are computed again, once there is one
    offload: BlockOffload | None = None  # what the forward leaves for the backward, if it goes to host memory meanwhile

    def __init__(self, microbatch: Microbatch, block: int, stretch: Stretch | None = None) -> None:
        self.microbatch, self.block, self.stretch = microbatch, block, stretch
        self.installed: Installation = microbatch.installed
        self.facts = self.installed.facts[block]
        """What the step knows of the block."""
        self.learns = not self.facts.uses.known
        """Whether the forward shows how the block uses its parameters and places."""
        self.queue = WeightQueue()
        self.deferred: dict[int, WeightQueue] = {}
        """Of the blocks of a stretch that leave weight gradients to turns of their own."""
        self.segments: list[Segment] = []
        """Segments whose backward has not ended; none once nothing is left to run."""
        self.sent: dict[Place, Sent] = {}
        """Exchanges that the forward has reached, until their backward."""
        self._summed: Gradients = {}  # gradients that wait for others of the same parameters

    @property
    def name(self) -> str:
        """Name of the block, for messages."""
        return self.installed.stage.names[self.block]

    @property
    def last(self) -> int:
        """The last of the blocks that it runs through."""
        return self.block if self.stretch is None else self.stretch.last

    # ---------------------------------------------------------------------------------------------- forward

    def run_forward(self, received: Mapping[Place, Any]) -> None:
        """Run the next segment: from the block's input, or with the rows that its exchanges brought."""
        reached = self._resume(received) if received else self._start(self.microbatch.take_activations())
        if isinstance(reached, list):
            self._reach(reached)
            return
        if self.stretch is None and len(self.sent) < self.installed.cut.exchanges[self.block]:
            raise ValueError(self._wrong_number(f"{len(self.sent)}"))
        self.forward = None
        self._pass_on(reached)

    def _start(self, x: Tensors) -> Reached:
        """Run the module from its inputs to its first exchange or to its outputs."""
        microbatch, installed, shape = self.microbatch, self.installed, self.facts.shape
        grad, segment = microbatch.grad, self._open()
        inputs = segment.enter(x, [grad and t.requires_grad for t in x], installed.anchor)
        if self.stretch is not None:
            return self._run_through(self.stretch, inputs)
        lookout = self._lookout() if grad and installed.observers.lookouts else None
        suspends = lookout is not None or installed.cut.exchanges[self.block] > 0 or (grad and shape.drops(shape.own))
        mode = grad and (lookout is not None or bool(self.facts.own.every) or self.facts.uses.watched)
        if mode or suspends:
            self.mode = CrossingMode(self.entered, self.used_apart, lookout)
        call: Callable[..., Tensors] = partial(call_block, microbatch, self.block)
        if grad and (microbatch.index, self.block) in installed.offloaded:
            self.offload = installed.offload_of(self.block)
        with eager(mode, self._drawing()):
            if suspends:
                self.forward = self._suspendable(call, lookout)
                if self.carried is not None:
                    self.carried.begin(microbatch.random.seed)
                return self._carry(self.forward.start(tuple(inputs), installed.thread, grad=grad, mode=mode))
            call = call if self.offload is None else self.offload.around(call)
            with torch.set_grad_enabled(grad):
                if not mode or self.mode is None:  # nothing will suspend it, and nothing else can enter
                    return call(*inputs)
                with self.mode:
                    return call(*inputs)

    def _drawing(self) -> AbstractContextManager[None]:
        """Return the context of a segment that may draw random numbers."""
        draws, again = self.installed.stage.draws, self.facts.shape.recompute != "none"
        return draws.within(self.block, self.microbatch.random, always=again)

    def _run_through(self, stretch: Stretch, inputs: Sequence[Tensor]) -> Tensors:
        """Run the blocks of a stretch one after another, in one graph."""
        microbatch, installed = self.microbatch, self.installed
        blocks, passed, deferred = range(self.block, self.last + 1), tuple(inputs), stretch.deferred
        installed.queue = None
        torch._C._set_grad_enabled(microbatch.grad)
        try:
            with installed.stage.draws.through(blocks, microbatch.random):
                for block in blocks:
                    if deferred:
                        installed.queue = self.deferred[block] = WeightQueue()
                    passed = call_block(microbatch, block, *passed)
        finally:
            torch._C._set_grad_enabled(False)
        return passed

    def _lookout(self) -> Lookout | None:
        at = self.installed.stage, self.block, self.microbatch.index
        return next(filter(None, (look(*at) for look in self.installed.observers.lookouts)), None)

    def _suspendable(self, call: Callable[..., Tensors], lookout: Lookout | None) -> Forward:
        """Return the forward on a stack of its own."""
        shape, stage = self.facts.shape, self.installed.stage
        known = stage.inside[self.block].places
        learns, repeats = self.learns or lookout is not None, shape.recompute != "none"
        if learns or known.changing or known.own is not None:
            self.carried = PlaceValues(known, learns=learns, repeats=repeats)
        handlers = Handlers(parts=shape.parts)
        if self.microbatch.grad:
            part = None
            if repeats:
                parts = self._recomputation()
                part = partial(parts.run_part, later=True) if shape.drops(Op.EXPERTS) else parts.run_kept
                call = parts.function(call) if shape.drops(shape.own) else call
            hides = self.facts.own.hides if lookout is None else partial(self._look, lookout)
            handlers = Handlers(part, self._checkpoint, hides=hides, parts=shape.parts)
            call = call if self.offload is None else self.offload.around(call)
        return Forward(call, stage.names[self.block], stage.device, self.installed.stacks, self.mode, handlers)

    def _look(self, lookout: Lookout, tensors: Sequence[Tensor], splits: Splits, group: ProcessGroup) -> bool:
        if self.carried is not None:
            self.carried.look()
        return lookout.hides(tensors, splits, group)

    def _checkpoint(self, *arguments: Any) -> AbstractContextManager[None]:
        return DroppedPart(self._recomputation(), *arguments).first()

    def _recomputation(self) -> Recomputation:
        """Return what computes parts of the forward again; it does not refer to this run."""
        if self.recomputation is None:
            seed, keep = self.microbatch.random.seed, Kept if self.offload is None else self.offload.pack
            self.recomputation = Recomputation(self.installed, self.block, seed, self.facts.own.hides, keep)
        return self.recomputation

    def _resume(self, received: Mapping[Place, Any]) -> Reached:
        """Run the module on from some exchanges, with what each has brought, to the next or to its outputs."""
        assert self.forward is not None
        installed, mode = self.installed, self.microbatch.grad
        segment, brought, requires_grad = self._open(), list[Any](), list[bool]()
        for place, rows in received.items():
            sent = self.sent[place]
            call = sent.call
            if sent.counts is not None:
                flight, sent.counts = sent.counts, None
                call.splits.arrive(flight.wait(), flight.lane.failures)
            tensors = sent.results(rows)
            segment.taken.append((sent, len(tensors)))
            brought += tensors
            requires_grad += sent.results_require_grad
            mode = mode and not call.feeds_part
        inputs = segment.enter(brought, requires_grad, installed.anchor)
        with eager(mode, self._drawing()):
            if self.carried is not None:
                self.carried.enter()
            return self._carry(self.forward.resume(tuple(inputs), installed.thread, mode=mode))

    def _carry(self, reached: Reached) -> Reached:
        """Take what the forward has set on its modules along while it is suspended."""
        if self.carried is not None:
            if isinstance(reached, list):
                self.carried.leave()
            else:
                self.carried.end()
                self.carried = None
        return reached

    def _open(self) -> Segment:
        """Add the next segment; its weight gradients go to the queue of its weight node."""
        place, deferred = self.installed.cut.segments[self.block][len(self.segments)]
        segment = Segment(place, WeightQueue() if deferred else self.queue)
        if segment.part:  # the parts of a call have one weight node
            segment.queue = self.segments[-1].queue
        self.segments.append(segment)
        self.installed.queue = segment.queue
        return segment

    def _close(self, segment: Segment) -> None:
        segment.close()
        self.installed.made.append((segment.start, segment.end, self.microbatch.index))

    def _reach(self, calls: list[ExchangeCall]) -> None:
        """Take what the forward hands out for exchanges; of its graph only the edges stay."""
        cut, segment = self.installed.cut, self.segments[-1]
        behind = cut.behind[self.block][len(self.segments) - 1] if len(self.sent) < cut.exchanges[self.block] else ()
        if len(calls) != len(behind):
            raise ValueError(self._wrong_number(f"more than {len(self.sent)}"))
        if self.facts.own.every or self.installed.observers.routed:
            self._look_at(calls, behind)
        self._close(segment)
        for call, place in zip(calls, behind, strict=True):
            sent = self.sent[place] = self._prepared(place, call)
            segment.sent.append(sent)
            if self.learns:
                self._check_graph(segment, sent.edges)

    def _look_at(self, calls: Sequence[ExchangeCall], behind: Sequence[Place]) -> None:
        """Check exchanges of the block's own; tell the observers of a call of experts when its rows leave."""
        stage, own = self.installed.stage, self.facts.own
        for call, (_, number, _) in zip(calls, behind, strict=True):
            if own.every:  # a model may send what an earlier segment has made; our experts send what they make
                sizes = [segment.sent[0].call.splits for segment in self.segments[:-1]]
                own.check(len(sizes), call, sizes)
                call.tensors[:] = map(self.entered, call.tensors)
            elif not call.back and isinstance(call.splits, Route):
                places = stage.number, self.block, number, self.microbatch.index
                for tell in self.installed.observers.routed:
                    tell(ExpertCall(*places, stage.names[self.block], call.splits, call.tensors[0]))

    def _prepared(self, place: Place, call: ExchangeCall) -> Sent:
        """Return the exchange of a call, whose tensors it takes."""
        requires_grad, edges, bare = list[bool](), list[GradientEdge | None](), list[Tensor]()
        grad = self.microbatch.grad
        for tensor in call.tensors:
            required = grad and tensor.requires_grad
            requires_grad.append(required)
            edges.append(edge_of(tensor) if required else None)
            bare.append(tensor.detach())
        call.tensors.clear()
        layout = Layout.of_tensors(bare)
        if isinstance(call.splits, LibrarySplits):
            library = LibraryExchange(call.splits.function, self.installed.library_stream, self.installed.anchor)
            return Sent(place, call, layout, requires_grad, edges, library, bare)
        rows = layout.pack(bare) if len(bare) > 1 else bare[0]
        # The model may change its own tensor while it is still being sent.
        rows = rows.clone() if self.facts.own.every and len(bare) == 1 else rows
        return Sent(place, call, layout, requires_grad, edges, None, rows, rows.shape[0])

    def _check_graph(self, segment: Segment, edges: Sequence[GradientEdge | None]) -> None:
        """Check, in a block's first forward, that a segment's graph does not lead into another segment's.

        It does if torch has not shown a call that used a tensor of an earlier segment. A tensor that another block has
        left in a place of its own is a warning: nothing tells whether that is meant.
        """
        first = self.segments[0].start
        for node in nodes_behind(edge.node for edge in edges if edge is not None):
            if not self.installed.began <= node._sequence_nr() < segment.start or is_walked_often(node):
                continue
            if node._sequence_nr() < first:
                self.facts.uses.note("outside")
                warnings.warn(
                    f"{self._self_or_loss} uses a tensor of {node.name()} that another "
                    "block or microbatch has left in an attribute, a list or the like, with its graph: losses and "
                    "gradients may be wrong; allowed: outputs of the block before",
                    stacklevel=2,
                )
                return
            raise ValueError(
                f"{self.name} uses a tensor of {node.name()} behind exchange {len(self.segments) - 2}, in a call that "
                "torch does not show to function modes (scripted or compiled code, vmap, an extension, a kept "
                "MyFunction.apply); allowed there: a clone() of it"
            )

    def _wrong_number(self, found: str) -> str:
        """Return the message for a block that exchanges another number of times than it was cut at."""
        if self.facts.own.every:
            return (
                f"{self.name} exchanges rows {found} times; "
                f"allowed: {len(self.facts.own.every)} times, as in the first step, on all ranks"
            )
        return (
            f"{self.name} exchanges rows {found} times and holds {self.facts.shape.expert_calls} Experts; "
            f"allowed: one call of each, {self.installed.cut.exchanges[self.block]} exchanges"
        )

    def _pass_on(self, outs: Tensors) -> None:
        """Hand the outputs, detached, to the next block or to the end of the stage; keep their graph."""
        microbatch, stage = self.microbatch, self.installed.stage
        is_last, stretch = self.last == self.installed.cut.last, self.stretch
        if stretch is None:
            stage.draws.forwarded(self.block)
        requires_grad = tuple(map(_REQUIRES_GRAD, outs))
        if microbatch.grad and not is_last and any(self.segments[0].received) and not any(requires_grad):
            raise ValueError(_without_gradient(self.name))
        if microbatch.grad:
            # Their graph, for the backward.
            segment = self.segments[-1]
            segment.outs = [Root.at(out if stretch is not None else self.entered(out)) for out in outs]
            if self.recomputation is not None:
                self.recomputation.end()
            self._close(segment)
            if self.learns:
                self._check_graph(segment, [out and out.edge for out in segment.outs])
                self.facts.uses.note("forward")
        passed = tuple(map(Tensor.detach, outs))
        if is_last:
            microbatch.end_forward(passed, requires_grad)
        else:
            microbatch.activations = tuple(map(Tensor.requires_grad_, passed, requires_grad))
        if not microbatch.grad:
            self._release(ends=is_last)

    # ---------------------------------------------------------------------------------------------- entering

    def entered(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or what enters the running segment in its place."""
        node = tensor.grad_fn
        if node is None:
            return self._entered_parameter(tensor) if isinstance(tensor, Parameter) and tensor.requires_grad else tensor
        segment, number = self.segments[-1], node._sequence_nr()
        if not self.installed.began <= number < segment.start:
            return tensor
        if number < self.segments[0].start:
            if self.installed.maker_of(number) not in (None, self.microbatch.index):
                self._check_walked_often(node)
            return tensor
        key = id(node), tensor.output_nr
        if key not in segment.here:
            segment.cross()
            if not any(own.start <= number < own.end for own in self.segments):
                self._check_walked_often(node)
            storage = storage_of(tensor)
            _, version = segment.versions.setdefault(storage, (tensor, tensor._version))
            later = (one for one in self.segments if number < one.start)
            if tensor._version != version or any(storage in one.changed for one in later):
                raise ValueError(self._changed_in_place)
            segment.crossed[key], entered = Crossing.into_segment(tensor, self.installed.anchor)
            segment.here[key] = entered
            segment.uses[key] = Use(storage, tensor._version, entered.grad_fn, entered.grad_fn)
        entered, use = segment.here[key], segment.uses[key]
        if tensor._version != use.version:
            if entered.grad_fn is use.graph and segment.changed_through_another(key):
                raise ValueError(self._changed_in_place)
            segment.uses[key] = use._replace(version=tensor._version, graph=entered.grad_fn)
        return entered

    def _check_walked_often(self, node: Any) -> None:
        """Check that microbatches may share the graph of a tensor, which another one has made."""
        if not is_walked_often(node):
            raise ValueError(
                f"{self._self_or_loss} uses a tensor of {node.name()} that another microbatch has made and left in an "
                "attribute, a list or the like; allowed: outputs of the block before, or a tensor that each makes anew"
            )

    @property
    def _self_or_loss(self) -> str:
        names = self.installed.stage.names
        through = f" to {names[self.last]}" if self.last > self.block else ""
        return f"{self.name}{through}{' or the loss' if self.last == len(names) - 1 else ''}"

    @property
    def _changed_in_place(self) -> str:
        return (
            f"{self.name} changes a tensor in place behind an exchange that it made before it, and then uses "
            "it behind a third, or a view of it; allowed: a copy"
        )

    def used_apart(self, weight: Parameter) -> None:
        """Note that a layer uses a weight whose gradient it leaves to a queue."""
        self._may_cast(weight)
        self.facts.uses.defers(weight, len(self.segments) - 1)

    def _may_cast(self, parameter: Parameter) -> None:
        if torch.is_autocast_enabled(parameter.device.type):
            self.facts.uses.casts(parameter, tied=parameter in self.installed.stage.tied)

    def _entered_parameter(self, parameter: Parameter) -> Tensor:
        """Return a parameter, or what enters if it is used in other segments, blocks or layers, too.

        Its gradients are summed before they are added to ``.grad``, as in one backward of everything.
        """
        uses, number, segment = self.facts.uses, len(self.segments) - 1, self.segments[-1]
        alone = parameter not in uses.apart and self.installed.stage.tied.get(parameter, self.block) == self.block
        if alone and uses.first.setdefault(parameter, number) == number:
            return parameter
        if parameter not in segment.here:
            self._may_cast(parameter)
            uses.enters(parameter, number)
            segment.cross()
            segment.parameters[parameter], entered = Crossing.into_segment(parameter, self.installed.anchor)
            entered.__dict__ = parameter.__dict__  # a layer's backward may set one, as grad_added_to_main_grad
            segment.here[parameter] = entered
        return segment.here[parameter]

    # ---------------------------------------------------------------------------------------------- backward

    def run_backward(self, received: Mapping[Place, Any]) -> None:
        """Run the backward of the last segment; ``received`` are the gradients of the rows that it has sent."""
        # 1. Where gradients enter: at the block's outputs, or at the rows that the segment has sent.
        if not received:
            self._begin_backward()
        else:
            self._take(received)
        # 2. Walk the segment once.
        segment = self.segments[-1]
        # A checkpoint runs its forward again here, and must find what the first one found.
        self.installed.queue = segment.queue if self.stretch is None or self.stretch.deferred else None
        if segment.parameters or self._summed or self.microbatch.tied:
            self._add_tied(segment)
        try:
            segment.walk()
        except RuntimeError as error:
            if WALKED not in str(error):
                raise
            raise self._walked from error
        self.segments.pop()
        if self.facts.uses.several and segment.queue is not self.queue:
            segment.queue.move(self.facts.uses.several, self.queue)
        # 3. Gradients of the tensors that had entered it.
        if segment.crossed is not NOTHING_ENTERED:
            self._leave(segment)
        if segment.queue is not self.queue and not segment.part:
            self.microbatch.queues[segment.op, self.block, segment.call] = segment.queue
        # 4. Gradients of received rows travel back; gradients of the block's inputs go to the block before.
        if self.segments:
            entries = iter(segment.received)
            for sent, count in segment.taken:
                sent.rows = sent.grads_back(list(islice(entries, count)))
        else:
            self._finish_backward(segment)

    def _leave(self, segment: Segment) -> None:
        """Hand on the gradients of what had entered a segment beside rows and inputs."""
        for key, crossing in segment.crossed.items():
            if crossing.entry.grad is not None:
                self._pass_back(key, crossing.made, crossing.entry.grad)
        for parameter, crossing in segment.parameters.items():
            if crossing.entry.grad is not None:
                self._pass_to_others(parameter, crossing.entry.grad)

    @property
    def _walked(self) -> ValueError:
        return ValueError(
            f"the backward of {self._self_or_loss} comes to a graph that has been walked before, as of a tensor "
            "that a block has left in an attribute, a list or the like; allowed: outputs of the block before (an "
            "auxiliary loss as one more output)"
        )

    def _begin_backward(self) -> None:
        """Take the gradients of the block's outputs, where its graph begins; nothing here holds them in the walk."""
        grads = self.microbatch.take_gradients()
        segment = self.segments[-1]
        outs, segment.outs = segment.outs, ()
        name = self.installed.stage.names[self.last]
        for out, grad in zip(outs, grads, strict=True):
            if out is not None and grad is not None:
                segment.add_root(out.edge, out.checked(grad, name))

    def _take(self, received: Mapping[Place, Any]) -> None:
        segment = self.segments[-1]
        for sent in segment.sent:
            for edge, grad in zip(sent.edges, sent.results(received[sent.place]), strict=True):
                if edge is not None:
                    segment.add_root(edge, grad if sent.uncut_rows is None else uncut(grad, sent.uncut_rows))
            sent.edges = ()

    def _pass_back(self, key: tuple[int, int], made: GradientEdge, grad: Tensor) -> None:
        """Give the gradient of a tensor to the use before, or to the segment that has made it."""
        made_at = made.node._sequence_nr()
        for segment in reversed(self.segments):
            if segment.start <= made_at:
                segment.add_root(made, grad)
                return
            if key in segment.crossed and (entered := segment.crossed[key].entered) is not None:
                segment.add_root(entered, grad)
                return

    def _pass_to_others(self, parameter: Parameter, grad: Tensor) -> None:
        """Keep a gradient until the gradients of the parameter's other uses are there."""
        number = len(self.segments)
        if parameter in self.installed.stage.tied:
            self.microbatch.tied[parameter] = grad
        elif parameter not in self.facts.uses.apart and self.facts.uses.first.get(parameter, number) < number:
            self._summed[parameter] = grad
        else:
            self.queue.keep(parameter, grad)

    def _add_tied(self, segment: Segment) -> None:
        """Begin the walk of a segment with the gradients of later uses of its parameters."""
        stage, number = self.installed.stage, len(self.segments) - 1
        for parameter, crossing in segment.parameters.items():
            sums = self.microbatch.tied if parameter in stage.tied else self._summed
            if parameter in sums and (entered := crossing.entered) is not None:
                segment.add_root(entered, sums.pop(parameter))
        for sums in (self._summed, self.microbatch.tied):
            for parameter in list(sums):
                at_home = stage.tied.get(parameter, self.block) == self.block
                if at_home and self.facts.uses.first.get(parameter, 0) == number:
                    segment.add_root(edge_of(parameter), sums.pop(parameter))

    def _finish_backward(self, first: Segment) -> None:
        """Hand on the gradients of the block's inputs; those of weights wait for their node, or are added now."""
        shape = self.facts.shape
        if self.stretch is not None:
            for block, queue in self.deferred.items():
                self.microbatch.queues[Op.DENSE, block, 0] = queue
            accumulate(self.queue.compute())  # of forwards that ran again, and whose graph was walked
        elif shape.split:
            self.microbatch.queues[shape.own, self.block, 0] = self.queue
        else:
            accumulate(self.queue.compute())
        self.microbatch.gradients = tuple([None if entry is None else entry.dense() for entry in first.received])
        self._release(ends=self.block == 0)

    def _release(self, *, ends: bool) -> None:
        """End this run; with ``ends`` the microbatch has nothing left but weight gradients."""
        self.segments.clear()
        if self.mode is not None:
            self.mode.end()
        if ends:
            self.microbatch.phase = Phase.WEIGHTS

    def recompute(self, op: Op) -> None:
        """Compute a part again whose activations were dropped: the experts of the last segment, or everything else."""
        assert self.recomputation is not None
        self.installed.queue = self.queue  # as in its first forward; a block behind it may have left none
        self.recomputation.compute(op, self.installed.stacks)

    def stop(self) -> None:
        """Unwind a suspended forward, and release the graph."""
        if self.mode is not None:
            self.mode.end()
        if self.forward is not None:
            self.forward.stop()
        self.segments, self.sent, self.recomputation, self.offload = [], {}, None, None


def call_block(microbatch: Microbatch, block: int, *x: Tensor) -> Tensors:
    """Return the outputs of a block's own forward, or the loss after the last block."""
    stage = microbatch.installed.stage
    module = stage.blocks[block]
    special = isinstance(module, MicrobatchBlock)
    try:
        returned = module(*map(_value, x), microbatch=microbatch) if special else module(*x)
    except (IndexError, RuntimeError) as error:
        name = stage.names[block]
        if HOOKED in str(error):
            raise ValueError(
                f"{name} calls torch.func.grad, vjp or the like, which know no hooks of saved tensors; allowed: "
                "offload=False and recompute='none', or torch.autograd.grad"
            ) from None
        if OUTSIDE not in str(error):
            name_call(error, name, *x)
            raise
        raise ValueError(
            f"{name} is compiled with fullgraph=True, and calls experts or nn.Linear, where the engine leaves the "
            "graph; allowed: torch.compile without fullgraph"
        ) from None
    except TypeError as error:
        if not module._forward_pre_hooks:  # they may give it more
            allowed, kwargs = "a forward that takes what the block before returns", {"microbatch": microbatch}
            check_call(
                error, module.forward, stage.names[block], allowed, *map(_value, x), **(kwargs if special else {})
            )
        raise
    outs = (returned,) if isinstance(returned, Tensor) else _several(returned, module, stage.names[block], x)
    if block < microbatch.installed.cut.last:
        return outs
    if microbatch.grad and any(map(_REQUIRES_GRAD, x)) and not any(map(_REQUIRES_GRAD, outs)):
        raise ValueError(_without_gradient(stage.names[block]))
    return microbatch.with_loss(outs, stage.names[block])


def _value(tensor: Tensor) -> Tensor | None:
    """Return what a block is given for a tensor: None for the stand-in of an input that is not given."""
    return None if is_absent(tensor) else tensor


def _without_gradient(name: str) -> str:
    return (
        f"the outputs of {name} require no gradient although its input does; allowed: outputs that depend on the input"
    )


def _several(returned: Any, module: nn.Module, name: str, x: Tensors) -> Tensors:
    """Return the outputs of a module that returns another thing than one tensor."""
    outs = returned if isinstance(returned, tuple) else (returned,)
    if isinstance(module, MicrobatchBlock):
        outs = tuple([absent(x[0]) if out is None else out for out in outs])
    if not outs or not all(isinstance(out, Tensor) for out in outs):
        what = ", ".join(type(out).__name__ for out in outs) or "nothing"
        raise ValueError(f"{name} returns {what}; allowed: a tensor or a tuple of tensors")
    return outs
