"""Programs changed at random, against the rules and the executor of ``brute``.

Changes on up to four ranks, 500 in a part: none is accepted that breaks a rule or that ranks cannot carry out, and no
other is refused.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from overlap1f1b.schedule import SCHEDULES, Action, Kind, Pair, Program, Slot, build_schedule
from tests.schedule.brute import broken_rules, finishes

PARTS, EACH = 10, 500
CHANGES = ["drop", "double", "swap", "neighbours", "neighbours", "move", "rank"]
CHANGES += ["stray", "change", "split", "half", "join", "peak"]


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
    rows: list[list[Slot]] = [list(row) for row in program.ranks]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        row = rng.choice(rows)
        if not row:
            continue
        a, b = rng.randrange(len(row)), rng.randrange(len(row))
        step = row[a]
        match rng.choice(CHANGES):
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
            case "stray" if not isinstance(step, Pair):
                row.insert(b, changed(step, rng))
            case "change" if isinstance(step, Pair):
                member = rng.choice(step._fields)
                row[a] = step._replace(**{member: changed(getattr(step, member), rng)})
            case "change":
                row[a] = changed(step, rng)
            case "split" if isinstance(step, Pair):
                row[a : a + 1] = rng.sample(step, 2)
            case "half" if isinstance(step, Pair):
                row[a] = rng.choice(step)
            case "split" if not isinstance(step, Pair) and step.kind is Kind.B:
                row[a] = step._replace(kind=Kind.I)
                row.insert(rng.randint(a + 1, len(row)), step._replace(kind=Kind.W))
                program = replace(program, peak_weights=())
            case "join" if a + 1 < len(row):
                other_step = row[a + 1]
                if not isinstance(step, Pair) and not isinstance(other_step, Pair):
                    both = sorted((step, other_step), key=lambda action: action.kind is not Kind.F)
                    row[a : a + 2] = [Pair(*both) if rng.random() < 0.9 else Pair(*reversed(both))]
            case "peak":
                peaks = list(program.peak_activations)
                peaks[rng.randrange(len(peaks))] += rng.choice([-1, 1, 2])
                program = replace(program, peak_activations=tuple(peaks))
    return replace(program, ranks=tuple(map(tuple, rows)))


def refused(program: Program) -> str | None:
    try:
        program.check()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("part", [pytest.param(n, marks=[pytest.mark.wide] * (n > 2)) for n in range(PARTS)])
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
