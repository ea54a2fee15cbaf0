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
        spec, cut = config.model_spec, config.model_spec.pipelining_fn
        if getattr(cut, "func", cut) is not pipelining_fn:  # ours, perhaps with options by partial
            config = replace(config, model_spec=replace(spec, pipelining_fn=partial(pipelining_fn, split=cut)))
        made: Any = super().__init__
        made(config)

    def init_distributed(self) -> Any:
        """Return torchtitan's mesh, under which its trainer calls a schedule on one pipeline rank, too."""
        inherited: Any = super()
        dims = inherited.init_distributed()
        scheduled = type(type(dims).__name__, (type(dims),), {"pp_enabled": property(lambda self: True)})
        return scheduled(**{field.name: getattr(dims, field.name) for field in fields(dims)})
