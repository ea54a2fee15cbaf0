"""JSON files too large to be held: one event at a time, and the events of torch.profiler's Chrome traces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

from overlap1f1b.plan.ranges import PREFIX
from overlap1f1b.profiling.recording import MOST_NAME, Capture
from overlap1f1b.profiling.records import RecordedSteps

_CHUNK = 1 << 22
MOST_EVENTS = 10_000_000
"""Limit of events or spans in a file."""
MOST_VALUE = 1 << 24
"""Limit of characters in one event, or in another value."""
MOST_TEXT = 1 << 33
"""Limit of characters in a file."""
_BLANK = re.compile(r"[\s,]*")
_VALUE = json.JSONDecoder()

Event = dict[str, Any]
TRUNCATED = "it is truncated, its end is missing"


def read_events(
    file: IO[str], take: Callable[[Event], None], steps: RecordedSteps, *, seen: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Pass on the events of a trace or the steps of a record; return the other top-level values, and True for an array.

    If the file is an array itself, its elements are passed on as events.

    Args:
        file: JSON text.
        take: Called with each element of the array ``traceEvents``.
        steps: Receives the objects of the array ``steps``, and the elements of the array ``spans`` in each.
        seen: Called whenever more text was read.

    Raises:
        ValueError: The text ends too early, is not a JSON object or array, or exceeds ``MOST_EVENTS``, ``MOST_VALUE``
            or ``MOST_TEXT``.
    """
    return _Reader(file, seen).whole(take, steps)


class _Reader:
    def __init__(self, file: IO[str], seen: Callable[[], None]) -> None:
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._seen, self._read, self._events = seen, 0, 0

    def whole(self, take: Callable[[Event], None], steps: RecordedSteps) -> dict[str, Any]:
        others: dict[str, Any] = {}
        first = self._peek()
        if first == "[":
            self._array(take)
            others["traceEvents"] = True
        elif first == "{":
            for name in self._keys():
                if self._peek() == "[" and name == "traceEvents":
                    self._array(take)
                    others.setdefault(name, True)
                elif self._peek() == "[" and name == "steps":
                    self._steps(steps)
                    others[name] = True
                else:
                    others[name] = self._value()
        else:
            raise ValueError("it is not a JSON object or array")
        if self._ahead():
            raise ValueError("it has text behind its end")
        return others

    def _keys(self) -> Iterator[Any]:
        """Yield the keys of the object that begins here, each at the start of its value."""
        self._at += 1
        while self._peek() != "}":
            name = self._value()
            self._count()
            if self._peek() != ":":
                raise ValueError("it is not a JSON object")
            self._at += 1
            self._peek()
            yield name
        self._at += 1

    def _steps(self, steps: RecordedSteps) -> None:
        self._at += 1
        while (first := self._peek()) != "]":
            self._count()
            if first != "{":
                steps.end(self._value())
                continue
            others: dict[str, Any] = {}
            for name in self._keys():
                if name == "spans" and self._peek() == "[":
                    self._array(steps.take)
                else:
                    others[name] = self._value()
            steps.end(others)
        self._at += 1

    def _count(self, more: int = 1) -> None:
        self._events += more
        if self._events > MOST_EVENTS:
            raise ValueError(f"it has more than {MOST_EVENTS} events or spans; allowed: at most this number")

    def _array(self, take: Callable[[Event], None]) -> None:
        self._at += 1
        while self._peek() != "]":
            take(self._value())
            self._count(1 + self._take_whole(take))
        self._at += 1

    def _take_whole(self, take: Callable[[Event], None]) -> int:
        """Pass on the elements in the text so far; a number at its end may continue."""
        text, at, end, taken = self._text, self._at, len(self._text), 0
        decode, skip = _VALUE.raw_decode, _BLANK.match
        while True:
            found = skip(text, at)
            assert found is not None
            at = self._at = found.end()
            if at == end or text[at] not in "{[":
                return taken
            try:
                value, at = decode(text, at)
            except json.JSONDecodeError:
                return taken
            self._at = at
            taken += 1
            take(value)

    def _peek(self) -> str:
        """Return the next character that is neither blank nor comma."""
        if following := self._ahead():
            return following
        raise ValueError(TRUNCATED)

    def _ahead(self) -> str:
        """Return the next character that is neither blank nor comma; at the end of the text none."""
        while True:
            found = _BLANK.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def _value(self) -> Any:
        """Return the value that begins here, and move to its end."""
        while True:
            try:
                value, end = _VALUE.raw_decode(self._text, self._at)
                if self._ended or not isinstance(value, int | float) or end + 2 < len(self._text):
                    self._at = end
                    return value  # a number at the end of the text may continue, as 1e- does in 1e-5
            except json.JSONDecodeError as error:
                if self._ended:
                    raise ValueError(f"it is truncated, or not JSON ({error.msg.removesuffix(' at')})") from None
            self._fill()

    def _fill(self) -> None:
        """Read on, as much text as is held already."""
        left = self._text[self._at :]
        if len(left) > MOST_VALUE:
            raise ValueError(f"it has a value of more than {MOST_VALUE} characters; allowed: at most this number")
        more = self._file.read(max(_CHUNK, len(left)))
        self._read += len(more)
        if self._read > MOST_TEXT:
            raise ValueError(f"it has more than {MOST_TEXT} characters; allowed: at most this number")
        self._text, self._at, self._ended = left + more, 0, not more
        self._seen()


_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "privateuse1_runtime"})
_DEVICE_RANGES = "gpu_user_annotation"


def taker(capture: Capture) -> Callable[[Event], None]:
    """Return a function that records an event: our ranges, kernels, copies and launches; it skips all others.

    Times in the file are microseconds.
    """
    threads: dict[tuple[Any, Any], int] = {}
    add_range, add_launch, add_kernel = capture.add_range, capture.launches.append, capture.kernels.append

    def take(event: Event) -> None:
        if type(event) is not dict or event.get("ph") != "X":
            return
        category, name = event.get("cat"), event.get("name", "")
        if category in _KERNELS:
            args = event["args"]
            start = round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            add_kernel((args.get("correlation", -1), int(args.get("stream", 0)), start, end))
        elif category in _LAUNCHES:
            number = event.get("args", {}).get("correlation")
            if number is not None:
                thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
                add_launch((number, thread, round(event["ts"] * 1000)))
        elif (
            category != _DEVICE_RANGES and isinstance(name, str) and name.startswith(PREFIX) and len(name) <= MOST_NAME
        ):
            thread = threads.setdefault((event["pid"], event["tid"]), len(threads))
            start = round(event["ts"] * 1000)
            add_range(name, thread, start, start + round(event.get("dur", 0) * 1000))

    return take
