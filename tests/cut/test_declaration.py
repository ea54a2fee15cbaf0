"""Declared Functions are hidden; others stay where they stand, and one line says how to declare them."""

import inspect
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import declare
from overlap1f1b.cut.declaration import KNOWN, Declared, declared_of
from tests.all_to_all import Own
from tests.cut.test_exchanges import WithHandle
from tests.play.plain import MICROBATCHES, batch, compare, engine_of
from tests.play.test_crossing import Block as Layers
from tests.ranks import Ranks, over


class OneSize(torch.autograd.Function):
    """Sends as many rows to a rank as it receives from it, over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Any) -> Tensor:
        ctx.sizes, output = sizes, torch.empty_like(rows)
        dist.all_to_all_single(output, rows.contiguous(), sizes, sizes)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return OneSize.apply(grads[0], ctx.sizes), None


class Sized(torch.autograd.Function):
    """Gets the number of rows that it brings, and the shape of what it sends, besides."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receive: Any, send: Any, group: Any, count: int, shape: Any) -> Tensor:
        ctx.given = receive, send, group, len(rows), (count, *shape[1:])
        output = rows.new_empty((count, *shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), receive, send, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Sized.apply(grads[0], ctx.given[1], ctx.given[0], *ctx.given[2:]), *[None] * 5


class Unseen(Own):
    """Exchanges by a call that torch does not show to function modes."""

    @staticmethod
    def forward(ctx: Any, group: Any, rows: Tensor, receive: Any, send: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return Own.forward(ctx, group, rows, receive, send)


class Twice(Own):
    """Exchanges rows there and back."""

    @staticmethod
    def forward(ctx: Any, group: Any, rows: Tensor, receive: Any, send: Any) -> Tensor:
        there = Own.forward(ctx, group, rows, receive, send)
        Own.forward(ctx, group, there, send, receive)
        ctx.receive, ctx.send = receive, send
        return there


class ScalesBack(Own):
    """Does more than an all-to-all in its backward."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, Own.apply(ctx.group, grads[0] * 2, ctx.send, ctx.receive), None, None


class ScalesForward(Own):
    """Changes in place what has arrived."""

    @staticmethod
    def forward(ctx: Any, group: Any, rows: Tensor, receive: Any, send: Any) -> Tensor:
        return Own.forward(ctx, group, rows, receive, send).mul_(2)


class Undeclared(Own):
    """A subclass, which does not inherit the declaration."""


class UndeclaredHandle(WithHandle):
    """Returns a handle."""


declare(OneSize, tensor=0, send=1, receive=1)
declare(Sized, tensor=0, send=2, receive=1, group=3)
declare(Unseen, tensor=1, send=3, receive=2, group=0)
declare(ScalesBack, tensor=1, send=3, receive=2, group=0)
declare(ScalesForward, tensor=1, send=3, receive=2, group=0)


def numbered(s: Layers, x: Tensor, _: Any, ways: Sequence[Any]) -> Tensor:
    """Exchanges of uneven sizes, there and back, by ``apply(rows, receive, send, group)`` of each way."""
    rank, more = s.group.rank(), int(x[0, 0].abs() * 8) % 2  # in some microbatches, to this rank itself
    for way, sent in zip(ways, ((2, 1), (4, 3)), strict=True):
        send, receive = [more, more], [more, more]
        send[1 - rank], receive[1 - rank] = sent[rank], sent[1 - rank]
        y = way(s.a(x)[: sum(send)], receive, list(send), s.group)
        y = way(y * 2, list(send), list(receive), s.group)
        x = x + F.pad(y, (0, 0, 0, len(x) - len(y)))
    return x


def even(s: Layers, x: Tensor, _: Any, way: Any) -> Tensor:
    """An exchange of equal parts, there and back."""
    return x + way(way(s.a(x), [3, 3], [3, 3], s.group).tanh(), [3, 3], [3, 3], s.group)


def applied(function: Any) -> Any:
    return lambda rows, receive, send, group: function.apply(group, rows, receive, send)


def left_alone(rows: Tensor, receive: Any, send: Any, group: Any) -> Any:
    """Exchange rows without a gradient for them."""
    output = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(output, rows, receive, send, group=group)
    return rows.mean() * output


OWN = applied(Own)
STANDS = "exchanges rows where it stands, and is not hidden; allowed: overlap1f1b.exchange, "


def line_of(name: str, arguments: str) -> str:
    return (
        f"{__name__}.{name} {STANDS}or, if it is an all-to-all and no more, overlap1f1b.declare({name}, tensor=?, "
        f"send=?, receive=?, group=?) with positions in {name}.apply({arguments})"
    )


LINES: list[tuple[Any, str]] = [
    (applied(Undeclared), line_of("Undeclared", "group, rows, receive, send")),
    (applied(Twice), line_of("Twice", "group, rows, receive, send")),
    (
        lambda rows, receive, send, group: UndeclaredHandle.apply(rows, receive, send, group, False)[0],
        line_of("UndeclaredHandle", "rows, receive, send, group, later"),
    ),
    (
        left_alone,
        f"all_to_all_single outside of a Function, in block 0 (Block), {STANDS}torch's functional "
        "all_to_all_single, or a declared Function",
    ),
]
"""Ways that nobody has declared, and what is said of them."""


@over(2, timeout=120)
def test_one_line_says_how_to_declare_a_function(rank: int, size: int) -> None:
    """What is not declared runs where it stands, beside exchanges that are hidden."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, problems = mesh.get_group("ep"), list[str]()
    for way, line in LINES:
        build = lambda way=way: nn.Sequential(Layers(group, partial(numbered, ways=(way, OWN))))  # noqa: E731
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            problems += compare(line, build, mesh, exchanges=MICROBATCHES * 4)
        lines = [str(one.message) for one in told if STANDS in str(one.message)]
        problems += [f"{lines}, not {line}"] * (lines != [line])
    assert not problems, problems


@over(2, timeout=60)
def test_declared_functions_are_hidden(rank: int, size: int) -> None:
    """With sizes, without, with one for both ways, with arguments besides, and by a call that torch does not show."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    group, problems = mesh.get_group("ep"), list[str]()
    sized = lambda rows, receive, send, group: Sized.apply(rows, receive, send, group, sum(receive), rows.shape)  # noqa: E731
    no_sizes = lambda rows, receive, send, group: Own.apply(group, rows, None, None)  # noqa: E731
    evens = (no_sizes, lambda rows, receive, send, group: OneSize.apply(rows, send))
    for name, ways in (("sizes", (OWN, sized)), ("unseen", (applied(Unseen), OWN))):
        build = lambda ways=ways: nn.Sequential(Layers(group, partial(numbered, ways=ways)))  # noqa: E731
        problems += compare(name, build, mesh, exchanges=2 * 4 * MICROBATCHES)
    build = lambda: nn.Sequential(*(Layers(group, partial(even, way=way)) for way in evens))  # noqa: E731
    problems += compare("equal sizes", build, mesh, exchanges=2 * 2 * 2 * MICROBATCHES)
    assert not problems, problems


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tensor": 4, "send": 3, "receive": 2, "group": 0}, "has no such arguments: tuple index out of range"),
    ({"tensor": 1, "send": 2, "receive": 3, "group": 0}, "sizes of its call do not fit on all ranks"),
    ({"tensor": 1, "receive": 2, "group": 0}, "sizes of its call do not fit on all ranks"),
    ({"tensor": 1, "send": 3, "receive": 3, "group": 2}, "has no such arguments: ["),
    ({"tensor": 1, "send": 3, "receive": 2, "group": 0, "output": 5}, "its call shows another output"),
    ({"tensor": 1, "send": 3, "receive": 2, "group": 0, "async_op": 4}, "its call shows another async_op"),
]
"""Declarations of :class:`Own` that its call contradicts, and what is said of them."""


def _first_step(rank: int, size: int, functions: Sequence[Any]) -> list[str]:
    mesh, told = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    for given in functions:

        class Wrong(Own):
            """Declared in another way than it is called; only the call shows how many arguments it takes."""

            @staticmethod
            def forward(ctx: Any, *args: Any) -> Tensor:
                return Own.forward(ctx, *args)

        function = Wrong if isinstance(given, dict) else given
        if isinstance(given, dict):
            declare(Wrong, **given)
        body, data = partial(numbered, ways=(applied(function), OWN)), batch(rank)
        engine = engine_of(nn.Sequential(Layers(mesh.get_group("ep"), body)), mesh, timeout=10)
        with pytest.raises((ValueError, RuntimeError)) as caught:
            engine.step(data[0], target=data[1])
        told.append(str(caught.value).splitlines()[0])
    return told


def test_a_contradicted_declaration_is_one_line(ranks2: Ranks) -> None:
    every = ranks2.run(_first_step, [*(given for given, _ in WRONG), ScalesForward, ScalesBack], timeout=60)
    wanted = [f".Wrong is declared, and {what}" for _, what in WRONG]
    wanted += [
        f"{__name__}.ScalesForward is declared, and its call shows another rows; allowed: positions of an all-to-all's "
        "arguments in ScalesForward.apply(group, rows, receive, send)",
        f"{__name__}.ScalesBack is declared, and its backward does more than an all-to-all; allowed: Functions that do",
    ]
    for text, lines in zip(wanted, zip(*every, strict=True), strict=True):
        assert any(text in line for line in lines), (text, lines)


@pytest.mark.parametrize(
    ("function", "places", "message"),
    [
        (nn.Linear, {"tensor": 0}, r"^declare\(<class.*Linear'>\); allowed: a subclass of torch.autograd.Function"),
        ("Own", {"tensor": 0}, r"^function='Own'; allowed: type$"),
        (Undeclared, {"tensor": 7}, r"position 7; allowed: 0 to 3, as in .*\(group, rows, receive, send\)$"),
        (Undeclared, {"tensor": 0, "output": 4}, "position 4; allowed: 0 to 3, as in"),
        (Undeclared, {"tensor": "0"}, r"^declare\(Undeclared, tensor='0'\); allowed: positions from 0"),
        (Undeclared, {"tensor": -1}, r"^declare\(Undeclared, tensor=-1\); allowed: positions from 0"),
        (Undeclared, {"tensor": 0, "send": 0}, r"tensor=0, send=0\); allowed: positions from 0, each for one"),
    ],
)
def test_declarations_that_are_refused(function: Any, places: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declare(function, **places)


def test_a_declaration_of_ones_own_comes_before_the_table() -> None:
    from torch.distributed.nn.functional import _AlltoAllSingle

    assert declared_of(_AlltoAllSingle) == Declared(tensor=4, send=3, receive=2, group=0, output=1)
    other = type("_AlltoAllSingle", (Own,), {"__module__": _AlltoAllSingle.__module__})
    declare(other, tensor=1)
    assert declared_of(other) == Declared(tensor=1)
    assert declared_of(Undeclared) is None


NAMES = {
    "tensor": ("input", "x"),
    "send": ("input_split_sizes", "input_splits"),
    "receive": ("output_split_sizes", "output_splits"),
    "group": ("group",),
    "output": ("output",),
}


@pytest.mark.parametrize("place", KNOWN, ids=".".join)
def test_positions_of_the_table_are_those_of_the_installed_library(place: tuple[str, str]) -> None:
    module, name = place
    if find_spec(module.split(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    arguments = list(inspect.signature(getattr(import_module(module), name).forward).parameters)[1:]
    for field, allowed in NAMES.items():
        at = getattr(KNOWN[place], field)
        assert at is None or arguments[at] in allowed
