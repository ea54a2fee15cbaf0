"""JSON read an event at a time."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from overlap1f1b.profiling import stream
from overlap1f1b.profiling.stream import read_events

EVENTS = [{"name": 'a\\"]}', "args": {"n": [1, 2.5e-3, {"deep": "}"}]}}, {}, 7, {"name": "ü"}, -12.25]
TOP = {"first": 1, "list": [1, 2], "object": {"traceEvents": [9]}, "null": None, "last": 12345}


def parts(text: str) -> tuple[list[Any], dict[str, Any]]:
    taken: list[Any] = []
    others = read_events(io.StringIO(text), taken.append)
    return taken, others


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_chunks_end_anywhere(monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None) -> None:
    monkeypatch.setattr(stream, "_CHUNK", chunk)
    content = {"first": 1, "traceEvents": EVENTS, **TOP}
    assert parts(json.dumps(content, indent=indent)) == (EVENTS, {**TOP, "traceEvents": True})
    assert parts(json.dumps(EVENTS, indent=indent)) == (EVENTS, {"traceEvents": True})


def test_every_truncation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_CHUNK", 16)
    whole = json.dumps({"traceEvents": EVENTS, "last": {"a": 1}})
    for end in range(1, len(whole)):
        with pytest.raises(ValueError, match="truncated"):
            parts(whole[:end])


@pytest.mark.parametrize("text", ["hello", "12", '"text"', "<html></html>"])
def test_foreign_text(text: str) -> None:
    with pytest.raises(ValueError, match="it is no JSON object or array"):
        parts(text)


@pytest.mark.parametrize("text", ['{"a" 1}', '{"a": nothing}', '{"traceEvents": [{"a": }]}'])
def test_malformed(text: str) -> None:
    with pytest.raises(ValueError, match="no JSON"):
        parts(text)


class Watched(io.StringIO):
    """Notes how many events had been taken whenever more text is asked for."""

    def __init__(self, text: str, taken: list[Any]) -> None:
        super().__init__(text)
        self.taken, self.seen = taken, [0]

    def read(self, size: int | None = -1, /) -> str:
        self.seen.append(len(self.taken))
        return super().read(size)


def test_text_is_read_as_events_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory does not grow with the file."""
    monkeypatch.setattr(stream, "_CHUNK", 1000)
    taken: list[Any] = []
    file = Watched(json.dumps({"traceEvents": [{"n": n} for n in range(10_000)]}), taken)
    read_events(file, taken.append)
    assert len(taken) == 10_000
    steps = [after - before for before, after in zip(file.seen[1:], file.seen[2:], strict=False)]
    assert max(steps) <= 150
    assert len(steps) >= 100
