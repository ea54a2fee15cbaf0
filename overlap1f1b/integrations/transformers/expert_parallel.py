"""The exchange of this library under transformers' own expert parallelism, which names it in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from overlap1f1b.moe import Experts

NAME = "overlap1f1b"


def register(name: str = NAME) -> None:
    """Makes the exchange known to transformers by a name.

    >>> register()
    >>> config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="overlap1f1b")
    >>> model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)  # under torchrun

    Such a model trains in a loop of transformers' own, which waits for each exchange; it is :func:`split_model` and an
    engine that hide them.

    Raises:
        ValueError: transformers is not installed, or older than 5.23, whose expert parallelism has no such names.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        try:
            from transformers import __version__ as version
        except ImportError:
            version = "none"
        raise ValueError(
            f"transformers {version} has no EPImplementationInterface; allowed: 5.23 or newer, or split_model"
        ) from None
    EPImplementationInterface.register(name, ExchangedExperts)


class ExchangedExperts(Experts):
    """Brings the experts of a module their tokens, as transformers' ``EPImplementation`` does.

    Args:
        experts: The model's own module, whose weights are this rank's part.
        ep_mesh: Ranks that share the experts.
        tp_mesh: Ranks that hold the same tokens, of which there must be one.

    Raises:
        ValueError: Several ranks hold the same tokens.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__()
        if tp_mesh.size() > 1:
            raise ValueError(f"ep_implementation {NAME!r} with tp_size={tp_mesh.size()}; allowed: 1")
        # Not the module, which would be a child of its own child.
        self._own: Callable[[Tensor, Tensor, Tensor], Tensor] = experts.forward
        self.share(experts.num_experts * ep_mesh.size(), ep_mesh.get_group())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' weighted sum for this rank's tokens ``[T, H]``, ``[T, K]``, ``[T, K]``."""
        result: Tensor = super().__call__(hidden_states, top_k_index.long(), top_k_weights)
        return result

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        if not len(rows):  # one of zeros, so that every weight has a gradient, which FSDP2 then reduces on all ranks
            row = rows.new_zeros(1, rows.shape[1])
            return rows + self._own(row, row.new_zeros(1, 1, dtype=torch.int64), row.new_ones(1, 1))[:0]
        local = torch.arange(self.local_experts, device=rows.device)
        indices = local.repeat_interleave(torch.tensor(counts, device=rows.device), output_size=len(rows))
        return self._own(rows, indices[:, None], rows.new_ones(len(rows), 1))
