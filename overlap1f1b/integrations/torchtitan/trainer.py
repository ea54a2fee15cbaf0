"""A mixin for torchtitan's ``Trainer``: the engine plays its microbatches on one pipeline rank, too."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from overlap1f1b.integrations.torchtitan.pipelining import pipelining_fn


class Overlapped:
    """Let the engine play the steps of a torchtitan ``Trainer`` over any number of pipeline ranks, one included.

    >>> from torchtitan.trainer import Trainer
    >>> class OverlapTrainer(Overlapped, Trainer):
    ...     pass
    >>> trainer = OverlapTrainer(config)  # any Trainer.Config
    >>> trainer.train()

    torchtitan's own trainer asks for a schedule over several pipeline ranks alone, and on one runs its microbatches one
    after the other. Under this mixin a batch of ``training.local_batch_size`` sequences is played as microbatches of
    ``parallelism.pipeline_parallel_microbatch_size``. A model whose ``pipelining_fn`` is torchtitan's gets ours, cut as
    its own cuts it; for options give the model ours: see :func:`pipelining_fn`.

    Raises:
        ValueError: As of :func:`pipelining_fn`; a batch that does not divide into microbatches.
    """

    def __init__(self, config: Any) -> None:
        size, batch = config.parallelism.pipeline_parallel_microbatch_size, config.training.local_batch_size
        if batch % size:
            raise ValueError(
                f"training.local_batch_size={batch} with parallelism.pipeline_parallel_microbatch_size={size}; "
                f"allowed: a multiple of {size}"
            )
        spec = config.model_spec
        if not _is_ours(spec.pipelining_fn):
            ours = partial(pipelining_fn, split=spec.pipelining_fn)
            config = replace(config, model_spec=replace(spec, pipelining_fn=ours))
        made: Any = super().__init__
        made(config)

    def init_distributed(self) -> Any:
        """Return torchtitan's mesh, under which its trainer calls a schedule on one pipeline rank, too."""
        inherited: Any = super()
        return _with_schedule(inherited.init_distributed())


def _with_schedule(parallel_dims: Any) -> Any:
    kind = type(parallel_dims)
    scheduled = type(kind.__name__, (kind,), {"pp_enabled": property(lambda self: True)})
    return scheduled(**{field.name: getattr(parallel_dims, field.name) for field in fields(parallel_dims)})


def _is_ours(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return function is pipelining_fn
