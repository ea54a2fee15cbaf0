"""A checkpoint that does not fit the run that loads it: one line, and the run is as it was."""

import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from overlap1f1b.checkpoint import load_checkpoint
from tests.checkpoint.runs import Run as WholeRun
from tests.checkpoint.runs import State, Tiny, equal
from tests.checkpoint.test_load_resuming import Run
from tests.ranks import Ranks, over
from tests.tiers import wide


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
        before = other.state()
        with pytest.raises(ValueError, match=f"has .*{re.escape(has)}.*, this run has .*={re.escape(this)}; "):
            other.load(path)
        assert equal(other.state(), before)


def test_another_configuration_is_named(tmp_path: Path) -> None:
    path = Tiny().save(tmp_path, 1, config={"text": "abc", "hidden": 5, "long": "7" * 10**6})
    same = {"hidden": 5, "text": "abc", "long": "7" * 10**6}
    assert Tiny().load(path, same) == 1
    for config, difference in (
        (same | {"hidden": 6}, "hidden=5, this run has hidden=6"),
        ({"hidden": 5, "long": same["long"]}, "text=abc, this run has text=none"),
        (same | {"layers": (1,)}, "layers=none, this run has layers=[1]"),
        (same | {"long": 7}, f"long='{'7' * 40}'… (1000000 characters), this run has long=7"),
    ):
        expected = f"checkpoint {path} has {difference}; use the same settings or another checkpoint folder"
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            Tiny().load(path, config)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "step-nowhere"
    with pytest.raises(ValueError, match=f"^checkpoint {path} does not exist$"):
        Tiny().load(path)
    path.touch()
    with pytest.raises(ValueError, match=f"^checkpoint {path} is damaged: .*NotADirectoryError.*; remove it"):
        Tiny().load(path)
    with pytest.raises(ValueError, match=r"^engine=3; allowed: Engine$"):
        load_checkpoint(3, tmp_path, Tiny().adamw)  # type: ignore[arg-type]


@over(2)
def test_other_groups_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    run = Run({"pp": size}, lr=3.0)
    run.save(tmp_path, 7)
    before = [p.detach().clone() for p in run.engine.parameters()]
    run.optimizer = torch.optim.AdamW(run.engine.parameters())
    why = r"group 0 of the optimizer has [^\n]* for which the checkpoint has lr=3\.0 and lr=0\.75; allowed: the same"
    path = re.escape(f"checkpoint {tmp_path}/step-00000007")
    with pytest.raises(ValueError, match=rf"^rank pp 0: {path}: {why}[^\n]*$"):
        run.load(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(before, run.engine.parameters(), strict=True))


def _of_another_class(rank: int, size: int, folder: Path) -> dict[str, str]:
    """What is said of one process's checkpoint of one class, by runs of another over two ranks."""
    said = {}
    for there, here in (("AdamW", "momentum"), ("momentum", "AdamW"), ("plain SGD", "AdamW"), ("AdamW", "Adafactor")):
        run = Run({"pp": size}, here)
        before = [p.detach().clone() for p in run.engine.parameters()], [dict(g) for g in run.optimizer.param_groups]
        with pytest.raises(ValueError, match="the optimizer is a ") as caught:
            run.load(folder / there)
        said[f"{there} {here}"] = str(caught.value)
        after = list(run.engine.parameters()), run.optimizer.param_groups
        assert all(torch.equal(*pair) for pair in zip(before[0], after[0], strict=True)), here
        assert not run.optimizer.state, here
        assert [group["lr"] for group in before[1]] == [group["lr"] for group in after[1]], here
    return said


def test_an_optimizer_of_another_class(ranks2: Ranks, tmp_path: Path) -> None:
    for name in ("AdamW", "momentum", "plain SGD"):
        run = Run({}, name)
        run.train(1)
        run.save(tmp_path / name)
    first, second = ranks2.run(_of_another_class, tmp_path)
    assert first == second
    for names, text in first.items():
        (there, here) = ("AdamW", names.removeprefix("AdamW ")) if names.startswith("AdamW") else ("SGD", "AdamW")
        here = "SGD" if here == "momentum" else here
        why = f"the optimizer is a torch.{here}; allowed: torch.{there}, as it was saved with"
        assert re.fullmatch(rf"rank pp 0: checkpoint \S*[^\n]*: {re.escape(why)}", text), text


def _in_another_layout(rank: int, size: int, source: Path, layout: dict[str, int]) -> tuple[State, list[str]]:
    """Buffers after loading, and what was said."""
    run = WholeRun(layout)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run.load(source, state={"scheduler": run.scheduler, "loader": None})
    return run.buffers(), [str(one.message) for one in heard]


def _trained(rank: int, size: int, folder: Path, layout: dict[str, int]) -> State:
    run = WholeRun(layout)
    run.train(2)
    run.save(folder)
    return run.buffers()


@pytest.mark.parametrize(
    ("there", "others"), [({"ep": 2}, [{"dp": 2}]), *wide(({"dp": 2, "ep": 2}, [{"ep": 4}, {"pp": 2, "ep": 2}]))]
)
def test_buffers_of_each_rank_in_another_layout(
    kept: dict[int, Ranks], tmp_path: Path, there: dict[str, int], others: list[dict[str, int]]
) -> None:
    """All take the first rank's, and that is said once. For the same layout see test_save_background.py."""
    ranks = kept[math.prod(there.values())]
    saved = ranks.run(_trained, tmp_path, there)
    assert not equal(saved[0], saved[1])
    layouts = " × ".join(f"{name} {there.get(name, 1)}" for name in ("pp", "dp", "ep"))
    said = f"has 1.most of each rank of {layouts}; this run, over "
    for layout in others:
        (first, heard), *rest = ranks.run(_in_another_layout, tmp_path, layout)
        assert len(heard) == 1
        assert said in heard[0]
        assert not any(text for _, text in rest)
        assert all(
            torch.equal(value, saved[0][name]) for found, _ in [(first, []), *rest] for name, value in found.items()
        )
    found, heard = _in_another_layout(0, 1, tmp_path, {})
    assert equal(found, saved[0])
    assert [said in text and text.endswith("pp 1 × dp 1 × ep 1, takes the first rank's for all") for text in heard] == [
        True
    ]
