"""Experts of a layer, spread over the ranks of a group."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.fp8 import FITS, Precision, check_device
from overlap1f1b.kernels.grouped_mm import EightBits, ExpertRows, KnownRows, multiplied
from overlap1f1b.kernels.swiglu import swiglu
from overlap1f1b.moe.route import Route
from overlap1f1b.moe.router import Device, check_factory
from overlap1f1b.schedule.values import check_number, check_size, checked, quoted
from overlap1f1b.transport.calls import exchange_parts
from overlap1f1b.transport.exchange import Exchange, build_exchange
from overlap1f1b.transport.functions import direct, quick_apply
from overlap1f1b.transport.suspension import Forward, computed_once

WeightsIn = Literal["combine", "activation"]
"""Place where the experts' rank applies the routing weights: the sum of their results, or their activation before."""
GroupedProduct = Callable[[Tensor, Tensor, Sequence[int]], Tensor]


class Experts(nn.Module):
    """Experts spread over the ranks of a group.

    >>> y = experts(tokens, indices, weights)  # [T, H], [T, K] int64, [T, K] → [T, H]

    A call sends each token once to every rank that has experts of it, and back. In a plain loop it waits for both
    exchanges; under an engine the forward is suspended at each. A subclass implements :meth:`compute`; routing weights
    are applied to what it returns.

    Attributes:
        experts: E, over all ranks.
        local_experts: E / ranks; rank ``r`` holds experts ``r·E/ranks`` to ``(r+1)·E/ranks - 1``.
        group: Ranks that share the experts; None for one rank.
        exchange: Exchange between these ranks.
        kernels: Choice between Triton and torch for permutations, sums and activations, in the engine too.
        capacity: Room for rows in an engine's step, see :class:`~overlap1f1b.moe.route.Route`; None outside.
        weights_in: Place where routing weights are applied.
        precision: Of products and of rows sent to the experts; None for that of what is given.
        hidden: H, if a call checks it; None for any.
    """

    hidden: int | None = None
    weights_in: WeightsIn = "combine"
    precision: Precision | None = None
    capacity: float | None = None

    experts: int
    local_experts: int
    group: dist.ProcessGroup | None
    exchange: Exchange
    kernels: Kernels

    def product(self, rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the grouped matrix product for :meth:`compute`.

        The engine has one whose weight gradient may come later; a subclass that has a product of its own keeps it.
        """
        eight = EightBits(self.kernels, self.precision) if self.precision else None
        return multiplied(rows, weight, counts, eight)

    @property
    def reads_counts_late(self) -> bool:
        """Whether :meth:`compute` takes counts that the host does not know yet, and rows beyond them."""
        return False

    def share(self, experts: int, group: dist.ProcessGroup | None) -> None:
        """Set the group of ranks that share the experts.

        Raises:
            ValueError: E is not divisible by the ranks.
        """
        check_size("experts", experts)
        self.exchange = build_exchange(group)
        ranks = self.exchange.ranks
        self.group = group if ranks > 1 else None
        if experts % ranks:
            allowed = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
            raise ValueError(f"{experts} experts cannot be divided over {ranks} ranks; allowed: {allowed}")
        self.experts, self.local_experts = experts, experts // ranks
        self.kernels = Kernels()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with parameters of its own; it shares the group, which cannot be copied."""
        memo |= {id(shared): shared for shared in (self.group, self.exchange)}
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(deepcopy(self.__dict__, memo))
        return copied

    @property
    def row_kind(self) -> object:
        """Key of the rows' shape and cost: experts with equal keys have equal exchanges."""
        return self.experts, self.precision, tuple((p.shape, p.dtype) for p in self.weights())

    def weights(self) -> Iterator[nn.Parameter]:
        """Return the parameters that :meth:`compute` may give to :attr:`product`."""
        return self.parameters()

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply the local experts to ``rows [R, H]``, which are grouped by expert, ``counts [E_local]`` rows each."""
        raise NotImplementedError(f"{type(self).__name__} without compute(rows, counts)")

    def answer(self, tokens: Tensor) -> Tensor | None:
        """Return ``[0, H]``, like the rows that come back; None if their width is not known before they come."""
        return tokens.new_empty(0, tokens.shape[1])

    def compute_routed(self, rows: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor | None]:
        """Apply :meth:`compute` to the rows ``[C, H]`` of choices; return the weights too if they have yet to act."""
        counts = route.expert_rows
        if self.reads_counts_late:
            return self.compute(rows, counts), weights
        known = KnownRows(counts)  # numbers on the host, for a compute that reads them at once
        total = sum(known)
        result = self.compute(rows[:total], known)
        if len(result) != total:
            raise ValueError(
                f"compute of {type(self).__name__} returned {list(result.shape)} for {total} rows; "
                "allowed: a row for each"
            )
        rest = len(rows) - total  # rows of a fixed room without a choice
        return F.pad(result, (0, 0, 0, rest)) if rest else result, weights

    def __call__(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        # These checks are not in forward, which an engine wraps. The host knows shapes and dtypes but not values:
        # reading values would make every call wait for a GPU. Route finds unknown experts.
        for name, value in (("tokens", tokens), ("indices", indices), ("weights", weights)):
            if not isinstance(value, Tensor):
                raise ValueError(f"{name}={quoted(value)}; allowed: a tensor")
        hidden = tokens.shape[-1] if self.hidden is None else self.hidden
        if indices.dim() != 2 or indices.dtype != torch.int64:
            raise ValueError(f"indices {_described(indices)}; allowed: torch.int64 [T, K]")
        if tokens.shape != (indices.shape[0], hidden):
            raise ValueError(
                f"tokens {_described(tokens)} with indices {list(indices.shape)}; allowed: {[indices.shape[0], hidden]}"
            )
        if weights.shape != indices.shape or not weights.is_floating_point():
            raise ValueError(f"weights {_described(weights)}; allowed: floating, of the indices' {list(indices.shape)}")
        if self.precision == "fp8":
            check_device(tokens)
        return super().__call__(tokens, indices, weights)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():  # in graphs of torch 2.11 these Functions lose gradients in silence
            outside: Callable[..., Tensor] = torch.compiler.disable(self._computed_once)
            return outside(tokens, indices, weights)
        return self._computed_once(tokens, indices, weights)

    def _computed_once(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return computed_once(partial(self._there_and_back, tokens, indices, weights))

    def _there_and_back(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Exchange the tokens, compute them, and return their weighted sums, in as many parts as the step asks for."""
        options: dict[str, Any] = {"capacity": self.capacity, "precision": self.precision}
        forward = Forward.running()
        count = 1 if forward is None else forward.handlers.parts
        every = [(of,) if count == 1 else of.tensor_split(count) for of in (indices, tokens, weights)]
        routes = [Route(part, self.experts, self.exchange.ranks, self.kernels, **options) for part in every[0]]
        parts = zip(routes, *every[1:], strict=True)
        returned = exchange_parts(
            [_routed(route.pack, route.pack_backward, *part) for route, *part in parts],
            routes,
            [partial(self._compute_received, route, tokens.dtype) for route in routes],
            self.exchange,
            answer=self.answer(tokens),
        )
        sums = [_gather(returned.pop(0), route) for route in routes]
        return sums[0] if count == 1 else torch.cat(sums)

    def _compute_received(self, route: Route, dtype: torch.dtype, received: Tensor) -> Tensor:
        rows, weights = _routed(route.expand, route.expand_backward, received)
        result, weights = self.compute_routed(rows, weights, route)
        return _weigh(result.to(dtype), weights, route)


def has_product_of_experts(experts: Experts) -> bool:
    """Return whether nobody has given experts a product of their own."""
    return type(experts).product is Experts.product and "product" not in vars(experts)


class GroupedExperts(Experts):
    """SwiGLU experts as grouped matrix products, each rank holding an equal part of them.

    >>> experts = GroupedExperts(8, hidden=64, intermediate=128)
    >>> y = experts(tokens, indices, weights)  # [T, H], [T, K] int64, [T, K] → [T, H]

    Args:
        experts: E, over all ranks.
        hidden: H.
        intermediate: I.
        weights_in: Place where routing weights are applied, see :data:`WeightsIn`. In the activation, ``silu(gate) · up
            · p`` as in Megatron-Core, the sum of the results has no weights, and its backward does not need them.
        precision: Of products and of rows sent to the experts, in e4m3: ``"fp8"`` with a scale a row, ``"mxfp8"`` with
            one of 32 elements; None for the dtype of what is given. H and I are multiples of 16, or 32. For fp8 a GPU
            is of compute capability 9; for mxfp8 it multiplies these numbers in bfloat16. Weight gradients are as ever.
        group: Ranks that share the experts.

    Raises:
        ValueError: A size is not a whole number from 1, E is not divisible by the ranks, or a subclass with its own
            ``compute`` has ``weights_in="activation"``, or ``precision`` is unknown or does not fit. In a call: shapes
            or dtypes are wrong, an expert is unknown, or a GPU has no such products.
    """

    @checked
    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        weights_in: WeightsIn = "combine",
        precision: Precision | None = None,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        check_size("hidden", hidden)
        check_size("intermediate", intermediate)
        check_factory(dtype, device)
        self.hidden = hidden
        self.share(experts, group)
        for name, size in (("hidden", hidden), ("intermediate", intermediate)):
            if precision is not None and size % FITS[precision]:
                raise ValueError(f"{name}={size} with precision={precision!r}; allowed: multiples of {FITS[precision]}")
        self.weights_in, self.precision = weights_in, precision
        if weights_in == "activation" and not self.reads_counts_late:
            raise ValueError(
                f"weights_in='activation' of {type(self).__name__}, which computes itself; allowed: 'combine'"
            )
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.gate_up = nn.Parameter(torch.empty(self.local_experts, 2 * intermediate, hidden, **factory))
        self.down = nn.Parameter(torch.empty(self.local_experts, hidden, intermediate, **factory))
        self.reset_parameters()

    @checked
    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Draw normal weights: all E experts, of which this rank keeps its own, so the seed alone gives the model."""
        check_number("std", std)
        mine = self.exchange.rank
        for weight in (self.gate_up, self.down):
            where = "meta" if weight.is_meta else "cpu"
            for expert in range(self.experts):  # one draw each: normal_ fills in blocks, so parts would differ
                drawn = torch.empty(weight.shape[1:], dtype=torch.float32, device=where)
                drawn.normal_(std=std, generator=generator)
                if expert // self.local_experts == mine:
                    weight[expert % self.local_experts].copy_(drawn)

    @property
    def reads_counts_late(self) -> bool:
        return type(self).compute is GroupedExperts.compute

    def compute(self, rows: Tensor, counts: Sequence[int], weights: Tensor | None = None) -> Tensor:
        """Apply the local experts to ``rows [R, H]``, with ``weights [R]`` in the activation if given."""
        gate_up = self.product(rows, self.gate_up, counts)
        end = counts.total if isinstance(counts, ExpertRows) else None
        return self.product(swiglu(gate_up, self.kernels, weights, end), self.down, counts)

    def compute_routed(self, rows: Tensor, weights: Tensor, route: Route) -> tuple[Tensor, Tensor | None]:
        if self.weights_in == "combine":
            return super().compute_routed(rows, weights, route)
        return self.compute(rows, route.expert_rows, weights), None

    def extra_repr(self) -> str:
        return f"experts={self.experts}, local={self.local_experts}, gate_up={tuple(self.gate_up.shape)}"


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


@direct
class Routed(torch.autograd.Function):
    """A step of a route that keeps nothing for its backward, which is another step."""

    @staticmethod
    def forward(ctx: Any, step: Callable[..., Any], backward: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.step = backward
        return step(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.step(*grads)
        return None, None, *(found if isinstance(found, tuple) else (found,))


@direct
class Weigh(torch.autograd.Function):
    """Weighted sum of the results of each received row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, route: Route) -> Tensor:
        ctx.route = route
        ctx.save_for_backward(*(None, None) if weights is None else (rows, weights))
        return route.weigh(rows, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.route.weigh_backward(grads[0], *ctx.saved_tensors), None


_routed, _weigh = map(quick_apply, (Routed, Weigh))


def _gather(rows: Tensor, route: Route) -> Tensor:
    if route.order is None:  # what came back is the sum itself; a Function must not return what it is given
        return rows
    given, forward = (route.gather, route.gather_backward, rows), Forward.running()
    gathered: Tensor = _routed(*given) if forward is None else forward.without_mode(_routed, *given)
    return gathered
