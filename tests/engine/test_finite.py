"""A loss or a norm that is not finite: said once, or raised on all ranks alike; the engine goes on."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import build_schedule
from overlap1f1b.cut.options import Finite
from overlap1f1b.engine import Engine, NotFiniteError, finite
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import InlineStream
from tests import models
from tests.engines import make
from tests.ranks import Ranks
from tests.tiers import first

MICROBATCHES, BAD = 4, 2
"""The target of microbatch ``BAD`` begins with -1 where its loss is to be NaN; with -2 an infinite one."""


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    loss = models.loss_fn(logits, target.clamp(min=0))
    return loss * {-1: float("nan"), -2: float("inf")}.get(int(target.flatten()[0]), 1.0)


def engine_of(shape: dict[str, int], **options: Any) -> tuple[Engine, int]:
    """Return an engine over ranks, and the number of this one along "ep"."""
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)) if shape else None
    group = mesh.get_group("ep") if mesh is not None and "ep" in shape else None
    program = build_schedule("combined_1f1b", ranks=shape.get("pp", 1), microbatches=MICROBATCHES)
    engine = make(models.build(group), program, mesh=mesh, loss_fn=loss_fn, **options)
    return engine, 0 if group is None else group.rank()


def _told(rank: int, size: int, shape: dict[str, int], how: Finite) -> list[Any]:
    """Return what is warned of, or raised, by steps of which the fourth has a loss of NaN on the first "ep" rank."""
    engine, place = engine_of(shape, finite=how)
    inputs, target = models.batch(MICROBATCHES)
    bad = target.clone()
    bad[BAD * 2, 0] = -1 if place == 0 else bad[BAD * 2, 0]
    told: list[Any] = []
    for step in range(6):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for call in ("step", "clip"):
                try:
                    if call == "clip":
                        engine.clip_gradients(1.0)
                    else:
                        result = engine.step(inputs, target=bad if step in (3, 4) else target)
                except NotFiniteError as error:
                    told.append((step, call, str(error)))
                    result = error.result or result
            engine.mean_loss(result)
        told += [(step, "warned", str(one.message)) for one in said if "finite" in str(one.message)]
        for parameter in engine.parameters():
            parameter.grad = None
    return told


LAYOUTS: dict[str, dict[str, int]] = {"one": {}, "ep": {"ep": 2}, "pp": {"pp": 2}, "four": {"pp": 2, "ep": 2}}


def told_by(layout: str, how: Finite, request: pytest.FixtureRequest) -> list[list[Any]]:
    shape = LAYOUTS[layout]
    if not shape:
        return [_told(0, 1, shape, how)]
    ranks: Ranks = request.getfixturevalue("ranks4" if layout == "four" else "ranks2")
    return ranks.run(_told, shape, how, timeout=100)


ALLOWED = "; allowed: finite ones, as by a smaller learning rate, or a scale of gradients that suits the dtype"
WHERE = {"one": "", "ep": " on rank ep 0", "pp": " on rank pp 1", "four": " on rank pp 1, ep 0"}


@pytest.mark.parametrize("layout", first(LAYOUTS, "one", "pp"))
def test_the_first_is_said_where_it_is(layout: str, request: pytest.FixtureRequest) -> None:
    every = told_by(layout, "warn", request)
    loss = f"the loss of microbatch {BAD} of step 4 is nan{WHERE[layout]}{ALLOWED}; later ones are not said"
    norm = f"the norm of the gradients behind step 4 is nan{ALLOWED}; later ones are not said"
    assert any((3, "warned", loss) in told for told in every), every
    for told in every:  # the norm is the same on all ranks, the loss is known where it is
        assert [line for *_, line in told if line != loss] == [norm], every
        assert all(step == 3 and call == "warned" for step, call, _ in told), every


@pytest.mark.parametrize("layout", first(LAYOUTS, "one", "four"))
def test_all_ranks_raise_one_line_each_time_and_go_on(layout: str, request: pytest.FixtureRequest) -> None:
    every = told_by(layout, "raise", request)
    expected = [
        (step, call, f"{what} {step + 1} is nan{where}{ALLOWED}")
        for step in (3, 4)
        for call, what, where in (
            ("step", f"the loss of microbatch {BAD} of step", WHERE[layout]),
            ("clip", "the norm of the gradients behind step", ""),
        )
    ]
    assert every == [expected] * len(every), every


def test_none_looks_at_neither(request: pytest.FixtureRequest) -> None:
    assert told_by("one", None, request) == [[]]


def test_a_step_that_raises_is_not_lost() -> None:
    """Its gradients are those of the same step without the option, its result is in the error."""
    inputs, target = models.batch(MICROBATCHES)
    target[BAD * 2, 0] = -2
    quiet, _ = engine_of({}, finite=None)
    loud, _ = engine_of({}, finite="raise")
    result = quiet.step(inputs, target=target)
    with pytest.raises(NotFiniteError, match=f"^the loss of microbatch {BAD} of step 1 is inf; ") as caught:
        loud.step(inputs, target=target)
    assert caught.value.result is not None
    found = [{"losses": torch.stack(of.losses)} for of in (result, caught.value.result)]
    for grads, engine in zip(found, (quiet, loud), strict=True):
        grads |= {str(n): parameter.grad.nan_to_num() for n, parameter in enumerate(engine.parameters())}
    assert not models.equal(*found)


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are looked at in the first call that finds that their event has passed, and keep their step."""
    passed: list[bool] = []

    class Later(InlineStream):
        def run(self, job: Any, *tensors: Tensor, after: Any = None) -> Any:
            mark = super().run(job, *tensors)
            mark.is_completed = lambda: bool(passed)  # type: ignore[method-assign]
            return mark

    monkeypatch.setattr(finite, "InlineStream", Later)
    check = finite.FiniteCheck("warn", Mesh(None))
    check.note(1, [0, 3], [torch.tensor(1.0), torch.tensor(float("nan"))])
    assert check.found(1) is None
    check.note(2, [0, 3], [torch.tensor(1.0), torch.tensor(2.0)])
    passed.append(True)
    assert check.found(2) == f"the loss of microbatch 3 of step 1 is nan{ALLOWED}"
    assert check.found(3) is None
