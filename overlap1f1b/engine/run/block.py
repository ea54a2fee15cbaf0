"""One block for one microbatch, cut where it calls its experts.

A block's forward is an ordinary ``nn.Module.forward``; the residual around the experts is not cut. With the block's
input ``x`` detached, what goes through the seam detached, and the experts' result a fresh leaf ``y``, the backward is

1. ``gy = grad(out, y, g)``, which walks only what lies between ``y`` and ``out`` and leaves no other trace;
2. aggregate, combine, experts, dispatch backwards, whose graph is cut off from everything else;
3. ``grad([out, tokens, weights], [g, g_tokens, g_weights])`` by ``x`` and the parameters: all the rest, once.

With several calls of experts in a block, 1 and 2 repeat in reverse order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from overlap1f1b.engine.run.autograd import (
    Root,
    WeightQueue,
    accumulate,
    accumulated,
    dense,
    grad_of,
    gradients,
    leaf,
    main_grad,
    present,
)
from overlap1f1b.engine.run.microbatch import Microbatch, MicrobatchBlock, RandomStream, Tensors, absent, is_absent
from overlap1f1b.engine.run.stage import Dropped
from overlap1f1b.engine.run.suspend import OUTSIDE, Forward, SeamCall, ThreadState
from overlap1f1b.moe.experts import Experts
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.exchange import Exchange, Transfer
from overlap1f1b.transport.lanes import Post


class BlockRun:
    """The nodes of one block for one microbatch, forward and backward, in the order of the plan's chains.

    Each method is one node. A compute node takes what the exchange before it brought; an exchange node returns what
    starts its transfer.
    """

    def __init__(self, microbatch: Microbatch, block: int) -> None:
        self.microbatch, self.block = microbatch, block
        stage = microbatch.stage
        self.stage, self.module, self.is_last = stage, stage.blocks[block], block == len(stage.blocks) - 1
        self.queue = WeightQueue()
        self.seams: list[SeamRun] = []
        self.x: list[Tensor] = []
        self.outs: list[Root | None] = []  # their values have been handed on: only their graph is held
        self.in_backward = False
        self.roots: list[Tensor | GradientEdge] = []
        self.root_grads: list[Tensor] = []
        self.forward: Forward | None = None

    # ---------------------------------------------------------------------------------------------- forward

    def attention_f(self, received: Tensor | None) -> None:
        x = self.microbatch.take_activations()
        if self.microbatch.grad:
            if self.block == 0:  # the user's own tensors; between blocks they are leaves already
                x = tuple([leaf(t) for t in x])
            self.x = list(x)
        self._go(x)

    dense_f = attention_f

    def experts_f(self, received: Tensor) -> None:
        seam = self.seams[-1]
        differs = seam.state.grad and self.microbatch.grad
        seam.leaf = seam.route.group(received).detach().requires_grad_(differs)
        result = self._experts(seam, seam.state, self.microbatch.random)
        seam.rows = seam.route.ungroup(result.detach().to(seam.dtype))
        if result.requires_grad:
            seam.result, seam.result_dtype = get_gradient_edge(result), result.dtype
        else:
            seam.leaf = None

    def _experts(self, seam: SeamRun, state: ThreadState, random: RandomStream) -> Tensor:
        """What the experts make of the rows that one call has brought them."""
        name, grad = self.stage.names[self.block], self.microbatch.grad
        assert seam.leaf is not None
        self.stage.leave_to(seam.queue)
        with random, state.applied(name, device=self.stage.device, grad=grad):
            return seam.experts.compute_routed(seam.leaf, seam.route)

    def aggregate_f(self, received: Tensor) -> None:
        seam = self.seams[-1]
        if self.microbatch.grad and seam.route.keeps_returned:
            seam.returned = received
        self._go(seam.aggregate(received))

    def _advance(self, value: Tensor | Tensors, random: RandomStream) -> SeamCall | Tensors:
        """Runs the forward from the block's input, or from a call's result, to the next call of experts or its end."""
        stage = self.stage
        stage.leave_to(self.queue)
        with random, torch.set_grad_enabled(self.microbatch.grad):
            if isinstance(value, Tensor):
                assert self.forward is not None
                return self.forward.resume(value)
            if not stage.shape[self.block].seams:  # nothing will suspend it
                return self._run(*value)
            self.forward = Forward(self._run, stage.names[self.block], stage.device)
            return self.forward.start(*value)

    def _go(self, value: Tensor | Tensors) -> None:
        """Goes on with the forward."""
        step = self._advance(value, self.microbatch.random)
        if isinstance(step, SeamCall):
            if self.stage.capacity is not None and self.stage.check_tokens is not None:
                self.stage.check_tokens(len(step.indices))
            self._note(step)
            self.seams.append(SeamRun(step, self.stage.exchange, self.stage.capacity))
            route = self.seams[-1].route
            if route.dropped is not None:
                dropped = Dropped(self.block, self.microbatch.index, route.dropped, route.counts, route.send[0])
                self.stage.dropped.append(dropped)
            self._check_seams(ended=False)
            return
        self._check_seams(ended=True)
        self.forward = None
        microbatch, outs = self.microbatch, step
        handed = tuple([out.detach() for out in outs])
        if microbatch.grad:
            self._keep(outs)
        if self.is_last:
            microbatch.outputs, microbatch.forwarded = handed, True
            microbatch.differentiable = tuple([out.requires_grad for out in outs])
        else:
            microbatch.activations = tuple(
                t.requires_grad_(out.requires_grad) for t, out in zip(handed, outs, strict=True)
            )
        if not microbatch.grad:
            self._leave(ends=self.is_last)

    def _note(self, call: SeamCall) -> None:
        place = self.block, len(self.seams)
        if place not in self.stage.calls:
            k, hidden = call.indices.shape[-1], call.tokens.shape[-1]
            self.stage.calls[place] = f"{k} experts a token, hidden {hidden}, {str(call.tokens.dtype)[6:]}"

    def _keep(self, outs: Tensors) -> None:
        """Holds the graph of what the block returned."""
        self.outs = [Root.of(out) for out in outs]

    def _run(self, *x: Tensor) -> Tensors:
        name, microbatch = self.stage.names[self.block], self.microbatch
        given, values = {}, list[Tensor | None](x)
        if isinstance(self.module, MicrobatchBlock):
            given, values = {"microbatch": microbatch}, [None if is_absent(t) else t for t in x]
        try:
            returned = self.module(*values, **given)
        except RuntimeError as error:
            if OUTSIDE not in str(error):
                raise
            raise ValueError(
                f"{name} is compiled with fullgraph=True, and calls experts or nn.Linear, where the engine leaves the "
                "graph; allowed: torch.compile without fullgraph"
            ) from None
        outs = returned if isinstance(returned, tuple) else (returned,)
        if isinstance(self.module, MicrobatchBlock):
            outs = tuple([absent(x[0]) if out is None else out for out in outs])
        if not outs or not all(isinstance(out, Tensor) for out in outs):
            what = ", ".join(type(out).__name__ for out in outs) or "nothing"
            raise ValueError(f"{name} returns {what}; allowed: a tensor or a tuple of tensors")
        if microbatch.grad and any(t.requires_grad for t in x) and not any(t.requires_grad for t in outs):
            raise ValueError(
                f"what {name} returns requires no gradient, its input does; allowed: one that depends on it"
            )
        return microbatch.with_loss(outs, name) if self.is_last else outs

    def _check_seams(self, *, ended: bool) -> None:
        found, expected = len(self.seams), self.stage.shape[self.block].seams
        if found > expected or (ended and found < expected):
            times = str(found) if ended else f"more than {expected}"
            raise ValueError(
                f"{self.stage.names[self.block]} calls experts {times} times and holds {expected} Experts; "
                "allowed: one call of each"
            )

    # ---------------------------------------------------------------------------------------------- exchange

    def _post(self, node: Node) -> Post[Tensor]:
        """What starts an exchange of the last seam, perhaps in another thread, and announces the chain's next one."""
        seam, microbatch, op, kind = self.seams[-1], self.microbatch, node.op, node.kind
        node = node._replace(microbatch=microbatch.index, stage=self.stage.number)  # tags outlive a step's plan
        counts = microbatch.flights.pop(kind) if op is Op.DISPATCH and kind is Kind.F else None
        rows, seam.rows = seam.rows, seam.rows if op is Op.COUNTS else None

        def post() -> Transfer[Tensor]:
            route, exchange = seam.route, seam.exchange
            if counts is not None:
                route.arrive(counts.wait(), counts.lane.timeout)
            expected = microbatch.expected.pop(kind, None)
            if op is Op.COUNTS:
                sizes = exchange.counts(route.counts, node.tag, expected)
                route.host = sizes.host
                return sizes
            assert rows is not None
            outward = (op is Op.DISPATCH) == (kind is Kind.F)  # towards the experts
            send, receive = (route.send, route.receive) if outward else (route.receive, route.send)
            transfer = exchange.rows(rows, send, receive, node.tag, expected)
            self._announce(node)
            return transfer

        return post

    counts_f = dispatch_f = combine_f = combine_b = dispatch_b = _post

    def _announce(self, node: Node) -> None:
        """Announces the receive of the exchange that follows in the chain; a dispatch's sizes are not known yet."""
        seam, expected, kind = self.seams[node.seam], self.microbatch.expected, node.kind
        exchange, route, like = seam.exchange, seam.route, seam.back
        if (node.op is Op.DISPATCH) == (kind is Kind.F):  # dispatch.f or combine.b: the rows come back
            back = node._replace(op=Op.COMBINE if kind is Kind.F else Op.DISPATCH)
            expected[kind] = exchange.expect_rows(like if kind is Kind.F else seam.outward, route.send, back.tag)
            return
        neighbour = self.stage.seam_beside(node.block, node.seam, 1 if kind is Kind.F else -1)
        if neighbour is not None and not self.stage.alike:
            return
        if kind is Kind.F and neighbour is not None:
            following = node._replace(op=Op.COUNTS, block=neighbour[0], seam=neighbour[1])
            expected[kind] = exchange.expect_counts(route.counts, following.tag)
        elif kind is Kind.F and self.microbatch.grad:  # the last seam of the forward is the first of the backward
            expected[Kind.I] = exchange.expect_rows(like, route.receive, node._replace(kind=Kind.I).tag)
        elif kind is Kind.I and neighbour is not None:
            before = self.microbatch.runs[neighbour[0]].seams[neighbour[1]].route
            following = node._replace(op=Op.COMBINE, block=neighbour[0], seam=neighbour[1])
            expected[kind] = exchange.expect_rows(like, before.receive, following.tag)

    # ---------------------------------------------------------------------------------------------- backward

    def dense_b(self, received: Tensor | None) -> None:
        self._begin_backward()
        self._finish_backward()

    def aggregate_b(self, received: Tensor | None) -> None:
        seam = self.seams[-1]
        if self.in_backward:
            assert received is not None
            self._take_back(received)
            seam = self.seams[-1]
        else:
            self._begin_backward()
        assert seam.y is not None
        grad = None
        if seam.y.requires_grad and self.roots:
            grad = self._probe(seam.y)
        grad = dense(grad, seam.y)
        rows, weights = seam.route.aggregate_backward(grad, seam.returned, seam.weights.detach())
        seam.rows, seam.returned, seam.y = rows, None, None
        self._add_root(seam.weights, weights)

    def _probe(self, y: Tensor) -> Tensor | None:
        """The gradient of what experts returned, from a walk of what lies behind them, which is walked again later.

        Raises:
            ValueError: That adds to a main gradient, twice.
        """
        held = [main for p in self.stage.block_parameters[self.block] if (main := main_grad(p)) is not None]
        before = [main._version for main in held]
        self.queue.probing = True
        (grad,) = grad_of(self.roots, [y], self.root_grads, retain_graph=True)
        self.queue.probing = False
        if before != [main._version for main in held]:
            raise ValueError(
                f"{self.stage.names[self.block]} adds to main_grad in the backward of what follows its experts, which "
                "is walked twice; allowed: a block that ends before, or no gradient_accumulation_fusion"
            )
        return grad

    def experts_b(self, received: Tensor) -> None:
        seam = self.seams[-1]
        if seam.result is None or seam.leaf is None:  # no gradient passes these experts, but their rows still travel
            seam.rows = seam.outward.new_zeros(len(received), seam.outward.shape[1])
        else:
            parameters = self.stage.expert_parameters[seam.experts]
            grad = seam.route.group(received).to(seam.result_dtype)
            grads = gradients([seam.result], [grad], [seam.leaf, *parameters])
            seam.rows = seam.route.ungroup(dense(grads[0], seam.leaf))
            seam.queue.keep(present(parameters, grads[1:]))
        seam.result = seam.leaf = None
        self.microbatch.queues[Op.EXPERTS, self.block, len(self.seams) - 1] = seam.queue

    def attention_b(self, received: Tensor) -> None:
        self._take_back(received)
        self._finish_backward()

    def _begin_backward(self) -> None:
        self.in_backward = True
        grads = self.microbatch.take_output_grads()
        outs, self.outs = self.outs, []
        assert len(outs) == len(grads)
        for out, grad in zip(outs, grads, strict=True):
            if out is not None and grad is not None:
                self.roots.append(out.edge)
                self.root_grads.append(out.checked(grad, self.stage.names[self.block]))

    def _add_root(self, root: Tensor, grad: Tensor | None) -> None:
        if root.requires_grad and grad is not None:
            self.roots.append(root)
            self.root_grads.append(grad)

    def _take_back(self, received: Tensor) -> None:
        """The last seam's rows are back: its tokens have their gradient."""
        seam = self.seams.pop()
        assert seam.tokens is not None
        for root, grad in zip((seam.tokens, seam.weights), seam.route.gather_backward(received), strict=True):
            self._add_root(root, grad)

    def _finish_backward(self) -> None:
        leaves = [t for t in self.x if t.requires_grad]
        grads: Sequence[Tensor | None]
        if self.stage.whole_backward[self.block]:
            grads = accumulated(self.roots, self.root_grads, leaves)
        else:
            grads = self._leave_weights(leaves)
        self.roots, self.root_grads = [], []
        by_leaf = iter(grads)
        passed = tuple([dense(next(by_leaf), t) if t.requires_grad else None for t in self.x])
        self.x = []
        if self.block == 0:
            self.microbatch.input_grads = passed
        else:
            self.microbatch.output_grads = passed
        self._leave(ends=self.block == 0)

    def _leave_weights(self, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Gradients of the leaves; those of the block's parameters are left for its weight node, if it has one."""
        parameters, shape = self.stage.block_parameters[self.block], self.stage.shape[self.block]
        grads = gradients(self.roots, self.root_grads, [*leaves, *parameters])
        self.queue.keep(self.stage.whole(self.microbatch, present(parameters, grads[len(leaves) :]), self.block))
        if shape.split:
            self.microbatch.queues[shape.own, self.block, 0] = self.queue
        else:
            accumulate(self.queue.compute())
        return grads[: len(leaves)]

    def _leave(self, *, ends: bool) -> None:
        """The microbatch needs this block no more; ``ends`` says that nothing but weight gradients is left of it."""
        del self.microbatch.runs[self.block]
        self.microbatch.ended = ends

    def stop(self) -> None:
        """Unwinds a suspended forward."""
        if self.forward is not None:
            self.forward.stop()


class SeamRun:
    """One call of experts by one microbatch."""

    def __init__(self, call: SeamCall, exchange: Exchange, capacity: float | None = None) -> None:
        assert isinstance(call.experts, Experts)
        self.experts, self.exchange = call.experts, exchange
        self.tokens: Tensor | None = call.tokens
        self.weights, self.state, self.dtype = call.weights, call.state, call.tokens.dtype
        self.queue = WeightQueue()
        with torch.no_grad():
            experts = self.experts
            self.route = experts.route(call.indices, exchange.ranks, capacity=capacity)
            self.rows: Tensor | None = self.route.gather(call.tokens.detach(), call.weights.detach())
            # What rows look like on their way back, and on their way to the experts.
            hidden, width = call.tokens.shape[1], self.rows.shape[1]
            self.back = call.tokens.new_empty(0, hidden)
            self.outward = self.back if width == hidden else call.tokens.new_empty(0, width)
        self.result: GradientEdge | None = None  # the experts' output, whose values have been sent away
        self.result_dtype = self.dtype
        self.leaf: Tensor | None = None  # their input
        self.returned: Tensor | None = None  # what came back, if its sum needs it for its backward
        self.y: Tensor | None = None
        self.version = 0  # of y's values

    def aggregate(self, returned: Tensor) -> Tensor:
        """The result of the call, from the rows that came back; a leaf."""
        self.y = self.route.aggregate(returned, self.weights.detach()).requires_grad_(self.state.grad)
        self.version = 0 if self.y.is_inference() else self.y._version
        return self.y
