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
    others = read_events(io.StringIO(text), taken.append, Spans())
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
    with pytest.raises(ValueError, match="it is not a JSON object or array"):
        parts(text)


@pytest.mark.parametrize("text", ['{"a" 1}', '{"a": nothing}', '{"traceEvents": [{"a": }]}'])
def test_malformed(text: str) -> None:
    with pytest.raises(ValueError, match=r"not (a )?JSON"):
        parts(text)


class Spans:
    """Notes spans and what stands beside them."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def take(self, element: Any) -> None:
        self.taken.append(element)

    def end(self, others: Any) -> None:
        self.taken.append(others)


STEPS = [{"a": 1, "spans": [1, [2, "]"]], "b": [3]}, {}, {"spans": []}, {"spans": None}, {"spans": {"x": 1}}, 7, [8]]
TAKEN = [1, [2, "]"], {"a": 1, "b": [3]}, {}, {}, {"spans": None}, {"spans": {"x": 1}}, 7, [8]]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 1])
def test_arrays_of_objects_of_arrays(monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None) -> None:
    monkeypatch.setattr(stream, "_CHUNK", chunk)
    spans, events, told = Spans(), [], []
    text = io.StringIO(json.dumps({"steps": STEPS, "traceEvents": EVENTS, "rank": 0}, indent=indent))
    others = read_events(text, events.append, spans, seen=lambda: told.append(text.tell()))
    assert others == {"steps": True, "traceEvents": True, "rank": 0}
    assert (spans.taken, events) == (TAKEN, EVENTS)
    assert told == sorted(told)
    assert told[-1] == len(text.getvalue())


@pytest.mark.parametrize(
    ("name", "most", "why"),
    [
        ("MOST_EVENTS", 9, "it has more than 9 events or spans; allowed: at most this number"),
        ("MOST_VALUE", 40, "it has a value of more than 40 characters; allowed: at most this number"),
        ("MOST_TEXT", 100, "it has more than 100 characters; allowed: at most this number"),
    ],
)
def test_as_much_is_read_as_is_said(monkeypatch: pytest.MonkeyPatch, name: str, most: int, why: str) -> None:
    monkeypatch.setattr(stream, "_CHUNK", 16)
    events = [{"n": n} for n in range(8)]
    longer = [{"n": "x" * 200}] if name == "MOST_VALUE" else [{"n": 8}, {"n": 9}]
    monkeypatch.setattr(stream, name, most)
    fits = [json.dumps({"traceEvents": events}), json.dumps({"steps": [{"spans": events[:5]}]}), json.dumps(events)]
    for text in fits:
        read_events(io.StringIO(text), [].append, Spans())
    for text in (
        json.dumps({"traceEvents": events + longer}),
        json.dumps({"steps": [{"spans": events + longer}]}),
        json.dumps({"steps": [{"spans": events}, *longer]}),
        json.dumps(events + longer + longer),
        json.dumps({str(n): event for n, event in enumerate(events + longer)}),
    ):
        with pytest.raises(ValueError, match=f"^{why}$"):
            read_events(io.StringIO(text), [].append, Spans())


def test_a_long_name_is_given_up_early() -> None:
    """Before it is read, let alone decoded."""

    class Endless(io.StringIO):
        asked = 0

        def read(self, size: int | None = -1, /) -> str:
            assert size is not None
            text = '{"traceEvents": [{"name": "' if not self.asked else ""
            self.asked += size
            return text + "o" * (size - len(text))

    file = Endless()
    with pytest.raises(ValueError, match="it has a value of more than 16777216 characters"):
        read_events(file, [].append, Spans())
    assert file.asked < 4 * stream.MOST_VALUE


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
    read_events(file, taken.append, Spans())
    assert len(taken) == 10_000
    steps = [after - before for before, after in zip(file.seen[1:], file.seen[2:], strict=False)]
    assert max(steps) <= 150
    assert len(steps) >= 100
