"""Names of profiler ranges: written while a step is played, read from traces.

One grammar for NVTX and torch.profiler:

    o1 rank 3: pp 1/2, dp 0/1, ep 1/2     a label: the rank, its position and the size of each mesh dimension
    o1 step 17                            a step, counted from 1
    o1 experts.w[1] m3                    a node on the issuing thread; for an exchange or transfer, its launch
    o1 experts.f[1.2.1] m3 s2'            of block 1, call 2, part 1, on stage 2, of the second pipe
    o1 flight dispatch.f[1] m3            an exchange or transfer, from departure to arrival
    o1 wait dispatch.f[1] m3              the issuing thread waits for that arrival
    o1 action 2F0                         an action from its first node to its last; actions overlap without nesting
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from overlap1f1b.plan.costs import Held
from overlap1f1b.plan.node import Node, Op
from overlap1f1b.schedule import Action, Kind

PREFIX = "o1 "
FORMAT, VERSION = "overlap1f1b-spans", 1
"""Name of the format of records, which the engine writes and a report reads; their spans have these names too."""
NodeRangeKind = Literal["node", "flight", "wait"]

_NODE = re.compile(
    r"(flight |wait )?(\w+)\.([fbw])\[(\d{1,40})(?:\.(\d{1,40}))?(?:\.(\d{1,40}))?\] "
    r"m(\d{1,40})(?: s(\d{1,40})('{0,40}))?",
    re.ASCII,
)
_LABEL = re.compile(r"rank (\d{1,40}):((?: \w{1,40} \d{1,40}/\d{1,40}(?:,(?! *$)|$))*)", re.ASCII)
_STEP = re.compile(r"step (\d{1,40})", re.ASCII)
_RANGE_KIND: dict[str | None, NodeRangeKind] = {None: "node", "flight ": "flight", "wait ": "wait"}
_KIND = {"f": Kind.F, "b": Kind.I, "w": Kind.W}
_OPS = {op.value: op for op in Op}


class Label(NamedTuple):
    """The label of a rank: the first range of its profile.

    >>> str(Label(3, {"pp": (1, 2), "ep": (1, 2)}))
    'o1 rank 3: pp 1/2, ep 1/2'

    ``mesh`` has position and size of each dimension.
    """

    rank: int
    mesh: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        return f"{PREFIX}rank {self.rank}:" + ",".join(f" {name} {at}/{size}" for name, (at, size) in self.mesh.items())


@dataclass(frozen=True)
class About:
    """What a profile says of its run, in a record as ``about`` and in a Chrome trace as ``overlap1f1b``.

    Args:
        schedule: Name of the program.
        overlap: The setting that was asked for.
        choice: Name of the plan that was played, and the times by which the engine chose it.
        microbatches: Number in a step.
        model: Its size.
        date: When it was written, as ISO 8601.
        bytes: Bytes that leave the rank in an exchange or transfer, by step and node.
        held: What nodes hold, by the nodes of microbatch 0; empty if nobody has counted.
        costs: Seconds of the nodes by which the plan was made, of an exchange the mean over links, by the same nodes.
        parameters: Bytes of the rank's parameters.
        standing: Lines about exchanges that run where they stand, inside nodes: no figure of the exchange has them.
    """

    schedule: str = ""
    overlap: str = ""
    choice: str = ""
    microbatches: int = 0
    model: str = ""
    date: str = ""
    bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: Mapping[str, Held] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    parameters: int = 0
    standing: tuple[str, ...] = ()


class StepRange(NamedTuple):
    """The range of a training step.

    >>> str(StepRange(17))
    'o1 step 17'
    """

    number: int

    def __str__(self) -> str:
        return f"{PREFIX}step {self.number}"


class NodeRange(NamedTuple):
    """A node on the issuing thread, in flight, or waited for.

    >>> str(NodeRange("wait", Node(Op.DISPATCH, Kind.I, microbatch=3, block=1)))
    'o1 wait dispatch.b[1] m3'
    """

    kind: NodeRangeKind
    node: Node

    def __str__(self) -> str:
        return f"{PREFIX}{self.node}" if self.kind == "node" else f"{PREFIX}{self.kind} {self.node}"


class ActionRange(NamedTuple):
    """An action from its first node to its last.

    >>> str(ActionRange(Action(Kind.F, stage=2, microbatch=0)))
    'o1 action 2F0'
    """

    action: Action

    def __str__(self) -> str:
        return f"{PREFIX}action {self.action}"


Range = Label | StepRange | NodeRange | ActionRange


def parse_range(text: str) -> Range | None:
    """Parse the name of a range, the reverse of ``str``; None for a name that is not in the grammar.

    >>> parse_range("o1 step 17")
    StepRange(number=17)
    """
    if not text.startswith(PREFIX):
        return None
    text = text[len(PREFIX) :]
    if (match := _NODE.fullmatch(text)) and match[2] in _OPS:
        kind, op, direction, block, call, part, microbatch, stage, marks = match.groups()
        place = (int(microbatch), int(block), int(call or 0), int(part or 0), int(stage or 0), len(marks or ""))
        return NodeRange(_RANGE_KIND[kind], Node(_OPS[op], _KIND[direction], *place))
    if match := _STEP.fullmatch(text):
        return StepRange(int(match[1]))
    if match := _LABEL.fullmatch(text):
        entries = (re.split("[ /]", entry.strip()) for entry in match[2].split(",") if entry)
        return Label(int(match[1]), {name: (int(at), int(size)) for name, at, size in entries})
    if text.startswith("action "):
        with suppress(ValueError):
            return ActionRange(Action.parse(text.removeprefix("action ")))
    return None


def parse_node(text: str) -> Node | None:
    """Parse a node, the reverse of ``str``; None for any other text.

    >>> str(parse_node("experts.w[1] m3"))
    'experts.w[1] m3'
    """
    found = parse_range(PREFIX + text)
    return found.node if isinstance(found, NodeRange) and found.kind == "node" else None
