"""The route of rows in one call of experts by one microbatch: each token's way to its ranks, and back."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap1f1b.kernels.choice import Kernels
from overlap1f1b.kernels.combine import open_grads, pack_grads, spread_grad, sum_rows
from overlap1f1b.kernels.fp8 import Precision, narrow_rows, scale_bytes, widen_rows
from overlap1f1b.kernels.grouped_mm import ExpertRows
from overlap1f1b.kernels.permute import Layout, expand_rows, pack_rows, spread_rows, take_rows
from overlap1f1b.kernels.slots import Slots, place_rows, place_slots
from overlap1f1b.plan import rows_per_token
from overlap1f1b.transport.calls import Splits
from overlap1f1b.transport.failures import Failures


class Route(Splits):
    """Splits and maps of the rows for ``indices [T, K]`` over E experts, spread evenly over the ranks.

    A token is sent once to each rank that has experts of it. Its row carries the experts' numbers there and the weights
    (:meth:`pack`). That rank makes a row for each choice, sorted by expert (:meth:`expand`), computes, sums the results
    of a received row by their weights (:meth:`weigh`), and sends the sum back. The token's rank adds what comes back
    from its ranks (:meth:`gather`). On one rank tokens are the rows, and what comes back is the result.

    Without a capacity every rank sends as many rows as were routed, and the host must know their number. With a
    ``capacity`` every rank sends the same number of rows to every rank, padded with zeros: ``capacity`` times the
    expected number where all experts are equally likely, for as many choices as ``⌈capacity · T · K / ranks⌉``. Then
    nothing waits for the host, but all ranks must have equally many tokens. Choices without room are left out, the last
    tokens' first, and counted in :attr:`dropped`.

    Args:
        indices: ``[T, K]`` int64; −1 for no expert: nothing is sent for it, and a token without any gets 0.
        experts: E.
        ranks: Ranks that share the experts.
        kernels: Choice between Triton and torch.
        capacity: Room for rows and choices of a rank, as a multiple of an even share; None for exact sizes.
        precision: Of rows that are sent to the experts, and of their gradients back; None for theirs, as on one rank.

    Attributes:
        tokens: T.
        top_k: K.
        hidden: H, after :meth:`pack`.
        room: Choices for which each rank has room; None without a capacity.
        counts: ``[ranks, 1 + E / ranks]`` int64, rows sent to each rank, and the choices of each of its experts, also
            of those that were left out.
        dropped: ``[E]`` int64, choices without room; None without a capacity.
        padded: Whether rows include padding.
        partial: Whether rows to send may be without a token: padding, or room that a device has made for more rows.

    Raises:
        ValueError: ``indices`` name an unknown expert. On a GPU, where the host does not look, a device-side assertion
            fails instead.
    """

    counts: Tensor
    hidden: int

    def __init__(
        self,
        indices: Tensor,
        experts: int,
        ranks: int,
        kernels: Kernels,
        *,
        capacity: float | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__((), ())
        self.tokens, self.top_k = indices.shape
        self.experts, self.ranks, self.kernels, self.capacity = experts, ranks, kernels, capacity
        self.local, self.precision = experts // ranks, precision if ranks > 1 else None
        assert self.local < 1 << 15, "numbers of a rank's experts travel as int16"
        self.indices = indices
        self.room: int | None = None
        self.dropped: Tensor | None = None
        self.padded = capacity is not None
        self.partial = self.padded or not indices.is_cpu
        self._gaps = self.partial or ranks > 1  # whether a row may have fewer choices than it has room for
        self.order: Tensor | None = None
        self.spots: Tensor | None = None
        self._slots: Slots | None = None
        self._counted: list[list[int]] | None = None  # what has arrived, on the host, if the host must know
        self.choices = indices.numel()
        if indices.is_cpu and (none := _missing(indices, experts)):
            self.choices, self._gaps = self.choices - none, True
        if capacity is None and ranks == 1:
            self.counts = indices.reshape(-1)[:1]  # nobody reads it
            return
        rows: int | None = None
        if capacity is not None:
            expected = self.tokens * rows_per_token(experts, self.top_k, ranks) / ranks
            rows = min(math.ceil(capacity * expected), self.tokens)
            self.room = min(math.ceil(capacity * indices.numel() / ranks), rows * self.top_k)
            self.send = self.receive = [rows] * ranks
            self.choices, self.counts_first = self.room * ranks, False
        places = kernels(place_rows, indices, experts, ranks, rows, self.room or 0)
        self.order, self.spots, self.inverse, self.counts = places
        if self.padded:
            left_out = (self.spots < 0).long().view(-1)
            every = left_out.new_zeros(1 + experts).scatter_add_(0, (indices + 1).view(-1), left_out)
            self.dropped = every[1:]  # behind those that are none
        elif indices.is_cpu:
            self.order = self.order[: int(self.counts[:, 0].sum())]

    @property
    def counts_to_send(self) -> Tensor:
        """The counts, and for rows of equal sizes on a CPU a column of T: gloo aborts the process if sizes differ."""
        if not self.padded or not self.counts.is_cpu:
            return self.counts
        return torch.cat([self.counts, self.counts.new_full((self.ranks, 1), self.tokens)], 1)

    def arrive(self, counts: Tensor, failures: Failures | None = None) -> None:
        """Take the received ``counts``, a row of each rank; wait for them if the host must know sizes.

        Under a capacity they raise ValueError if ranks have other numbers of tokens.
        """
        if self.padded:
            if counts.is_cpu:
                self.check_tokens(counts[:, -1].tolist())
            return
        host, self.host = self.host, None
        sent, received = (self.counts, counts) if host is None else host.read(failures)
        if self.ranks == 1:
            self.send = self.receive = [self.tokens]
            return
        of_ranks, self._counted = sent.tolist(), received.view(self.ranks, -1).tolist()
        self.send, self.receive = ([rows for rows, *_ in every] for every in (of_ranks, self._counted))
        self.choices = sum(sum(of_experts) for _, *of_experts in self._counted)
        if sum(map(sum, of_ranks)) - sum(self.send) != self.indices.numel():  # others would be lost silently
            self._look()

    def _look(self) -> None:
        """Let the device look for an index that names no expert, without a wait of the host."""
        known = (self.indices >= -1) & (self.indices < self.experts)
        torch._assert_async(known.all(), f"indices name an expert that is none; allowed: -1 to {self.experts - 1}")

    def check_tokens(self, every: Sequence[int]) -> None:
        """Raise ValueError if ranks have other numbers of tokens: they would wait for rows that nobody sends."""
        if len(set(every)) > 1:
            raise ValueError(
                f"capacity={self.capacity:g} with {every} tokens on the ranks that share the experts; "
                "allowed: equally many, or capacity=None"
            )

    @property
    def expert_rows(self) -> ExpertRows:
        """Number of rows of each local expert, after :meth:`expand`."""
        assert self._slots is not None
        counted = self._counted
        host = None if counted is None else [sum(rows) for rows in zip(*counted, strict=True)][1:]
        return ExpertRows(self._slots.ends, host, padded=self.padded)

    def pack(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return the rows to send ``[rows, W]`` of ``tokens [T, H]`` and ``weights [T, K]``."""
        self.hidden = tokens.shape[1]
        self._layout = Layout.of(tokens, weights)
        if self.precision is not None:
            self._narrow = Layout.of(tokens, weights, scales=scale_bytes(self.hidden, self.precision))
        places = self.order, self.spots, self.local, self._layout, self.partial
        packed = self.kernels(pack_rows, tokens, self.indices, weights, *places)
        return self._narrowed(packed)

    def _narrowed(self, packed: Tensor) -> Tensor:
        if self.precision is None:
            return packed
        return narrow_rows(packed, self._layout, self._narrow, self.precision, self.kernels)

    def _widened(self, packed: Tensor) -> Tensor:
        if self.precision is None:
            return packed
        return widen_rows(packed, self._layout, self._narrow, self.precision)

    def pack_backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients ``[T, H]`` of the tokens and ``[T, K]`` of the weights."""
        if self.spots is None:
            tokens, weights, _ = self._layout.opened(grad)
            return tokens, weights
        grad = self._widened(grad)
        return self.kernels(open_grads, grad, self.inverse, self.spots, self._layout)

    def expand(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows ``[C, H]`` of each choice, sorted by expert, and their weights ``[C]``."""
        packed = self._widened(packed)
        if self._slots is None:
            chosen = self._layout.opened(packed)[2][:, : self._layout.choices]
            self._slots = self.kernels(place_slots, chosen, self.local, self.choices)
            if self.ranks == 1 and not (self.padded or packed.is_cpu):
                # The host does not know how many choices there are: the last rows may be without one, as any other's.
                self._look()
                self._slots = self._slots._replace(order=self._slots.order.clamp(min=0))
        return self.kernels(expand_rows, packed, *self._slots[:2], self._layout, self.padded)

    def expand_backward(self, grad_rows: Tensor, grad_weights: Tensor) -> Tensor:
        """Return the gradient ``[rows, W]`` of received rows."""
        assert self._slots is not None
        packed = self.kernels(pack_grads, grad_rows, grad_weights, self._slots.inverse, self._layout, self._gaps)
        return self._narrowed(packed)

    def weigh(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the rows of each received row's choices by their weights, None for 1: ``[C, H] → [rows, H]``."""
        assert self._slots is not None
        return self.kernels(sum_rows, rows, self._slots.inverse, self._layout.choices, weights, self._gaps)

    def weigh_backward(self, grad: Tensor, rows: Tensor | None, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return gradients ``[C, H]`` of the rows and ``[C]`` of the weights, None without weights."""
        assert self._slots is not None
        order, inverse, _ = self._slots
        if weights is None or rows is None:
            return self.kernels(spread_rows, grad, order, inverse, self._layout.choices, self.padded), None
        return self.kernels(spread_grad, grad, rows, order, inverse, weights, self.padded)

    def gather(self, rows: Tensor) -> Tensor:
        """Add the returned rows ``[rows, H]`` of each token, one from each rank that computed it: ``[T, H]``."""
        return self.kernels(sum_rows, rows, self.inverse, self.top_k)

    def gather_backward(self, grad: Tensor) -> Tensor:
        """Return the gradient ``[rows, H]`` of returned rows."""
        assert self.order is not None
        return self.kernels(take_rows, grad, self.order[: sum(self.send)], self.padded)


def _missing(indices: Tensor, experts: int) -> int:
    """Return how many indices on a CPU are −1; raise ValueError for one that names no expert otherwise."""
    lowest, highest = map(int, indices.aminmax()) if indices.numel() else (0, 0)
    if lowest < -1 or highest >= experts:
        wrong = lowest if lowest < -1 else highest
        raise ValueError(f"indices name expert {wrong}; allowed: 0 to {experts - 1}, or -1 for none")
    return int((indices < 0).sum()) if lowest < 0 else 0
