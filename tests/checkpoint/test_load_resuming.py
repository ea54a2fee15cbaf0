"""Checkpoints of an engine: the optimizer goes on as it was, over any layout; a failure is told to all ranks."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from overlap1f1b.checkpoint import folder as checkpoint_folder
from overlap1f1b.checkpoint import load_checkpoint, save, save_checkpoint
from overlap1f1b.checkpoint.optimizer import OptimizerTable
from overlap1f1b.checkpoint.shards import Shards
from overlap1f1b.moe import parameter_groups
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport import failures
from overlap1f1b.transport.failures import LostRankError
from tests import models
from tests.checkpoint.runs import Run as WholeRun
from tests.checkpoint.runs import placed
from tests.engines import COSTS, make
from tests.ranks import Ranks, over
from tests.tiers import wide

ROWS = 8
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"pp": 2}, {"ep": 2}],
    4: [{"pp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}, {"pp": 2, "dp": 2}],
}
"""Over which a checkpoint of an optimizer goes on, one after another, by the number of ranks."""


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


class Whitened(torch.optim.Optimizer):
    """Steps by matrices that it gathers of each weight, in lists and dicts, as Shampoo and SOAP do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                grad = parameter.grad.reshape(len(parameter), -1)
                state = self.state[parameter]
                if not state:
                    sides = [grad.new_zeros(size, size, dtype=torch.float64) for size in grad.shape]
                    state |= {
                        "sides": sides,
                        "kept": {"done": 0, 2: (torch.zeros_like(parameter), "by rows")},
                        "at": {1},
                    }
                left, right = (
                    side.mul_(0.5).add_(g @ g.T) for side, g in zip(state["sides"], (grad, grad.T), strict=True)
                )
                move = (left @ grad.double() @ right / (left.norm() * right.norm() + 1e-12)).to(parameter.dtype)
                moment, _ = state["kept"][2]
                parameter.sub_(group["lr"] * moment.mul_(0.5).add_(move.view_as(parameter)))
                state["kept"]["done"] += 1
                state["at"] = {state["kept"]["done"]}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.9), amsgrad=True, weight_decay=0.0),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.3),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, weight_decay=0.0),
    "plain SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "step": lambda groups: StepOnly(groups, lr=0.1, floor=1e-3),
    "Whitened": Whitened,
    "Adafactor apart": lambda groups: torch.optim.Adafactor(groups, weight_decay=0.0),
}
APART = {"Whitened", "Adafactor apart"}
"""Those for which each expert is a matrix of its own."""


class Spare(models.Block):
    """With a parameter that never has a gradient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.spare = nn.Parameter(torch.ones(3, 2))


def build(group: Any = None) -> nn.Sequential:
    """The second of two ranks has experts that no token meets."""
    return models.build(group, layers=2, choose=(models.first_experts,), block=Spare)


class Run(WholeRun):
    """Training on the same rows in every step, whatever the layout, with a learning rate for each kind of parameter."""

    state = None

    def __init__(
        self, layout: dict[str, int], optimizer: str = "AdamW", *, lr: float = 0.02, limit: float = 20.0
    ) -> None:
        self.shards = layout.get("dp", 1) * layout.get("ep", 1)
        mesh, group, self.shard = placed(layout)
        model = build(group)
        program = build_schedule("1f1b", ranks=layout.get("pp", 1), microbatches=2)
        self.engine = make(model, program, mesh=mesh, costs=COSTS, timeout=limit)
        self.apart = optimizer in APART
        self.optimizer = OPTIMIZERS[optimizer](self.groups(lr))

    def groups(self, lr: float) -> list[dict[str, Any]]:
        of = parameter_groups(self.engine) if self.apart else [{"params": self.engine.parameters()}]
        every = [p for group in of for p in group["params"]]
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


# The optimizer goes on as it was.


def _over_layouts(rank: int, size: int, name: str, folder: Path) -> list[float]:
    """Losses of two steps in each layout, from layout to layout; `idle` goes the same way, and nothing is trained."""
    losses = []
    idle = busy = folder / "start"
    for number, layout in enumerate(LAYOUTS[size]):
        run = Run(layout, name, lr=3.0)
        assert run.load(idle) == 3
        assert run.rates == [0.02, 0.005, 0.0025], run.rates
        run.save(idle := folder / f"idle{number}")
        run.load(busy)
        losses += run.train(2)
        run.save(busy := folder / f"busy{number}")
    return losses


@pytest.mark.parametrize(("size", "name"), [(2, "AdamW"), (2, "Whitened"), *wide(*((4, name) for name in OPTIMIZERS))])
def test_an_optimizer_goes_on_over_other_layouts(kept: dict[int, Ranks], tmp_path: Path, size: int, name: str) -> None:
    """One parameter is never updated, in one process and on several ranks."""
    first, last = Run({}, name), len(LAYOUTS[size]) - 1
    start = first.train(2)
    first.save(tmp_path / "start")
    unbroken = first.train(2 * len(LAYOUTS[size]) + 2)
    assert unbroken[-1] < start[0]
    tolerance = 5e-3 if name == "Adafactor" else 2e-5  # it clips updates by the rows that a rank has
    for losses in kept[size].run(_over_layouts, name, tmp_path):
        assert losses == pytest.approx(unbroken[:-2], rel=tolerance)
    again = Run({}, name, lr=3.0)
    for source in ("start", f"idle{last}"):
        again.load(tmp_path / source)
        assert again.train(2) == unbroken[:2]
    again.load(tmp_path / f"busy{last}")
    assert again.train(2) == pytest.approx(unbroken[-2:], rel=tolerance)


# The numbers of the groups.


def test_a_schedule_made_anew_goes_on_at_its_step(tmp_path: Path) -> None:
    """The groups have the rates that it began with."""

    def schedule(run: Run, last: int) -> LambdaLR:
        return LambdaLR(run.optimizer, lambda step: 1 / (1 + step), last_epoch=last)

    first, again = Run({}), Run({}, lr=3.0)
    schedules = [schedule(first, -1)]
    first.train(1)
    schedules[0].step()
    first.save(tmp_path)
    again.load(tmp_path)
    schedules.append(schedule(again, 0))
    assert schedules[0].base_lrs == schedules[1].base_lrs == [0.02, 0.005, 0.0025]
    assert again.rates == pytest.approx(first.rates, rel=1e-12)


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


# What fails on one rank.


@over(4)
def test_a_mesh_of_some_ranks_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))["pp"]
    for layout, ranks in ((mesh, 2), (None, 1)):
        engine = make(build(), build_schedule("1f1b", ranks=ranks, microbatches=2), mesh=layout, timeout=20.0)
        optimizer = torch.optim.AdamW(engine.parameters())
        text = rf"^([^\n]*: )?the engine's mesh has {ranks} of 4 ranks; allowed: a mesh of all ranks$"
        with pytest.raises(ValueError, match=text):
            save_checkpoint(engine, tmp_path / "new", 1, optimizer)
        with pytest.raises(ValueError, match=text):
            load_checkpoint(engine, tmp_path / "new", optimizer)
    assert not (tmp_path / "new").exists()


Phases = dict[str, tuple[Any, str]]
SAVING: Phases = {
    "model": (nn.Module, "state_dict"),
    "optimizer": (Shards, "of_optimizer"),
    "folder": (save, "begin"),
    "plan": (DefaultSavePlanner, "create_local_plan"),
    "merge": (DefaultSavePlanner, "create_global_plan"),
    "write": (FileSystemWriter, "write_data"),
    "index": (FileSystemWriter, "finish"),
    "publish": (save, "publish"),
}
LOADING: Phases = {
    "latest": (checkpoint_folder, "_checkpoints"),
    "index": (FileSystemReader, "read_metadata"),
    "read": (FileSystemReader, "read_data"),
    "model": (nn.Module, "state_dict"),
    "groups": (OptimizerTable, "chosen"),
    "optimizer": (torch.optim.Optimizer, "load_state_dict"),
}
FIRST_ALONE = {"save folder", "save merge", "save index", "save publish", "load latest"}
ERRORS: list[type[BaseException]] = [KeyError, OSError, ValueError, MemoryError]


def _failing(rank: int, size: int, folder: Path, victim: int, every: bool) -> dict[str, tuple[str, str]]:
    """For each phase and error, or one of the errors in turn, the type and the text of the failure on this rank."""
    found = {}
    run = Run({"pp": 2, "ep": size // 2})
    run.train(1)
    run.save(folder, 1)
    phases = {f"save {name}": phase for name, phase in SAVING.items()}
    phases |= {f"load {name}": phase for name, phase in LOADING.items()}
    for number, (name, (owner, attribute)) in enumerate(phases.items()):
        if victim and name in FIRST_ALONE:
            continue
        for error in ERRORS if every else [ERRORS[(number + victim // 2) % len(ERRORS)]]:

            def fail(*_: Any, error: type[BaseException] = error, **__: Any) -> Any:
                raise error("injected")

            with patch.object(owner, attribute, fail if rank == victim else getattr(owner, attribute)):
                try:
                    run.save(folder, 2) if name.startswith("save") else run.load(folder)
                except Exception as caught:
                    found[f"{name} {error.__name__}"] = type(caught).__name__, str(caught)
    assert run.load(folder) == 1
    run.save(folder, 3)
    return found


@pytest.mark.parametrize(
    ("size", "victim", "every"), [(2, 0, False), *wide((2, 1, False), (4, 0, True), (4, 1, False), (4, 3, False))]
)
def test_what_fails_on_one_rank_is_raised_on_all(
    kept: dict[int, Ranks], tmp_path: Path, size: int, victim: int, every: bool
) -> None:
    first, *others = kept[size].run(_failing, tmp_path, victim, every)
    assert all(other == first for other in others)
    assert len(first) == (9 if victim else 14 * (len(ERRORS) if every else 1))
    for case, (kind, text) in first.items():
        name, error = case.rsplit(" ", 1)
        assert "injected" in text
        assert "\n" not in text
        if name in ("load index", "load read"):
            assert kind == "ValueError"
            assert "is damaged: " in text
        else:
            usual = "OSError" if name == "save write" else "RuntimeError"
            assert kind == (error if error in ("OSError", "ValueError") else usual)
        if victim or kind != "ValueError" or name not in FIRST_ALONE | {"load read"}:
            assert (f"rank pp {victim}: " if size == 2 else f"rank pp {victim // 2}, ep {victim % 2}: ") in text


def _stopped(rank: int, size: int, folder: Path) -> str:
    """Rank 1 is stopped where it writes; rank 0 gives up and lets it continue."""
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    run, whole = Run({"pp": 2}, limit=2.0), FileSystemWriter.write_data
    run.train(1)

    def stop(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return whole(*args)

    with (
        patch.object(FileSystemWriter, "write_data", stop if rank == 1 else whole),
        patch.object(failures, "ROLL_CALL_S", 0.5),
    ):
        try:
            run.save(folder)
        except LostRankError as error:
            return str(error)
        finally:
            if rank == 0:
                os.kill(pids[1], signal.SIGCONT)
    return "saved"


def test_a_rank_that_is_stopped(ranks2: Ranks, tmp_path: Path) -> None:
    """The limit is the engine's, not that of the default group, which is the test's."""
    waited, was_stopped = ranks2.run(_stopped, tmp_path)
    silent = "no word, within 0.5 s, from rank pp 1: killed, stopped, ended or busy, or not there yet"
    why = f"checkpoint {tmp_path}/step-00000003 cannot be written: the ranks along 'pp' did not meet"
    assert waited.startswith(f"{silent}; here: {why}"), waited
    assert was_stopped.startswith(why), was_stopped
