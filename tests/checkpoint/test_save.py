"""Checkpoints: the same bits back, on any number of ranks, whatever was killed, and a clear word if they do not fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.checkpoint import folder as checkpoint_folder
from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.checkpoint.folder import latest
from overlap1f1b.engine import Engine
from overlap1f1b.moe import Experts
from overlap1f1b.schedule import build_schedule
from tests.checkpoint.test_state import equal
from tests.engines import make
from tests.ranks import RankError, Ranks, over, run
from tests.tiers import wide

EXPERTS = 4
CONFIG = {"hidden": 5, "sizes": (3, 2)}

State = dict[str, Tensor]


class Dense(nn.Linear):
    """A linear map with a frozen parameter and a buffer."""

    seen: Tensor

    def __init__(self, hidden: int, source: torch.Generator) -> None:
        super().__init__(hidden, 3)
        nn.init.normal_(self.weight, generator=source)
        nn.init.normal_(self.bias, generator=source)
        self.frozen = nn.Parameter(torch.randn(2, generator=source), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


class Slice(Experts):
    """Experts of one parameter, of which a rank has a slice."""

    def __init__(self, group: Any, source: torch.Generator) -> None:
        super().__init__()
        self.share(EXPERTS, group)
        self.mine = slice(self.exchange.rank * self.local_experts, (self.exchange.rank + 1) * self.local_experts)
        self.weight = nn.Parameter(torch.randn(EXPERTS, 3, 2, generator=source)[self.mine])


class Tiny(nn.Sequential):
    """A dense block and a slice of experts, with an optimizer of both."""

    def __init__(self, devices: DeviceMesh | None = None, *, hidden: int = 5, seed: int = 0) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.devices = devices
        self.dense = Dense(hidden, source)
        self.experts = Slice(None if devices is None else devices.get_group("ep"), source)
        self.adamw = torch.optim.AdamW([self.experts.weight, self.dense.weight, self.dense.bias], lr=0.1)

    def train_steps(self, first: int, count: int) -> Tiny:
        """AdamW steps with gradients that are a function of the step alone."""
        for step in range(first, first + count):
            source = torch.Generator().manual_seed(100 + step)
            for parameter in (self.dense.weight, self.dense.bias):
                parameter.grad = torch.randn(parameter.shape, generator=source)
            grad = torch.randn(EXPERTS, 3, 2, generator=source)
            self.experts.weight.grad = grad[self.experts.mine].contiguous()
            self.adamw.step()
            self.dense.seen += 1
        return self

    def state(self) -> State:
        """Everything that a checkpoint must bring back."""
        moments = {
            f"{name}.{entry}": value
            for name, parameter in self.named_parameters()
            for entry, value in self.adamw.state.get(parameter, {}).items()
        }
        return {name: tensor.detach().clone() for name, tensor in (self.state_dict() | moments).items()}

    def engine(self) -> Engine:
        program = build_schedule("sequential", ranks=1, microbatches=1)
        return make(self, program, mesh=self.devices, loss_fn=torch.mean, timeout=30.0)

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return save_checkpoint(self.engine(), folder, step, self.adamw, **({"config": CONFIG} | options)).result()

    def load(self, path: Path | None, config: dict[str, Any] = CONFIG) -> int:
        assert path is not None
        return load_checkpoint(self.engine(), path, self.adamw, config=config)


def joined(slices: list[State]) -> State:
    """The state of one rank that holds all experts, of the states of several."""
    whole = dict(slices[0])
    for key, value in whole.items():
        if key.startswith("experts") and value.ndim:
            whole[key] = torch.cat([one[key] for one in slices])
        else:
            assert all(torch.equal(one[key], value) for one in slices), key
    return whole


def ep(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))


# What the ranks run.


def save_on(rank: int, size: int, folder: Path) -> State:
    model = Tiny(ep(size)).train_steps(0, 3)
    model.save(folder, 3)
    return model.state()


def load_on(rank: int, size: int, folder: Path) -> State:
    model = Tiny(ep(size), seed=1)
    assert model.load(latest(folder)) == 3
    return model.state()


def killed_on(rank: int, size: int, folder: Path, victim: int) -> None:
    """`victim` is killed: rank 0 when all have written and nothing is renamed, rank 1 instead of writing."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    model = Tiny(ep(size)).train_steps(0, 4)
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(*[(checkpoint_folder, "_fingerprint"), (FileSystemWriter, "write_data")][rank], die)
        model.save(folder, 4)


# The same bits.


@pytest.mark.parametrize("stored", ["trained", *wide("none")])
def test_what_is_not_stored_stays_as_it_is(stored: str, tmp_path: Path) -> None:
    model = Tiny().train_steps(0, 3)
    model.save(tmp_path, 3, model=stored)
    other = Tiny(seed=1)
    before, wanted = other.state(), model.state()
    assert other.load(tmp_path) == 3
    left = {"dense.frozen"} if stored == "trained" else before.keys() & model.state_dict().keys()
    assert equal(other.state(), wanted | {name: before[name] for name in left})
    assert not equal(other.state(), wanted)


@over(2)
def test_everything_is_stored_once_and_whole(rank: int, size: int, tmp_path: Path) -> None:
    path = Tiny(ep(size)).train_steps(0, 1).save(tmp_path, 1)
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    shapes = {key: (list(m.size), len(m.chunks)) for key, m in metadata.items() if isinstance(m, TensorStorageMetadata)}
    assert shapes["model.experts.weight"] == ([EXPERTS, 3, 2], 2)
    assert shapes["optimizer.experts.weight.exp_avg"] == ([EXPERTS, 3, 2], 2)
    assert shapes["model.dense.weight"] == ([3, 5], 1)
    assert len(shapes) == 5 + 3 * 2
    files = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert files < 1.1 * sum(entry.length for entry in FileSystemReader(path).read_metadata().storage_data.values())


def test_a_state_like_a_parameter_of_one_number_is_a_tensor_too(tmp_path: Path) -> None:
    """In another run the parameter may be a DTensor."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    engine = Engine(nn.Sequential(model), build_schedule("sequential", microbatches=2))
    path = save_checkpoint(engine, tmp_path, 1, optimizer).result()
    index = FileSystemReader(path).read_metadata().state_dict_metadata
    assert {key for key in index if key.startswith("optimizer.0.bias")} == {
        "optimizer.0.bias.exp_avg",
        "optimizer.0.bias.exp_avg_sq",
    }


def test_the_same_bits_on_any_number_of_ranks(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    whole = joined(ranks2.run(save_on, tmp_path / "two"))
    one = Tiny(seed=1)
    assert one.load(latest(tmp_path / "two")) == 3
    assert equal(one.state(), whole)
    for ranks in (ranks2, ranks4):
        assert equal(joined(ranks.run(load_on, tmp_path / "two")), whole)
    assert not equal(whole, Tiny(seed=1).state())
    assert {"experts.weight.exp_avg", "experts.weight.step", "dense.bias.exp_avg_sq", "dense.seen"} <= whole.keys()
    one.save(tmp_path / "one", 3)
    assert equal(joined(ranks2.run(load_on, tmp_path / "one")), whole)


def test_before_the_first_step(tmp_path: Path) -> None:
    fresh = Tiny()
    fresh.save(tmp_path, 0)
    other = Tiny(seed=1)
    assert other.load(tmp_path / "empty") == 0
    assert other.load(latest(tmp_path)) == 0
    assert equal(other.state(), fresh.state())
    assert equal(other.train_steps(0, 2).state(), Tiny().train_steps(0, 2).state())


# The folder.


def test_nothing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tiny().train_steps(0, 1).save(tmp_path, 1)
        Tiny().load(latest(tmp_path))
    assert capfd.readouterr() == ("", "")


def test_a_state_of_the_optimizer_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    """As the lists of tensors of LBFGS, SOAP and others."""
    model = nn.Sequential(nn.Linear(2, 2))
    engine, optimizer = Engine(model, build_schedule("sequential", microbatches=2)), torch.optim.SGD(model.parameters())
    for value in ([torch.ones(2)], "a text"):
        optimizer.state[model[0].bias]["old_dirs"] = value
        kind = type(value).__name__
        message = f"^the optimizer's old_dirs of 0.bias is of type {kind}; allowed: a tensor, a number, or a list of "
        with pytest.raises(ValueError, match=message):
            save_checkpoint(engine, tmp_path, 1, optimizer)
    assert not [*tmp_path.glob("step-*")]


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    model = Tiny()
    with pytest.raises(ValueError, match=r"^directory=3; allowed: str or PathLike$"):
        model.save(3, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^engine=3; allowed: Engine$"):
        load_checkpoint(3, tmp_path, model.adamw)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep=0; allowed: 1 or more"):
        model.save(tmp_path, 1, keep=0)
    with pytest.raises(ValueError, match="model='some'; allowed: all, trained, none"):
        model.save(tmp_path, 1, model="some")
    for config in (["a"], "abc", 5):
        with pytest.raises(ValueError, match="allowed: JSON values"):
            model.save(tmp_path, 1, config=config)
    assert os.listdir(tmp_path) == []


@over(2)
def test_sliced_parameters_under_other_names_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    model = Tiny(ep(size))

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        for name in [name for name in state if "expert" in name]:
            state[f"{name}.slice"] = state.pop(name)

    model.register_state_dict_post_hook(rename)
    with pytest.raises(
        ValueError, match="of which ranks have slices; allowed: a state_dict with the parameters' names"
    ):
        model.save(tmp_path, 1)


# Killed, or out of disk.


def kill_at(folder: Path, left: int) -> None:
    """Let this process end at so many uses of a folder of the file system from now."""

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if (event == "open" or event.startswith(("os.", "shutil."))) and args and str(folder) in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def kill_at_each_event(rank: int, size: int, start: Path, step: int, keep: int) -> list[tuple[int, list[str]]]:
    """Save `step` again and again from the folder `start`, each time killed at a later use of the file system.

    What comes back for each kill: the state that the newest checkpoint has (how many steps it was trained for), and
    what lies in the folder after the same save and one more.
    """
    outcomes = []
    for last in range(1, 1000):
        folder = start.with_name(f"killed-{last}")
        shutil.copytree(start, folder)
        child = os.fork()
        if child == 0:
            model = Tiny().train_steps(0, 2)
            kill_at(folder, last)
            model.save(folder, step, keep=keep)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
        for path in [*folder.glob("step-*"), latest(folder), folder]:  # the last one may have another name then
            model = Tiny(seed=1)
            model.load(path)
            trained = int(model.dense.seen)
            assert equal(model.state(), Tiny().train_steps(0, trained).state())
        model.save(folder, step, keep=keep)
        model.save(folder, 9, keep=1)
        outcomes.append((trained, os.listdir(folder)))
    return outcomes


@pytest.mark.parametrize(("step", "keep"), [(2, 1), *wide((1, 1))], ids=["in place of", "the same step"])
def test_killed_at_any_moment_of_a_save(tmp_path: Path, step: int, keep: int) -> None:
    Tiny().train_steps(0, 1).save(tmp_path / "start", 1)
    (outcomes,) = run(kill_at_each_event, 1, tmp_path / "start", step, keep)
    trained = [steps for steps, _ in outcomes]
    assert len(outcomes) > 10
    assert trained == sorted(trained)
    assert set(trained) == {1, 2}  # the old one until the rename, the new one from then on
    assert all(names == ["step-00000009"] for _, names in outcomes)


def test_the_only_checkpoint_survives_a_second_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kill was between the renames of a save of the same step; the second save fails before its rename."""
    saved = Tiny().train_steps(0, 1)
    saved.save(tmp_path, 1).rename(tmp_path / ".replaced-step-00000001")

    def fail(_: Path) -> None:
        raise OSError("disk gone")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "_fingerprint", fail)
        with pytest.raises(OSError, match="disk gone"):
            Tiny().save(tmp_path, 1)
    model = Tiny(seed=1)
    assert model.load(tmp_path) == 1
    assert equal(model.state(), saved.state())


@pytest.mark.parametrize("victim", [0, *wide(1)])
def test_a_rank_killed_before_all_have_written_and_renamed(ranks2: Ranks, tmp_path: Path, victim: int) -> None:
    saved = ranks2.run(save_on, tmp_path)
    with pytest.raises(RankError, match=f"rank {victim}: died, exit code -9"):
        run(killed_on, 2, tmp_path, victim)
    assert sorted(os.listdir(tmp_path)) == [".step-00000004.unfinished", "step-00000003"]
    assert equal(joined(ranks2.run(load_on, tmp_path)), joined(saved))
    ranks2.run(save_on, tmp_path)
    assert os.listdir(tmp_path) == ["step-00000003"]


@over(2)
def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(rank: int, size: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file is a file; allowed: a folder that can be written"):
        Tiny(ep(size)).save(tmp_path / "file", 3)


# What does not fit.


def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    path = Tiny().train_steps(0, 1).save(tmp_path, 1)
    half, more, less = Tiny(), Tiny(), Tiny()
    half.experts.bfloat16()
    more.dense.extra = nn.Parameter(torch.zeros(1))
    less.adamw = torch.optim.AdamW([less.experts.weight])
    for other, has, this in (
        (Tiny(hidden=6), "model.dense.weight=torch.float32[3, 5]", "torch.float32[3, 6]"),
        (half, "experts.weight=torch.float32[4, 3, 2]", "torch.bfloat16[4, 3, 2]"),
        (more, "model.dense.extra=none", "torch.float32[1]"),
        (less, "optimizer.dense.weight.exp_avg=", "none"),
    ):
        with pytest.raises(ValueError, match=f"has .*{re.escape(has)}.*, this run has .*={re.escape(this)}; "):
            other.load(path)
    with pytest.raises(ValueError, match=r"checkpoint .*step-nowhere does not exist"):
        Tiny().load(tmp_path / "step-nowhere")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@over(2)
def test_a_damaged_checkpoint(rank: int, size: int, tmp_path: Path) -> None:
    """All ranks say so; test_folder.py has every kind of damage."""
    model = Tiny(ep(size))
    path = model.save(tmp_path, 3)
    for name, harm, why in (("__1_0.distcp", flip, "has other bytes"), (".metadata", Path.unlink, "cannot be read")):
        dist.barrier()
        if rank == 0:
            harm(path / name)
        dist.barrier()
        with pytest.raises(ValueError, match=rf"step-00000003 is damaged: {re.escape(name)} {why}"):
            model.load(path)


def test_an_index_of_another_release_of_torch(tmp_path: Path) -> None:
    """The bytes are those that were written; the classes in the pickle are not there."""
    path = Tiny().save(tmp_path, 1)
    index = (path / ".metadata").read_bytes()
    content = index.replace(b"TensorStorageMetadata", b"TensorStorageMetaDATA")
    assert content != index
    (path / ".metadata").write_bytes(content)
    config = json.loads((path / "config.json").read_text())
    config["files"][".metadata"] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    del config["crc32"]
    (path / "config.json").write_text(json.dumps({"crc32": zlib.crc32(json.dumps(config).encode()), **config}))
    why = re.escape(f"is damaged: torch {torch.__version__} cannot read its index (AttributeError); remove it")
    with pytest.raises(ValueError, match=why):
        Tiny().load(path)


class Counts(nn.Linear):
    """A linear map whose extra state is a tensor of ``kept`` numbers, made anew each time, or what ``kept`` is."""

    def __init__(self, kept: Any) -> None:
        super().__init__(2, 2)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return torch.arange(self.kept) if isinstance(self.kept, int) else self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = int(state[-1]) + 1


def test_extra_states_of_modules_come_back(tmp_path: Path) -> None:
    program = build_schedule("sequential", microbatches=2)
    for kept in (5, 0):
        model = nn.Sequential(nn.Linear(2, 2), Counts(kept))
        engine, optimizer = Engine(model, program), torch.optim.SGD(model.parameters(), 0.1)
        if kept:
            save_checkpoint(engine, tmp_path, 1, optimizer)
        else:
            assert load_checkpoint(engine, tmp_path, optimizer) == 1
            assert model[1].kept == 5  # type: ignore[comparison-overlap]
    model = nn.Sequential(Counts({"a": 1}))
    engine, optimizer = Engine(model, program), torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="_extra_state of the model's state_dict is of type dict; allowed: a tensor"):
        save_checkpoint(engine, tmp_path / "other", 1, optimizer)
