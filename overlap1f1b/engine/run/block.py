"""One block for one microbatch, cut where the block calls its experts.

A block's forward is an ordinary ``nn.Module.forward``; ``Blocks.installed`` makes its calls of experts suspend. The
residual around the experts is not cut. With the block's input ``x`` detached, the tensors that go to the experts
detached, and the experts' result a fresh leaf ``y``, the backward has three phases:

1. ``gy = grad(out, y, g)`` walks the graph between ``y`` and ``out``, and frees or accumulates nothing;
2. aggregate, combine, experts and dispatch run backward; their graph is cut off from everything else;
3. ``grad([out, tokens, weights], [g, g_tokens, g_weights])`` by ``x`` and the parameters walks the rest, once.

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
from overlap1f1b.engine.run.blocks import Dropped, MicrobatchBlock
from overlap1f1b.engine.run.microbatch import Microbatch, Tensors, absent, is_absent
from overlap1f1b.engine.run.random import RandomStream
from overlap1f1b.engine.run.suspend import OUTSIDE, Forward, SeamCall, ThreadState
from overlap1f1b.moe.experts import Experts
from overlap1f1b.plan import Node, Op
from overlap1f1b.schedule import Kind
from overlap1f1b.transport.exchange import Exchange, Transfer
from overlap1f1b.transport.lanes import Post


class SeamRun:
    """One call of experts by one microbatch, from the dispatch to the end of its backward.

    Args:
        call: The suspended call.
        exchange: Carries rows to the experts and back.
        capacity: Room for rows as a multiple of an even share; None for exact sizes.
    """

    def __init__(self, call: SeamCall, exchange: Exchange, capacity: float | None = None) -> None:
        assert isinstance(call.experts, Experts)
        self.experts, self.exchange = call.experts, exchange
        self.tokens: Tensor | None = call.tokens
        self.weights, self.state, self.dtype = call.weights, call.state, call.tokens.dtype
        self.queue = WeightQueue()
        with torch.no_grad():
            self.route = self.experts.route(call.indices, exchange.ranks, capacity=capacity)
            self.rows: Tensor | None = self.route.gather(call.tokens.detach(), call.weights.detach())
            hidden, width = call.tokens.shape[1], self.rows.shape[1]
            self.back = call.tokens.new_empty(0, hidden)
            """``[0, H]``, like rows on their way back."""
            self.outward = self.back if width == hidden else call.tokens.new_empty(0, width)
            """Like rows on their way to the experts."""
        self.leaf: Tensor | None = None
        """Input of the experts."""
        self.result: GradientEdge | None = None
        """Output of the experts, whose values have been sent away."""
        self.result_dtype = self.dtype
        self.returned: Tensor | None = None
        """Rows that came back, if the backward of their sum needs them."""
        self.y: Tensor | None = None
        """Result of the call, a leaf."""
        self.version = 0  # of y's values

    def aggregate(self, returned: Tensor) -> Tensor:
        """Return the result of the call, a leaf, from the rows that came back."""
        self.y = self.route.aggregate(returned, self.weights.detach()).requires_grad_(self.state.grad)
        self.version = 0 if self.y.is_inference() else self.y._version
        return self.y


class BlockRun:
    """The nodes of one block for one microbatch, in the order of the plan's chains.

    ``*_f`` and ``*_b`` are the compute nodes of forward and backward; ``received`` are the rows of the exchange before.
    :meth:`post` starts the exchange nodes. Which node is which method: :mod:`overlap1f1b.engine.run.nodes`.
    """

    def __init__(self, microbatch: Microbatch, block: int) -> None:
        self.microbatch, self.block = microbatch, block
        stage = microbatch.stage
        self.stage, self.module, self.name = stage, stage.blocks[block], stage.names[block]
        self.is_last = block == len(stage.blocks) - 1
        self.queue = WeightQueue()
        self.forward: Forward | None = None
        self.seams: list[SeamRun] = []
        """Calls of experts whose backward has not ended."""
        self.x: list[Tensor] = []
        """Inputs, leaves."""
        self.outs: list[Root | None] = []
        """Outputs; their values have been handed on, only their graph is held."""
        self.in_backward = False
        self.roots: list[Tensor | GradientEdge] = []  # where gradients enter the graph, and these gradients
        self.root_grads: list[Tensor] = []

    # ---------------------------------------------------------------------------------------------- forward

    def attention_f(self) -> None:
        """Run from the block's input to its first call of experts, or, without experts, to its end."""
        x = self.microbatch.take_activations()
        if self.microbatch.grad:
            if self.block == 0:  # the user's own tensors; between blocks they are leaves already
                x = tuple([leaf(t) for t in x])
            self.x = list(x)
        self._continue(x)

    def experts_f(self, received: Tensor) -> None:
        """Run the experts on the rows that they received."""
        seam = self.seams[-1]
        differs = seam.state.grad and self.microbatch.grad
        seam.leaf = seam.route.group(received).detach().requires_grad_(differs)
        result = self._run_experts(seam, seam.state, self.microbatch.random)
        seam.rows = seam.route.ungroup(result.detach().to(seam.dtype))
        if result.requires_grad:
            seam.result, seam.result_dtype = get_gradient_edge(result), result.dtype
        else:
            seam.leaf = None

    def aggregate_f(self, received: Tensor) -> None:
        """Sum the rows that came back, and run on to the next call of experts or to the end."""
        seam = self.seams[-1]
        if self.microbatch.grad and seam.route.keeps_returned:
            seam.returned = received
        self._continue(seam.aggregate(received))

    def _run_experts(self, seam: SeamRun, state: ThreadState, random: RandomStream) -> Tensor:
        assert seam.leaf is not None
        self.stage.queue = seam.queue
        with random, state.applied(self.name, device=self.stage.device, grad=self.microbatch.grad):
            return seam.experts.compute_routed(seam.leaf, seam.route)

    def _continue(self, value: Tensor | Tensors) -> None:
        """Run the forward on, and note whether it ended or suspended at a call of experts."""
        reached = self._advance(value, self.microbatch.random)
        if isinstance(reached, SeamCall):
            self._begin_call(reached)
            self._check_seams(ended=False)
            return
        self._check_seams(ended=True)
        self.forward = None
        self._pass_on(reached)

    def _advance(self, value: Tensor | Tensors, random: RandomStream) -> SeamCall | Tensors:
        """Run from the block's input, or from a call's result, to the next call of experts or to the outputs."""
        self.stage.queue = self.queue
        with random, torch.set_grad_enabled(self.microbatch.grad):
            if isinstance(value, Tensor):
                assert self.forward is not None
                return self.forward.resume(value)
            if not self.stage.shape[self.block].seams:  # nothing will suspend it
                return self._run_module(*value)
            self.forward = Forward(self._run_module, self.name, self.stage.device)
            return self.forward.start(*value)

    def _begin_call(self, call: SeamCall) -> None:
        stage = self.stage
        if stage.capacity is not None and stage.check_tokens is not None:
            stage.check_tokens(len(call.indices))
        place = self.block, len(self.seams)
        if place not in stage.calls:
            k, hidden = call.indices.shape[-1], call.tokens.shape[-1]
            stage.calls[place] = f"{k} experts a token, hidden {hidden}, {str(call.tokens.dtype)[6:]}"
        seam = SeamRun(call, stage.exchange, stage.capacity)
        self.seams.append(seam)
        if seam.route.dropped is not None:
            route, index = seam.route, self.microbatch.index
            stage.dropped.append(Dropped(self.block, index, seam.route.dropped, route.counts, route.send[0]))

    def _pass_on(self, outs: Tensors) -> None:
        """Hand the outputs, detached, to the next block or to the end of the stage; keep their graph."""
        microbatch = self.microbatch
        detached = tuple([out.detach() for out in outs])
        if microbatch.grad:
            self._keep(outs)
        if self.is_last:
            microbatch.outputs, microbatch.forwarded = detached, True
            microbatch.differentiable = tuple([out.requires_grad for out in outs])
        else:
            microbatch.activations = tuple(
                t.requires_grad_(out.requires_grad) for t, out in zip(detached, outs, strict=True)
            )
        if not microbatch.grad:
            self._leave(ends=self.is_last)

    def _keep(self, outs: Tensors) -> None:
        """Hold the graph of the outputs for the backward."""
        self.outs = [Root.of(out) for out in outs]

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
        outs = returned if isinstance(returned, tuple) else (returned,)
        if isinstance(self.module, MicrobatchBlock):
            outs = tuple([absent(x[0]) if out is None else out for out in outs])
        if not outs or not all(isinstance(out, Tensor) for out in outs):
            what = ", ".join(type(out).__name__ for out in outs) or "nothing"
            raise ValueError(f"{self.name} returns {what}; allowed: a tensor or a tuple of tensors")
        if microbatch.grad and any(t.requires_grad for t in x) and not any(t.requires_grad for t in outs):
            raise ValueError(
                f"the outputs of {self.name} require no gradient although its input does; "
                "allowed: outputs that depend on the input"
            )
        return microbatch.with_loss(outs, self.name) if self.is_last else outs

    def _check_seams(self, *, ended: bool) -> None:
        found, expected = len(self.seams), self.stage.shape[self.block].seams
        if found > expected or (ended and found < expected):
            times = str(found) if ended else f"more than {expected}"
            raise ValueError(
                f"{self.name} calls experts {times} times and holds {expected} Experts; allowed: one call of each"
            )

    # ---------------------------------------------------------------------------------------------- exchange

    def post(self, node: Node) -> Post[Tensor]:
        """Return the function that starts an exchange of the last call; a lane's thread may call it."""
        seam, microbatch, op, kind = self.seams[-1], self.microbatch, node.op, node.kind
        node = node._replace(microbatch=microbatch.index, stage=self.stage.number)  # tags outlive a step's plan
        counts = microbatch.flights.pop(kind) if op is Op.DISPATCH and kind is Kind.F else None
        rows, seam.rows = seam.rows, seam.rows if op is Op.COUNTS else None

        def start() -> Transfer[Tensor]:
            route, exchange = seam.route, seam.exchange
            if counts is not None:
                route.arrive(counts.wait(), counts.lane.timeout)
            expected = microbatch.expected.pop(kind, None)
            if op is Op.COUNTS:
                sizes = exchange.counts(route.counts, node.tag, expected)
                route.host = sizes.host
                return sizes
            assert rows is not None
            to_experts = (op is Op.DISPATCH) == (kind is Kind.F)
            send, receive = (route.send, route.receive) if to_experts else (route.receive, route.send)
            transfer = exchange.rows(rows, send, receive, node.tag, expected)
            self._announce(node)
            return transfer

        return start

    def _announce(self, node: Node) -> None:
        """Announce the receive of the chain's next exchange; the sizes of a forward dispatch are not known yet."""
        seam, expected, kind = self.seams[node.seam], self.microbatch.expected, node.kind
        exchange, route, like = seam.exchange, seam.route, seam.back
        if (node.op is Op.DISPATCH) == (kind is Kind.F):  # rows went to the experts and come back next
            back = node._replace(op=Op.COMBINE if kind is Kind.F else Op.DISPATCH)
            expected[kind] = exchange.expect_rows(like if kind is Kind.F else seam.outward, route.send, back.tag)
            return
        neighbour = self.stage.seam_beside(node.block, node.seam, 1 if kind is Kind.F else -1)
        if neighbour is not None and not self.stage.alike:
            return
        if kind is Kind.F and neighbour is not None:
            following = node._replace(op=Op.COUNTS, block=neighbour[0], seam=neighbour[1])
            expected[kind] = exchange.expect_counts(route.counts, following.tag)
        elif kind is Kind.F and self.microbatch.grad:  # the last call of the forward is the first of the backward
            expected[Kind.I] = exchange.expect_rows(like, route.receive, node._replace(kind=Kind.I).tag)
        elif kind is Kind.I and neighbour is not None:
            before = self.microbatch.runs[neighbour[0]]
            assert isinstance(before, BlockRun)
            following = node._replace(op=Op.COMBINE, block=neighbour[0], seam=neighbour[1])
            expected[kind] = exchange.expect_rows(like, before.seams[neighbour[1]].route.receive, following.tag)

    # ---------------------------------------------------------------------------------------------- backward

    def dense_b(self) -> None:
        """Run the whole backward of a block without experts."""
        self._begin_backward()
        self._finish_backward()

    def aggregate_b(self, received: Tensor | None) -> None:
        """Compute the gradients of the rows that the last open call returned (phase 1).

        ``received`` are the gradients of the rows that the block's next call sent; None at its last call.
        """
        if self.in_backward:
            assert received is not None
            self._end_call(received)
        else:
            self._begin_backward()
        seam = self.seams[-1]
        assert seam.y is not None
        grad = self._probe(seam.y) if seam.y.requires_grad and self.roots else None
        grad = dense(grad, seam.y)
        rows, weights = seam.route.aggregate_backward(grad, seam.returned, seam.weights.detach())
        seam.rows, seam.returned, seam.y = rows, None, None
        self._add_root(seam.weights, weights)

    def experts_b(self, received: Tensor) -> None:
        """Run the experts' backward on the gradients of their output rows (phase 2)."""
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
        """Run the rest of the backward (phase 3); ``received`` are gradients of the rows that the first call sent."""
        self._end_call(received)
        self._finish_backward()

    def _begin_backward(self) -> None:
        self.in_backward = True
        grads = self.microbatch.take_output_grads()
        outs, self.outs = self.outs, []
        for out, grad in zip(outs, grads, strict=True):
            if out is not None and grad is not None:
                self.roots.append(out.edge)
                self.root_grads.append(out.checked(grad, self.name))

    def _probe(self, y: Tensor) -> Tensor | None:
        """Return the gradient of the experts' result, by a walk of the graph behind it that phase 3 walks again.

        Raises:
            ValueError: The walk adds to a main gradient, which would be added twice.
        """
        held = [main for p in self.stage.block_parameters[self.block] if (main := main_grad(p)) is not None]
        before = [main._version for main in held]
        self.queue.probing = True
        (grad,) = grad_of(self.roots, [y], self.root_grads, retain_graph=True)
        self.queue.probing = False
        if before != [main._version for main in held]:
            raise ValueError(
                f"{self.name} adds to main_grad in the backward of the layers behind its experts, which is walked "
                "twice; allowed: a block that ends with its experts, or no gradient_accumulation_fusion"
            )
        return grad

    def _end_call(self, received: Tensor) -> None:
        """Take the gradients of the rows that the last open call sent; its tokens have their gradient now."""
        seam = self.seams.pop()
        assert seam.tokens is not None
        for root, grad in zip((seam.tokens, seam.weights), seam.route.gather_backward(received), strict=True):
            self._add_root(root, grad)

    def _add_root(self, root: Tensor, grad: Tensor | None) -> None:
        if root.requires_grad and grad is not None:
            self.roots.append(root)
            self.root_grads.append(grad)

    def _finish_backward(self) -> None:
        leaves = [t for t in self.x if t.requires_grad]
        grads: Sequence[Tensor | None]
        if self.stage.whole_backward[self.block]:
            grads = accumulated(self.roots, self.root_grads, leaves)
        else:
            grads = self._split_backward(leaves)
        self.roots, self.root_grads = [], []
        by_leaf = iter(grads)
        passed = tuple([dense(next(by_leaf), t) if t.requires_grad else None for t in self.x])
        self.x = []
        if self.block == 0:
            self.microbatch.input_grads = passed
        else:
            self.microbatch.output_grads = passed
        self._leave(ends=self.block == 0)

    def _split_backward(self, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return gradients of the leaves; keep the parameters' for the weight node, or add them if none follows."""
        parameters, shape = self.stage.block_parameters[self.block], self.stage.shape[self.block]
        grads = gradients(self.roots, self.root_grads, [*leaves, *parameters])
        self.queue.keep(self.microbatch.complete(present(parameters, grads[len(leaves) :]), self.block))
        if shape.split:
            self.microbatch.queues[shape.own, self.block, 0] = self.queue
        else:
            accumulate(self.queue.compute())
        return grads[: len(leaves)]

    def _leave(self, *, ends: bool) -> None:
        """Release this block; with ``ends`` the microbatch has nothing left to run but weight gradients."""
        del self.microbatch.runs[self.block]
        self.microbatch.ended = ends

    def stop(self) -> None:
        """Unwind a suspended forward."""
        if self.forward is not None:
            self.forward.stop()
