"""Training loops of transformers on tiny models: Trainer on one process, and overlapped trainers on ranks."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import Tensor

from overlap1f1b.engine import LostRankError
from overlap1f1b.integrations.transformers import OverlapArguments, Overlapped, OverlapTrainer
from overlap1f1b.plan import Node
from tests.integrations.transformers import tiny
from tests.ranks import Ranks

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
LAYOUTS = {
    "ep 2": (2, OverlapArguments(ep=2), 4),
    "pp 2 × ep 2": (4, OverlapArguments(pp=2), 4),
    "pp 2, dualpipev": (2, OverlapArguments(pp=2, schedule="dualpipev"), 4),
    "dp 2 × ep 2": (4, OverlapArguments(dp=2, ep=2), 2),
}
SHOWN = ("loss", "grad_norm", "learning_rate", "eval_loss")


class Sentences(torch.utils.data.Dataset[Any]):
    """Rows of different lengths; the first labels do not count. `pad` collates them."""

    def __init__(self, rows: int, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (rows,), generator=generator).tolist()
        self.rows = [torch.randint(3, tiny.V, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.rows[index].clone()
        labels[: 1 + index % 2] = -100
        return {"input_ids": self.rows[index], "labels": labels}


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same rows without a length."""

    def __init__(self, rows: Sentences) -> None:
        self.held = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.held[index] for index in range(len(self.held)))


def pad(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest row, which differs from batch to batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> Tensor:
        missing = [longest - len(row[name]) for row in rows]
        parts = [torch.nn.functional.pad(row[name], (0, n), value=value) for row, n in zip(rows, missing, strict=True)]
        return torch.stack(parts)

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


@dataclass
class Spec:
    """A run: its model, its data, and how it is trained."""

    folder: Path
    model: str | None = "qwen3_moe"
    config: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2  # as many as most layouts have stages
    rows: int = 44
    accumulation: int = 4
    steps: int = 3  # the second changes the weights: the first has a rate of zero
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    layout: OverlapArguments | None = None
    kind: Callable[..., Any] = OverlapTrainer  # with a layout a plain trainer is one under the mixin
    resume: str | None = None
    seed: int = 3
    on_meta: bool = False
    configures: Callable[..., Any] = transformers.TrainingArguments  # the class of the trainer's arguments

    def build(self) -> Any:
        """Return the trainer of this process."""
        chosen: dict[str, Any] = {
            "output_dir": str(self.folder),
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": self.accumulation,
            "max_steps": self.steps,
            "learning_rate": 3e-3,
            "adam_epsilon": 1e-5,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
        }
        arguments = self.configures(**{**chosen, **self.arguments})
        more = {} if self.layout is None else {"overlap_args": self.layout}
        with torch.device("meta" if self.on_meta else "cpu"):
            sizes = {"num_hidden_layers": self.layers, **self.config}
            model = None if self.model is None else tiny.build(self.model, seed=self.seed, **sizes)
        data: dict[str, Any] = {"train_dataset": Sentences(self.rows), "eval_dataset": Sentences(16, seed=9)}
        kind = self.kind if self.layout is None else mixed(self.kind)
        given = {"data_collator": pad, **data, **more, **self.trainer}
        return kind(model=model, args=arguments, **{name: value for name, value in given.items() if value is not None})


def mixed(kind: Any) -> Any:
    """Return a trainer under the mixin."""
    return kind if issubclass(kind, Overlapped) else type(f"Overlapped{kind.__name__}", (Overlapped, kind), {})


def history(trainer: Any) -> list[dict[str, float]]:
    """Return loss, gradient norm, rate and evaluations, in order."""
    return shown(trainer.state.log_history)


def shown(log: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the same of the log of a rank."""
    lines = [{name: line[name] for name in SHOWN if name in line} for line in log]
    return [line for line in lines if line]


def close(found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 5e-6) -> None:
    """Compare lines of :func:`shown`; ``tolerance`` is relative."""
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance)


def same_logs(every: list[list[dict[str, Any]]], expected: list[dict[str, float]], tolerance: float = 5e-6) -> None:
    """Compare the logs of ranks."""
    for found in every:
        close(shown(found), expected, tolerance)


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder of weights."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same_weights(folder: Path, other: Path | dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Compare the weights of two folders."""
    found, expected = weights(folder), weights(other) if isinstance(other, Path) else other
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= tolerance, name


@contextmanager
def launched(rank: int, size: int) -> Iterator[None]:
    """The environment of a launcher's process, for ranks that have a process group; nothing without one."""
    own: dict[str, object] = {}
    if dist.is_initialized():  # else accelerate would make a group of this process
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 1}
        own["MASTER_ADDR"] = "localhost"
    os.environ |= {name: str(value) for name, value in own.items()}
    _forget()
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(rank: int, size: int, spec: Spec, look: Callable[[Any], Any] | None = None) -> Any:
    """Train on this rank and save; return the log, or what ``look`` sees of the trainer."""
    with launched(rank, size):
        trainer = alone(spec)
        return list(trainer.state.log_history) if look is None else look(trainer)


def alone(spec: Spec) -> Any:
    """Train on this process and save; return the trainer."""
    _forget()
    trainer = spec.build()
    trainer.train(resume_from_checkpoint=spec.resume)
    trainer.save_model()
    return trainer


def plain(spec: Spec, shards: int = 1, **changes: Any) -> Any:
    """Trainer, or a plain one's own kind, on one process, with the microbatches of all ranks."""
    arguments = {**spec.arguments}
    if "per_device_eval_batch_size" in arguments:
        arguments["per_device_eval_batch_size"] *= shards
    accumulation = spec.accumulation * shards
    kind = spec.kind if not issubclass(spec.kind, Overlapped) else transformers.Trainer  # type: ignore[arg-type]
    own = {"kind": kind, "layout": None, "arguments": arguments, "accumulation": accumulation}
    return alone(replace(spec, folder=spec.folder / "plain", **{**own, **changes}))


def as_plain(spec: Spec, ranks: Ranks | None = None, shards: int = 1, **changes: Any) -> Any:
    """Compare the logs, of this process without ``ranks``, with those of :func:`plain`; return the latter's trainer."""
    expected = plain(spec, shards, **changes)
    every = [alone(spec).state.log_history] if ranks is None else ranks.run(train, spec)
    same_logs(every, history(expected))
    return expected


def counted(spec: Spec, microbatches: int) -> list[int]:
    """Return the tokens that count in each step, in the order in which Trainer reads the rows."""
    loader = replace(spec, kind=transformers.Trainer, layout=None, accumulation=1).build().get_train_dataloader()
    tokens: list[int] = []
    for epoch in range(spec.steps):
        loader.set_epoch(epoch)
        every = [int((batch["labels"][:, 1:] != -100).sum()) for batch in loader]
        tokens += [sum(every[start : start + microbatches]) for start in range(0, len(every), microbatches)]
    return tokens[: spec.steps]


def layers_of(layout: str) -> int:
    """Return as many layers as the layout has stages, at least two."""
    return 4 if layout == "pp 2, dualpipev" else 2


def refused(rank: int, size: int, spec: Spec) -> str:
    """Return the message of what is refused in training."""
    with launched(rank, size), pytest.raises((ValueError, LostRankError)) as caught:
        spec.build().train()
    return str(caught.value)


def played(rank: int, size: int, spec: Spec) -> tuple[list[dict[str, Any]], list[tuple[float, float]], list[Node]]:
    """Train; return the log, the exposed and the whole time of exchanges in each play, and the last plan's nodes."""
    with launched(rank, size):
        trainer = spec.build()
        engine, plays = trainer.engine, []
        play = engine.play

        def recorded(*args: Any, **kwargs: Any) -> Any:
            found = play(*args, **kwargs)
            plays.append((found.result.overlap.exposed, found.result.overlap.exchange))
            return found

        engine.play = recorded
        trainer.train()
        return list(trainer.state.log_history), plays, list(engine.plan.ranks[engine.mesh.rank("pp")])
