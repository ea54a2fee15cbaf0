"""Our own records: spans that the engine noted, without a profiler."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from overlap1f1b.plan import Lane, Node
from overlap1f1b.plan.ranges import FORMAT, VERSION, parse_node
from overlap1f1b.profiling.recording import Recording, Spans, Step, What

_KINDS = {"node": 0, "flight": 1, "wait": 2}
_SECOND = 1e9
_LONGEST = 1e9  # seconds that fit into whole nanoseconds


def read_records(path: Path, content: Mapping[str, Any]) -> Recording:
    """The rank of a file of ours.

    Args:
        path: The file, for messages.
        content: Its JSON: ``format``, ``version``, ``rank``, ``mesh`` and ``steps``, each with its number, its seconds
            and spans ``[kind, node, start, end]`` in seconds from its start.

    Raises:
        ValueError: Another version, or content that is not of this form.
    """
    if content.get("version") != VERSION:
        raise ValueError(f"{path}: version {content.get('version')!r} of {FORMAT}; allowed: {VERSION}")
    names = _Names()
    try:
        mesh = {str(name): (int(at), int(size)) for name, (at, size) in content["mesh"].items()}
        begin, steps = 0, []
        for step in content["steps"]:
            steps.append(_step(step, begin, names))
            begin = steps[-1].end
        rank = int(content["rank"])
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: not a record of overlap1f1b profile ({type(error).__name__}: {error})") from None
    if not steps:
        raise ValueError(f"{path} has no steps; allowed: a record of one or more")
    world = prod(size for _, size in mesh.values())
    return Recording(path, rank, mesh, world, tuple(names.what), tuple(steps), "records")


class _Names:
    def __init__(self) -> None:
        self.what: list[What] = []
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        index = self._index.get(text)
        if index is None:
            node = parse_node(text)
            if node is None:
                raise ValueError(f"{text!r} is no node")
            index = self._index[text] = len(self.what)
            self.what.append(node)
        return index


def _step(content: Mapping[str, Any], begin: int, names: _Names) -> Step:
    """One step; its clock starts at ``begin``."""
    kinds, texts, begins, ends = zip(*content["spans"], strict=True) if content["spans"] else ((),) * 4
    times, seconds = np.array([begins, ends], float), float(content["seconds"])
    if not (abs(seconds) < _LONGEST and (np.abs(times) < _LONGEST).all() and (times[0] <= times[1]).all()):
        raise ValueError(f"step {content['step']} has times that no step has")  # nan is none, too
    start, end = begin + np.rint(times * _SECOND).astype(np.int64)
    kind = np.array([_KINDS[kind] for kind in kinds], np.int64)
    every = Spans.of(np.array([names(text) for text in texts], np.int64), start, end)
    every, kind = every[order := np.argsort(start, kind="stable")], kind[order]
    issued, flights, waits = (every[kind == number] for number in _KINDS.values())
    computes = [isinstance(what, Node) and what.lane is Lane.COMPUTE for what in names.what]
    compute = issued[np.array(computes, bool)[issued.what]]
    last = max((int(spans.end.max()) for spans in (issued, flights, waits) if len(spans)), default=begin)
    until = max(begin + round(seconds * _SECOND), last)
    return Step(int(content["step"]), begin, until, issued, compute, flights, waits)
