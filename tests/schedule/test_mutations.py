"""Programs and lowered programs changed at random, against rules and executors of ``brute``.

10,000 changes of programs and 6,000 of lowered ones, on up to four ranks: none is accepted that breaks a rule or that
ranks cannot carry out, and no other is refused.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from overlap1f1b.schedule import (
    SCHEDULES,
    Action,
    Command,
    Instruction,
    Kind,
    LoweredProgram,
    Pair,
    Program,
    Step,
    Verb,
    build_schedule,
    lower,
)
from overlap1f1b.schedule.lowered_flow import run_lowered
from tests.schedule.brute import broken_commands, broken_rules, delivers, finishes

PARTS, EACH, LOWERED = 20, 500, 300


def a_program(rng: random.Random) -> Program:
    while True:
        P, M = rng.randint(1, 4), rng.randint(1, 6)
        name, v = rng.choice(SCHEDULES), rng.choice([None, None, 2, 3])
        if name.startswith("dualpipe"):
            P, v = rng.choice([2, 2, 4] if name == "dualpipe" else [1, 2, 2, 3, 4]), None
            M = 2 * P + rng.choice([0, 2] if P < 4 else [0])
        try:
            return build_schedule(name, ranks=P, microbatches=M, chunks=v, forward_only=rng.random() < 0.1)
        except ValueError:
            continue


def changed(action: Action, rng: random.Random) -> Action:
    field = rng.choice(["kind", "stage", "microbatch", "pipe"])
    value = rng.choice(list(Kind)) if field == "kind" else max(0, getattr(action, field) + rng.choice([-1, 1]))
    return action._replace(**{field: value})  # type: ignore[arg-type]


def mutant(program: Program, rng: random.Random) -> Program:  # noqa: PLR0912  a case for each kind of change
    rows: list[list[Step]] = [list(row) for row in program.ranks]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        row = rng.choice(rows)
        if not row:
            continue
        a, b = rng.randrange(len(row)), rng.randrange(len(row))
        step = row[a]
        match rng.choice(
            ["drop", "double", "swap", "neighbours", "neighbours", "move", "rank", "change", "split", "join", "peak"]
        ):
            case "drop":
                del row[a]
            case "double":
                row.insert(b, step)
            case "swap":
                row[a], row[b] = row[b], row[a]
            case "neighbours":
                row[a : a + 2] = reversed(row[a : a + 2])
            case "move":
                row.insert(b, row.pop(a))
            case "rank":
                other = rng.choice(rows)
                other.insert(rng.randint(0, len(other)), row.pop(a))
            case "change" if isinstance(step, Pair):
                row[a] = step._replace(forward=changed(step.forward, rng))
            case "change":
                row[a] = changed(step, rng)
            case "split" if isinstance(step, Pair):
                row[a : a + 1] = rng.sample(step, 2)
            case "split" if step.kind is Kind.B:
                row[a] = step._replace(kind=Kind.I)
                row.insert(rng.randint(a + 1, len(row)), step._replace(kind=Kind.W))
                program = replace(program, peak_weights=())
            case "join" if a + 1 < len(row):
                other_step = row[a + 1]
                if not isinstance(step, Pair) and not isinstance(other_step, Pair):
                    both = sorted((step, other_step), key=lambda action: action.kind is not Kind.F)
                    row[a : a + 2] = [Pair(*both)]
            case "peak":
                peaks = list(program.peak_activations)
                peaks[rng.randrange(len(peaks))] += rng.choice([-1, 1, 2])
                program = replace(program, peak_activations=tuple(peaks))
    return replace(program, ranks=tuple(map(tuple, rows)))


def refused(what: Program | LoweredProgram) -> str | None:
    try:
        what.check()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_of_programs(part: int) -> None:
    rng = random.Random(part)
    verdicts: Counter[str] = Counter()
    for _ in range(EACH):
        program = mutant(a_program(rng), rng)
        broken = list(broken_rules(program))
        finished = not broken and finishes(program)
        verdict = refused(program)
        assert "\n" not in (verdict or "")
        assert (verdict is None) == finished, (program.draw(), broken, verdict)
        verdicts["broken" if broken else "fine" if finished else "stuck"] += 1
    assert verdicts["fine"] > EACH // 20, verdicts
    assert verdicts["stuck"] > EACH // 50, verdicts


def lowered_mutant(lowered: LoweredProgram, rng: random.Random) -> LoweredProgram:
    rows: list[list[Instruction]] = [list(row) for row in lowered.ranks]
    for _ in range(rng.choice([1, 1, 1, 2])):
        row = rng.choice([row for row in rows if row])
        commands = [i for i, entry in enumerate(row) if isinstance(entry, Command)] or [0]
        a, b = rng.choice(commands), rng.randrange(len(row))
        entry = row[a]
        match rng.choice(["drop", "double", "move", "near", "near", "rank", "number", "lane", "steps", "reduce"]):
            case "drop":
                del row[a]
            case "double":
                row.insert(b, entry)
            case "move":
                row.insert(b, row.pop(a))
            case "near":
                row.insert(max(0, a + rng.choice([-3, -2, -1, 1, 2, 3])), row.pop(a))
            case "rank":
                other = rng.choice(rows)
                other.insert(rng.randint(0, len(other)), row.pop(a))
            case "number" if isinstance(entry, Command):
                row[a] = entry._replace(number=max(-1, entry.number + rng.choice([-1, 1])))
            case "steps":
                row[b : b + 2] = reversed(row[b : b + 2])
            case kind:
                verbs = (Verb.SEND, Verb.RECV) if kind == "lane" else (Verb.REDUCE_GRAD, Verb.REDUCE_REPLICA, Verb.FREE)
                alike = [i for i in commands if isinstance(row[i], Command) and row[i].verb in verbs]  # type: ignore[union-attr]
                if len(alike) > 1:
                    c, d = rng.sample(alike, 2)
                    row[c], row[d] = row[d], row[c]
    return replace(lowered, ranks=tuple(map(tuple, rows)))


@pytest.mark.parametrize("part", range(PARTS))
def test_mutants_of_lowered_programs(part: int) -> None:
    rng = random.Random(1000 + part)
    verdicts: Counter[str] = Counter()
    for _ in range(LOWERED):
        lowered = lowered_mutant(lower(a_program(rng), ahead=rng.choice([0, 1, 2])), rng)
        steps = tuple(tuple(e for e in row if not isinstance(e, Command)) for row in lowered.ranks)
        program = replace(lowered.program, ranks=steps)
        broken = [*broken_rules(program)] or ([] if finishes(program) else ["steps"]) or [*broken_commands(lowered)]
        finished = not broken and all(delivers(lowered, blocking=blocking) for blocking in (False, True))
        verdict = refused(lowered)
        assert (verdict is None) == finished, (lowered.draw(), broken, verdict)
        verdicts["broken" if broken else "fine" if finished else "stuck"] += 1
    assert verdicts["fine"] > LOWERED // 20, verdicts
    assert verdicts["stuck"] > LOWERED // 100, verdicts


@pytest.mark.parametrize("part", range(10))
def test_waiting_for_each_other_under_both_kinds_of_sends(part: int) -> None:
    """RECVs moved to random places in the order of their lanes: the verdicts agree, and differ between the kinds."""
    rng = random.Random(2000 + part)
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(200):
        lowered = lower(a_program(rng))
        rows = [late(list(row), rng) for row in lowered.ranks]
        lowered = replace(lowered, ranks=tuple(map(tuple, rows)))
        got = tuple(carried_out(lowered, rendezvous=kind) for kind in (False, True))
        assert got == tuple(delivers(lowered, blocking=kind) for kind in (False, True)), lowered.draw()
        verdicts[got[0], got[1]] += 1
    assert verdicts[True, True] > 20
    assert verdicts[True, False] > 2, verdicts


def late(row: list[Instruction], rng: random.Random) -> list[Instruction]:
    """Every RECV as late as its lane and the step that needs it let it be, some one or two steps earlier."""
    for a in reversed(range(len(row))):
        entry = row[a]
        if not isinstance(entry, Command) or entry.verb is not Verb.RECV:
            continue
        b = a
        while b + 1 < len(row) and not stops(row[b + 1], entry) and rng.random() < 0.95:
            b += 1
        row.insert(b, row.pop(a))
    return row


def stops(other: Instruction, receive: Command) -> bool:
    if isinstance(other, Command):
        return other.verb is Verb.RECV and other.peer == receive.peer
    return any(action[1:] == receive[1:4] for action in (other if isinstance(other, Pair) else (other,)))


def carried_out(lowered: LoweredProgram, *, rendezvous: bool) -> bool:
    try:
        run_lowered(lowered, rendezvous=rendezvous)
    except ValueError:
        return False
    return True
