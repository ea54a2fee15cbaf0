"""``overlap1f1b plan``: draw, compare, search, write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from overlap1f1b.cli.draw import STYLES, Grid, legend, paint, tracks_of
from overlap1f1b.cli.options import PlanOptions, PlanOutput
from overlap1f1b.cli.plan.results import content_of, distinct, found, per_rank, per_schedule, row_of
from overlap1f1b.plan import NodeCosts, Overlap, parse_overlap
from overlap1f1b.schedule import AUTO, DEFAULT_PROGRAM, EXTRA_WARMUP, OPTIONS, SCHEDULES, Program
from overlap1f1b.schedule.values import counted
from overlap1f1b.simulation import Costs, PlanTimeline
from overlap1f1b.simulation.search import (
    CHUNKS,
    OVERLAPS,
    Candidate,
    Model,
    NodeModel,
    Played,
    Ranking,
    candidates,
    play,
    played,
    search,
)
from overlap1f1b.terminal.output import Say, console, print_lines, showing, write_json, writing

ROWS = 15  # rows of the table of a search
MOST_NODES = 1_000_000  # largest number of nodes of a simulation with --layers: some minutes on one core


def plan(options: PlanOptions) -> None:
    screen = console(options.output.json)
    with showing(screen, "starting", to=console("-")) as say:  # standard output has drawings and tables alone
        _plan(options, screen, say)


def _plan(options: PlanOptions, screen: Console, say: Say) -> None:
    model, output, doing = model_of(options), options.output, [""]

    def begin(what: str) -> None:
        doing[0] = what
        say(what)

    if isinstance(model, NodeModel):
        model = replace(model, progress=lambda share: say(f"{doing[0]}, {share:.0%} of the search for an order done"))
    total = 1 + len(options.compare)
    extra: dict[str, Any] = {}
    candidate: Candidate | None = None
    step: dict[str, Any] = {
        "ranks": options.ranks or 4,
        "microbatches": options.microbatches or 8,
        "forward_only": options.forward_only,
        "peak_activations": options.peak_activations,
    }
    if options.from_csv is not None:
        begin(f"0 of {total} programs played, now {options.from_csv}")
        program, timeline = read(options.from_csv, model)
        step |= {"ranks": len(program.ranks), "microbatches": program.microbatches}
        step["forward_only"] = program.forward_only
    else:
        check_scale(step["ranks"], step["microbatches"], options.sub_op_costs.layers)
        candidate = requested(options)
        if options.search:
            ranking = _search(options, step, model, begin)
            candidate, extra["search"] = ranking.found[0][0], found(ranking)
            _show_search(extra["search"], options.top, screen)
        begin(f"0 of {total} programs played, now {candidate}")
        program, timeline = played(candidate, model, **step)
    rows = [row_of(program, timeline, candidate)]
    for number, other in enumerate(map(parse, options.compare), 1):
        begin(f"{number} of {total} programs played, now {other}")
        rows.append(row_of(*played(other, model, **step), other))
    begin(f"{total} of {total} programs played, now tables and drawings")
    content = content_of(program, timeline) | extra | ({"compare": rows} if options.compare else {})
    title = _title(content)
    _write(program, timeline, output, title, screen)
    write_json(output.json, content)
    print_lines(screen, title, style="bold")
    if not output.tables:
        _draw(timeline, screen, screen.width if output.width is None else output.width)
    screen.print()
    screen.print(per_rank(content["per_rank"]))
    if len(front := content.get("front", ())) > 1:
        points = ", ".join(f"{point['makespan']:.6g} with {point['held']}" for point in front)
        print_lines(screen, f"time by microbatches held, weight gradients to come included: {points}")
    if isinstance(model, Costs) and model.pair == 1 and any(row["pairs"] for row in content["per_rank"]):
        print_lines(screen, "a pair takes as long as both its members here; --pair 0.8 or --layers N has what it hides")
    if options.compare:
        screen.print()
        screen.print(per_schedule(rows))


def _search(options: PlanOptions, step: dict[str, Any], model: Model, begin: Callable[[str], None]) -> Ranking:
    tried, ranks, microbatches = searched(options, model), step["ranks"], step["microbatches"]
    if options.schedule not in (None, AUTO):
        requested(options).build(ranks, microbatches)  # raises if none of them is possible
    text = f"of {len(tried)} schedules tried"
    begin(f"0 {text}")
    top = (options.top or 1) if isinstance(model, NodeModel) else None
    ranking = search(tried, model=model, top=top, progress=lambda done: begin(f"{done} {text}"), **step)
    if not ranking.found and ranking.over:
        least, peak = ranking.over[0]
        raise ValueError(
            f"--peak-activations {options.peak_activations:g}: of {counted(len(tried), 'schedule')} none fits; "
            f"allowed: {peak:g} or more ({least})"
        )
    if not ranking.found:
        first, *others = dict.fromkeys(why for _, why in ranking.refused)
        raise ValueError(f"of {counted(len(tried), 'schedule')} none is possible: {first}" if others else first)
    return ranking


def _show_search(result: dict[str, Any], top: int | None, screen: Console) -> None:
    rows, shown = distinct(result["rows"]), ROWS if top is None else top
    screen.print(per_schedule(rows[:shown]))
    if len(rows) > shown:
        screen.print(f"… {len(rows) - shown} slower ones; --top {len(rows)} shows them")
    if alike := len(result["rows"]) - len(rows):
        print_lines(screen, f"left out: {alike} that take as long as one above with as many chunks and no more memory")
    if pruned := result["pruned"]:
        place = f"among the first {top}" if top else "the fastest"
        further = "" if top else "; --top N plays what the first N need"
        least = f"none takes less than {pruned[0]['bound']:.6g}{further}"
        print_lines(screen, f"not played: {len(pruned)} that cannot be {place}, {least}")
    if over := result["over_memory"]:
        screen.print(f"left out, over the memory limit: {len(over)}, the least with {over[0]['peak_activations']:g}")
    if refused := result["refused"]:
        print_lines(screen, f"impossible: {len(refused)}, such as {refused[0]['reason']}")
    screen.print()


def _draw(timeline: Played, screen: Console, width: int) -> None:
    grid = Grid.of(tracks_of(timeline), width=width, shortens=isinstance(timeline, PlanTimeline))
    colours = {name: style.terminal for name, style in STYLES.items()} | {"axis": "dim"}
    for line in grid.lines:
        text = Text.assemble(*((piece, colours.get(style, "")) for piece, style in line))
        text.rstrip()
        screen.print(text, soft_wrap=True)
    print_lines(screen, legend(timeline), style="dim")
    if grid.until is not None:
        cut = f"cut at {grid.until:.6g} of {timeline.makespan:.6g}"
        print_lines(screen, f"{cut}: --width N draws more, --svg FILE all of it")


def _title(content: dict[str, Any]) -> str:
    ranks, chunks, microbatches = (content[key] for key in ("ranks", "chunks", "microbatches"))
    sizes = [counted(ranks, "rank"), *([f"{chunks} chunks"] if chunks > 1 else [])]
    sizes.append(counted(microbatches, "microbatch"))
    if "overlap" in content:
        sizes.append(f"overlap {content['overlap']}")
    sizes.append(f"makespan {content['makespan']:.6g}")
    if content.get("bound"):
        sizes[-1] += f" ({content['makespan'] / content['bound']:.3f} of any order's bound)"
    sizes.append(f"bubble {content['bubble_share']:.1%}")
    if "overlap" in content:
        hidden = content["hidden_fraction"]
        sizes.append("nothing is exchanged" if hidden is None else f"{hidden:.1%} of the exchange hidden")
    return f"{content['schedule']}: {', '.join(sizes)}"


def _write(program: Program, timeline: Played, output: PlanOutput, title: str, screen: Console) -> None:
    if output.png or output.svg:  # first what needs a package that may be missing
        paint(tracks_of(timeline), output, screen, title=title, unit="time, in the unit of the costs")
    if output.csv is not None:
        with writing("csv", output.csv, screen) as file:
            program.to_csv(file)
    if output.trace is not None:
        with writing("trace", output.trace, screen) as file:
            timeline.to_chrome_trace(file)


# The program that the options ask for, and the costs of its parts.


def requested(options: PlanOptions) -> Candidate:
    """Return the candidate that the options describe."""
    name = DEFAULT_PROGRAM if options.schedule is None else options.schedule
    values = {option: getattr(options, option, None) for option in OPTIONS}
    return Candidate(name, {option: value for option, value in values.items() if value is not None})


def check_scale(ranks: int, microbatches: int, layers: int | None) -> None:
    """Raise ``ValueError`` for a program of too many nodes; ``build_schedule`` counts actions."""
    if layers is not None and (count := 13 * layers * ranks * microbatches) > MOST_NODES:
        sizes = f"--ranks {ranks}, --microbatches {microbatches} and --layers {layers}"
        raise ValueError(f"{sizes} are about {count} nodes; allowed: at most {MOST_NODES}")


def searched(options: PlanOptions, model: Model) -> list[Candidate]:
    """Return the candidates of ``--search``; given options are not varied, nor is the warm-up of ``--forward-only``."""
    schedules = SCHEDULES if options.schedule is None else (options.schedule,)
    chunks = CHUNKS if options.chunks is None else (options.chunks,)
    extra = EXTRA_WARMUP if options.extra_warmup is None else (options.extra_warmup,)
    if options.forward_only:
        extra = extra[:1]
    found, overlaps = list[Candidate](), tuple[Overlap | None, ...]((None,))
    if isinstance(model, NodeModel):  # given chunks are tried in any case, so that a refusal says why
        overlaps = OVERLAPS if options.sub_op_costs.overlap is None else (model.overlap,)
        found = [Candidate(AUTO, {"chunks": v}) for v in chunks if options.chunks or not model.layers % v]
    if options.schedule == AUTO:
        return found
    orders = options.schedule is None and not options.forward_only and not options.extra_warmup
    fixed = candidates(schedules=schedules, chunks=chunks, extra_warmup=extra, overlaps=overlaps)
    return [*found, *fixed] if orders else list(fixed)


SUB_OPS = ("attention", "experts", "dispatch", "combine", "counts", "launch")


def model_of(options: PlanOptions) -> Model:
    """Return the model that plays programs: by sub-ops if ``--layers`` is given, else by actions."""
    sub_ops = options.sub_op_costs
    if sub_ops.layers is None:
        seconds = {name: value for name, value in vars(options.action_costs).items() if value is not None}
        if options.send is not None:
            seconds["send"] = options.send
        if "weight" not in seconds and "backward" in seconds:
            seconds["weight"] = seconds["backward"] / 2
        return Costs(**seconds)
    costs: dict[str, Any] = {name: value for name in SUB_OPS if (value := getattr(sub_ops, name)) is not None}
    if sub_ops.activations and sub_ops.host_link:
        costs["copy"] = sub_ops.activations / sub_ops.host_link
    settings: dict[str, Any] = {"parts": sub_ops.parts or 1, "seconds": sub_ops.seconds or 10.0}
    if options.search and options.chunks is None:
        settings["seconds"] /= len(CHUNKS)
    if sub_ops.overlap is not None:
        settings["overlap"] = parse_overlap(sub_ops.overlap)
    costs = {"attention": 3.0, "experts": 4.0, "dispatch": 5.0, "send": options.send or 0.0} | costs
    return NodeModel(NodeCosts.uniform(**costs), sub_ops.layers, **settings)


def read(path: Path, model: Model) -> tuple[Program, Played]:
    """Return the program of ``--from-csv`` and its timeline; a ``ValueError`` names the file."""
    try:
        program = Program.from_csv(path)
        return program, play(program, model)
    except ValueError as error:
        said = str(error).removeprefix(str(path))
        raise ValueError(f"--from-csv {path}{'' if said != str(error) else ': '}{said}") from None


def parse(text: str) -> Candidate:
    """Return the candidate of one word of ``--compare``.

    >>> parse("combined_1f1b:chunks=2,extra_warmup=1")
    Candidate(schedule='combined_1f1b', options={'chunks': 2, 'extra_warmup': 1}, overlap=None)
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    try:
        if name not in (*SCHEDULES, AUTO):
            raise ValueError(f"unknown schedule {name!r}; allowed: {', '.join((*SCHEDULES, AUTO))}")
        for part in rest.split(",") if ":" in text else ():
            key, _, value = part.partition("=")
            key, value = key.strip().replace("-", "_"), value.strip()
            if key == "overlap":
                options[key] = parse_overlap(value)
            elif key in OPTIONS and value.isdecimal():
                options[key] = int(value)
            else:
                numbers = ", ".join(f"{option}=NUMBER" for option in OPTIONS)
                what = repr(part) if part else "an option is missing"
                raise ValueError(f"{what}; allowed: {numbers}, overlap=serial|pairs|NUMBER, with commas between")
    except ValueError as error:
        raise ValueError(f"--compare {text}: {error}") from None
    overlap = options.pop("overlap", None)
    return Candidate(name, options, overlap)
