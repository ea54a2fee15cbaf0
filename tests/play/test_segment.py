"""Several tensors of one exchange travel as one."""

import pytest
import torch
from torch import Tensor

from overlap1f1b.play.segment import Layout

ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
SEVERAL: dict[str, tuple[Tensor, ...]] = {
    "a column": (ROWS, ROWS[:, 1]),
    "columns": (ROWS, ROWS[:, :2]),
    "an expanded gradient": (ROWS, torch.tensor(1.0).expand(4)),
    "other dtypes": (ROWS.bfloat16(), ROWS > 0, ROWS.double().t().contiguous().t(), ROWS.to(torch.complex64)),
    "one row": (ROWS[:1], ROWS.t()[0][::2][:1]),
    "no rows": (ROWS[:0], ROWS[:0, 0]),
    "rows without room": (ROWS[:, :0], ROWS.unsqueeze(1)[:, :0]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_tensors_of_any_strides_and_shapes_are_packed(name: str) -> None:
    layout = Layout.of_tensors(SEVERAL[name])
    for given, back in zip(SEVERAL[name], layout.unpack(layout.pack(SEVERAL[name])), strict=True):
        assert back.dtype == given.dtype
        assert torch.equal(back, given)
        assert back.is_contiguous()
