"""The rows of a timeline, for the grid in the terminal and for pictures."""

from __future__ import annotations

from overlap1f1b.cli.plan.grid import Cell, Row
from overlap1f1b.schedule import Pair, Program, Step, actions_of
from overlap1f1b.simulation import ProgramTimeline


def rows_of(timeline: ProgramTimeline) -> list[Row]:
    """One row a rank, one cell a step.

    >>> from overlap1f1b.schedule import build_schedule
    >>> from overlap1f1b.simulation import Costs, simulate
    >>> rows = rows_of(simulate(build_schedule("1f1b", ranks=2, microbatches=1), Costs()))
    >>> [cell.text for cell in rows[1].cells]
    ['F0', 'B0']
    """
    chunked = _chunked(timeline.program)
    return [
        Row(
            f"rank {rank}",
            [Cell(text_of(span.step, chunked), span.start, span.end, style_of(span.step)) for span in spans],
        )
        for rank, spans in enumerate(timeline.ranks)
    ]


def text_of(step: Step, chunked: bool) -> str:
    """``F5``, ``B0‖F5``; with the stage in front where a rank holds several: ``4F5``, ``6B0‖0F4``."""
    return "‖".join(str(a) if chunked else f"{a.kind.value}{a.microbatch}" for a in actions_of(step))


def style_of(step: Step) -> str:
    """The kind of an action; ``pair`` for two."""
    return "pair" if isinstance(step, Pair) else step.kind.value


def _chunked(program: Program) -> bool:
    """Whether some rank holds several stages."""
    return any(len(program.placement.places(rank)) > 1 for rank in range(len(program.ranks)))
