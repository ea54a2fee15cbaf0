"""What a forward keeps on modules between exchanges goes with its microbatch; what it only leaves there is common."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.cut.places import KnownPlaces, carried, places
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.plan import Recompute
from overlap1f1b.play.values import PlaceValues
from overlap1f1b.transport.calls import exchange
from tests.play.plain import HIDDEN, MICROBATCHES, ROWS, STEPS, compare
from tests.ranks import over
from tests.tiers import wide


@dataclass(slots=True)
class Slots:
    order: Tensor | None = None


@dataclass
class Plain:
    order: Tensor | None = None


class Recipe:
    """What a block's file has beside the block."""

    scale = 1.0


ORDER: Tensor | None = None
STATE = Slots()


@contextmanager
def scaled(value: float) -> Iterator[None]:
    before, Recipe.scale = Recipe.scale, value
    try:
        yield
    finally:
        Recipe.scale = before


class Somewhere(nn.Module):
    """Keeps the order of its rows somewhere while they are exchanged, in a scale that it sets meanwhile.

    It leaves an auxiliary loss on a module, has a buffer of its own for each forward, and counts its calls.
    """

    shared: Tensor | None = None
    held: Any

    def __init__(self, group: dist.ProcessGroup, kind: str, scale: float, *, foreign: bool) -> None:
        super().__init__()
        self.kind, self.scale, self.group, self.calls, self.seen = kind, scale, group, 0, 0
        self.gate = nn.Linear(HIDDEN, 4)
        self.register_buffer("last", torch.zeros(HIDDEN))
        if not foreign:
            self.experts = GroupedExperts(4, HIDDEN, 8, group=group)
            self.experts.reset_parameters(torch.Generator().manual_seed(1), std=0.3)
        self.held = {
            "object": Plain(), "slots": Slots(), "list": [[Slots()]], "tuple": (1, Plain()),
            "dictionary": {"a": Plain()}, "entry": {}, "unregistered": [nn.Identity()],
        }.get(kind)  # fmt: skip

    def keep(self, order: Tensor) -> None:
        global ORDER  # noqa: PLW0603 - as models do
        if self.kind == "global":
            ORDER = order
        elif self.kind == "class":
            Somewhere.shared = order
        elif self.kind == "entry":
            self.held["order"] = order
        elif self.kind == "late":  # makes its object in the first forward
            self.held = self.held or Slots()
            self.held.order = order
        else:
            self._object().order = order

    def kept(self) -> Tensor:
        if self.kind in ("global", "class", "entry"):
            order = {"global": ORDER, "class": Somewhere.shared, "entry": (self.held or {}).get("order")}[self.kind]
        else:
            order = self._object().order
        assert order is not None
        return order

    def _object(self) -> Any:
        kinds = {"global object": lambda: STATE, "list": lambda: self.held[0][0], "tuple": lambda: self.held[1],
                 "dictionary": lambda: self.held["a"], "unregistered": lambda: self.held[0]}  # fmt: skip
        return kinds.get(self.kind, lambda: self.held)()

    def forward(self, x: Tensor) -> Tensor:
        assert Recipe.scale == 1
        self.calls += 1
        self.seen += len(x)
        with scaled(self.scale):
            self.keep(x.detach()[:, 0].argsort())
            rows = x[self.kept()]
            self.gate.auxiliary = rows.square().mean().tanh()  # type: ignore[assignment]
            self.last = rows.detach().mean(0)
            if hasattr(self, "experts"):
                weights, indices = self.gate(rows).softmax(-1).topk(2)
                y = self.experts(rows, indices, weights)
            else:
                y = exchange(self.gate(exchange(rows, None, None, self.group)), None, None, self.group).repeat(1, 3)
            y = torch.empty_like(y).index_copy(0, self.kept(), y.tanh()) * self.last
            return x + y * Recipe.scale + self.gate.auxiliary


PLACES = (
    "object", "slots", "list", "tuple", "dictionary", "entry", "unregistered", "global", "global object", "class"
)  # fmt: skip


CASES: list[tuple[bool, Recompute]] = [(False, "none"), (True, "block"), (False, "block"), (True, "none")]


@pytest.mark.parametrize("cases", [CASES[:2], *wide(CASES[2:])])
@over(2, timeout=120)
def test_what_is_kept_anywhere_goes_with_its_microbatch(
    rank: int, size: int, cases: list[tuple[bool, Recompute]]
) -> None:
    """In blocks with experts, and in blocks that exchange rows by themselves."""
    mesh, problems = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)), list[str]()
    group, wanted = mesh.get_group("ep"), (STEPS + 1) * MICROBATCHES  # with the evaluation
    for foreign, recompute in cases:
        # Forwards that begin while the first one is open would make objects of their own: its step must be serial.
        kinds = (*PLACES, "late") if foreign else PLACES

        built = list[nn.Sequential]()

        def build(foreign: bool = foreign, kinds: Any = kinds, built: list[nn.Sequential] = built) -> nn.Sequential:
            blocks = (Somewhere(group, k, 0.5 + n / 8, foreign=foreign) for n, k in enumerate(kinds))
            built.append(nn.Sequential(*blocks))
            return built[-1]

        where = f"foreign {foreign}, recompute {recompute}"
        problems += compare(where, build, mesh, overlap=3, recompute=recompute, verify=True)
        counted = {(block.calls, block.seen) for block in built[1]}
        problems += [f"{where}: counted {counted}"] * (counted != {(wanted, wanted * ROWS)})
    problems += [f"scale {Recipe.scale}"] * (Recipe.scale != 1)
    assert not problems, problems


def test_objects_that_forwards_make_end_with_them() -> None:
    block, made = nn.Linear(2, 2), []
    known = KnownPlaces(block)
    for learns in (True, True, False):
        carried = PlaceValues(known, learns=learns)
        carried.begin(0)
        block.state = Plain()  # type: ignore[assignment]
        made.append(weakref.ref(block.state))
        carried.leave()
        carried.enter()
        block.state.order = torch.ones(1)  # type: ignore[union-attr]
        carried.end()
        del carried
    gc.collect()
    assert [one() is None for one in made] == [True, True, False]
    assert len(known.changing) == 1


def test_every_place_has_a_name() -> None:
    group = cast("dist.ProcessGroup", None)
    blocks = {kind: Somewhere(group, kind, 1, foreign=True) for kind in PLACES}
    names = {kind: dict(places(block, "block")) for kind, block in blocks.items()}
    assert names["slots"]["attribute 'order' of Slots in block.held"] is None
    assert "attribute 'order' of Slots in block.held[0][0]" in names["list"]
    assert "attribute 'order' of Plain in block.held[a]" in names["dictionary"]
    blocks["entry"].keep(torch.ones(1))
    assert "entry order of block.held" in dict(places(blocks["entry"], "block"))
    for name in (
        "attribute 'training' of Linear in block.gate",
        "class attribute Somewhere.shared",
        "class attribute Recipe.scale",
        "global ORDER of test_places.py",
        "attribute 'order' of Slots in STATE of test_places.py",
    ):
        assert name in names["object"]


@pytest.mark.parametrize(
    ("block", "holder", "message"),
    [
        ("x", gc, "block='x'; allowed: Module"),
        (nn.Identity(), 3, "holder 3; allowed: an object, class, dictionary or module of Python"),
    ],
)
def test_what_cannot_be_carried(block: Any, holder: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        carried(block, holder)
