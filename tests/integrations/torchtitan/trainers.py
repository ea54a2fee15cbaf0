"""torchtitan's own trainer over its debug models, and the same under the engine."""

import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import overlap1f1b as o1
from overlap1f1b.plan import Op, StageShape
from tests.integrations.torchtitan import on_cpu

SEQUENCES, MICRO, TOKENS, STEPS, EXPERTS = 4, 1, 20, 3, 8
STOPPED = 2
"""Step after which a run that resumes another goes on."""

FAMILIES = {"deepseek_v3": ("debugmodel", 3), "qwen3": ("debugmodel_moe", 2)}
"""The debug model with experts of each family, and how many of its layers are used."""


def own(folder: str, **case: Any) -> dict[str, Any]:
    """Return the case of torchtitan's own trainer, which runs a microbatch after the other."""
    run = "own " + " ".join(f"{key}={case[key]}" for key in sorted(case))
    return {"folder": folder, "run": run, "batch": case.get("micro", MICRO), "total": SEQUENCES, **case}


def train(rank: int, size: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what torchtitan's trainer logs in each case, and what the engine has played."""
    on_cpu.install_trainer()
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(size)}
    return [_train(rank, **case) for case in cases]


def ours_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ``pipelining_fn``: options of the engine stand in one object."""
    apart = {name: given[name] for name in ("schedule", "extra_warmup", "split", "dispatcher") if name in given}
    options = o1.EngineOptions(**{name: value for name, value in given.items() if name not in apart})
    return {**apart, "options": options}


def _train(
    rank: int, *, by: str = "torchtitan", options: dict[str, Any] | None = None, writes: bool = False, **case: Any
) -> dict[str, Any]:
    """Train ``by`` "torchtitan", or "pipelining_fn" or "mixin" with ``options``; or write the first weights.

    With ``writes`` the last weights are written, too; for ``case`` see :func:`config_of`.
    """
    from torchtitan.trainer import Trainer

    class OverlapTrainer(o1.integrations.torchtitan.Overlapped, Trainer):  # type: ignore[misc]
        pass

    config = config_of(**case)
    if by == "pipelining_fn" or options:
        ours = partial(o1.integrations.torchtitan.pipelining_fn, **ours_of(options or {}))
        config = replace(config, model_spec=replace(config.model_spec, pipelining_fn=ours))
    trainer = OverlapTrainer(config) if by == "mixin" else config.build()
    try:
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            return {}
        if not writes and not case.get("saves"):
            trainer.checkpointer.save = lambda *_, **__: None
        logged: dict[str, Any] = {"loss": [], "norm": [], "valid": []}

        def log(step: int, mean: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
            logged["loss"].append(mean)
            logged["norm"].append(norm)

        trainer.metrics_processor.log = log
        trainer.metrics_processor.log_validation = lambda loss, step: logged["valid"].append(loss)
        trainer.train()
        if by != "torchtitan":
            engine = trainer.pp_schedule.engine
            logged["ops"] = Counter(node.op.name for node in engine.plan.ranks[engine.mesh.rank("pp")])
            logged["cut"] = [exchanges_of(shape) for shape in engine.shapes]
            engine.close()
        return logged
    finally:
        trainer.close()
        gc.enable()  # torchtitan collects at steps of its own


def exchanges_of(shape: StageShape) -> int:
    """Return how often a stage's forward exchanges rows."""
    return sum(op in (Op.DISPATCH, Op.COMBINE) for block in shape for op in block.exchanges)


def config_of(
    *,
    folder: str,
    run: str = "seed",
    family: str = "deepseek_v3",
    seed: bool = False,
    steps: int = STEPS,
    batch: int = SEQUENCES,
    total: int = -1,
    micro: int = MICRO,
    dtype: str = "float32",
    chunked: bool = False,
    checkpointing: str = "",
    validates: bool = False,
    saves: bool = False,
    resumes: str | None = None,
    pp: int = 1,
    ep: int = 1,
    tp: int = 1,
    schedule: str = "1F1B",
    backend: str = "partial_dtensor",
) -> Any:
    """Return a config of torchtitan's trainer over packed documents, from the weights that a seed checkpoint has.

    A ``run`` is a folder in ``folder``. ``seed`` writes the first weights instead; ``chunked``, the loss calls the head
    by parts; it ``saves`` everything after each step, and ``resumes`` another run after its second. ``batch`` are
    sequences of a rank and call, ``micro`` of a microbatch, ``total`` of a step, -1 for one call; ``backend`` is the
    ``spmd_backend``.
    """
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.validate import Validator
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.trainer import Trainer

    flavour, layers = FAMILIES[family]
    spec = import_module(f"torchtitan.models.{family}").model_registry(flavour)
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        _make_smaller(layer)
    loss: Any = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    data = _packed_documents()
    where, begin = Path(folder) / family, 0 if resumes is None else STOPPED
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=4) if chunked else loss,
        dump_folder=str(where if seed else where / run),
        tokenizer=_tokenizer(),
        dataloader=data(),
        validator=Validator.Config(enable=validates, freq=1, steps=1, dataloader=data(first=1000)),
        metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=default_adamw(lr=1e-3, eps=1e-5),  # a smaller one enlarges the last bits of small gradients
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=batch,
            global_batch_size=total,
            seq_len=TOKENS,
            steps=steps,
            mixed_precision_param=dtype,
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=pp,
            expert_parallel_degree=ep,
            tensor_parallel_degree=tp,
            data_parallel_shard_degree=-1,
            pipeline_parallel_schedule=schedule,
            pipeline_parallel_microbatch_size=micro,
            spmd_backend=backend,
        ),
        activation_checkpoint={"": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[checkpointing],
        checkpoint=CheckpointManager.Config(
            enable=True,
            create_seed_checkpoint=seed,
            interval=1 if saves else 1000,
            last_save_model_only=not saves,
            initial_load_path=None if seed else str(where / (resumes or "") / "checkpoint" / f"step-{begin}"),
            initial_load_model_only=resumes is None,
        ),
        debug=DebugConfig(seed=1),
    )


def _make_smaller(layer: Any) -> None:
    """Leave it fewer and narrower experts, and a quarter of DeepSeek's heads: most of the time goes by weights."""
    if hasattr(layer.attention, "kv_lora_rank"):
        layer.attention.n_heads //= 4
        layer.attention.wq.out_features //= 4
        layer.attention.wkv_b.out_features //= 4
        layer.attention.wo.in_features //= 4
    if layer.moe is not None:
        moe, experts = layer.moe, layer.moe.routed_experts
        moe.num_experts = moe.router.num_experts = moe.router.gate.out_features = EXPERTS
        experts.inner_experts.num_experts = experts.token_dispatcher.num_experts = EXPERTS
        experts.inner_experts.hidden_dim = 64
        moe.router.top_k = experts.token_dispatcher.top_k = min(moe.router.top_k, 3)


def _tokenizer() -> Any:
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            self.eos_id = 0

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 0

    return NoTokenizer.Config()


def _packed_documents() -> Any:
    """Return the config of a loader: the same sequences in each step, however many ranks share them."""
    from torchtitan.components.dataloader import BaseDataLoader

    class PackedDocuments(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            first: int = 0
            infinite: bool = True

        def __init__(
            self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
        ) -> None:
            share = SEQUENCES // dp_world_size
            self.step, self.rows = config.first, range(dp_rank * share, (dp_rank + 1) * share)
            self.tokens, self.batch = seq_len, local_batch_size

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                every = [_document(self.step * SEQUENCES + row, self.tokens) for row in self.rows]
                self.step += 1
                for at in range(0, len(every), self.batch):
                    tokens, positions, labels = map(torch.stack, zip(*every[at : at + self.batch], strict=True))
                    yield {"input": tokens, "positions": positions}, labels

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.step = state_dict["step"]

    return PackedDocuments.Config


def _document(seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, positions of two documents in one sequence, and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 2048, (tokens + 1,), generator=generator)
    second = int(torch.randint(1, tokens, (), generator=generator))
    positions = torch.arange(tokens)
    positions[second:] -= second
    labels = text[1:].clone()
    labels[torch.rand(tokens, generator=generator) < seed % 5 / 6] = -100
    return text[:-1], positions, labels


def weights_of(folder: str, case: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights in the checkpoint that a run has written at its end."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    path = Path(folder) / case.get("family", "deepseek_v3") / case["run"] / "checkpoint" / f"step-{STEPS}"
    held: dict[str, Any] = _load_state_dict_from_keys(checkpoint_id=path)
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}
