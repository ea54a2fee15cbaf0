"""Configurations that nobody named: what a case trains, on which ranks, and how, drawn from its seed alone."""

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, Literal, get_args

from overlap1f1b.moe.experts import WeightsIn
from overlap1f1b.plan import Overlap, Recompute
from overlap1f1b.schedule import SCHEDULES, Program, build_schedule
from tests.blocks import HOWS
from tests.campaign.places import PLACES
from tests.engines import CALLS

Kind = Literal["engine", "combined", "dualpipe", "pipelining", "hidden"]
"""The engine, combined_forward_backward_step by hand, the drop-ins for DualPipe and torch.distributed.pipelining, and
blocks that keep something in a hidden place."""
KINDS: tuple[Kind, ...] = get_args(Kind)
SHARE = {"engine": 12, "combined": 3, "dualpipe": 3, "pipelining": 2, "hidden": 3}
RANKS: dict[Kind, tuple[int, ...]] = {
    "engine": (1, 2, 3, 4), "combined": (1, 2, 3, 4), "dualpipe": (1, 2, 4), "pipelining": (1, 2, 4),
    "hidden": (2,),
}  # fmt: skip
"""Numbers of ranks that are drawn."""
OVERLAPS: tuple[Overlap, ...] = ("serial", "pairs", 1, 2, 3, 4, 5)
TORCH_SCHEDULES = {  # by name: whether stages lie in a V, and fewest microbatches a pipeline rank
    "ScheduleDualPipeV": (True, 2),
    "ScheduleZBVZeroBubble": (True, 1),
    "ScheduleInterleaved1F1B": (False, 1),
    "ScheduleInterleavedZeroBubble": (False, 1),
    "ScheduleLoopedBFS": (False, 1),
}


class Drawn:
    """Prints what differs from the defaults, so that a configuration is a line."""

    def __repr__(self) -> str:
        shown = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown if value)})"


@dataclass(frozen=True, repr=False)
class Model(Drawn):
    """An embedding, ``layers`` and a head."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: tuple[str | int, ...]  # "dense", "norm", an odd use of two layers (tests.blocks), or how many expert calls
    routing: Literal["best", "first", "balanced"]  # by the best scores, always to the first experts, or by a Router
    norm: bool
    weights_in: WeightsIn
    dropout: float = 0.0
    beside: int = 0  # tensors that travel beside the hidden states: none, one, or another of integers
    tied: bool = False  # whether the head has the embedding's weight
    frozen: float = 0.0  # part of the parameters, the embedding's apart, that are not trained
    masked: bool = False  # whether a mask of padding travels beside, by which experts get real tokens alone
    biased: bool = False  # whether the routers' biases follow their loads


@dataclass(frozen=True, repr=False)
class Data(Drawn):
    """The batch of a step on each rank that holds data."""

    microbatches: int
    rows: int
    sequence: int
    varying: Literal["", "microbatches", "steps"] = ""  # whether sequences differ between microbatches, and over steps
    listed: bool = False  # whether a batch is a list of microbatches
    uneven: bool = False  # whether they differ in length between ranks
    ignored: float = 0.0  # part of the targets that count for nothing; of some microbatches then all


@dataclass(frozen=True, repr=False)
class Layout(Drawn):
    """Ranks and what they play."""

    schedule: str  # of the library; of torch by its class; none by hand
    pp: int
    dp: int
    ep: int
    overlap: Overlap
    chunks: int = 0
    extra_warmup: int = 0
    recompute: Recompute = "none"
    capacity: float = 0.0
    sharded: bool = False  # whether blocks are under FSDP2
    planned: bool = False  # whether the plan is made outside and set
    measured: bool = False  # whether costs are measured instead of given
    split: bool = False  # of steps by hand, whether weight gradients are left for later
    offload: bool = False

    def program(self, microbatches: int) -> Program:
        """Return the program that the engine plays."""
        return build_schedule(
            self.schedule,
            ranks=self.pp,
            microbatches=microbatches,
            chunks=self.chunks or None,
            extra_warmup=self.extra_warmup or None,
        )


@dataclass(frozen=True, repr=False)
class Case(Drawn):
    """A training."""

    seed: int
    kind: Kind
    ranks: int
    double: bool
    model: Model
    data: Data
    layouts: tuple[Layout, ...]  # one, or a second that goes on from the first one's checkpoint
    updates: tuple[bool, ...]  # for each step whether the optimizer follows; else gradients add up
    autocast: bool = False
    evaluated: bool = False
    loss_scale: float = 1.0
    max_norm: float = 0.0  # to which gradients are clipped before it; 0 for none
    paused: bool = False  # whether threads pause at random wherever two of them meet
    calls: tuple[str, ...] = ()  # at the end one rank's call and that of all others, which must be named; none if equal
    alone: int = 0  # this one rank

    def layout(self, step: int) -> Layout:
        """Return the layout of a step: the second one from the second step on."""
        return self.layouts[min(step, len(self.layouts) - 1)]

    @property
    def deterministic(self) -> bool:
        """Whether a plain loop can do the same, since it draws other random numbers."""
        return not self.model.dropout


@dataclass(frozen=True, repr=False)
class Hidden(Drawn):
    """A step over blocks that keep something.

    Args:
        place: Where, a key of ``hidden.PLACES``; empty for nothing.
        when: Who reads it: the block behind its exchange, a later block, or the backward.
    """

    seed: int
    kind: Kind
    ranks: int
    place: str
    when: Literal["behind", "later", "backward"]
    schedule: str
    layers: int
    microbatches: int
    overlap: Overlap
    recompute: Recompute
    parts: int
    paused: bool = False


def draw(seed: int) -> Case | Hidden:
    """The case of a seed."""
    random = Random(seed)
    kind = random.choices(KINDS, [SHARE[kind] for kind in KINDS])[0]
    case = _DRAW[kind](seed, random)
    if not isinstance(case, Case) or kind != "engine":
        return case
    masked, biased = random.random() < 0.4, not case.autocast and random.random() < 0.4
    differ = case.ranks > 1 and random.random() < 0.4
    layouts = tuple(  # steps that measure refuse it where nothing is left to leave
        replace(layout, offload=random.random() < 0.3 and not layout.measured) for layout in case.layouts
    )
    return replace(
        case,
        layouts=layouts,
        model=replace(case.model, masked=masked, biased=biased),
        calls=tuple(random.sample(CALLS, 2)) if differ else (),
        alone=random.randrange(case.ranks) if differ else 0,
    )


def _engine(seed: int, random: Random) -> Case:
    ranks = random.choice((1, 2, 2, 3, 4, 4))
    layout, microbatches = _layout(random, ranks)
    autocast = random.random() < 0.1
    dropout = random.choice((0.0, 0.0, 0.0, 0.3))
    tied = not layout.sharded and random.random() < 0.2
    layouts = (layout,)
    if not (layout.sharded or dropout or tied) and random.random() < 0.3:
        layouts = (layout, _layout(random, ranks, microbatches, sharded=False)[0])
    updates = tuple(random.random() < 0.7 for _ in range(random.randint(2, 3)))
    varying = random.choice(("", "", "microbatches", "steps"))
    uneven = not any(layout.capacity for layout in layouts) and random.random() < 0.2
    return Case(
        seed,
        "engine",
        ranks,
        double=not autocast and random.random() < 0.8,
        model=_model(
            random,
            ranks,
            fewest=max(layout.program(microbatches).placement.stages for layout in layouts) - 2,
            dropout=dropout,
            tied=tied,
            beside=random.choice((0, 0, 1, 2)),
        ),
        data=Data(
            microbatches,
            rows=random.randint(1, 3),
            sequence=random.choice((1, 3, 5, 8)),
            varying=varying,
            listed=bool(varying) or uneven or random.random() < 0.3,
            uneven=uneven,
            ignored=random.choice((0.0, 0.0, 0.4)),
        ),
        layouts=layouts,
        updates=updates if len(layouts) == 1 else (True, *updates),  # a checkpoint holds no gradients
        autocast=autocast,
        evaluated=not dropout and random.random() < 0.3,
        loss_scale=random.choice((1.0, 1.0, 8.0, 3.0)),
        max_norm=0.0 if layout.sharded else random.choice((0.0, 0.05, 100.0)),
        paused=random.random() < 0.3,
    )


def _layout(
    random: Random, ranks: int, microbatches: int | None = None, *, sharded: bool | None = None
) -> tuple[Layout, int]:
    """Ranks in a grid with a schedule, and how many microbatches it is given, where that is not said."""
    while True:
        schedule, pp = random.choice(SCHEDULES), _divisor(random, ranks)
        for _ in range(50):
            count = microbatches or random.randint(1, 9)
            layout = _options(random, Layout(schedule, pp, 1, 1, overlap=random.choice(OVERLAPS)), ranks, sharded)
            try:
                layout.program(count)
            except ValueError:  # it asks for other numbers
                continue
            return layout, count


def _options(random: Random, layout: Layout, ranks: int, sharded: bool | None) -> Layout:
    """The same schedule with all else that can be chosen."""
    others = ranks // layout.pp
    ep = _divisor(random, others)
    room = random.choice((0.0, 0.0, 0.0, 1.0, 1.3))
    return replace(
        layout,
        dp=others // ep,
        ep=ep,
        chunks=random.choice((0, 0, 2, 3)),
        extra_warmup=random.choice((0, 0, 1, 3)),
        recompute=random.choice(get_args(Recompute)),
        capacity=room * ep,  # room for all
        sharded=others > 1 and random.random() < 0.3 if sharded is None else sharded,
        planned=random.random() < 0.2,
        measured=random.random() < 0.1,
    )


def _divisor(random: Random, ranks: int) -> int:
    return random.choice([size for size in range(1, ranks + 1) if ranks % size == 0])


def _model(random: Random, ranks: int, *, fewest: int = 1, **given: Any) -> Model:
    """Draw a model of at least ``fewest`` layers whose experts can be divided over any part of the ranks."""
    experts = ranks * random.randint(1, 3)
    odd = random.choice([how for how in HOWS if how != "hooks"])  # FSDP2 leaves hooks of parameters behind
    kinds = ("dense", "norm", odd, 1, 1, 1, 2)
    layers = [random.choice(kinds) for _ in range(max(1, fewest) + random.randint(0, 2))]
    return Model(
        hidden=random.choice((3, 4, 7, 12, 20)),
        intermediate=random.choice((1, 4, 9)),
        experts=experts,
        top_k=random.randint(1, min(3, experts)),
        layers=tuple(layers),
        routing=random.choice(("best", "best", "first", "balanced")),
        norm=random.random() < 0.6,
        weights_in=random.choice(get_args(WeightsIn)),
        frozen=random.choice((0.0, 0.0, 0.0, 0.3)),
        **given,
    )


def _combined(seed: int, random: Random) -> Case:
    ranks = random.choice(RANKS["combined"])
    dropout = random.choice((0.0, 0.0, 0.3))
    stages = random.choice((1, 1, 2))
    layout = Layout(
        "",
        1,
        1,
        ranks,
        overlap=random.choice(OVERLAPS),
        chunks=stages,
        recompute=random.choice(get_args(Recompute)),
        split=random.random() < 0.3,
    )
    return Case(
        seed,
        "combined",
        ranks,
        double=random.random() < 0.8,
        model=_model(random, ranks, fewest=stages, dropout=dropout),
        data=Data(random.randint(1, 4), rows=random.randint(1, 3), sequence=random.choice((1, 3, 5, 8))),
        layouts=(layout,),
        updates=(False,) * random.randint(1, 2),
        paused=random.random() < 0.5,
    )


def _dualpipe(seed: int, random: Random) -> Case:
    ranks = random.choice((1, 2, 2, 4))
    name = random.choice(("dualpipe", "dualpipev")) if ranks > 1 else "dualpipev"
    pp = ranks if ranks < 4 else random.choice((2, 4))
    layout = Layout(name, pp, 1, ranks // pp, overlap=random.choice(OVERLAPS), measured=random.random() < 0.3)
    microbatches = 2 * pp + 2 * random.randint(0, 2) + (random.randint(0, 1) if name == "dualpipev" else 0)
    stages = layout.program(microbatches).placement.stages
    return Case(
        seed,
        "dualpipe",
        ranks,
        double=random.random() < 0.8,
        model=_model(random, ranks, fewest=stages),
        data=Data(microbatches, rows=random.randint(1, 3), sequence=random.choice((1, 3, 5))),
        layouts=(layout,),
        updates=(False,) * random.randint(1, 3),
        paused=random.random() < 0.3,
    )


def _pipelining(seed: int, random: Random) -> Case:
    ranks = random.choice(RANKS["pipelining"])
    pp = ranks if ranks < 4 else 2
    name = random.choice(list(TORCH_SCHEDULES))
    _, fewest = TORCH_SCHEDULES[name]
    layout = Layout(name, pp, 1, ranks // pp, overlap=random.choice(OVERLAPS), chunks=2)
    model = _model(random, ranks, fewest=2 * pp)
    return Case(
        seed,
        "pipelining",
        ranks,
        double=random.random() < 0.8,
        model=replace(model, layers=(1,) * len(model.layers)),  # every rank has to hold experts
        data=Data(2 * fewest * pp * random.randint(1, 2), rows=random.randint(1, 3), sequence=random.choice((1, 3, 5))),
        layouts=(layout,),
        updates=(False,) * random.randint(1, 2),
        paused=random.random() < 0.3,
    )


def _hidden(seed: int, random: Random) -> Hidden:
    place = random.choice(("", *PLACES))
    schedule = random.choice(("combined_1f1b", "combined_1f1b", "1f1b", "zb_h1", "afab", "dualpipev"))
    when = random.choice(("behind", "behind", "later", "backward"))
    recompute: Recompute = random.choice(("none", "none", "experts", "attention", "block"))
    if place in ("a stack", "a queue"):  # what is taken off is there once
        when, recompute = "behind", "none"
    if when == "backward":  # a second forward would put its own there, as in a checkpoint
        recompute = "none"
    if schedule == "dualpipev" and when == "later":  # the block before is on another rank
        when = "behind"
    return Hidden(
        seed,
        "hidden",
        2,
        place,
        when,
        schedule,
        layers=random.randint(1, 3) if schedule != "dualpipev" else random.randint(4, 6),
        microbatches=random.randint(2, 6) if schedule != "dualpipev" else random.randint(4, 6),
        overlap=random.choice(("pairs", 2, 3)),
        recompute=recompute,
        parts=random.choice((1, 1, 2)),
        paused=random.random() < 0.3,
    )


_DRAW = {
    "engine": _engine, "combined": _combined, "dualpipe": _dualpipe, "pipelining": _pipelining, "hidden": _hidden
}  # fmt: skip
