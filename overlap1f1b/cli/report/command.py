"""``overlap1f1b report``: read, print, compare, draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from overlap1f1b.cli.draw import paint, tracks_of_bars
from overlap1f1b.cli.report import figures
from overlap1f1b.cli.report.figures import content_of, print_table, remarks
from overlap1f1b.cli.report.options import PICTURES, OutputOptions, ReportOptions
from overlap1f1b.cli.report.page import page_of
from overlap1f1b.profiling import Bar, Recording, Recordings, arrows, bars_of, predict, predicted_bars, read
from overlap1f1b.profiling.reading import Progress, files_of
from overlap1f1b.schedule.values import counted
from overlap1f1b.simulation.trace import write_trace
from overlap1f1b.terminal.output import Say, console, middle_left_out, print_lines, showing, write_json, writing

READ = "all files are read"


def report(options: ReportOptions) -> None:
    screen = console(options.output.json)
    with showing(screen, "starting") as say:
        if options.compare is not None:
            _compare(options.compare, screen, say, options.output.json)
        else:
            _report(options.files, options.output, screen, say)


def _report(files: Sequence[Path], output: OutputOptions, screen: Console, say: Say) -> None:
    recordings = read(*files, progress=reading(say, files))
    say(f"{READ}, now the figures")
    content = content_of(recordings)
    bars: list[Bar] = []
    predicted: list[Bar] = []
    if output.predicted or any(getattr(output, name) is not None for name in PICTURES):
        step = _drawn_step(recordings.ranks, output.step)
        bars = bars_of(recordings.ranks, step)
        if output.predicted:
            timelines = predict(recordings.ranks, step)
            figures.add_predicted(content, timelines, step)
            predicted = predicted_bars(recordings.ranks, timelines)
            bars += predicted
        if not bars:
            raise ValueError(f"step {step} has nothing to draw; allowed: a step with spans")
        content["drawn_step"] = step
    elif output.step is not None:
        raise ValueError(f"--step {output.step} alone; allowed: with --{', --'.join(PICTURES)} or --predicted")
    say(f"{READ}, now the drawings")
    title = _title(recordings)
    _write(bars, output, f"{title}, step {content.get('drawn_step')}", screen)
    if output.html is not None:
        page = page_of(content, recordings, predicted, title)
        with writing("html", output.html, screen) as file:
            file.write_text(page, encoding="utf-8")
    write_json(output.json, content)
    print_lines(screen, title, style="bold")
    print_lines(screen, *remarks(content), *middle_left_out(content["notes"], str))
    for table in figures.tables_of(content):
        screen.print()
        print_table(table, screen)
    figures.print_verdict(content, screen)


def _compare(paths: Sequence[Path], screen: Console, say: Say, target: str | None) -> None:
    progress = reading(say, paths)
    contents = [content_of(read(path, progress=progress)) for path in paths]
    names = [str(path) for path in paths]
    sentence = figures.sentence_of(contents[0], contents[1], names)
    write_json(target, {"compare": contents, "verdict": sentence})
    for content, name in zip(contents, names, strict=True):
        lines = (*remarks(content), *middle_left_out(content["notes"], str))
        print_lines(screen, *(f"{name}: {line}" for line in lines))
    print_table(figures.comparison(contents, names), screen)
    screen.print()
    print_lines(screen, sentence, style="bold")


def _drawn_step(ranks: Sequence[Recording], wanted: int | None) -> int:
    numbers = [{step.number for step in recording.steps} for recording in ranks]
    every = sorted(set.union(*numbers))
    if wanted is None:
        return max(set.intersection(*numbers) or every)
    if wanted not in every:
        raise ValueError(f"--step {wanted}; allowed: {', '.join(map(str, every))}")
    return wanted


def _write(bars: Sequence[Bar], output: OutputOptions, title: str, screen: Console) -> None:
    paint(tracks_of_bars(bars), output, screen, title=title, unit="ms from the start of the step")
    if output.trace is not None:
        flows = [(source.event, target.event) for source, target in arrows(bars)]
        with writing("trace", output.trace, screen) as file:
            write_trace([bar.event for bar in bars], file, flows=flows)


def _title(recordings: Recordings) -> str:
    ranks = recordings.ranks
    steps = sorted({len(recording.steps) for recording in ranks})
    sources = ", ".join(dict.fromkeys(recording.source for recording in ranks))
    first = "" if steps[0] == steps[-1] else f"{steps[0]} to "
    return f"{counted(len(ranks), 'rank')}, {first}{counted(steps[-1], 'step')} ({sources})"


def reading(say: Say, paths: Sequence[Path]) -> Progress:
    """Return a function that is told the bytes read of a file and passes them on to ``say``."""
    count, seen = len(files_of(*paths)), set[Path]()

    def tell(path: Path, read: int, size: int) -> None:
        seen.add(path)
        megabytes = f"{read / 2**20:.0f} of {size / 2**20:.0f} MiB"
        say(f"reading {path.name}, file {len(seen)} of {count}: {megabytes}")

    return tell
