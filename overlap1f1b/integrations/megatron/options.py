"""Options of a Megatron-Core config that would change results if they were ignored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from overlap1f1b.integrations.megatron.config import found, size_of


class Refused(NamedTuple):
    """An option that the drop-in does not carry out, and the value without it.

    Args:
        field: Of the config.
        allowed: Its value where it has no effect; what is falsy is allowed, too.
        suspended: Whether it only matters where forwards are suspended: it keeps a state for the one that runs.
    """

    field: str
    allowed: object = False
    suspended: bool = False


REFUSED = (
    Refused("num_microbatches_with_partial_activation_checkpoints", None),  # forward steps would need an argument
    Refused("defer_embedding_wgrad_compute"),  # gradients that the schedule would have to compute at its end
    Refused("delay_wgrad_compute"),  # the same of every layer
    Refused("fine_grained_activation_offloading"),  # what is loaded next follows the schedule's order
    Refused("cpu_offloading"),  # the same
    Refused("hybrid_context_parallel"),  # other groups for every microbatch
    Refused("cuda_graph_impl", "none"),  # captured in the order of the schedule
    Refused("enable_cuda_graph"),
    Refused("external_cuda_graph"),
    Refused("fp8", None, suspended=True),
    Refused("fp4", None, suspended=True),
)
SIZES = {
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
}
"""The number of ranks in each group, by the field that says it."""


def check_options(model: nn.Module, *, suspends: bool) -> None:
    """Raises ``ValueError`` for an option of a chunk's config that is refused.

    Args:
        model: The chunk.
        suspends: Whether its forward is cut, or calls experts that are exchanged meanwhile.
    """
    config = found(model, "config")
    for option in REFUSED:
        value = getattr(config, option.field, option.allowed)
        if value and value != option.allowed and option.suspended == suspends:
            where = " in a chunk that is cut or holds Experts" if suspends else ""
            besides = ", or layers=lambda chunk: [] without Experts" if suspends else ""
            raise ValueError(f"{option.field}={value!r}{where}; allowed: {option.allowed}{besides}")


def check_sizes(model: nn.Module, groups: object, names: Iterable[str]) -> None:
    """Raises ``ValueError`` where a chunk is made for several ranks and a group of that name has another number.

    A chunk that is made for one rank may still hold Experts over several.
    """
    config = found(model, "config")
    for name in names:
        held = size_of(groups, name)
        wanted = getattr(config, SIZES[name], None) or 1
        if wanted not in (1, held):
            raise ValueError(
                f"{SIZES[name]}={wanted} with a group {name} of {held} ranks; "
                f"allowed: a pg_collection whose {name} has {wanted}"
            )
