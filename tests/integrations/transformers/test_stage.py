"""A step's inputs by the names that a model was split with, and inputs that are not given."""

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from transformers import BatchEncoding

from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.integrations.transformers.test_split import problems_of
from tests.ranks import over
from tests.tiers import first, wide

NAMES = ("input_ids", "attention_mask", "position_ids")
MICROBATCHES = 3


def given_of(rows: int = 6) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch padded on the left, and labels."""
    tokens, labels = tiny.batch(rows)
    mask = torch.ones(rows, tiny.S, dtype=torch.int64)
    for row in range(rows):
        mask[row, : row % 4] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {"position_ids": positions, "input_ids": tokens, "attention_mask": mask}, labels


def forms(given: Mapping[str, Tensor], left_out: tuple[str, ...]) -> dict[str, Any]:
    """Return the same inputs in all forms that a step takes."""
    named: dict[str, Tensor | None] = {n: None if n in left_out else v for n, v in given.items()}
    parts = [
        {n: None if v is None else v.chunk(MICROBATCHES)[i] for n, v in named.items()} for i in range(MICROBATCHES)
    ]
    return {
        "dict": named,
        "encoding": BatchEncoding(named),
        "mapping": UserDict(named),
        "tuple": tuple(named[name] for name in NAMES),
        "dicts": parts,
        "mixed": [parts[0], tuple(parts[1][name] for name in NAMES), UserDict(parts[2])],
    }


LEFT_OUT = [(), ("attention_mask",), ("position_ids",), ("attention_mask", "position_ids")]


@pytest.mark.parametrize(
    "left_out",
    first([(names,) for names in LEFT_OUT[::-1]], (LEFT_OUT[-1],)),
    ids=lambda names: "+".join(names) or "none",
)
def test_every_form_gives_the_models_own_gradients(left_out: tuple[str, ...]) -> None:
    given, labels = given_of()
    own = {name: value for name, value in given.items() if name not in left_out}
    losses, expected = tiny.own_gradients(tiny.build("qwen3_moe", num_hidden_layers=2), own, labels, MICROBATCHES)
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=MICROBATCHES, chunks=2)
    stages = split_model(tiny.build("qwen3_moe", num_hidden_layers=2), program, inputs=NAMES, grouped=True)
    engine = tiny.engine(stages, program, recompute="block")
    for inputs in forms(given, left_out).values():
        for parameter in stages.parameters():
            parameter.grad = None
        result = engine.step(inputs, target=labels)
        torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses), rtol=1e-6, atol=0)
        assert problems_of(stages, expected, 1e-5) == []
        again = engine.evaluate(inputs, target=labels)
        torch.testing.assert_close(torch.stack(again.losses), torch.stack(losses), rtol=1e-6, atol=0)


def parts_of(left_out: tuple[str, ...]) -> list[dict[str, Tensor | None]]:
    """Return the inputs of each microbatch, of which only the second has those that are left out."""
    given, _ = given_of()
    return [
        {n: None if n in left_out and i != 1 else v.chunk(MICROBATCHES)[i] for n, v in given.items()}
        for i in range(MICROBATCHES)
    ]


def own_of(left_out: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the model's own loss of the last microbatch, and the gradients of all."""
    whole, (_, labels) = tiny.build("mixtral", num_hidden_layers=2), given_of()
    for part, part_labels in zip(parts_of(left_out), labels.chunk(MICROBATCHES), strict=True):
        named = {name: value for name, value in part.items() if value is not None}
        losses, expected = tiny.own_gradients(whole, named, part_labels, 1, 1 / MICROBATCHES)
    return losses[-1], expected


@pytest.mark.parametrize("dynamic", [False, *wide(True)])
@over(2)
def test_over_two_stages(rank: int, size: int, dynamic: bool) -> None:
    """Steps with more and with fewer inputs; without dynamic shapes three equal ones."""
    own = {left_out: own_of(left_out) for left_out in (LEFT_OUT if dynamic else LEFT_OUT[1:2])}
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pp", "ep"))
    program = build_schedule("combined_1f1b", ranks=size, microbatches=MICROBATCHES)
    stages = split_model(tiny.build("mixtral", num_hidden_layers=2), program, mesh, inputs=NAMES)
    engine = tiny.engine(stages, program, mesh, dynamic_shapes=dynamic)
    given, labels = given_of()
    problems = []
    for left_out in own if dynamic else [*own] * 3:
        inputs, (wanted, expected) = parts_of(left_out), own[left_out]
        for parameter in stages.parameters():
            parameter.grad = None
        result = engine.step(inputs if rank == 0 else None, target=labels)
        problems += problems_of(stages, expected, 1e-5)
        evaluated = engine.evaluate(inputs, target=labels)
        for loss in (*result.losses[-1:], *evaluated.losses[-1:]):
            problems += [f"loss {loss} and {wanted}"] * (abs(float(loss - wanted)) > 1e-5)
    if not dynamic:
        for asked in (given, {**given, "attention_mask": None, "position_ids": None}):
            found = engine.evaluate(asked, target=labels)
            problems += ["no loss"] * (rank == 1 and len(found.losses) != MICROBATCHES)
    assert not problems, problems


@over(2)
def test_another_choice_in_a_later_step_says_what_allows_it(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
    program = build_schedule("1f1b", ranks=size, microbatches=MICROBATCHES)
    stages = split_model(tiny.build("mixtral"), program, mesh, inputs=NAMES[:2])
    engine = tiny.engine(stages, program, mesh, timeout=20)
    given, labels = given_of()
    del given["position_ids"]
    engine.step(given, target=labels)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        engine.step({**given, "attention_mask": None}, target=labels)
    assert ("rank pp 0 failed" if rank else FIRST) in str(caught.value)


FIRST = (
    "stage 0 passes on float32[2, 8, 32], int64[2, 8], None, in the first step float32[2, 8, 32], int64[2, 8], "
    "int64[2, 8]; allowed: the same, or an Engine with dynamic_shapes=True"
)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (
            lambda x: {"input_ids": x},
            "inputs named input_ids; allowed: exactly input_ids, attention_mask, None for one",
        ),
        (lambda x: (None, x), "input_ids is None; allowed: a tensor, only other inputs may be left out"),
        (lambda x: x, "1 inputs; allowed: 2, input_ids, attention_mask"),
        (
            lambda x: (x, 3),
            "inputs of type tuple of Tensor, int; allowed: a tensor, a tuple or a dict of input_ids, attention_mask, a",
        ),
    ],
)
def test_other_names_are_refused(inputs: Any, said: str) -> None:
    program = build_schedule("1f1b", microbatches=MICROBATCHES)
    engine = tiny.engine(split_model(tiny.build("mixtral"), program, inputs=NAMES[:2]), program)
    tokens, labels = tiny.batch(6)
    for call in (engine.step, engine.evaluate):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call(inputs(tokens), target=labels)
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)
