"""The options of an engine: the only list of them. The module does not load torch.

:class:`UserOptions` has those that a user chooses. ``train``, ``bench`` and Trainer derive theirs from it, so none is
forgotten. :class:`EngineOptions` adds what follows from the model and its loop: a program gives it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeVar, get_args

from overlap1f1b.plan import NodeCosts, Overlap, Plan, Recompute, parse_overlap, parse_parts, parse_recompute
from overlap1f1b.schedule.values import check_kind, check_number, check_size, checked, quoted
from overlap1f1b.transport.budget import DeviceOptions
from overlap1f1b.transport.limits import DEFAULT_LIMIT_S

if TYPE_CHECKING:
    from torch import Tensor

MOST_S = 1e9
"""Longest limit of a wait, in seconds: longer ones do not fit torch's."""
Parts = int | Literal["auto"]
Finite = Literal["warn", "raise"] | None
Offload = Literal[False, True, "auto"]
AUTO_PARTS = (1, 2, 4)
"""Numbers of parts whose costs ``auto`` measures."""
TRIES = 3
"""Steps in which each of the fastest plans is tried."""
T = TypeVar("T")


def documented(options: type[T]) -> type[T]:
    """Give each field of a dataclass its text, from ``Args`` of the class or of its bases, as ``metadata["help"]``.

    There transformers' ``HfArgumentParser`` looks for it; tyro reads the docstrings itself.
    """
    texts: dict[str, str] = {}
    for of in reversed(options.__mro__):
        args = inspect.cleandoc(of.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        texts.update(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", args, re.MULTILINE))
    for one in fields(options):  # type: ignore[arg-type]
        one.metadata = MappingProxyType({"help": " ".join(texts[one.name].split())})
    return options


@documented
@dataclass(frozen=True, kw_only=True)
class UserOptions:
    """Options of an engine that a user chooses, each a number, a word or a switch.

    Args:
        overlap: serial, pairs, or k: the fastest of both and of up to k open actions. The schedule auto opens any
            number, as the costs ask for.
        recompute: Activations that blocks drop after their forward and compute again before their backward: experts,
            the experts' own; attention, all others (in a block without experts everything); block, both. Nothing is
            exchanged twice: rows that the experts received and returned are kept. auto, under a limit of memory,
            measures all four, two steps each, and chooses for each block, by the bytes that are saved for each second
            of the step.
        parts: Parts of the tokens of each call of experts, each with exchanges of its own: these travel behind the
            experts of another part of the same microbatch. So exchanges are hidden where few microbatches are open, as
            in warm-up, with one or two microbatches, and in evaluation. Smaller products cost more: auto measures 1, 2
            and 4 parts, two steps each (five with a single microbatch), and keeps the number whose plan is the fastest.
        capacity: Room for rows in exchanges of equal sizes, as a multiple of an even share, such as 1.25: no host waits
            for sizes. Ranks along "ep" must have equally many tokens. By default sizes are exact.
        offload: Whether what blocks' forwards leave for their backwards goes to host memory in between, and comes back
            behind compute: of every block, or with auto, under a limit of memory, what has to. With recompute both are
            chosen together.
        offload_threshold: Bytes below which a saved tensor's storage stays.
        host_link: On CPUs the rate of an imitated link to host memory, in gigabytes (1e9 bytes) per second each way.
        memory: Most bytes of tensors that this rank may hold in a step, parameters and optimizer included: a number, a
            text such as 70GB or 64GiB, or on a GPU auto, what it has free less a reserve. A step counts what each node
            holds, on a CPU one more. Only plans that keep within it are played; they may have fewer open actions and
            forwards to warm up. Ranks may have different ones.
        tries: Steps of each of the three plans that measured costs predict to be the fastest. They are played in turns,
            and the one whose steps were the fastest is kept. Gradients do not depend on it. With 0, and with costs that
            are given, the predicted fastest is kept.
        verify: Whether the first step of every plan is compared, bit by bit, with one microbatch after another. Steps
            that measure nodes are not: they hide nothing. Nor are plans for another number of microbatches, unless more
            of them are open at once.
        finite: What follows from a loss, or a norm of gradients, that is not finite: warn says the first of each with
            its step and microbatch; raise ends the call on all ranks, every time, and the engine can go on; without a
            word neither is looked at. A GPU is not waited for: its losses are looked at in the first call that finds
            them ready.
        gate: Least share of the plan's hidden fraction that the median of five steps may hide. 0.8 warns of the first
            time below, error:0.8 ends the step on all ranks each time, and the engine can go on.
        drift: Whether the run goes over to another plan when node times have left what its plan was made for.
        timeout: Limit in seconds of every wait for another rank; also set on FSDP2's process groups.
    """

    overlap: Overlap = 3
    recompute: Literal[Recompute, "auto"] = "none"
    parts: Parts = 1
    offload: Offload = False
    offload_threshold: int = 65536
    host_link: float | None = None
    capacity: float | None = None
    memory: int | str | None = None
    tries: int = TRIES
    verify: bool = True
    finite: Finite = "warn"
    gate: float | str | None = None
    drift: bool = False
    timeout: float = DEFAULT_LIMIT_S

    def check(self) -> None:
        """Raise ``ValueError`` for a value of another kind, or out of range."""
        parse_overlap(self.overlap)
        parse_memory(self.memory)
        parse_gate(self.gate)
        for name, parse in (("recompute", parse_recompute), ("parts", parse_parts)):
            if (value := getattr(self, name)) != "auto":
                try:
                    parse(value)
                except ValueError as error:
                    raise ValueError(f"{error}, or auto") from None
        if self.recompute == "auto" and (self.memory is None or self.parts != 1):
            beside = "without memory" if self.memory is None else f"with parts={self.parts}"
            allowed = f"with memory and parts=1, or one of {', '.join(get_args(Recompute))}"
            raise ValueError(f"recompute='auto' {beside}; allowed: {allowed}")
        if not any(self.offload is one for one in (False, True)) and self.offload != "auto":
            raise ValueError(f"offload={quoted(self.offload)}; allowed: False, True, auto")
        if self.offload == "auto" and self.memory is None:
            raise ValueError("offload='auto' without memory; allowed: with memory, or True, False")
        check_size("offload_threshold", self.offload_threshold, 0)
        if self.host_link is not None:
            check_number("host_link", self.host_link, above=True)
            if not self.offload:
                raise ValueError(f"host_link={self.host_link} without offload; allowed: with offload=True or 'auto'")
        if self.capacity is not None:
            check_number("capacity", self.capacity, above=True)
        check_size("tries", self.tries, 0)
        check_kind("verify", self.verify, bool)
        check_kind("drift", self.drift, bool)
        if self.finite not in (None, "warn", "raise"):
            raise ValueError(f"finite={quoted(self.finite)}; allowed: warn, raise")
        check_timeout(self.timeout)

    def engine_options(self, **others: Any) -> EngineOptions:
        """Return the options of an engine: these, and what a program gives."""
        chosen = {one.name: getattr(self, one.name) for one in fields(UserOptions)}
        return EngineOptions(**chosen | others)


@checked
@dataclass(frozen=True, kw_only=True)
class EngineOptions(UserOptions):
    """How an :class:`~overlap1f1b.engine.Engine` plays; all ranks are given the same.

    >>> EngineOptions(overlap="pairs", recompute="experts").parts
    1

    Beside the :class:`UserOptions`, a program may give:

    Args:
        costs: Seconds of every node, instead of measuring them.
        plan: A compiled plan to play, instead of compiling one.
        reduce: Whether gradients are summed over the ranks that hold the same parameters, under the rest of the step.
            For modules under torch's FSDP2, FSDP2 sums them. In the first step values of these parameters are compared,
            and over a tensor group batches, gradients and the tokens at the experts.
        count_tokens: ``(*targets) → int`` or a scalar tensor, tokens that a microbatch's target counts for. The loss of
            the step is then the mean over tokens, ``loss_fn`` the mean over the tokens of its microbatch, not called if
            there are none.
        dynamic_shapes: Whether tensors that pass between stages may change their sizes from step to step.
        experts_over: Dimensions whose ranks share the experts: "cp", too, and "tp" where blocks split the tokens of a
            tensor group before the experts. Ranks along other dimensions have copies of them.
        block_weights: Relative costs of the blocks of a whole model, to split it into stages: see :func:`split_blocks`.
        device: How transfers and compute share a GPU.

    Raises:
        ValueError: A value of another kind, or out of range. What depends on model or program, its Engine refuses.
    """

    costs: NodeCosts | None = None
    plan: Plan | None = None
    reduce: bool = True
    count_tokens: Callable[..., int | Tensor] | None = None
    dynamic_shapes: bool = False
    experts_over: Sequence[Literal["ep", "cp", "tp"]] = ("ep",)
    block_weights: Sequence[float] | None = None
    device: DeviceOptions = field(default_factory=DeviceOptions)

    def __post_init__(self) -> None:
        self.check()
        check_kind("count_tokens", self.count_tokens, Callable, None)  # a Tensor in it is for type checkers alone
        for name, chosen in (("recompute", "auto"), ("parts", "auto"), ("drift", True)):
            if getattr(self, name) == chosen and (self.costs, self.plan) != (None, None):
                raise ValueError(f"{name}={chosen!r} with costs or a plan, which have one already; allowed: that one")

    @property
    def limit(self) -> timedelta:
        """Limit of every wait for another rank."""
        return timedelta(seconds=float(self.timeout))

    @property
    def settings(self) -> list[tuple[Recompute, int]]:
        """Modes of recomputation, and numbers of parts, whose costs are measured, in their order."""
        modes = get_args(Recompute) if self.recompute == "auto" else (self.recompute,)
        return list(product(modes, AUTO_PARTS if self.parts == "auto" else (self.parts,)))

    @property
    def facts(self) -> dict[str, object]:
        """All options by their names, to be compared over ranks: limits may differ, functions have no value."""
        every: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        del every["timeout"]
        every["memory"] = self.memory is not None
        return every | {
            "plan": None if self.plan is None else self.plan.fingerprint,
            "count_tokens": None if self.count_tokens is None else "a function",
            "experts_over": tuple(sorted(self.experts_over)),
        }


def parse_gate(value: object) -> tuple[float | None, bool]:
    """Return the share of a gate, and whether it raises; ValueError for no share from 0 to 1.

    >>> parse_gate("error:0.8"), parse_gate(0.5), parse_gate(None)
    ((0.8, True), (0.5, False), (None, False))
    """
    if value is None:
        return None, False
    text = str(value)
    share = text.removeprefix("error:")
    try:
        if isinstance(value, bool) or not 0 <= float(share) <= 1:
            raise ValueError(value)
    except ValueError:
        raise ValueError(f"gate={quoted(value)}; allowed: 0 to 1, or error:0 to error:1, such as error:0.8") from None
    return float(share), share != text


def check_timeout(timeout: object) -> None:
    """Raise ``ValueError`` for what is no limit of a wait."""
    if not isinstance(timeout, SupportsFloat) or isinstance(timeout, bool) or not 0 < float(timeout) <= MOST_S:
        raise ValueError(f"timeout={quoted(timeout)}; allowed: seconds > 0, at most {MOST_S:g}")


_UNITS = {letter: at for at, letter in enumerate("KMGT", 1)}


def parse_memory(value: object) -> int | Literal["auto"] | None:
    """Return a limit of memory in bytes, ``"auto"``, or None; ValueError for no positive number of bytes.

    >>> parse_memory("70GB"), parse_memory("1.5KiB")
    (70000000000, 1536)
    """
    if value is None:
        return None
    if value == "auto":
        return "auto"
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B?", str(value))
    unit = 1 if found is None else (1024 if found[3] else 1000) ** _UNITS.get(found[2], 0)
    number = 0 if found is None else int(float(found[1]) * unit)
    if not number or (unit == 1 and "." in str(value)):
        raise ValueError(f"memory={quoted(value)}; allowed: bytes above 0, such as 70GB or 64GiB, or auto")
    return number
