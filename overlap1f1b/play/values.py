"""What a forward of one microbatch has set in places of its block, and takes along while it is suspended.

begin(seed)    a forward begins
leave()        it is suspended: take what it has set, put back what was there
enter()        it goes on: put on what it has set
end()          it has ended: its last values stay; a place that each forward sets anew gets back what was there
undo()         in place of end(), behind a second forward of the same microbatch: nothing of it stays
"""

from __future__ import annotations

from typing import Any

from overlap1f1b.cut.places import Key, KnownPlaces, may_hold
from overlap1f1b.cut.replacement import ABSENT, put


class PlaceValues:
    """The values that one forward has set.

    Args:
        known: Which places of the block change.
        learns: Whether the forward shows places that are not known: all of them are compared at every exchange.
        repeats: Whether parts of the forward run twice: places that change behind the last exchange count, too.
    """

    def __init__(self, known: KnownPlaces, *, learns: bool = False, repeats: bool = False) -> None:
        self._known, self._learns, self._repeats = known, learns, repeats
        self._values: dict[Key, Any] = {}  # what it has set
        self._starts: dict[Key, Any] = {}  # what was there before
        self._own: Any = None  # of the block's own state
        self._made = False  # whether it has made objects
        # In the running segment:
        self._copies: dict[int, dict[Any, Any]] = {}  # of all places at its begin, while it learns
        self._before: list[Any] = []  # known values at its begin
        self._outside: dict[Key, Any] = {}  # what was there before values were put on, where it differs

    def begin(self, seed: int) -> None:
        """Note what is there; ``seed`` is that of the microbatch's random numbers."""
        known = self._known
        if not self._learns:
            known.tables.clear()  # among them may be objects that a forward has made
        elif not known.tables:
            known.find()
        if known.own is not None:
            known.own.begin(seed)
        self._watch()

    def enter(self) -> None:
        """Put on what the forward has set before it was suspended."""
        known = self._known
        if known.own is not None:
            known.own.enter(self._own)
        for key, value in self._values.items():
            table = known.changing.get(key)
            if table is None:  # of an object that was made anew since
                continue
            there = table.get(key[1], ABSENT)
            if there is not value:  # another forward was here
                self._outside[key] = there
                put(table, key[1], value)
        self._watch()

    def _watch(self) -> None:
        self._before = [table.get(name, ABSENT) for (_, name), table in self._known.changing.items()]
        self._copies = self._known.copies() if self._learns else {}

    def look(self) -> None:
        """Learn which places have changed since the running segment began."""
        self._before += self._known.learn(self._copies)

    def leave(self) -> None:
        """Take what the forward has set, and put back what was there."""
        if self._learns:
            self.look()
        changes, known = self._take(), self._known
        for key, there in self._outside.items():
            if key not in changes or key not in known.staying:
                put(known.changing[key], key[1], there)
        self._release()

    def end(self) -> None:
        """Leave what the forward has set last; put back what only others need, and note what stays."""
        if self._learns and self._repeats:
            self.look()
        changes, known = self._take(), self._known
        for key, there in self._outside.items():
            if key in known.staying and key not in changes:
                put(known.changing[key], key[1], there)
        known.staying.update(key for key, start in self._starts.items() if self._values[key] is not start)
        if self._made:
            known.find()
        self._release()

    def _take(self) -> dict[Key, Any]:
        """Return what the running segment has changed, and add it to what the forward has set."""
        known, changes = self._known, dict[Key, Any]()
        for (key, table), before in zip(known.changing.items(), self._before, strict=True):
            now = table.get(key[1], ABSENT)
            if now is not before:
                changes[key] = now
                self._outside.setdefault(key, before)
                self._made |= self._learns and may_hold(now)
        self._values |= changes
        for key, there in self._outside.items():
            if key not in known.staying:
                self._starts.setdefault(key, there)
        return changes

    def _release(self) -> None:
        self._copies, self._before, self._outside = {}, [], {}
        if self._known.own is not None:
            self._own = self._known.own.leave()

    def undo(self) -> None:
        """Put back all that was there when the forward began: it has never been suspended."""
        for (key, table), before in zip(self._known.changing.items(), self._before, strict=True):
            put(table, key[1], before)
        self._release()
