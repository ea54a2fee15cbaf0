"""One block for one microbatch, cut at its exchanges.

A block's forward is an ordinary ``nn.Module.forward``, which every exchange suspends: ``S0 E0 S1 E1 … SK``, segments
and exchanges in turns. The backward goes the same way in reverse. Every node computes one segment:

1. forward: it takes the rows that the exchange before it brought, and runs on to the next exchange or to the end;
2. backward: it takes the gradients of the rows that the segment has sent, walks the segment's graph once, and leaves
   the gradients of the rows that the segment had received, for the exchange before it;
3. gradients of tensors that entered the segment from an earlier one wait for the walk of the earlier one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from overlap1f1b.cut.blocks import MicrobatchBlock
from overlap1f1b.cut.crossing import CrossingMode, Lookout, eager
from overlap1f1b.cut.edges import edge_of, is_walked_often, nodes_behind
from overlap1f1b.cut.exchanges import Seen, check_back, forms_of
from overlap1f1b.cut.replacement import Replacement
from overlap1f1b.cut.segment import Crossing, Layout, LibraryExchange, Segment, Sent, Use, storage_of
from overlap1f1b.cut.weights import Gradients, Root, WeightQueue, accumulate
from overlap1f1b.moe.route import Route
from overlap1f1b.plan import Op, Place
from overlap1f1b.play.microbatch import Microbatch, Tensors, absent, check_call, is_absent
from overlap1f1b.play.observers import Routed
from overlap1f1b.transport.calls import ExchangeCall, LibrarySplits, Splits, uncut
from overlap1f1b.transport.suspension import OUTSIDE, Forward

WALKED = "backward through the graph a second time"
"""In torch's error of a graph that has been freed."""

Reached = list[ExchangeCall] | Tensors
"""Result of running a forward on: its next exchanges, or its outputs."""


class BlockRun:
    """The nodes of one block for one microbatch, in the order of the plan's chains.

    :meth:`run_forward` and :meth:`run_backward` are the compute nodes; ``received`` are the rows of the exchange
    before. Which node is which method: ``compute`` in ``play/player.py``. Exchange nodes start in
    :mod:`overlap1f1b.play.posting`.
    """

    def __init__(self, microbatch: Microbatch, block: int) -> None:
        self.microbatch, self.block = microbatch, block
        stage = microbatch.stage
        self.stage, self.module, self.name = stage, stage.blocks[block], stage.names[block]
        self.installed = microbatch.installed
        shape = self.installed.cut.shape[block]
        self.foreign = stage.foreign.hidden.get(block, ()) if microbatch.grad and shape.exchanges else ()
        self.exchanges = self.installed.cut.exchanges[block]
        """Number of the block's exchanges of rows."""
        seen = stage.foreign.seen if microbatch.grad else None
        self.seen = None if seen is None else seen.get(block)
        if self.seen is not None:
            self.seen[microbatch.index] = []
        self.drops_own = self.drops_experts = False
        if microbatch.grad and shape.recompute != "none":
            self.drops_own, self.drops_experts = shape.drops(shape.own), shape.drops(Op.EXPERTS)
        self.suspends = bool(self.exchanges) or self.seen is not None or self.drops_own
        """Whether its forward runs on a stack of its own."""
        self.buffers: list[Replacement] | None = None
        """Copies of its buffers before its first part that is computed again."""
        self.is_last = block == len(stage.blocks) - 1
        self.uses = self.installed.uses[block]
        self.learns = not self.uses.known
        self.queue = WeightQueue()
        self.forward: Forward | None = None
        """The block's forward on a stack of its own; None if nothing suspends it, and after its end."""
        self.mode: CrossingMode | None = None
        """Shows what may enter a segment, where something may."""
        self.segments: list[Segment] = []
        """Segments whose backward has not ended."""
        self.outs: list[Root | None] = []
        """Outputs; their values have been handed on, only their graph is held."""
        self.sent: dict[Place, Sent] = {}
        """Exchanges that the forward has reached, until their backward."""
        self._state = stage.state_of(block)
        self._carried: Any = None  # what the suspended forward has taken along
        self._again = shape.recompute != "none"
        self._changed: dict[int, int] = {}  # storages that a later segment has changed in place, and its start
        self._summed: Gradients = {}  # gradients that wait for others of the same parameters

    @cached_property
    def weights(self) -> set[int]:
        """Storages of the module's parameters."""
        return {storage_of(parameter) for parameter in self.module.parameters()}

    # ---------------------------------------------------------------------------------------------- forward

    def run_forward(self, received: Mapping[Place, Any]) -> None:
        """Run the next segment: from the block's input, or with the rows that its exchanges brought."""
        if not received:
            reached = self._start(self.microbatch.take_activations())
        else:
            results = []
            for place, rows in received.items():
                sent = self.sent[place]
                if sent.counts is not None:
                    flight, sent.counts = sent.counts, None
                    sent.call.splits.arrive(flight.wait(), flight.lane.failures)
                results.append((sent, sent.results(rows)))
            reached = self._resume(results)
        if isinstance(reached, list):
            self._reach(reached)
            return
        if len(self.sent) < self.exchanges:
            raise ValueError(self._wrong_number(f"{len(self.sent)}"))
        self.forward = None
        self._pass_on(reached)

    def _start(self, x: Tensors) -> Reached:
        """Run the module from its inputs to its first exchange or to its outputs."""
        grad, stage = self.microbatch.grad, self.stage
        segment = self._open()
        given = segment.enter(x, [grad and t.requires_grad for t in x], self.installed.anchor)
        mode = grad and stage.watches(self.block, self.uses)
        if mode or self.suspends:
            tell = stage.foreign.standing.add
            lookout = None if self.seen is None else Lookout(stage.foreign.ranks, self.name, tell)
            self.mode = CrossingMode(self.entered, self.used_apart, lookout)
        with stage.draws.within(self.block, self.microbatch.random, always=self._again), eager(mode):
            if self.suspends:
                self.forward = Forward(self._run_module, self.name, stage.device, self.installed.stacks, self.mode)
                self.forward.hides = self.hides
                self.begin(self.forward)
                if self._state is not None:
                    self._state.begin(self.microbatch.random.seed)
                return self._carry(self.forward.start(tuple(given), self.installed.thread, grad=grad, mode=mode))
            with torch.set_grad_enabled(grad):
                if not mode or self.mode is None:  # nothing will suspend it, and nothing else can enter
                    return self._run_module(*given)
                with self.mode:
                    return self._run_module(*given)

    def _resume(self, results: Sequence[tuple[Sent, list[Any]]]) -> Reached:
        """Run the module on from some exchanges, with the tensors of each, to the next or to its outputs."""
        assert self.forward is not None
        grad = self.microbatch.grad
        segment, received, requires_grad = self._open(), list[Any](), list[bool]()
        for sent, tensors in results:
            segment.taken.append((sent, len(tensors)))
            received += tensors
            requires_grad += sent.results_require_grad
        given = segment.enter(received, requires_grad, self.installed.anchor)
        mode = grad and not results[0][0].call.feeds_part
        with self.stage.draws.within(self.block, self.microbatch.random, always=self._again), eager(mode):
            if self._state is not None:
                self._state.enter(self._carried)
            return self._carry(self.forward.resume(tuple(given), self.installed.thread, mode=mode))

    def _carry(self, reached: Reached) -> Reached:
        """Take what the forward has set on its modules along while it is suspended."""
        if self._state is not None:
            suspended = isinstance(reached, list)
            carried = self._state.leave(ended=not suspended)
            self._carried = carried if suspended else None
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

    def _close(self, segment: Segment) -> list[int]:
        """Close the running segment; return the storages that it has changed in place."""
        changed = segment.close()
        self.installed.made.append((segment.start, segment.end, self.microbatch.index))
        return changed

    def _reach(self, calls: list[ExchangeCall]) -> None:
        """Take what the forward hands out for exchanges; of its graph only the edges stay."""
        number = len(self.segments) - 1
        behind = self.installed.cut.behind[self.block][number] if len(self.sent) < self.exchanges else ()
        if len(calls) != len(behind):
            raise ValueError(self._wrong_number(f"more than {len(self.sent)}"))
        for call, (_, at, _) in zip(calls, behind, strict=True):
            if self.foreign:
                self._check_expected(call, number)
            elif isinstance(call.splits, Route):
                self._tell_routed(call, call.splits, at)
        self._send(calls)

    def _tell_routed(self, call: ExchangeCall, route: Route, number: int) -> None:
        """Tell the observers of a call of experts, by its number in the block, when its rows leave."""
        if not call.back:
            places = self.stage.number, self.block, number, self.microbatch.index
            for tell in self.installed.observers.routed:
                tell(Routed(*places, self.name, route, call.tensors[0]))

    def _check_expected(self, call: ExchangeCall, number: int) -> None:
        """Check that an exchange of the block's own is as in the first step."""
        wanted, where = self.foreign[number], f"exchange {number} of {self.name}"
        found = forms_of(call.tensors)
        if found != wanted.forms:
            raise ValueError(
                f"{where} has tensors of dtypes and dimensions {list(found)}; "
                f"allowed: {list(wanted.forms)}, as in the first step"
            )
        if wanted.op is Op.COMBINE:
            check_back(call.splits, self.segments[wanted.back_of].sent[0].call.splits, where)

    def _send(self, calls: Sequence[ExchangeCall]) -> None:
        """Prepare the exchanges behind the last segment."""
        segment, grad = self.segments[-1], self.microbatch.grad
        every = [[self.entered(tensor) for tensor in call.tensors] if grad else list(call.tensors) for call in calls]
        self._changed |= dict.fromkeys(self._close(segment), segment.start)
        for place, call in zip(self.installed.cut.behind[self.block][len(self.segments) - 1], calls, strict=True):
            call.tensors.clear()
            sent = self.sent[place] = self._prepared(place, call, every.pop(0))
            segment.sent.append(sent)
            if self.learns:
                self._check_graph(segment, sent.edges)

    def _prepared(self, place: Place, call: ExchangeCall, tensors: list[Tensor]) -> Sent:
        requires_grad, edges, bare = list[bool](), list[GradientEdge | None](), list[Tensor]()
        for tensor in tensors:
            required = self.microbatch.grad and tensor.requires_grad
            requires_grad.append(required)
            edges.append(edge_of(tensor) if required else None)
            bare.append(tensor.detach())
        layout = Layout.of(bare)
        if isinstance(call.splits, LibrarySplits):
            library = LibraryExchange(call.splits.function, self.installed.library_stream, self.installed.anchor)
            return Sent(place, call, layout, requires_grad, edges, library, bare)
        rows = layout.pack(bare)
        # The model may change its own tensor while it is still being sent.
        rows = rows.clone() if self.foreign and len(bare) == 1 else rows
        return Sent(place, call, layout, requires_grad, edges, None, rows, len(rows))

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
                self.uses.reaches_out = True
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
        expected = self.installed.cut.shape[self.block].expert_calls
        if self.foreign:
            return (
                f"{self.name} exchanges rows {found} times; "
                f"allowed: {len(self.foreign)} times, as in the first step, on all ranks"
            )
        return (
            f"{self.name} exchanges rows {found} times and holds {expected} Experts; "
            f"allowed: one call of each, {self.exchanges} exchanges"
        )

    def _pass_on(self, outs: Tensors) -> None:
        """Hand the outputs, detached, to the next block or to the end of the stage; keep their graph."""
        microbatch, passed, requires_grad = self.microbatch, list[Tensor](), list[bool]()
        self.stage.draws.forwarded(self.block, always=self._again)
        for out in outs:
            requires_grad.append(out.requires_grad)
            passed.append(out.detach() if self.is_last else out.detach().requires_grad_(out.requires_grad))
        if microbatch.grad:
            if not self.is_last:
                self._check_requires_grad(outs)
            self.outs = [Root.of(self.entered(out)) for out in outs]  # their graph, for the backward
            if self.buffers is not None:
                self.stage.buffers[self.block].ended(self.buffers)
                self.buffers = None
            self._close(self.segments[-1])
            if self.learns:
                self._check_graph(self.segments[-1], [out and out.edge for out in self.outs])
            self.uses.known = True
            self.stage.attributes[self.block].learning = self.seen is not None
        if self.is_last:
            microbatch.outputs, microbatch.forwarded = tuple(passed), True
            microbatch.requires_grad = tuple(requires_grad)
        else:
            microbatch.activations = tuple(passed)
        if not microbatch.grad:
            self._release(ends=self.is_last)

    def begin(self, forward: Forward) -> None:
        """Say which parts of a forward are computed again."""

    def _run_module(self, *x: Tensor) -> Tensors:
        """Return the outputs of the module's own forward, or the loss after the last block."""
        microbatch = self.microbatch
        given, values = {}, list[Tensor | None](x)
        if isinstance(self.module, MicrobatchBlock):
            given, values = {"microbatch": microbatch}, [None if is_absent(t) else t for t in x]
        try:
            returned = self.module(*values, **given)
        except RuntimeError as error:
            if OUTSIDE not in str(error):
                raise
            raise ValueError(
                f"{self.name} is compiled with fullgraph=True, and calls experts or nn.Linear, where the engine leaves "
                "the graph; allowed: torch.compile without fullgraph"
            ) from None
        except TypeError as error:
            if not self.module._forward_pre_hooks:  # they may give it more
                allowed = "a forward that takes what the block before returns"
                check_call(error, self.module.forward, self.name, allowed, *values, **given)
            raise
        outs = (returned,) if isinstance(returned, Tensor) else self._several(returned, x)
        if not self.is_last:
            return outs
        self._check_requires_grad(outs)
        return microbatch.with_loss(outs, self.name)

    def _several(self, returned: Any, x: Tensors) -> Tensors:
        """Return the outputs of a module that returns another thing than one tensor."""
        outs = returned if isinstance(returned, tuple) else (returned,)
        if isinstance(self.module, MicrobatchBlock):
            outs = tuple([absent(x[0]) if out is None else out for out in outs])
        if not outs or not all(isinstance(out, Tensor) for out in outs):
            what = ", ".join(type(out).__name__ for out in outs) or "nothing"
            raise ValueError(f"{self.name} returns {what}; allowed: a tensor or a tuple of tensors")
        return outs

    def _check_requires_grad(self, outs: Tensors) -> None:
        """Check that outputs require a gradient if an input does."""
        if any(self.segments[0].received) and not any(out.requires_grad for out in outs):
            raise ValueError(
                f"the outputs of {self.name} require no gradient although its input does; "
                "allowed: outputs that depend on the input"
            )

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
            if not any(own.start <= number < own.end for own in self.segments):
                self._check_walked_often(node)
            storage = storage_of(tensor)
            _, version = segment.versions.setdefault(storage, (tensor, tensor._version))
            if tensor._version != version or number < self._changed.get(storage, 0):
                raise ValueError(self._changed_in_place)
            segment.crossed[key], entered = Crossing.of(tensor, self.installed.anchor)
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
        return f"{self.name}{' or the loss' if self.is_last else ''}"

    @property
    def _changed_in_place(self) -> str:
        return (
            f"{self.name} changes a tensor in place behind an exchange that it made before it, and then uses "
            "it behind a third, or a view of it; allowed: a copy"
        )

    def used_apart(self, weight: Parameter) -> None:
        """Note that a layer uses a weight whose gradient it leaves to a queue."""
        self.uses.defers(weight, len(self.segments) - 1)

    def _entered_parameter(self, parameter: Parameter) -> Tensor:
        """Return a parameter, or what enters if it is used in other segments, blocks or layers, too.

        Its gradients are summed before they are added to ``.grad``, as in one backward of everything.
        """
        uses, number, segment = self.uses, len(self.segments) - 1, self.segments[-1]
        alone = parameter not in uses.apart and self.stage.tied.get(parameter, self.block) == self.block
        if alone and uses.first.setdefault(parameter, number) == number:
            return parameter
        if parameter not in segment.here:
            uses.enters(parameter, number)
            segment.parameters[parameter], entered = Crossing.of(parameter, self.installed.anchor)
            entered.__dict__ = parameter.__dict__  # a layer's backward may set one, as grad_added_to_main_grad
            segment.here[parameter] = entered
        return segment.here[parameter]

    # ---------------------------------------------------------------------------------------------- exchange

    def hides(self, tensors: Sequence[Tensor], splits: Splits, group: dist.ProcessGroup) -> bool:
        """Return whether an exchange that the block makes by itself suspends its forward.

        One without a gradient, or over other ranks, runs where it stands; so do all in the first step, which notes
        them.
        """
        foreign, library = self.stage.foreign, isinstance(splits, LibrarySplits)
        ranks = dist.get_process_group_ranks(group)
        if not set(foreign.ranks) <= set(ranks) if library else list(foreign.ranks) != ranks:
            return False
        if not any(tensor.requires_grad for tensor in tensors) or not torch.is_grad_enabled():
            if library and self.seen is not None:
                foreign.library_stands = True
            elif library and self.foreign and not foreign.library_stands:
                raise ValueError(
                    f"{self.name} exchanges rows by a library without a gradient, and with one in the first step; "
                    "allowed: the same in every step"
                )
            return False
        if self.seen is not None:
            self._note(tensors, splits)
        return bool(self.foreign) and not (library and foreign.library_stands)

    def _note(self, tensors: Sequence[Tensor], splits: Splits) -> None:
        assert self.seen is not None
        if self._state is not None:
            self._state.look()
        by_library = isinstance(splits, LibrarySplits)
        self.seen[self.microbatch.index].append(Seen(splits.send, splits.receive, forms_of(tensors), by_library))

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
        self.installed.queue = segment.queue
        if segment.parameters or self._summed or self.microbatch.tied:
            self._add_tied(segment)
        self._walk(segment)
        self.segments.pop()
        if self.uses.several and segment.queue is not self.queue:
            segment.queue.move(self.uses.several, self.queue)
        # 3. Gradients of the tensors that had entered it.
        for key, crossing in segment.crossed.items():
            if crossing.entry.grad is not None:
                self._pass_back(key, crossing.made, crossing.entry.grad)
        for parameter, crossing in segment.parameters.items():
            if crossing.entry.grad is not None:
                self._pass_to_others(parameter, crossing.entry.grad)
        if segment.queue is not self.queue and not segment.part:
            self.microbatch.queues[segment.op, self.block, segment.call] = segment.queue
        # 4. Gradients of received rows travel back; gradients of the block's inputs go to the block before.
        if self.segments:
            entries = iter(segment.received)
            for sent, count in segment.taken:
                self.sent[sent.place].rows = sent.grads_back(list(islice(entries, count)))
        else:
            self._finish_backward(segment)

    def _walk(self, segment: Segment) -> None:
        try:
            segment.walk()
        except RuntimeError as error:
            if WALKED not in str(error):
                raise
            raise ValueError(
                f"the backward of {self._self_or_loss} comes to a graph that has been walked before, as of a tensor "
                "that a block has left in an attribute, a list or the like; allowed: outputs of the block before (an "
                "auxiliary loss as one more output)"
            ) from error

    def _begin_backward(self) -> None:
        grads = self.microbatch.take_output_grads()
        outs, self.outs = self.outs, []
        for out, grad in zip(outs, grads, strict=True):
            if out is not None and grad is not None:
                self.segments[-1].add_root(out.edge, out.checked(grad, self.name))

    def _take(self, received: Mapping[Place, Any]) -> None:
        segment = self.segments[-1]
        for sent in segment.sent:
            for edge, grad in zip(sent.edges, sent.results(received[sent.place]), strict=True):
                if edge is not None:
                    segment.add_root(edge, grad if sent.given is None else uncut(grad, sent.given))
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
        if parameter in self.stage.tied:
            self.microbatch.tied[parameter] = grad
        elif parameter not in self.uses.apart and self.uses.first.get(parameter, number) < number:
            self._summed[parameter] = grad
        else:
            self.queue.keep(parameter, grad)

    def _add_tied(self, segment: Segment) -> None:
        """Begin the walk of a segment with the gradients of later uses of its parameters."""
        stage, number = self.stage, len(self.segments) - 1
        for parameter, crossing in segment.parameters.items():
            sums = self.microbatch.tied if parameter in stage.tied else self._summed
            if parameter in sums and (entered := crossing.entered) is not None:
                segment.add_root(entered, sums.pop(parameter))
        for sums in (self._summed, self.microbatch.tied):
            for parameter in list(sums):
                at_home = stage.tied.get(parameter, self.block) == self.block
                if at_home and self.uses.first.get(parameter, 0) == number:
                    segment.add_root(edge_of(parameter), sums.pop(parameter))

    def _finish_backward(self, first: Segment) -> None:
        passed = tuple([None if entry is None else entry.dense() for entry in first.received])
        shape = self.installed.cut.shape[self.block]
        if shape.split:
            self.microbatch.queues[shape.own, self.block, 0] = self.queue
        else:
            accumulate(self.queue.compute())
        if self.block == 0:
            self.microbatch.input_grads = passed
        else:
            self.microbatch.output_grads = passed
        self._release(ends=self.block == 0)

    def _release(self, *, ends: bool) -> None:
        """Release this block; with ``ends`` the microbatch has nothing left to run but weight gradients."""
        self._end_mode()
        del self.microbatch.runs[self.block]
        self.microbatch.ended = ends

    def _end_mode(self) -> None:
        if self.mode is not None:
            self.mode.end()
        self.mode = None

    def stop(self) -> None:
        """Unwind a suspended forward, and release the graph: parts that are computed again refer to this run."""
        self._end_mode()
        if self.forward is not None:
            self.forward.stop()
        self.segments, self.outs, self.sent = [], [], {}
