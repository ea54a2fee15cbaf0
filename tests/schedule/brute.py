"""The rules of programs written down a second time, and ranks that carry them out one step at a time.

Nothing here shares code with the library but its data: actions, pairs, placements.
"""

from collections import Counter
from collections.abc import Iterator

from overlap1f1b.schedule import Action, Kind, Pair, Program, Slot

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def members(step: Slot) -> tuple[Action, ...]:
    return tuple(step) if isinstance(step, Pair) else (step,)


def broken_rules(program: Program) -> Iterator[str]:
    """What is wrong with the rows, whether or not they can be carried out."""
    placement, rows = program.placement, program.ranks
    if len(rows) != 1 + max(map(max, placement.pipes)) or not all(rows):
        yield "ranks"
        return
    counts = [Counter(action for step in row for action in members(step)) for row in rows]
    trains = any(action.kind is not F for count in counts for action in count)
    expected = {
        (rank, s, m, p)
        for p, pipe in enumerate(placement.pipes)
        for s, rank in enumerate(pipe)
        for m in range(program.microbatches)
        if len(placement.pipes) == 1 or (m >= program.microbatches / 2) == bool(p)
    }
    found = {(rank, *action[1:]) for rank, count in enumerate(counts) for action in count}
    if found != expected:
        yield f"actions {found ^ expected}"
    for rank, s, m, p in found:
        kinds = tuple(counts[rank][Action(kind, s, m, p)] for kind in (F, B, I, W))
        if kinds not in ([(1, 1, 0, 0), (1, 0, 1, 1)] if trains else [(1, 0, 0, 0)]):
            yield f"{kinds} of {s} {m} {p}"
    for rank, row in enumerate(rows):
        for pair in (step for step in row if isinstance(step, Pair)):
            if pair.forward.kind is not F or pair.backward.kind not in (B, I):
                yield f"kinds of {pair}"
            if pair.forward.microbatch == pair.backward.microbatch and pair.forward.pipe == pair.backward.pipe:
                yield f"dependent members of {pair}"
        if trains and any(a > program.peak_activations[rank] for a, _ in held(row)):
            yield f"alive on {rank}"
        if trains and program.peak_weights and any(w > program.peak_weights[rank] for _, w in held(row)):
            yield f"waiting on {rank}"


def held(row: tuple[Slot, ...]) -> Iterator[tuple[int, int]]:
    """At every step, the activations alive and the weight gradients waiting while it runs."""
    alive: Counter[tuple[int, ...]] = Counter()
    waiting: Counter[tuple[int, ...]] = Counter()
    for step in row:
        for action in members(step):
            alive[action[1:]] += action.kind is F
            waiting[action[1:]] += action.kind is I
        yield sum(alive.values()), sum(waiting.values())
        for action in members(step):
            alive[action[1:]] -= action.kind in (B, W)
            waiting[action[1:]] -= action.kind is W


def needed(action: Action, done: set[Action], last: int) -> bool:
    """Whether the action can be carried out."""
    kind, s, m, p = action

    def behind(stage: int) -> bool:
        return Action(B, stage, m, p) in done or Action(I, stage, m, p) in done

    if kind is F:
        return s == 0 or Action(F, s - 1, m, p) in done
    if kind is W:
        return Action(I, s, m, p) in done
    return Action(F, s, m, p) in done and (s == last or behind(s + 1))


def finishes(program: Program) -> bool:
    """Whether ranks that each try their next step over and over come to an end."""
    done: set[Action] = set()
    at = [0] * len(program.ranks)
    last = len(program.placement.pipes[0]) - 1
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.ranks):
            if at[rank] < len(row) and all(needed(action, done, last) for action in members(row[at[rank]])):
                done |= set(members(row[at[rank]]))
                at[rank] += 1
                moved = True
    return all(position == len(row) for position, row in zip(at, program.ranks, strict=True))
