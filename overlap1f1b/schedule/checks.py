"""The rules that a Program keeps, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from overlap1f1b.schedule.action import Action, Kind, Pair, actions_of
from overlap1f1b.schedule.program import Program

_NEEDS: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.F: (),
    Kind.B: (Kind.F,),
    Kind.I: (Kind.F,),
    Kind.W: (Kind.I,),
}


def check(program: Program) -> None:
    """Raises ``ValueError`` for the first broken rule, naming rank, position and action.

    Rules: every (pipe, stage, microbatch) has its forward exactly once and, unless the program is forward only,
    either one B or one I and one W; each after what it needs; members of a pair are independent; at most the declared
    number of microbatches is alive, of a pair both.

    >>> from overlap1f1b.schedule import sequential
    >>> steps = sequential(2).ranks[0]
    >>> check(Program("mine", microbatches=2, ranks=(steps[1:],), peak_activations=(1,)))
    Traceback (most recent call last):
    ValueError: program 'mine', rank 0, position 0: 0B0 stands before 0F0, which it needs
    """
    backward = not program.forward_only
    if len(program.peak_activations) != len(program.ranks):
        raise ValueError(
            f"program {program.name!r} declares peak activations for {len(program.peak_activations)} ranks "
            f"and has {len(program.ranks)}; allowed: the same number"
        )
    for rank, steps in enumerate(program.ranks):
        done: set[Action] = set()
        alive: set[tuple[int, int, int]] = set()
        for position, step in enumerate(steps):
            where = f"program {program.name!r}, rank {rank}, position {position}"
            if isinstance(step, Pair):
                _check_pair(step, where)
            for action in actions_of(step):
                _check_action(action, done, program.microbatches, where)
                done.add(action)
            alive |= {action[1:] for action in actions_of(step) if action.kind is Kind.F}
            if backward and len(alive) > program.peak_activations[rank]:
                raise ValueError(
                    f"{where}: {step} makes {len(alive)} microbatches alive, "
                    f"declared are {program.peak_activations[rank]}"
                )
            alive -= {action[1:] for action in actions_of(step) if action.kind in (Kind.B, Kind.W)}
        _check_complete(program, rank, done, backward)


def _check_pair(pair: Pair, where: str) -> None:
    if pair.forward.kind is not Kind.F or pair.backward.kind not in (Kind.B, Kind.I):
        raise ValueError(f"{where}: {pair} must join a forward and a backward")
    if pair.forward[1:] == pair.backward[1:]:
        raise ValueError(f"{where}: {pair} joins two actions of one microbatch, the second needs the first")


def _check_action(action: Action, done: set[Action], microbatches: int, where: str) -> None:
    if not 0 <= action.microbatch < microbatches:
        raise ValueError(f"{where}: {action} names microbatch {action.microbatch}, allowed are 0 to {microbatches - 1}")
    if action in done:
        raise ValueError(f"{where}: {action} stands a second time")
    if action.kind in (Kind.B, Kind.I) and {action._replace(kind=Kind.B), action._replace(kind=Kind.I)} & done:
        raise ValueError(f"{where}: {action} repeats the backward of its microbatch")
    for kind in _NEEDS[action.kind]:
        if action._replace(kind=kind) not in done:
            raise ValueError(f"{where}: {action} stands before {action._replace(kind=kind)}, which it needs")


def _check_complete(program: Program, rank: int, done: set[Action], backward: bool) -> None:
    if not done:
        raise ValueError(f"program {program.name!r}, rank {rank} has no action; allowed: every microbatch's forward")
    places = {(action.pipe, action.stage) for action in done}
    for pipe, stage in sorted(places):
        for microbatch in range(program.microbatches):
            forward = Action(Kind.F, stage, microbatch, pipe)
            kinds = {kind for kind in Kind if forward._replace(kind=kind) in done}
            complete = ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}) if backward else ({Kind.F},)
            if kinds not in complete:
                missing = "its weight gradient" if Kind.I in kinds else "a backward" if Kind.F in kinds else "a forward"
                raise ValueError(f"program {program.name!r}, rank {rank}: {forward} lacks {missing}")
