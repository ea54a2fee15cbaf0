"""The rules of programs written down a second time, and ranks that carry them out one step at a time.

Nothing here shares code with the library but its data: actions, pairs, commands, placements.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from overlap1f1b.schedule import Action, Command, Kind, LoweredProgram, Pair, Program, Step, Verb

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def members(step: Step) -> tuple[Action, ...]:
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


def held(row: tuple[Step, ...]) -> Iterator[tuple[int, int]]:
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


def broken_commands(lowered: LoweredProgram) -> Iterator[str]:  # noqa: PLR0912  one place for all the rules
    """What is wrong with commands of a program whose steps are right."""
    program, pipes = lowered.program, lowered.program.placement.pipes
    trains = any(
        a.kind is not F for row in lowered.ranks for e in row if not isinstance(e, Command) for a in members(e)
    )
    summed = []
    for rank, row in enumerate(lowered.ranks):
        at = {action: i for i, e in enumerate(row) if not isinstance(e, Command) for action in members(e)}
        where = {entry._replace(number=0): i for i, entry in enumerate(row) if isinstance(entry, Command)}
        if len(where) != sum(isinstance(entry, Command) for entry in row):
            yield f"twice on {rank}"
        wanted: dict[Command, tuple[list[int], list[int]]] = {}  # command: positions before and behind it
        groups: dict[int, list[int]] = {}
        for (kind, s, m, p), i in at.items():
            way, up = (F, s + 1) if kind is F else (B, s - 1)
            down = s - 1 if kind is F else s + 1
            sent = None
            if kind is not W and 0 <= up < len(pipes[p]):
                there = pipes[p][up]
                if there == rank:
                    sent = Command(Verb.LOCAL_PASS, s, m, p, way, -1, 0)
                    users = [
                        at[a] for a in at if a[1:] == (up, m, p) and (a.kind is F) == (kind is F) and a.kind is not W
                    ]
                    wanted[sent] = ([i], users)
                else:
                    sent = Command(Verb.SEND, s, m, p, way, there, 0)
                    wanted[sent] = ([i], [])
            if kind is not W and 0 <= down < len(pipes[p]) and pipes[p][down] != rank:
                wanted[Command(Verb.RECV, s, m, p, way, pipes[p][down], 0)] = ([], [i])
            if kind in (B, W):
                groups.setdefault(s, []).append(i)
            if kind in (B, W) or not trains:
                outputs = [where[sent]] if not trains and sent in where else []
                wanted[Command(Verb.FREE, s, m, p, F, -1, 0)] = ([i, *outputs], [])
        for group, positions in groups.items():
            both = Command(Verb.REDUCE_REPLICA, group, number=0)
            if len({pipe[group] for pipe in pipes}) > 1:
                wanted[both] = (positions, [])
            wanted[Command(Verb.REDUCE_GRAD, group, number=0)] = ([*positions, where.get(both, -1)], [])
        if set(wanted) != {c._replace(number=0) for c in where}:
            yield f"commands of {rank}"
            return
        for command, (earlier, later) in wanted.items():
            if any(i > where[command] for i in earlier) or any(i < where[command] for i in later):
                yield f"place of {command}"
        alive = 0
        for entry in row:
            if isinstance(entry, Command):
                alive -= entry.verb is Verb.FREE
            else:
                alive += sum(action.kind is F for action in members(entry))
                if trains and alive > program.peak_activations[rank]:
                    yield f"alive on {rank}"
        summed.append([e.stage for e in row if isinstance(e, Command) and e.verb is Verb.REDUCE_REPLICA])
    for a, mine in enumerate(summed):
        for b, others in enumerate(summed):
            if [g for g in mine if g in others and a != b] != [g for g in others if g in mine and a != b]:
                yield f"order of replicas on {a} and {b}"


def delivers(lowered: LoweredProgram, *, blocking: bool) -> bool:
    """Whether ranks come to an end that hand messages over through queues, in any order of their turns.

    A lane is two queues: messages that were sent and buffers that were posted; the first of one goes into the first of
    the other. A blocking SEND ends when its message has found its buffer. A wrong message in a buffer ends the run.
    """
    ranks = lowered.ranks
    sent: dict[tuple[int, int], deque[tuple[object, ...]]] = {}
    posted: dict[tuple[int, int], deque[tuple[object, ...]]] = {}
    counted: Counter[tuple[str, int, int]] = Counter()
    arrived: set[tuple[object, ...]] = set()
    begun = [False] * len(ranks)
    at = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(ranks):
            if at[rank] == len(row):
                continue
            entry = row[at[rank]]
            advance = True
            if not isinstance(entry, Command):
                inputs = {
                    (rank, F if a.kind is F else B, *a[1:])
                    for a in members(entry)
                    if a.kind is not W and remote(lowered.program, a, rank)
                }
                advance = inputs <= arrived
            elif entry.verb in (Verb.SEND, Verb.RECV):
                out = entry.verb is Verb.SEND
                lane = (rank, entry.peer) if out else (entry.peer, rank)
                stage = entry.stage + (0 if not out else 1 if entry.kind is F else -1)
                message = (lane[1], entry.kind, stage, entry.microbatch, entry.pipe)
                if not begun[rank]:
                    begun[rank] = moved = True
                    if counted[entry.verb, *lane] != entry.number:
                        return False
                    counted[entry.verb, *lane] += 1
                    (sent if out else posted).setdefault(lane, deque()).append(message)
                advance = not (out and blocking) or message in arrived
            if advance:
                at[rank] += 1
                begun[rank] = False
                moved = True
        for lane, messages in sent.items():
            while messages and posted.get(lane):
                message = messages.popleft()
                if posted[lane].popleft() != message:
                    return False
                arrived.add(message)
                moved = True
    return all(position == len(row) for position, row in zip(at, ranks, strict=True))


def remote(program: Program, action: Action, rank: int) -> bool:
    pipe = program.placement.pipes[action.pipe]
    source = action.stage + (-1 if action.kind is F else 1)
    return 0 <= source < len(pipe) and pipe[source] != rank
