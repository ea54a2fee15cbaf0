"""Records of the engine: spans that it recorded without a profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from msgspec import DecodeError, Struct
from msgspec.json import decode

from overlap1f1b.plan import About, Node, Resource
from overlap1f1b.plan.ranges import parse_node
from overlap1f1b.profiling.recording import Recording, Spans, StepRecord
from overlap1f1b.schedule.values import quoted, shortened

SpanKind = Literal["node", "flight", "wait", "device"]
_SECOND = 1e9
_LONGEST = 1e9  # seconds that fit into whole nanoseconds


class _StepSpans(Struct):
    """A step; spans are ``[kind, node, start, end]``, times in seconds from its start."""

    step: int
    seconds: float
    spans: list[tuple[SpanKind, str, float, float]]


class _Record(Struct):
    rank: int
    mesh: dict[str, tuple[int, int]]
    steps: list[_StepSpans]
    about: About = About()


def read_record(path: Path, text: bytes) -> Recording:
    """Return the rank of a record."""
    try:
        record = decode(text, type=_Record)
    except DecodeError as error:
        raise ValueError(f"{path}: not a record of overlap1f1b profile ({shortened(str(error))})") from None
    if not record.steps:
        raise ValueError(f"{path} has no steps; allowed: a record of one or more")
    texts = dict.fromkeys(text for step in record.steps for _, text, _, _ in step.spans)
    names: list[Node] = []
    for name in texts:
        if (node := parse_node(name)) is None:
            raise ValueError(f"{path}: not a record of overlap1f1b profile ({quoted(name)} is not a node)")
        names.append(node)
    index = {text: number for number, text in enumerate(texts)}
    steps: list[StepRecord] = []
    for step in record.steps:
        steps.append(_step(path, step, steps[-1].end if steps else 0, index, names))
    world = prod(size for _, size in record.mesh.values())
    device = any(kind == "device" for step in record.steps for kind, *_ in step.spans)
    return Recording(
        path, record.rank, record.mesh, world, tuple(names), tuple(steps), "records", device, about=record.about
    )


def _step(path: Path, step: _StepSpans, begin: int, index: Mapping[str, int], names: Sequence[Node]) -> StepRecord:
    """Return one step; its clock starts at ``begin``."""
    times = np.array([[start for _, _, start, _ in step.spans], [end for *_, end in step.spans]], float)
    if not (0 <= step.seconds < _LONGEST and (np.abs(times) < _LONGEST).all() and (times[0] <= times[1]).all()):
        raise ValueError(f"{path}: not a record of overlap1f1b profile (step {step.step} has impossible times)")
    start, end = begin + np.rint(times * _SECOND).astype(np.int64)
    every = Spans.of([index[text] for _, text, _, _ in step.spans], start, end)
    kinds = np.array([kind for kind, *_ in step.spans], "U6")
    issued, flights, waits, device = (every[kinds == kind].ordered for kind in get_args(SpanKind))
    computes = np.array([what.resource is Resource.COMPUTE for what in names], bool)
    compute = issued[computes[issued.what]]
    last = max((int(spans.end.max()) for spans in (issued, flights, waits, device) if len(spans)), default=begin)
    if len(device):
        begins = {what: start for what, start, _ in issued}  # a span was launched when the host began its node
        launched = np.array([begins.get(what, start) for what, start, _ in device], np.int64)
        device = replace(device, launched=launched)
        compute, travelled = (device[computes[device.what] == does] for does in (True, False))
        flights = (travelled + flights[~np.isin(flights.what, travelled.what)]).ordered
    until = max(begin + round(step.seconds * _SECOND), last)
    return StepRecord(step.step, begin, until, issued, compute, flights, waits)
