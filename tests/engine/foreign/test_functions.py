"""Functions of users: an all-to-all and no more is hidden, others stay where they stand, on all ranks alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.all_to_all import Own
from tests.engine.run.plain import HIDDEN, MICROBATCHES, batch, compare, engine_of
from tests.ranks import Ranks


class ScalesBack(Own):
    """Scales the gradient."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, Own.apply(ctx.group, grads[0] * 2, ctx.send, ctx.receive), None, None


class ScalesForward(Own):
    """Changes what has arrived in place, on one rank alone."""

    @staticmethod
    def forward(ctx: Any, group: Any, rows: Tensor, receive: Any, send: Any) -> Tensor:
        return Own.forward(ctx, group, rows, receive, send).mul_(1 + group.rank())


class Once(Own):
    """Has sizes for one backward alone."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sizes = ctx.send, ctx.receive
        del ctx.send, ctx.receive
        return None, Own.apply(ctx.group, grads[0], *sizes), None, None


class Default(torch.autograd.Function):
    """Equal parts if no sizes are given."""

    @staticmethod
    def forward(ctx: Any, group: Any, rows: Tensor, receive: Any, send: Any) -> Tensor:
        ctx.group, ctx.receive, ctx.send = group, receive, send
        output = rows.new_empty((len(rows) if receive is None else sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, Default.apply(ctx.group, grads[0], ctx.send, ctx.receive), None, None


class OneSize(torch.autograd.Function):
    """Sends as many rows to a rank as it receives from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Any, flag: bool) -> Tensor:
        ctx.sizes, output = sizes, torch.empty_like(rows)
        dist.all_to_all_single(output, rows.contiguous(), sizes, sizes)
        return output * 2 if flag else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return OneSize.apply(grads[0], ctx.sizes, False), None, None


class Two(nn.Module):
    """Two exchanges, there and back."""

    def __init__(self, group: dist.ProcessGroup, there: Any, back: Any) -> None:
        super().__init__()
        self.group, self.there, self.back = group, there, back
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rank = self.group.rank()
        send, receive = [[2, 4], [4, 2]][rank], [[2, 4], [4, 2]][rank]
        y = self.there(self.group, self.a(x), receive, send)
        return x + self.back(self.group, self.b(y), send, receive)


def with_equal_sizes(group: Any, rows: Tensor, receive: Any, send: Any) -> Any:
    sizes = [3, 3]
    return Own.apply(group, rows, sizes, sizes)


def without_sizes(group: Any, rows: Tensor, receive: Any, send: Any) -> Any:
    return Default.apply(group, rows, None, None)


def one_size(flag: bool) -> Any:
    return lambda group, rows, receive, send: OneSize.apply(rows, [3, 3], flag)


class DoublesBack(torch.autograd.Function):
    """Stands behind a plain exchange, and its backward does more than an exchange."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back = torch.empty_like(grads[0])
        dist.all_to_all_single(back, grads[0].contiguous() * 2, group=ctx.group)
        return None, back, None


def doubled(group: Any, rows: Tensor, receive: Any, send: Any) -> Any:
    output = torch.empty_like(rows)
    dist.all_to_all_single(output, rows, group=group)
    return DoublesBack.apply(output, rows, group)


def left_alone(group: Any, rows: Tensor, receive: Any, send: Any) -> Any:
    """Exchange rows without a gradient for them."""
    output = torch.empty_like(rows)
    dist.all_to_all_single(output, rows, group=group)
    return rows * output.mean()


FUNCTIONS: dict[str, tuple[Any, Any, int]] = {
    "once": (lambda *given: Once.apply(*given), lambda *given: Once.apply(*given), 2),  # noqa: PLW0108
    "scales back": (lambda *given: ScalesBack.apply(*given), lambda *given: Own.apply(*given), 1),  # noqa: PLW0108
    "scales forward": (lambda *given: ScalesForward.apply(*given), lambda *given: Own.apply(*given), 1),  # noqa: PLW0108
    "without sizes": (without_sizes, lambda *given: Default.apply(*given), 2),  # noqa: PLW0108
    "equal sizes": (with_equal_sizes, without_sizes, 1),
    "doubles back behind a plain call": (doubled, lambda *given: Own.apply(*given), 1),  # noqa: PLW0108
    "a plain call alone": (left_alone, lambda *given: Own.apply(*given), 1),  # noqa: PLW0108
    "one size": (one_size(False), one_size(False), 2),
    "flag": (one_size(True), one_size(False), 1),
    "other Functions on other ranks": (
        lambda group, *given: (Own, Once)[group.rank()].apply(group, *given),
        lambda *given: Default.apply(*given),  # noqa: PLW0108
        1,
    ),
}
"""Two exchanges, and how many of them are hidden."""


def _functions(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    problems = []
    for how, (there, back, exchanges) in FUNCTIONS.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            problems += compare(
                how,
                lambda there=there, back=back: nn.Sequential(Two(mesh.get_group("ep"), there, back)),  # type: ignore[misc]
                mesh,
                exchanges=2 * MICROBATCHES * exchanges,
            )
        lines = [str(one.message) for one in told if "exchanges rows where it stands" in str(one.message)]
        problems += [f"{how}: warnings {lines}"] * (len(lines) != (exchanges == 1))
    return problems


def test_a_function_that_does_more_than_an_all_to_all_stays_where_it_stands(ranks2: Ranks) -> None:
    """Backwards that are asked about once, flags, calls with and without sizes; on all ranks alike."""
    assert ranks2.run(_functions, timeout=120) == [[], []]


class Mode(Enum):
    PLAIN, DOUBLE = 1, 2


class Factor:
    """An object of a user's own."""

    def __init__(self, value: int) -> None:
        self.value = value


class Scaled(torch.autograd.Function):
    """An all-to-all with one more argument, whose backward multiplies by it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: Any, send: Any, group: Any, scale: Any) -> Tensor:
        ctx.given = receive, send, group, scale
        output = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        receive, send, group, scale = ctx.given
        factor = getattr(scale, "value", scale)
        back = Scaled.apply(grads[0], send, receive, group, 1)
        return back if isinstance(factor, tuple) else back * int(factor), None, None, None, None


class Sized(torch.autograd.Function):
    """An all-to-all that is told how many rows it brings, and the shape of what it sends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: Any, send: Any, group: Any, count: int, shape: Any) -> Tensor:
        ctx.given = receive, send, group, len(rows), (count, *shape[1:])
        output = rows.new_empty((count, *shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Sized.apply(grads[0], ctx.given[1], ctx.given[0], *ctx.given[2:]), *[None] * 5


class Uneven(nn.Module):
    """Two exchanges of sizes that differ between microbatches, by ``apply(rows, receive, send, group, numbers)``."""

    def __init__(self, group: dist.ProcessGroup, there: Any, back: Any) -> None:
        super().__init__()
        self.group, self.there, self.back = group, there, back
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        most = int(x[0, 0].abs() * 8) % 4  # of the rows, to this rank itself; each rank sends the other one three
        send = [most, 3][:: 1 if self.group.rank() == 0 else -1]
        y = self.a(x)[: sum(send)]
        y = self.there(y, list(send), send, self.group)
        y = self.back(self.b(y), send, list(send), self.group)
        return x + F.pad(y, (0, 0, 0, len(x) - len(y)))


def scaled(scale: Any) -> Any:
    return lambda rows, receive, send, group: Scaled.apply(rows, receive, send, group, scale)


def sized(rows: Tensor, receive: Any, send: Any, group: Any) -> Any:
    return Sized.apply(rows, receive, send, group, sum(receive), rows.shape)


def by_rank(rows: Tensor, receive: Any, send: Any, group: Any) -> Any:
    return Scaled.apply(rows, receive, send, group, (group.rank(),))


BESIDES: dict[str, tuple[Any, Any, int]] = {
    "a number": (scaled(1), scaled(2), 1),
    "a number, the other way round": (scaled(2), scaled(1), 1),
    "several numbers of nothing": (scaled((1, 2)), scaled((1, 3)), 2),
    "an enumeration": (scaled(Mode.PLAIN), scaled(Mode.DOUBLE), 1),
    "objects": (scaled(Factor(1)), scaled(Factor(2)), 0),
    "tensors": (scaled(torch.tensor(1)), scaled(torch.tensor(2)), 0),
    "numbers of rows": (sized, sized, 2),
    "other values on other ranks": (by_rank, scaled((5,)), 0),
}
"""Two exchanges with arguments besides rows, sizes and group, and how many of them are hidden."""


def _besides(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    problems, alone = [], [dist.new_group([one]) for one in range(size)][rank]
    own_values = scaled((torch.device("cuda", rank), alone))
    for how, (there, back, exchanges) in {**BESIDES, "a rank's device and group": (own_values, own_values, 2)}.items():
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            problems += compare(
                how,
                lambda there=there, back=back: nn.Sequential(  # type: ignore[misc]
                    Uneven(mesh.get_group("ep"), there, there), Uneven(mesh.get_group("ep"), back, back)
                ),
                mesh,
                exchanges=2 * 2 * MICROBATCHES * exchanges,
            )
        lines = [str(one.message) for one in told if "exchanges rows where it stands" in str(one.message)]
        problems += [f"{how}: warnings {lines}"] * (len(lines) != (exchanges < 2))
    return problems


def test_arguments_besides_rows_sizes_and_group(ranks2: Ranks) -> None:
    """Each value is tried, numbers of rows may change, and what nobody can compare stays where it stands."""
    assert ranks2.run(_besides, timeout=120) == [[], []]


class Numbered(nn.Module):
    """Two exchanges of other sizes, there and back, by ``apply(rows, receive, send, group)`` of each."""

    def __init__(self, group: dist.ProcessGroup, ways: Sequence[Any]) -> None:
        super().__init__()
        self.group, self.ways, self.a = group, ways, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rank = self.group.rank()
        for way, sent in zip(self.ways, ((2, 1), (4, 3)), strict=True):
            send, receive = [1, 1], [1, 1]
            send[1 - rank], receive[1 - rank] = sent[rank], sent[1 - rank]
            y = way(self.a(x)[: sum(send)], receive, list(send), self.group)
            y = way(y * 2, list(send), list(receive), self.group)
            x = x + F.pad(y, (0, 0, 0, len(x) - len(y)))
        return x


def _own(rows: Tensor, receive: Sequence[int], send: Sequence[int], group: Any) -> Any:
    return Own.apply(group, rows, receive, send)


def _orders(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    problems = []
    numbers, functions = (scaled((1,)), scaled((2,))), (_own, scaled((1,)))
    for how, ways, other in (("numbers", numbers, False), ("numbers", numbers, True), ("Functions", functions, True)):
        order = -1 if other and rank else 1
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            problems += compare(
                f"{how}, another order: {other}",
                lambda given=ways[::order]: nn.Sequential(Numbered(mesh.get_group("ep"), given)),  # type: ignore[misc]
                mesh,
                exchanges=0 if other else 2 * 4 * MICROBATCHES,
            )
        lines = [str(one.message) for one in told if "in each call the same values on all ranks" in str(one.message)]
        problems += [f"{how}: warnings {lines}"] * ((not lines) == other)
    return problems


def test_values_in_another_order_on_another_rank(ranks2: Ranks) -> None:
    """Calls whose exchanges met are tried together: others have other sizes, and gloo would end the process."""
    assert ranks2.run(_orders, timeout=60) == [[], []]


def _changing_value(rank: int, size: int, on: int) -> str:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    scale = [1]

    def there(*given: Any) -> Any:
        return scaled(scale[0])(*given)

    model = nn.Sequential(Uneven(mesh.get_group("ep"), there, scaled(1)))
    engine, data = engine_of(model, mesh, timeout=10), batch(rank)
    engine.step(data[0], target=data[1])
    scale[0] = 2 if rank >= on else 1
    with pytest.raises((ValueError, RuntimeError)) as caught:
        engine.step(data[0], target=data[1])
    return str(caught.value)


@pytest.mark.parametrize("on", [0, 1])
def test_a_value_that_nobody_has_tried_is_refused(ranks2: Ranks, on: int) -> None:
    wanted = (
        f"{__name__}.Scaled is called with 2 besides rows, sizes and group, and no such call was in the first step; "
        "allowed: values of the first step, or numbers of the rows that it sends or receives"
    )
    told = ranks2.run(_changing_value, on, timeout=60)
    assert told[1].splitlines()[0] == wanted
    assert wanted in told[0]
