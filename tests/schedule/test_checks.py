"""``Program.check`` against rules that are written down a second time here, on programs changed at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap1f1b.schedule import Action, Kind, Pair, Program, Slot, combined_1f1b, forward_only, sequential

F0, F1, F2 = (Action(Kind.F, 0, m) for m in range(3))
B0, B1, B2 = (Action(Kind.B, 0, m) for m in range(3))
NONE = Action(Kind.F, 0, -1)
I0, W0, I1, W1 = (Action(kind, 0, m) for m in range(2) for kind in (Kind.I, Kind.W))


def program_of(*steps: Slot, microbatches: int = 2, peak: int = 2) -> Program:
    return Program("mine", microbatches, (steps,), (peak,))


def split(program: Program) -> Program:
    """The same program with every B as an I, and its W a step later."""
    steps: list[Slot] = []
    for step in program.ranks[0]:
        if isinstance(step, Pair):
            steps += [
                step._replace(backward=step.backward._replace(kind=Kind.I)),
                step.backward._replace(kind=Kind.W),
            ]
        elif step.kind is Kind.B:
            steps += [step._replace(kind=Kind.I), step._replace(kind=Kind.W)]
        else:
            steps.append(step)
    return replace(program, ranks=(tuple(steps),), peak_weights=())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    microbatches = draw(st.integers(1, 5))
    program = draw(
        st.sampled_from(
            [sequential(microbatches), forward_only(microbatches)]
            + [combined_1f1b(microbatches, extra) for extra in range(3)]
        )
    )
    return split(program) if draw(st.booleans()) else program


def changed_action(draw: st.DrawFn, action: Action, microbatches: int) -> Action:
    match draw(st.sampled_from(["microbatch", "kind", "stage", "pipe"])):
        case "microbatch":
            return action._replace(microbatch=draw(st.integers(-1, microbatches)))
        case "kind":
            return action._replace(kind=draw(st.sampled_from(Kind)))
        case "stage":
            return action._replace(stage=action.stage + 1)
        case _:
            return action._replace(pipe=action.pipe + 1)


@st.composite
def mutants(draw: st.DrawFn) -> Program:  # noqa: PLR0912  a case for each kind of change
    """A program with a step or two dropped, doubled, moved, swapped or changed, or its limits lowered."""
    program = draw(programs())
    steps = list(program.ranks[0])
    for _ in range(draw(st.integers(1, 2))):
        if not steps:
            break
        a, b = draw(st.integers(0, len(steps) - 1)), draw(st.integers(0, len(steps) - 1))
        step = steps[a]
        match draw(
            st.sampled_from(["drop", "double", "stray", "swap", "move", "change", "unpair", "pair", "half", "peak"])
        ):
            case "drop":
                del steps[a]
            case "double":
                steps.insert(b, step)
            case "stray" if not isinstance(step, Pair):
                steps.insert(b, changed_action(draw, step, program.microbatches))
            case "swap":
                steps[a], steps[b] = steps[b], steps[a]
            case "move":
                steps.insert(b, steps.pop(a))
            case "change":
                if isinstance(step, Pair):
                    member = draw(st.sampled_from(["forward", "backward"]))
                    action = changed_action(draw, getattr(step, member), program.microbatches)
                    steps[a] = step._replace(**{member: action})
                else:
                    steps[a] = changed_action(draw, step, program.microbatches)
            case "unpair" if isinstance(step, Pair):
                steps[a : a + 1] = draw(st.permutations(step))
            case "half" if isinstance(step, Pair):
                steps[a] = draw(st.sampled_from(step))
            case "pair" if a != b and not isinstance(step, Pair):
                other = steps[b]
                if not isinstance(other, Pair):
                    steps[a] = Pair(step, other)
                    del steps[b]
            case _:
                program = replace(program, peak_activations=(draw(st.integers(0, 4)),))
    return replace(program, ranks=(tuple(steps),))


def broken_rules(program: Program) -> Iterator[str]:  # noqa: PLR0912  one place for all the rules
    """The rules again, with nothing of the library but its data."""
    steps = program.ranks[0]
    at: dict[Action, list[int]] = {}
    for position, step in enumerate(steps):
        for action in step if isinstance(step, Pair) else (step,):
            at.setdefault(action, []).append(position)
    for pair in (step for step in steps if isinstance(step, Pair)):
        if pair.forward.kind is not Kind.F or pair.backward.kind not in (Kind.B, Kind.I):
            yield f"kinds of {pair}"
        if pair.forward[1:] == pair.backward[1:]:
            yield f"dependent members of {pair}"
    if not at:
        yield "nothing to do"
    if any(action.stage or action.pipe for action in at):
        yield "a place of no rank"
    trains = any(action.kind is not Kind.F for action in at)
    spans: list[tuple[int, int]] = []
    for stage, pipe in {(0, 0)} | {(action.stage, action.pipe) for action in at}:
        for microbatch in {*range(program.microbatches), *(action.microbatch for action in at)}:
            found = {
                kind: at.get(Action(kind, stage, microbatch, pipe), []) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            }
            counts = tuple(len(positions) for positions in found.values())
            if not 0 <= microbatch < program.microbatches:
                if any(counts):
                    yield f"microbatch {microbatch}"
            elif counts not in ([(1, 1, 0, 0), (1, 0, 1, 1)] if trains else [(1, 0, 0, 0)]):
                yield f"{counts} actions of microbatch {microbatch}"
            else:
                order = [positions[0] for positions in found.values() if positions]
                if order != sorted(set(order)):
                    yield f"order of microbatch {microbatch}"
                spans.append((order[0], order[-1]))
    alive = [sum(first <= position <= last for first, last in spans) for position in range(len(steps))]
    if trains and max(alive, default=0) > program.peak_activations[0]:
        yield "too many alive"


@given(programs())
@settings(deadline=None, max_examples=50)
def test_generated_programs_pass(program: Program) -> None:
    assert not list(broken_rules(program))
    program.check()


@given(mutants())
@settings(deadline=None, max_examples=600)
def test_no_mutant_that_breaks_a_rule_is_accepted_and_no_other_refused(program: Program) -> None:
    broken = list(broken_rules(program))
    if broken:
        with pytest.raises(ValueError, match="program '"):
            program.check()
    else:
        program.check()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (program_of(F0, B0, F1), "program 'mine', rank 0: 0F1 lacks a backward"),
        (program_of(F0, B0), "rank 0: 0F1 lacks a forward"),
        (program_of(F0, I0, F1, B1), "rank 0: 0F0 lacks its weight gradient"),
        (program_of(F0, F0, B0, F1, B1), "rank 0, position 1: 0F0 comes a second time"),
        (program_of(F0, B0, F1, B0, B1), "rank 0, position 3: 0B0 comes a second time"),
        (program_of(F0, B0, I0, F1, B1), "rank 0, position 2: 0I0 repeats the backward of its microbatch"),
        (program_of(F0, I0, B0, F1, B1), "rank 0, position 2: 0B0 repeats the backward of its microbatch"),
        (program_of(B0, F0, F1, B1), "rank 0, position 0: 0B0 comes before 0F0, which it needs"),
        (program_of(F0, W0, I0, F1, B1), "rank 0, position 1: 0W0 comes before 0I0, which it needs"),
        (program_of(F0, B0, F2, B2), "rank 0, position 2: 0F2 names microbatch 2, allowed are 0 to 1"),
        (program_of(F0, B0, F1, B1, NONE), "rank 0, position 4: 0F-1 names microbatch -1, allowed are 0 to 1"),
        (program_of(F0, Pair(F1, B1), B0), "position 1: .* joins two actions of one microbatch"),
        (program_of(F0, Pair(F1, F0), B0), "position 1: .* must join a forward and a backward"),
        (program_of(F0, F1, Pair(B1, B0)), "position 2: .* must join a forward and a backward"),
        (program_of(F0, I0, Pair(F1, W0), B1), "position 2: .* must join a forward and a backward"),
        (program_of(F0, Pair(F1, B1)), "position 1: .* joins two actions of one microbatch"),
        (program_of(F0, F1, B0, B1, peak=1), "position 1: 0F1 makes 2 microbatches alive, declared are 1"),
        (program_of(F0, Pair(F1, B0), B1, peak=1), "position 1: .* makes 2 microbatches alive, declared are 1"),
        (program_of(), "program 'mine', rank 0 has no action"),
        (Program("mine", -1, ((F0, B0),), (1,)), "program 'mine': microbatches=-1; allowed: 1 or more"),
        (Program("mine", 2.5, ((F0, B0),), (1,)), "microbatches=2.5; allowed: a whole number, 1 or more"),  # type: ignore[arg-type]
        (Program("mine", 1, ((F0, B0),), (-1,)), "program 'mine': peak activations=-1; allowed: 0 or more"),
        (
            Program("mine", 1, ((F0, "0B0"),), (1,)),
            "rank 0, position 1: '0B0' is not an action; allowed: an Action of a",
        ),  # type: ignore[arg-type]
        (
            Program("mine", 1, ((Action("F", 0, 0), B0),), (1,)),
            "rank 0, position 0: Action.kind='F', .* is not an action",
        ),  # type: ignore[arg-type]
        (program_of(F0, F0._replace(stage="1")), "position 1: 1F0 names stage 1 of pipe 0, allowed are stages 0 to 0"),  # type: ignore[arg-type]
        (Program("mine", 1, ((F0, B0),), (1, 1)), "peak activations for 2 ranks and has 1"),
        (Program("mine", 1, ((F0, B0), (F0, F0)), (1, 1)), "has 2 ranks and a placement over 1; allowed: the same"),
    ],
)
def test_messages_name_rank_position_and_action(program: Program, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        program.check()


def test_split_backwards_and_harmless_orders_pass() -> None:
    program_of(F0, I0, F1, I1, W1, W0).check()
    program_of(F0, F1, B1, B0).check()
    program_of(F0, Pair(F1, I0), W0, B1).check()
