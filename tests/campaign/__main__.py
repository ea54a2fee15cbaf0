"""Draws random trainings and compares each with a plain loop over the whole model in one process.

Schedules, ranks, overlaps, recomputation, capacities, padding, FSDP2, checkpoints between layouts, drop-ins, pauses of
threads and more are drawn from a case's seed alone, so a case can be run again by itself. Not a part of the default
tests.

    python -m tests.campaign --cases 500                     # about 20 minutes on two processors
    python -m tests.campaign --cases 50 --seed 7 --kinds combined,dualpipe --ranks 1,2
    python -m tests.campaign --only 1000017                  # the case that a failure names
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count, islice

from rich.console import Console
from rich.progress import Progress

from tests.campaign.draw import KINDS, RANKS, Case, draw
from tests.campaign.play import play
from tests.ranks import RankError, run

SEEDS = 1_000_000  # between two campaigns' first cases
LIMIT_S = 180.0
LINES = 50

Play = Callable[[int, int, Case], list[str]]


def main(arguments: Sequence[str] | None = None, play: Play = play) -> int:
    """Runs a campaign; 1 where a case has failed. ``play`` is what each rank runs."""
    options = _options(arguments)
    screen = Console(highlight=False, soft_wrap=True)
    cases = [draw(options.only)] if options.only is not None else list(islice(_cases(options), options.cases))
    kinds, failed, start = Counter(case.kind for case in cases), [], time.monotonic()
    with Progress(console=screen) as bar, ThreadPoolExecutor(options.jobs) as pool:
        task = bar.add_task("cases", total=len(cases))
        running = {pool.submit(problem_of, case, play): case for case in cases}
        for number, done in enumerate(as_completed(running), 1):
            case, problem = running[done], done.result()
            bar.advance(task)
            if number % LINES == 0 and not screen.is_terminal:  # where no bar is seen
                screen.print(f"{number}/{len(cases)} cases, {len(failed)} failed")
            if problem:
                failed.append(case.seed)
                bar.console.print(f"--only {case.seed}: {problem} | {case}", markup=False)
    drawn = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    screen.print(f"{len(cases)} cases ({drawn}) in {time.monotonic() - start:.0f} s: {len(failed)} failed")
    return 1 if failed else 0


def problem_of(case: Case, play: Play) -> str:
    """Return the problems of a case in a line; an empty line for none."""
    try:
        problems = run(play, case.ranks, case, timeout=LIMIT_S, few=False)
    except RankError as error:
        return " / ".join(
            f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in sorted(error.failures.items())
        )
    found = [f"rank {rank}: {problem}" for rank, mine in enumerate(problems) for problem in mine]
    return "; ".join(found[:3]) + (f"; {len(found) - 3} more" if len(found) > 3 else "")


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield cases of the kinds and numbers of ranks that are asked for."""
    for seed in count(options.seed * SEEDS):
        case = draw(seed)
        if case.kind in options.kinds and case.ranks in options.ranks:
            yield case


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign (0)")
    parser.add_argument("--only", type=int, metavar="SEED", help="one case, by its own seed")
    parser.add_argument("--kinds", type=_kinds, default=KINDS, help=f"of {','.join(KINDS)} (all)")
    parser.add_argument("--ranks", type=_ranks, default=RANKS["engine"], help="such as 1,2 (all of 1 to 4)")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (2)")
    options = parser.parse_args(arguments)
    if not any(set(RANKS[kind]) & set(options.ranks) for kind in options.kinds):
        parser.error(f"no case of {','.join(options.kinds)} on {options.ranks} ranks; allowed: {RANKS}")
    return options


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; allowed: {', '.join(KINDS)}")
    return names


def _ranks(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: numbers such as 1,2") from None


if __name__ == "__main__":
    sys.exit(main())
