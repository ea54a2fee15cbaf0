"""``overlap1f1b profile`` on one rank: warm up, profile, print the files' names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from torch.profiler import profile as torch_profile

from overlap1f1b.cli.report.figures import content_of, of_timeline, print_table, print_verdict, tables_of
from overlap1f1b.engine import Engine
from overlap1f1b.play.observers import Observer
from overlap1f1b.play.times import Times
from overlap1f1b.profiling import read
from overlap1f1b.record import Profile
from overlap1f1b.running.bench.command import kind_of
from overlap1f1b.running.bench.measure import asked_for
from overlap1f1b.running.options import BenchOptions, ProfileBenchOptions, ProfileTrainOptions, TrainOptions
from overlap1f1b.running.ranks import Rank
from overlap1f1b.running.text import Corpus
from overlap1f1b.running.train import Trainer
from overlap1f1b.running.workload import environment
from overlap1f1b.schedule.values import counted
from overlap1f1b.simulation import Timeline
from overlap1f1b.terminal.output import Say, console, number, plain_table, print_lines, showing, write_json

Options = ProfileTrainOptions | ProfileBenchOptions
COUNTERS = ("step_ms", "exchange_ms", "exposed_ms")


class Last(Observer):
    """Keeps the times of the last step."""

    def begin(self, times: Times) -> None:
        self.spans = times.spans


def profile(options: Options, rank: Rank) -> None:
    """Profile a few steps; every rank writes its files, and the first rank reports."""
    screen = console(options.json, quiet=rank.rank != 0)
    with showing(screen, "starting") as say, subject(options, rank, say) as (engine, step):
        steps = f"of {options.profile_steps} steps profiled"
        for number in range(options.profile_warmup):
            say(f"0 {steps}, {number} of {options.profile_warmup} for warming up done")
            step()
        say(f"0 {steps}")
        if not options.nsys:
            timed = isinstance(options, BenchOptions) and options.compute == "timed"  # computes no tensors
            if not (timed or engine.tuner.held):  # a picture of memory needs the bytes of every node
                engine.tuner.count_next()
            with torch_profile(acc_events=True):  # the first step under a profiler is slower
                step()
                while engine.tuner.verifies_next():  # a step that counts is not compared with a plain loop
                    step()
        measured = []
        engine.observers.append(last := Last())
        tool = Profile(engine, options.out, tool="nsys" if options.nsys else "torch")
        if rank.rank == 0:
            remove_others(options.out, rank.size)
        with tool:
            for number in range(options.profile_steps):
                say(f"{number} {steps}")
                step()
                measured.append(of_timeline(Timeline(last.spans()), 1e3, alone=rank.group is None))
        say(f"{options.profile_steps} {steps}, now writing the files")
        traced = [*tool.files, *([options.out / f"rank{rank.rank}.sqlite"] if options.nsys else [])]
        mine = {"rank": rank.rank, "files": [str(path) for path in traced], "steps": measured}
        ranks = engine.mesh.every(mine)
    if rank.rank == 0:
        result = _result(options, rank, engine, [found for _, found in sorted(ranks.items())])
        show(result, screen)
        traces = [Path(found["files"][-1]) for found in result["ranks"]]
        if not options.nsys and all(path.exists() for path in traces):  # another machine may have some
            with showing(screen, "all steps profiled, now reading the traces"):
                content = content_of(read(*traces))
            for table in tables_of(content)[:2]:
                screen.print()
                print_table(table, screen)
            print_verdict(content, screen)
            result |= {"verdict": content["verdict"], "advice": content["advice"]}
        write_json(options.json, result)


def remove_others(folder: Path, ranks: int) -> None:
    """Remove the files of an earlier run that had more ranks: a report would mix the two."""
    for path in folder.iterdir():
        named = re.fullmatch(r"rank(\d+)\.(record|json|trace\.json\.gz|sqlite|nsys-rep)", path.name)
        if named is not None and int(named[1]) >= ranks:
            path.unlink()


def _result(options: Options, rank: Rank, engine: Engine, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    for found in ranks:
        found |= {key: fmean(step[key] for step in found["steps"]) for key in COUNTERS}
        exchange, exposed = found["exchange_ms"], found["exposed_ms"]
        found["hidden_fraction"] = 1 - exposed / exchange if exchange else None
    return {
        "environment": environment(rank),
        "workload": {
            "of": "train" if isinstance(options, TrainOptions) else "bench",
            "program": engine.program.name,
            "overlap": str(options.overlap),
            "order": engine.plan.order,
            "microbatches": options.microbatches,
        },
        "tool": "nsys" if options.nsys else "torch.profiler",
        "ranks": ranks,
        "report": f"overlap1f1b report {shlex.join(found['files'][-1] for found in ranks)}",
    }


def show(result: dict[str, Any], screen: Console) -> None:
    """Print the engine's own figures and the command to run next."""
    workload, steps = result["workload"], len(result["ranks"][0]["steps"])
    of = f"{workload['program']}, overlap {workload['overlap']} (order {workload['order']})"
    how = f"under {result['tool']}; means by the engine's own counters"
    print_lines(screen, f"{counted(steps, 'step')} of {of}, {how}")
    table = plain_table(("rank", "step ms", "exchange ms", "hidden", "exposed ms", "trace"), ("trace",), no_wrap=True)
    for found in result["ranks"]:
        step, exchange, exposed = (f"{found[key]:.0f}" for key in COUNTERS)
        hidden = number(found["hidden_fraction"], ".1%")
        table.add_row(str(found["rank"]), step, exchange, hidden, exposed, found["files"][-1])
    screen.print(table, highlight=False)
    print_lines(screen, f"next: {result['report']}")


@contextmanager
def subject(options: Options, rank: Rank, say: Say) -> Iterator[tuple[Engine, Callable[[], object]]]:
    """Yield an engine whose plan is compiled, and a function that makes its next step.

    A training goes on from its last checkpoint, if there is one, and is not saved.
    """
    if isinstance(options, BenchOptions):
        variant = asked_for(options)
        bench = kind_of(options)(options, rank, say)
        with bench.ready([variant]) as (engines, _):
            engine = engines[variant.key]
            yield engine, lambda: bench.step(engine)
        return
    say(f"loading, then {counted(options.profile_steps, 'step')}")
    corpus = Corpus.load(options.text, sequence=options.sequence)
    trainer = Trainer(options, rank, corpus, options.program(), overlap=options.overlap)
    indices = count(0 if options.checkpoint is None else trainer.load(options.checkpoint))
    say(f"measuring nodes, then {counted(options.profile_steps, 'step')}")
    while trainer.engine.tuner.settling:
        trainer.step(next(indices))
    yield trainer.engine, lambda: trainer.step(next(indices))
