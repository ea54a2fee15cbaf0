"""What a rank stores of its model and optimizer, and under which names; what cannot be stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap1f1b.checkpoint import load_checkpoint, save_checkpoint
from overlap1f1b.checkpoint.tensors import empty, read_index, read_tensors
from overlap1f1b.engine import Engine
from overlap1f1b.moe import GroupedExperts, parameter_groups
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.checkpoint.runs import EXPERTS, Tiny, ep, equal
from tests.checkpoint.test_load_resuming import Run
from tests.engines import COSTS, make
from tests.ranks import Ranks, over
from tests.reduce.test_ties import Stage, build
from tests.tiers import wide


def stored(path: Path) -> dict[str, tuple[list[int], int]]:
    """Shape and number of parts of every tensor of the model and the optimizer."""
    index = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: (list(meta.size), len(meta.chunks))
        for key, meta in index.items()
        if isinstance(meta, TensorStorageMetadata) and key.startswith(("model.", "optimizer."))
    }


def content(path: Path) -> dict[str, Tensor]:
    """Every tensor of the model and the optimizer."""
    index = read_index(path)
    tensors = {key: empty(index[key]) for key in stored(path)}
    read_tensors(path, tensors)
    return tensors


def small(model: nn.Module) -> tuple[Engine, torch.optim.Optimizer]:
    """An engine of one process with AdamW."""
    program = build_schedule("sequential", microbatches=2)
    return Engine(nn.Sequential(model), program), torch.optim.AdamW(model.parameters())


@over(2)
def test_everything_is_stored_once_and_whole(rank: int, size: int, tmp_path: Path) -> None:
    path = Tiny(ep(size)).train_steps(0, 1).save(tmp_path, 1)
    shapes = stored(path)
    assert shapes["model.experts.weight"] == ([EXPERTS, 3, 2], 2), shapes
    assert shapes["optimizer.experts.weight.exp_avg"] == ([EXPERTS, 3, 2], 2), shapes
    assert shapes["model.dense.weight"] == ([3, 5], 1), shapes
    assert len(shapes) == 5 + 3 * 2, shapes
    files = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert files < 1.1 * sum(entry.length for entry in FileSystemReader(path).read_metadata().storage_data.values())


def test_a_state_like_a_parameter_of_one_number_is_a_tensor_too(tmp_path: Path) -> None:
    """In another run the parameter may be a DTensor."""
    model = nn.Linear(2, 1)
    engine, optimizer = small(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    shapes = stored(save_checkpoint(engine, tmp_path, 1, optimizer).result())
    assert {key for key in shapes if key.startswith("optimizer.0.bias")} == {
        "optimizer.0.bias.exp_avg",
        "optimizer.0.bias.exp_avg_sq",
    }


@pytest.mark.parametrize("which", ["trained", *wide("none")])
def test_what_is_not_stored_stays_as_it_is(which: str, tmp_path: Path) -> None:
    model = Tiny().train_steps(0, 3)
    model.save(tmp_path, 3, model=which)
    other = Tiny(seed=1)
    before, wanted = other.state(), model.state()
    assert other.load(tmp_path) == 3
    left = {"dense.frozen"} if which == "trained" else before.keys() & model.state_dict().keys()
    assert equal(other.state(), wanted | {name: before[name] for name in left})
    assert not equal(other.state(), wanted)


class Listed(nn.Module):
    """A stage of plain lists, with the blocks of another."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.blocks, self.tied = list(stage.blocks), nn.ParameterDict(stage.tied)


FORMS: dict[str, Callable[[Stage], Any]] = {"module": lambda stage: stage, "list": Listed}
"""In which a stage is given."""


def _handed_on(stages: Any, mesh: DeviceMesh | None, ranks: int, source: Path | None, folder: Path) -> Path:
    """Train two steps, or load what another layout has saved; then save."""
    chunks = 1 if ranks > 1 or not isinstance(stages, dict) else len(stages)
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    engine = make(stages, build_schedule(name, ranks=ranks, microbatches=2, chunks=chunks), mesh=mesh, costs=COSTS)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=0.05)
    inputs, target = models.batch(2)
    for _ in range(2 if source is None else 0):
        engine.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
    if source is not None:
        with torch.no_grad():
            for parameter in engine.parameters():
                parameter.zero_()
        assert load_checkpoint(engine, source, optimizer) == 2
    return save_checkpoint(engine, folder, 2, optimizer).result()


def _stage_a_rank(rank: int, size: int, form: str, source: Path | None, folder: Path) -> Path:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    stages = {number: FORMS[form](stage) for number, stage in build([rank], size).items()}
    return _handed_on(stages, mesh, size, source, folder)


@pytest.mark.parametrize("form", ["module", *wide("list")])
def test_stages_that_are_given_have_the_names_of_the_whole_model(ranks2: Ranks, tmp_path: Path, form: str) -> None:
    """From stages on two ranks to the model, to four stages on a rank, and back."""
    path, *_ = ranks2.run(_stage_a_rank, form, None, tmp_path / "first")
    first = content(path)
    assert {"model.0.weight", "model.4.weight", "optimizer.0.weight.exp_avg"} < first.keys()
    assert "optimizer.4.weight.exp_avg" not in first
    layouts = {
        "model": models.build(tied=True),
        "modules": nn.ModuleList(models.build(tied=True)),
        "stages": {number: FORMS[form](stage) for number, stage in build([0, 1, 2, 3], 4).items()},
        "one object": {number: FORMS[form](stage) for number, stage in build([0, 1], 2, copy=False).items()},
    }
    for name, layout in layouts.items():
        path = _handed_on(layout, None, 1, path, tmp_path / name)
        assert equal(content(path), first), name
    path, *_ = ranks2.run(_stage_a_rank, form, path, tmp_path / "last")
    assert equal(content(path), first)


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
    engine, optimizer = small(Counts(5))
    save_checkpoint(engine, tmp_path, 1, optimizer)
    other = Counts(0)
    engine, optimizer = small(other)
    assert load_checkpoint(engine, tmp_path, optimizer) == 1
    assert other.kept == 5
    engine, optimizer = small(Counts({"a": 1}))
    with pytest.raises(ValueError, match="_extra_state of the model's state_dict is of type dict; allowed: a tensor"):
        save_checkpoint(engine, tmp_path / "other", 1, optimizer)


NESTED = {
    "old_dirs": [torch.ones(3), torch.zeros(())],
    "by step": {0: {"sums": (torch.arange(6.0).view(2, 3).double(), None)}, "name": "a text"},
    "seen": {2, 3},
    "none": [],
}
"""A state of an optimizer as heavyball, SOAP and LBFGS have it, with another dtype than the parameter's."""


class Counting(torch.optim.SGD):
    """An optimizer with a number of its own, in its ``state_dict``."""

    steps = 0

    def state_dict(self) -> Any:
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_nested_states_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    (engine, _), optimizer = small(model), Counting(model.parameters())
    optimizer.steps = 5
    optimizer.state[model.bias] |= NESTED
    optimizer.state["steps"] = [torch.tensor([7])]  # of no parameter, as of MADGRAD
    path = save_checkpoint(engine, tmp_path, 1, optimizer).result()
    assert stored(path)["optimizer.0.bias.by step.0.sums.0"] == ([2, 3], 1)
    other = nn.Linear(2, 2).bfloat16()
    (engine, _), optimizer = small(other), Counting(other.parameters())
    load_checkpoint(engine, tmp_path, optimizer)
    found = optimizer.state[other.bias]
    assert found.keys() == NESTED.keys()
    assert (optimizer.steps, optimizer.state["steps"]) == (5, [torch.tensor([7])])
    assert torch.equal(found["old_dirs"][0], torch.ones(3))
    sums = found["by step"][0]["sums"]
    assert torch.equal(sums[0], torch.arange(6.0).view(2, 3).double())
    assert (sums[0].dtype, type(sums), sums[1]) == (torch.float64, tuple, None)
    assert (found["by step"]["name"], found["seen"], found["none"]) == ("a text", {2, 3}, [])


def test_a_state_of_the_optimizer_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    engine, optimizer = small(model)
    for value, path, kind in (([len], "old_dirs.0", "builtin_function_or_method"), ({(1, 2): 3}, "old_dirs", "dict")):
        optimizer.state[model.bias]["old_dirs"] = value
        with pytest.raises(
            ValueError, match=f"^the optimizer's {path} of 0.bias is of type {kind}; allowed: tensors, "
        ):
            save_checkpoint(engine, tmp_path, 1, optimizer)
    optimizer.state = {"mean": torch.ones(2)}
    with pytest.raises(ValueError, match=r"^the torch\.AdamW's state_dict\.state\.mean is of type Tensor; allowed: "):
        save_checkpoint(engine, tmp_path, 1, optimizer)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2, 9))])
    with pytest.raises(ValueError, match=r"^the optimizer has a parameter of shape \[2, 9\] that this rank's model"):
        save_checkpoint(engine, tmp_path, 1, optimizer)
    assert not [*tmp_path.iterdir()]


def test_several_optimizers(tmp_path: Path) -> None:
    """Each of some parameters; a parameter in two of them is refused."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), GroupedExperts(2, 3, 4))
        engine = Engine(model, build_schedule("sequential", microbatches=2))
        experts, _ = parameter_groups(engine)
        optimizers = [torch.optim.Muon([model[0].weight, *experts["params"]]), torch.optim.AdamW([model[0].bias])]
        if seed == 0:
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            for optimizer in optimizers:
                optimizer.step()
            with pytest.warns(UserWarning, match=r"none of these optimizers has 0.weight \(3 such parameters\)"):
                save_checkpoint(engine, tmp_path / "one", 1, optimizers[1])
            path = save_checkpoint(engine, tmp_path, 1, optimizers).result()
            assert stored(path)["optimizer.1.gate_up.1.momentum_buffer"] == ([8, 3], 1)
        else:
            assert load_checkpoint(engine, tmp_path, reversed(optimizers)) == 1
        found.append(
            [*model.parameters(), *(p for one in optimizers for state in one.state.values() for p in state.values())]
        )
    assert len(found[0]) == 4 + 5 + 3
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    for twice in (model[1].gate_up, experts["params"][0], model[0].bias):
        with pytest.raises(ValueError, match=r"is twice in the optimizers; allowed: once, or once as its experts$"):
            save_checkpoint(engine, tmp_path / "new", 1, [*optimizers, torch.optim.SGD([twice])])


@over(2)
def test_sliced_parameters_under_other_names_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    model = Tiny(ep(size))

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        for name in [name for name in state if "expert" in name]:
            state[f"{name}.slice"] = state.pop(name)

    model.register_state_dict_post_hook(rename)
    text = "of which ranks have slices; allowed: a state_dict with the parameters' names"
    with pytest.raises(ValueError, match=text):
        model.save(tmp_path, 1)


@over(2)
def test_a_state_with_other_rows_than_its_parameter_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    model = Tiny(ep(size)).train_steps(0, 1)
    for entry, path, allowed in (
        (torch.ones(3), "square", r"has shape \[3\]; allowed for a part of shape \[2, 3, 2\] [^\n]*: 2 rows, or"),
        (
            [torch.ones(2, 2)],
            "square.0",
            r"has shape \[2, 2\]; allowed for [^\n]*: the same, .* or parameter_groups of",
        ),
    ):
        model.adamw.state[model.experts.weight]["square"] = entry
        with pytest.raises(ValueError, match=f"'s {path} of experts.weight {allowed}"):
            model.save(tmp_path, 1)


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
