"""Numbers of an optimizer's groups: into a file and back, by the names of the parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overlap1f1b.checkpoint.optimizer import OptimizerTable, fill, numbers_of, plain
from overlap1f1b.checkpoint.tensors import decoded, encoded


def stored_value(value: Any) -> Any:
    return decoded(encoded(plain(value)))


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -7, 2**70, 0.1, 1e-300, math.inf, -math.inf, "adam", (), (0.9, 0.999), [1, (2, [None])], {3, 4}],
)
def test_back_and_forth(value: Any) -> None:
    found = stored_value(value)
    assert found == value
    assert type(found) is type(value)


def test_tensors_and_nan() -> None:
    for tensor in (torch.tensor(0.1), torch.tensor(1e300, dtype=torch.float64), torch.tensor(3), torch.tensor(True)):
        found = stored_value(tensor)
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype
    assert math.isnan(stored_value(math.nan))
    assert [type(stored_value(value)) for value in (np.float64(0.5), np.int64(3))] == [float, int]


@pytest.mark.parametrize("value", [len, {len}, {"a": 1}, torch.ones(2), object(), 1j, [len]])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError):
        plain(value)


def optimizer(*lrs: Any, **options: Any) -> tuple[torch.optim.Optimizer, dict[nn.Parameter, str]]:
    parameters = [nn.Parameter(torch.ones(2)) for _ in lrs]
    names = {parameter: f"p{number}" for number, parameter in enumerate(parameters)}
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, lrs, strict=True)]
    return torch.optim.AdamW(groups, **options), names


def stored(*lrs: Any, **options: Any) -> OptimizerTable:
    one, names = optimizer(*lrs, **options)
    groups = [numbers_of(group) for group in one.param_groups]
    table = OptimizerTable({}, dict(zip(names.values(), groups, strict=True)), groups, {}, {})
    return OptimizerTable(**decoded(encoded(OptimizerTable.merged([table])._asdict())))


def test_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    here, names = optimizer(rate, 0.5)
    fill([here], {}, stored(torch.tensor(0.25), torch.tensor(0.125)).chosen([here], names), {})
    assert here.param_groups[0]["lr"] is rate
    assert [float(group["lr"]) for group in here.param_groups] == [0.25, 0.125]
    assert type(here.param_groups[1]["lr"]) is float


def test_how_a_step_is_computed_is_not_taken_over() -> None:
    there = stored(0.5, foreach=True, maximize=True, betas=(0.5, 0.25), amsgrad=True)
    here, names = optimizer(0.1, fused=True)
    fill([here], {}, there.chosen([here], names), {})
    (group,) = here.param_groups
    assert (group["foreach"], group["fused"]) == (None, True)
    assert (group["lr"], group["maximize"], group["betas"], group["amsgrad"]) == (0.5, True, (0.5, 0.25), True)
