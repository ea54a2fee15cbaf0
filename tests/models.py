"""Small models that tests share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap1f1b.engine import Engine
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.moe.experts import WeightsIn

V, H, E, K = 31, 20, 8, 2
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def top_k(tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Ordinary routing, uneven since the gate is random."""
    weights, indices = logits.softmax(-1).topk(K, -1)
    return indices, weights


def first_experts(tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Every token goes to experts 0 and 1: all others, and every rank but the first, receive nothing."""
    indices = torch.arange(K, device=tokens.device).expand(len(tokens), K)
    return indices, logits.softmax(-1).gather(1, indices)


class Block(nn.Module):
    """Norm, linear, experts, and a linear between the experts and the output; ``expert_calls`` calls of experts."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        expert_calls: int = 1,
        choose: Choose = top_k,
        dropout: float = 0.0,
        weights_in: WeightsIn = "combine",
    ) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(H), nn.Linear(H, H)
        self.gates = nn.ModuleList(nn.Linear(H, E, bias=False) for _ in range(expert_calls))
        options = {"group": group, "weights_in": weights_in}
        self.experts = nn.ModuleList(GroupedExperts(E, H, 12, **options) for _ in range(expert_calls))
        self.post = nn.ModuleList(nn.Linear(H, H) for _ in range(expert_calls))
        self.choose, self.dropout = choose, nn.Dropout(dropout)
        for experts in self.experts:  # large enough that their gradients matter
            experts.reset_parameters(torch.Generator().manual_seed(3), std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.mix(self.norm(x)))
        for gate, experts, post in zip(self.gates, self.experts, self.post, strict=True):
            tokens = x.reshape(-1, H)
            indices, weights = self.choose(tokens, gate(tokens))
            x = x + self.dropout(post(self.around(experts, tokens, indices, weights))).view_as(x)
        return x

    def around(self, experts: nn.Module, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The call of experts, for subclasses that wrap it."""
        return experts(tokens, indices, weights)


class Tied(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def build(
    group: dist.ProcessGroup | None = None,
    *,
    layers: int = 2,
    expert_calls: int = 1,
    choose: Sequence[Choose] = (top_k, first_experts),
    dropout: float = 0.0,
    tied: bool = False,
    block: type[Block] = Block,
    **options: Any,
) -> nn.Sequential:
    """Embedding, blocks, a dense block in between, head: the same weights for every group.

    The blocks take turns with ``choose``.
    """
    torch.manual_seed(11)
    embedding = nn.Embedding(V, H)
    blocks: list[nn.Module] = [
        block(group, expert_calls=expert_calls, choose=choose[layer % len(choose)], dropout=dropout, **options)
        for layer in range(layers)
    ]
    blocks.insert(1, nn.Sequential(nn.LayerNorm(H), nn.Linear(H, H), nn.Tanh()))
    return nn.Sequential(embedding, *blocks, Tied(embedding) if tied else nn.Linear(H, V))


def batch(microbatches: int, *, rows: int = 2, sequence: int = 7, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step, ``rows`` sequences a microbatch."""
    generator = torch.Generator().manual_seed(seed)
    shape = (microbatches * rows, sequence)
    return torch.randint(V, shape, generator=generator), torch.randint(V, shape, generator=generator)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def plain_gradients(
    model: nn.Module,
    inputs: Tensor,
    target: Tensor,
    microbatches: int,
    scale: float = 1.0,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_fn,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of a plain loop over the microbatches."""
    losses = []
    for x, y in zip(inputs.chunk(microbatches), target.chunk(microbatches), strict=True):
        loss = loss_fn(model(x), y)
        (loss * (scale / microbatches)).backward()
        losses.append(loss.detach())
    return losses, gradients(model)


def of_one_process(whole: nn.Module, data: Sequence[tuple[Tensor, Tensor]], microbatches: int) -> dict[str, Tensor]:
    """Gradients of one process with the batches of all ranks."""
    for inputs, target in data:
        _, found = plain_gradients(whole, inputs, target, microbatches, 1 / len(data))
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name; zeros where there is none."""
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {n: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone() for n, grad in found.items()}


def held(engine: Engine, model: nn.Module) -> dict[str, Tensor]:
    """The same of the parameters of this rank's stages; no other has one."""
    here, grads = set(engine.parameters()), gradients(model)
    assert not [name for name, p in model.named_parameters() if p not in here and p.grad is not None]
    return {name: grads[name] for name, p in model.named_parameters() if p in here}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors and parameters that are made meanwhile have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def apart(
    found: dict[str, Tensor], whole: dict[str, Tensor], rank: int, size: int, limit: float, least: float = -1.0
) -> list[str]:
    """Gradients that are not within a relative limit of one process's, or experts' that are as near as ``least``.

    Of experts each of ``size`` ranks has its part. A gradient that is zero there has to be zero here.
    """
    problems = []
    for name, mine in found.items():
        full = whole[name].chunk(size)[rank] if "experts" in name else whole[name]
        error = float((mine.to(full.dtype) - full).norm() / full.norm().clamp(min=1e-30))
        if not (least if "experts" in name else min(least, 0.0)) < error <= limit:
            problems.append(f"{name} differs by {error:.1e} from one process")
    return problems


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose gradients are not bit-equal, or that one side alone has."""
    return [name for name in a | b if name not in a or name not in b or not torch.equal(a[name], b[name])]


def _twice(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else 2 * grad for grad in grads)


def _own_forward(module: nn.Module) -> Any:
    forward = module.forward
    module.forward = lambda *x: 2 * forward(*x)  # type: ignore[method-assign]


OWN_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "a forward of its own": _own_forward,
    "forward pre hooks of its own": lambda m: m.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
    "forward hooks of its own": lambda m: m.register_forward_hook(lambda _, x, y: 2 * y),
    "backward pre hooks of its own": lambda m: m.register_full_backward_pre_hook(lambda _, dy: _twice(dy)),
    "backward hooks of its own": lambda m: m.register_full_backward_hook(lambda _, dx, dy: _twice(dx)),
}
"""What a call of a module may do beside the forward of its class, by its name in messages: each changes gradients."""
