"""Checkpoints of an engine: the optimizer goes on as it was, over any layout; a failure is told to all ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from overlap1f1b.engine import Saving, load_checkpoint, save_checkpoint
from overlap1f1b.engine.checkpoint import folder as checkpoint_folder
from overlap1f1b.engine.checkpoint import load, save
from overlap1f1b.engine.checkpoint.held import Held
from overlap1f1b.engine.checkpoint.optimizer import Table
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.engines import COSTS, make
from tests.ranks import Ranks, run

ROWS = 8
LAYOUTS: list[dict[str, int]] = [{"pp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}, {"pp": 2, "dp": 2}]


class StepOnly(torch.optim.Optimizer):
    """Steps that shrink; its state is a whole number and no tensor."""

    def __init__(self, params: Any, lr: float, floor: float) -> None:
        super().__init__(params, {"lr": lr, "floor": floor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    done = self.state[parameter].get("step", 0)
                    parameter.sub_(max(group["lr"] / (1 + done), group["floor"]) * parameter.grad)
                    self.state[parameter]["step"] = done + 1


class Rows(torch.optim.Optimizer):
    """Adagrad with one sum for each row of a matrix, made at its first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state, square = (
                        self.state[parameter],
                        parameter.grad.square().flatten(1 if parameter.ndim > 1 else 0),
                    )
                    state["sum"] = state.get("sum", 0.1) + square.sum(-1)
                    scale = state["sum"].sqrt().view(*state["sum"].shape, *[1] * (parameter.ndim - state["sum"].ndim))
                    parameter.sub_(group["lr"] * parameter.grad / scale)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.9), amsgrad=True, weight_decay=0.0),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.3),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, weight_decay=0.0),
    "plain SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "step": lambda groups: StepOnly(groups, lr=0.1, floor=1e-3),
    "rows": lambda groups: Rows(groups, lr=0.1),
}


def layouts(name: str) -> list[dict[str, int]]:
    """Over which a checkpoint of an optimizer goes on, one after another: over all, and of the first tier over two."""
    return LAYOUTS[:2] if name == "AdamW" else LAYOUTS


class Spare(models.Block):
    """With a parameter that never has a gradient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spare = nn.Parameter(torch.ones(3, 2))


def build(group: Any = None) -> nn.Sequential:
    """The second of two ranks has experts that no token meets."""
    return models.build(group, layers=2, choose=(models.first_experts,), block=Spare)


class Run:
    """Training on the same rows in every step, whatever the layout, with a learning rate for each kind of parameter."""

    def __init__(
        self, layout: dict[str, int], optimizer: str = "AdamW", *, lr: float = 0.02, limit: float = 20.0
    ) -> None:
        mesh, at = None, {}
        if layout:
            mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
            at = dict(zip(layout, mesh.get_coordinate() or (), strict=True))
        self.shards = layout.get("dp", 1) * layout.get("ep", 1)
        self.shard = at.get("dp", 0) * layout.get("ep", 1) + at.get("ep", 0)
        model = build(mesh.get_group("ep") if mesh is not None and layout.get("ep", 1) > 1 else None)
        program = build_schedule("1f1b", ranks=layout.get("pp", 1), microbatches=2)
        self.engine = make(model, program, mesh=mesh, costs=COSTS, timeout=limit)
        self.optimizer = OPTIMIZERS[optimizer](self.groups(lr))

    def groups(self, lr: float) -> list[dict[str, Any]]:
        every = list(self.engine.parameters())
        return [
            {"params": [p for p in every if p.ndim > 1], "lr": lr},
            {"params": [p for p in every if p.ndim == 1], "lr": lr / 4, "name": "vectors"},
            {"params": [], "lr": lr / 8},
        ]

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            tokens, target = (rows.chunk(self.shards)[self.shard] for rows in models.batch(ROWS // 2))
            losses.append(self.engine.mean_loss(self.engine.step(tokens, target=target)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def save(self, folder: Path, step: int = 2, **options: Any) -> Saving:
        return save_checkpoint(self.engine, folder, step, self.optimizer, **options)

    def load(self, folder: Path) -> int:
        return load_checkpoint(self.engine, folder, self.optimizer)


# The optimizer goes on as it was.


def _over_layouts(
    rank: int, size: int, name: str, start: Path, folder: Path
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Losses behind a checkpoint of one process that goes over layouts, and behind one of each layout, here and there.

    Those of the first layout come first, then those of the second.
    """
    losses: dict[str, list[float]] = {}
    further: list[list[float]] = []
    source = start
    for number, layout in enumerate(layouts(name)):
        run = Run(layout, name, lr=3.0)
        if number:
            assert run.load(folder / f"trained{number - 1}") == 4
            further.append(run.train(2))
        assert run.load(source) == 2
        assert run.rates == [0.02, 0.005, 0.0025]
        run.save(source := folder / f"over{number}")
        losses[str(layout)] = run.train(2)
        if number + 1 < len(layouts(name)):
            run.save(folder / f"trained{number}", 4)
            further.append(run.train(2))
    return losses, further


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_over_other_layouts(ranks4: Ranks, tmp_path: Path, name: str) -> None:
    """One parameter is never updated, in one process and on several ranks."""
    first = Run({}, name)
    start = first.train(2)
    first.save(tmp_path / "start")
    unbroken = first.train(2)
    assert unbroken[-1] < start[0]
    again = Run({}, name, lr=3.0)
    again.load(tmp_path / "start")
    assert again.train(2) == unbroken
    for losses, further in ranks4.run(_over_layouts, name, tmp_path / "start", tmp_path):
        assert losses == dict.fromkeys(losses, pytest.approx(unbroken, rel=2e-5))
        assert len(losses) == len(further) // 2 + 1 == len(layouts(name))
        for here, there in zip(further[::2], further[1::2], strict=True):
            assert there == pytest.approx(here, rel=2e-5)
    again = Run({}, name, lr=3.0)
    again.load(tmp_path / f"over{len(layouts(name)) - 1}")
    assert again.train(2) == unbroken
    again.load(tmp_path / "trained0")
    assert again.train(2) == pytest.approx(further[0], rel=2e-5)


class Few(Run):
    """Of the parameters on the second of two stages that are optimized none is ever updated."""

    def groups(self, lr: float) -> list[dict[str, Any]]:
        return [{"params": [p for p in self.engine.parameters() if p.shape in ((3, 2), (models.V, 20))][:3], "lr": lr}]


def _few(rank: int, size: int, name: str, folder: Path) -> tuple[bool, list[float]]:
    run = Few({"pp": size}, name)
    few = [p for p in run.engine.parameters() if p.shape == (3, 2) or rank == 0]
    run.optimizer = OPTIMIZERS[name]([{"params": few, "lr": run.optimizer.param_groups[0]["lr"]}])
    run.train(2)
    run.save(folder)
    return any(run.optimizer.state.values()), run.train(2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stage_that_was_never_updated(ranks2: Ranks, tmp_path: Path, name: str) -> None:
    (_, unbroken), (updated, _) = ranks2.run(_few, name, tmp_path)
    assert updated == (name == "Adagrad")
    stage, spare = 3, (3, 2)
    one = Few({}, name, lr=3.0)
    blocks = enumerate(one.engine.model)
    one.optimizer.param_groups[0]["params"] = [
        p for n, b in blocks for p in b.parameters() if n < stage or p.shape == spare
    ]
    one.load(tmp_path)
    assert one.train(2) == pytest.approx(unbroken, rel=2e-5)


def _updated_on_one_rank(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Slices with two, one and no updates: the most count, and rows without a state are zeros."""
    run = Run({"ep": size})
    experts = next(p for p in run.engine.parameters() if p.ndim == 3)
    for step in range(2):
        if rank >= 2 - step and rank < 3:
            experts.grad = torch.full_like(experts, 1.0 + rank)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.save(folder)
    return dict(run.optimizer.state.get(experts, {}))


def test_the_slice_with_most_updates_counts(ranks4: Ranks, tmp_path: Path) -> None:
    states = ranks4.run(_updated_on_one_rank, tmp_path)
    assert [float(state.get("step", 0)) for state in states] == [0, 1, 2, 0]
    one = Run({})
    one.load(tmp_path)
    state = one.optimizer.state[next(p for p in one.engine.parameters() if p.ndim == 3)]
    assert float(state["step"]) == 2
    for part, there in zip(state["exp_avg"].chunk(4), states, strict=True):
        assert torch.equal(part, there.get("exp_avg", torch.zeros_like(part)))


# The numbers of the groups.


def _schedule(run: Run, last: int = -1) -> LambdaLR:
    return LambdaLR(run.optimizer, lambda step: 1 / (1 + step), last_epoch=last)


def test_a_schedule_of_the_learning_rate_goes_on(tmp_path: Path) -> None:
    first = Run({})
    schedule = _schedule(first)
    for _ in range(3):
        first.train(1)
        schedule.step()
    first.save(tmp_path, 3)
    again = Run({}, lr=3.0)
    again.load(tmp_path)
    resumed = _schedule(again, last=2)
    for _ in range(3):
        assert again.rates == pytest.approx(first.rates, rel=1e-12)
        schedule.step()
        resumed.step()
    assert resumed.base_lrs == schedule.base_lrs == [0.02, 0.005, 0.0025]


class ByBlock(Run):
    """A learning rate for each block: a rank has as many groups as it has blocks."""

    def groups(self, lr: float) -> list[dict[str, Any]]:
        held = {block for stage in self.engine.stages.values() for block in stage.blocks}
        blocks = enumerate(self.engine.model)
        return [{"params": list(b.parameters()), "lr": lr * 2**-n} for n, b in blocks if b in held]


def _by_block(rank: int, size: int, start: Path, folder: Path) -> list[float]:
    run = ByBlock({"pp": size}, lr=3.0)
    run.load(start)
    run.save(folder)
    return run.rates


def test_groups_that_are_others_on_every_stage(ranks2: Ranks, tmp_path: Path) -> None:
    one = ByBlock({}, lr=0.5)
    one.train(1)
    one.save(tmp_path / "one")
    rates = ranks2.run(_by_block, tmp_path / "one", tmp_path / "two")
    assert [len(one) for one in rates] == [3, 2]
    assert [*rates[0], *rates[1]] == one.rates == [0.5 * 2**-n for n in range(5)]
    again = ByBlock({}, lr=3.0)
    again.load(tmp_path / "two")
    assert again.rates == one.rates


def _other_groups(rank: int, size: int, folder: Path, count: int) -> str:
    run = Run({"pp": size}, lr=3.0)
    run.optimizer = torch.optim.AdamW([{"params": list(run.engine.parameters())}] + [{"params": []}] * (count - 1))
    before = [p.detach().clone() for p in run.engine.parameters()]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        run.load(folder)
    assert all(torch.equal(*pair) for pair in zip(before, run.engine.parameters(), strict=True))
    return str(refused.value)


def test_other_groups_are_refused(ranks2: Ranks, tmp_path: Path) -> None:
    Run({}).save(tmp_path, 7)
    path = f"checkpoint {tmp_path}/step-00000007"
    text = (
        f"{path}: the optimizer has 2 parameter groups, the checkpoint has 3; allowed: the same groups as it was saved"
    )
    assert ranks2.run(_other_groups, tmp_path, 2) == [f"rank pp 0: {text} with"] * 2
    (one, other) = ranks2.run(_other_groups, tmp_path, 3)
    assert one == other
    assert re.search(
        r"rank pp 0: checkpoint .*: group 0 of the optimizer has .* for which the checkpoint has lr=0.02 and lr", one
    )


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    run = Run({})
    run.optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2, 9))])
    with pytest.raises(
        ValueError, match=r"the optimizer has a parameter of shape \[2, 9\] that this rank's model does not have"
    ):
        run.save(tmp_path)
    assert os.listdir(tmp_path) == []


# What fails on one rank.


def _part_of_the_world(rank: int, size: int, folder: Path) -> list[str]:
    texts = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))["pp"]
    for layout in (mesh, None):
        program = build_schedule("1f1b", ranks=1 if layout is None else 2, microbatches=2)
        engine = make(build(), program, mesh=layout, costs=COSTS, timeout=20.0)
        optimizer = torch.optim.AdamW(engine.parameters())
        for call in (
            lambda: save_checkpoint(engine, folder, 1, optimizer),  # noqa: B023
            lambda: load_checkpoint(engine, folder, optimizer),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"^[^\n]*allowed: a mesh of all ranks$") as refused:
                call()
            texts.append(re.sub(r".*: the engine", "the engine", str(refused.value)))
    return texts


def test_a_mesh_of_some_ranks_is_refused(ranks4: Ranks, tmp_path: Path) -> None:
    for texts in ranks4.run(_part_of_the_world, tmp_path / "new"):
        assert texts == [f"the engine's mesh has {n} of 4 ranks; allowed: a mesh of all ranks" for n in (2, 2, 1, 1)]
    assert not (tmp_path / "new").exists()


SAVING: dict[str, tuple[Any, str]] = {
    "model": (nn.Module, "state_dict"),
    "groups": (Held, "listed"),
    "folder": (save, "begin"),
    "plan": (DefaultSavePlanner, "create_local_plan"),
    "merge": (DefaultSavePlanner, "create_global_plan"),
    "write": (FileSystemWriter, "write_data"),
    "fingerprint": (save, "fingerprints"),
    "index": (FileSystemWriter, "finish"),
    "publish": (save, "publish"),
}
LOADING: dict[str, tuple[Any, str]] = {
    "latest": (checkpoint_folder, "_checkpoints"),
    "config": (load, "read_contents"),
    "files": (load, "check_files"),
    "model": (nn.Module, "state_dict"),
    "groups": (Table, "chosen"),
    "index": (FileSystemReader, "read_metadata"),
    "read": (FileSystemReader, "read_data"),
    "optimizer": (torch.optim.Optimizer, "load_state_dict"),
}
FIRST_ALONE = {"folder", "merge", "publish", "latest", "config"}
ERRORS: list[type[BaseException]] = [KeyError, OSError, ValueError, MemoryError]


def errors_on(victim: int, number: int) -> list[type[BaseException]]:
    """All where a rank does what the first does alone; on the others they take turns over the phases."""
    return [ERRORS[(number + victim // 2) % len(ERRORS)]] if victim else ERRORS


def _failing(rank: int, size: int, folder: Path, victim: int) -> dict[str, tuple[str, str]]:
    """For each phase and error the type and the text that the failure has on this rank."""
    found = {}
    run = Run({"pp": 2, "ep": size // 2})
    run.train(1)
    run.save(folder, 1)
    for name, phases, call in (
        ("save", SAVING, lambda: run.save(folder, 2)),
        ("load", LOADING, lambda: run.load(folder)),
    ):
        for number, (phase, (owner, attribute)) in enumerate(phases.items()):
            if victim and (phase in FIRST_ALONE or (name, phase) == ("save", "index")):
                continue
            for error in errors_on(victim, number):

                def fail(*_: Any, error: type[BaseException] = error, **__: Any) -> Any:
                    raise error("injected")

                with pytest.MonkeyPatch.context() as patch:
                    if rank == victim:
                        patch.setattr(owner, attribute, fail)
                    try:
                        call()
                    except Exception as caught:
                        found[f"{name} {phase} {error.__name__}"] = type(caught).__name__, str(caught)
    assert run.load(folder) == 1
    run.save(folder, 3)
    return found


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_what_fails_on_one_rank_is_raised_on_all(ranks4: Ranks, tmp_path: Path, victim: int) -> None:
    (first, *others) = ranks4.run(_failing, tmp_path, victim)
    assert all(other == first for other in others)
    assert len(first) == (11 if victim else 17 * len(ERRORS))
    for case, (kind, text) in first.items():
        name, phase, error = case.split()
        assert "\n" not in text
        if phase == "index" and name == "load":
            assert re.search(r"is damaged: torch \S+ cannot read its index", text)
            assert kind == "ValueError"
        elif (name, phase) == ("load", "read"):
            assert kind == "ValueError"
            assert f"is damaged: {error}: " in text
        else:
            assert "injected" in text
            wanted = {"OSError": "OSError", "ValueError": "ValueError"}.get(error, "RuntimeError")
            assert kind == ("OSError" if phase in ("write", "fingerprint") and error != "ValueError" else wanted)
        if error != "ValueError" or phase not in FIRST_ALONE | {"index"}:
            assert f"rank pp {victim // 2}, ep {victim % 2}: " in text


def _stopped(rank: int, size: int, folder: Path, phase: str) -> str:
    """Rank 1 is stopped in a phase; rank 0 gives up and lets it continue."""
    every: list[Any] = [None] * size
    dist.all_gather_object(every, os.getpid())
    return _stopped_in(*SAVING[phase], rank, every[1], folder)


def _stopped_in(owner: Any, attribute: str, rank: int, victim: int, folder: Path) -> str:
    run = Run({"pp": 2}, limit=2.0)
    run.train(1)
    whole = getattr(owner, attribute)

    def stop(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(owner, attribute, stop)
        try:
            run.save(folder)
        except RuntimeError as error:
            return str(error)
        finally:
            if rank == 0:
                os.kill(victim, signal.SIGCONT)
    return "saved"


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """The limit is the engine's, not that of the default group, which is the test's."""
    phases = ("groups", "plan", "write")
    with ThreadPoolExecutor(len(phases)) as pool:  # at the same time, for the ranks mostly wait
        runs = [pool.submit(run, _stopped, 2, tmp_path / phase, phase, timeout=100) for phase in phases]
    for phase, texts in zip(phases, runs, strict=True):
        silent = "no word, within 2 s, from rank pp 1: killed, stopped, ended or busy, or not there yet"
        why = f"checkpoint {tmp_path / phase}/step-00000002 cannot be written: the ranks along 'pp' did not meet"
        waited, was_stopped = texts.result()
        assert waited.startswith(f"{silent}; here: {why}"), waited
        assert was_stopped.startswith(why), was_stopped
