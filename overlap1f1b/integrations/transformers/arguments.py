"""Arguments of a trainer beside transformers' ``TrainingArguments``, and the ones of these that it refuses."""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

from overlap1f1b.cut.options import UserOptions, documented
from overlap1f1b.engine import EngineOptions
from overlap1f1b.schedule import Program, build_schedule
from overlap1f1b.schedule.values import check_kind, check_size


@documented
@dataclass(frozen=True)
class OverlapArguments(UserOptions):
    """Division of the model and way to play a trainer's steps; ``HfArgumentParser`` reads it from the command line.

    >>> arguments = OverlapArguments(pp=2)
    >>> arguments.sizes(8)
    (2, 1, 4)
    >>> arguments.program(microbatches=4).name
    'combined_1f1b'

    All :class:`UserOptions` are among the arguments, and:

    Args:
        pp: Pipeline ranks, each with equally many layers.
        ep: Ranks that share the experts, each with data of its own; 0 for all that pp and dp leave.
        dp: Copies of this, each with data of its own.
        schedule: Name of the schedule that is played in every optimizer step; its microbatches are the
            gradient_accumulation_steps.
        pretrained: Folder of the weights of a model on the meta device; each rank reads its part.
        adapter: Folder of an adapter that PEFT has written, for a PEFT model on the meta device.

    Raises:
        ValueError: A value of another kind, or out of range.
    """

    pp: int = 1
    ep: int = 0
    dp: int = 1
    schedule: str = "combined_1f1b"
    pretrained: str | None = None
    adapter: str | None = None
    # HfArgumentParser allows no union of a number and a word: parts are listed, so that it reads numbers as numbers.
    overlap: str = "3"  # type: ignore[assignment]
    parts: Literal[1, 2, 3, 4, 5, 6, 7, 8, "auto"] = 1
    memory: str | None = None

    def __post_init__(self) -> None:
        self.check()
        for name in ("pp", "ep", "dp"):
            check_size(name, getattr(self, name), 0)
        check_kind("schedule", self.schedule, str)
        for name in ("pretrained", "adapter"):
            check_kind(name, getattr(self, name), str, None)

    @property
    def options(self) -> EngineOptions:
        """The options of the engine."""
        # batches are padded to their longest sequence, and an epoch's last is smaller
        return self.engine_options(dynamic_shapes=True)

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """Return the sizes of "pp", "dp" and "ep"; ValueError if they do not multiply to the number of ranks."""
        pp, dp = self.pp, self.dp
        ep = self.ep or max(1, ranks // max(1, pp * dp))
        if min(pp, dp, ep) < 1 or pp * dp * ep != ranks:
            raise ValueError(
                f"pp={self.pp}, dp={self.dp}, ep={self.ep} on {ranks} ranks; allowed: sizes from 1 whose product is "
                f"{ranks}, ep=0 for all that pp and dp leave"
            )
        return pp, dp, ep

    def program(self, microbatches: int) -> Program:
        """Return the program of an optimizer step; ValueError if ``gradient_accumulation_steps`` does not fit."""
        try:
            return build_schedule(self.schedule, ranks=self.pp, microbatches=microbatches)
        except ValueError as error:
            raise ValueError(
                f"schedule={self.schedule!r} with pp={self.pp} and gradient_accumulation_steps={microbatches}: {error}"
            ) from None


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("fp16", "fp16_full_eval", "bf16_full_eval"), ((False,), "bf16=True, or neither")),
    "torch_compile": ((False,), "compiled layers inside the model"),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "parallelism_config"), ((None, "", [], False), "pp, dp and ep of OverlapArguments")
    ),
    "activation_offloading": ((False,), "recompute of OverlapArguments"),
    "auto_find_batch_size": ((False,), "a per_device_train_batch_size that fits"),
    "neftune_noise_alpha": ((None,), "None"),
    **dict.fromkeys(("use_liger_kernel", "eval_use_gather_object"), ((False,), "False")),
    "save_on_each_node": ((False,), "False, and an output_dir that all ranks see"),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        ((None,), "None, the engine sums gradients"),
    ),
    "debug": ((None, "", []), "none"),
}
"""Arguments of Trainer and SFTTrainer that cannot be honoured: their values that change nothing, and what to use."""


def with_checkpointing(args: Any, parallel: OverlapArguments) -> tuple[Any, OverlapArguments]:
    """Return the arguments with Trainer's activation checkpointing as ``recompute="block"``, and say so.

    With options that change what is computed again, such as ``every_n_layers``, the layers' own stays.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")  # the second is the older name
    own = any((getattr(args, f"{name}_kwargs", None) or {}).keys() - {"use_reentrant"} for name in names)
    if own or not any(getattr(args, name, False) for name in names):
        return args, parallel
    args = copy(args)  # another trainer's, too
    for name in names:
        setattr(args, name, False)
    if parallel.recompute == "none":
        parallel = replace(parallel, recompute="block")
        if args.process_index == 0:
            from transformers.utils import logging

            logging.get_logger(__name__).warning(
                "gradient_checkpointing=True is taken as recompute='block' of OverlapArguments: layers are computed "
                "again in the backward; with False they are not"
            )
    return args, parallel


def check_arguments(args: Any, parallel: OverlapArguments) -> None:
    """Raise ValueError for arguments of Trainer that an engine cannot honour."""
    for name, (harmless, instead) in REFUSED.items():
        if (value := getattr(args, name, harmless[0])) not in harmless:
            raise ValueError(f"{name}={value!r} under an overlapped trainer; allowed: {instead}")
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in ("lomo", "adalomo") or optim.endswith("_layerwise"):
        raise ValueError(f"optim={optim!r} steps inside the backward; allowed: an optimizer that steps after it")
    if parallel.pp > 1 and args.train_sampling_strategy == "batch_rebalance":
        raise ValueError("train_sampling_strategy='batch_rebalance' with pp > 1; allowed: another strategy, or pp=1")
    if args.accelerator_config.dispatch_batches:
        raise ValueError("dispatch_batches=True; allowed: False or None, every rank reads its own data")
