"""The program that the options ask for, and the costs of its parts."""

from __future__ import annotations

from typing import Any

from overlap1f1b.cli.plan.options import PlanOptions
from overlap1f1b.plan import NodeCosts, parse_overlap
from overlap1f1b.schedule import AUTO, DEFAULT_PROGRAM, SCHEDULES, Program
from overlap1f1b.simulation import ActionModel, Candidate, Costs, Model, NodeModel
from overlap1f1b.simulation.search import CHUNKS, EXTRA_WARMUP, candidates

MOST = 10_000_000
"""Largest number of actions, or of nodes with --layers, that a simulation takes."""

_NUMBERS = ("chunks", "extra_warmup", "group_size", "overlap")


def requested(options: PlanOptions) -> Candidate:
    """Return the candidate that the options describe."""
    return Candidate(
        DEFAULT_PROGRAM if options.schedule is None else options.schedule,
        chunks=options.chunks,
        extra_warmup=options.extra_warmup,
        group_size=options.group_size,
    )


def check_scale(candidate: Candidate, ranks: int, microbatches: int, layers: int | None) -> None:
    """Raise ``ValueError`` for a program that is too large to be simulated."""
    chunks = 1 if candidate.chunks is None else candidate.chunks
    if chunks < 1:  # building the program refuses it
        return
    per_microbatch = 2 * chunks if layers is None else 13 * layers
    count = per_microbatch * ranks * microbatches
    if count > MOST:
        sizes = {"ranks": ranks, "microbatches": microbatches}
        sizes |= {"chunks": chunks} if layers is None else {"layers": layers}
        named = ", ".join(f"{name}={size}" for name, size in sizes.items())
        what = "actions" if layers is None else "nodes"
        raise ValueError(f"{candidate.schedule} with {named} has about {count} {what}; allowed: at most {MOST}")


def searched(options: PlanOptions, model: Model) -> list[Candidate]:
    """Return the candidates of ``--search``; given options are not varied, nor is the warm-up of ``--forward-only``."""
    schedules = SCHEDULES if options.schedule is None else (options.schedule,)
    chunks = CHUNKS if options.chunks is None else (options.chunks,)
    extra = EXTRA_WARMUP if options.extra_warmup is None else (options.extra_warmup,)
    if options.forward_only:
        extra = extra[:1]
    found = []
    if isinstance(model, NodeModel):  # given chunks are tried in any case, so that a refusal says why
        found = [Candidate(AUTO, chunks=v) for v in chunks if options.chunks or not model.layers % v]
    if options.schedule == AUTO:
        return found
    orders = options.schedule is None and not options.forward_only and not options.extra_warmup
    fixed = candidates(schedules=schedules, chunks=chunks, extra_warmup=extra, overlaps=model.overlaps)
    return [*found, *fixed] if orders else list(fixed)


SUB_OPS = ("attention", "experts", "dispatch", "combine", "counts", "launch")


def model_of(options: PlanOptions) -> Model:
    """Return the model that plays programs: by sub-ops if ``--layers`` is given, else by actions."""
    sub_ops = options.sub_op_costs
    if sub_ops.layers is None:
        given = {name: value for name, value in vars(options.action_costs).items() if value is not None}
        if options.send is not None:
            given["send"] = options.send
        if "weight" not in given and "backward" in given:
            given["weight"] = given["backward"] / 2
        return ActionModel(Costs(**given))
    costs: dict[str, Any] = {name: value for name in SUB_OPS if (value := getattr(sub_ops, name)) is not None}
    seconds = 10.0 if sub_ops.seconds is None else sub_ops.seconds
    settings: dict[str, Any] = {"parts": sub_ops.parts or 1, "seconds": seconds}
    if options.search and options.chunks is None:
        settings["seconds"] /= len(CHUNKS)
    if sub_ops.overlap is not None:
        overlap = parse_overlap(sub_ops.overlap)
        settings |= {"default": overlap, "overlaps": (overlap,)}
    costs = {"attention": 3.0, "experts": 4.0, "dispatch": 5.0, "send": options.send or 0.0} | costs
    return NodeModel(NodeCosts.uniform(**costs), sub_ops.layers, **settings)


def read(options: PlanOptions) -> Program:
    """Read the program of ``--from-csv``.

    Raises:
        ValueError: The file cannot be read, or is malformed.
    """
    path = options.from_csv
    assert path is not None
    try:
        return Program.from_csv(path)
    except UnicodeDecodeError:
        raise ValueError(f"--from-csv {path} is not text; allowed: a file of --csv or of torch's schedules") from None
    except OSError as error:
        raise ValueError(f"--from-csv {path}: {error.strerror}; allowed: a file that can be read") from error


def parse(text: str) -> Candidate:
    """Return the candidate of one word of ``--compare``.

    >>> parse("combined_1f1b:chunks=2,extra_warmup=1")
    Candidate(schedule='combined_1f1b', chunks=2, extra_warmup=1, group_size=None, overlap=None)

    Raises:
        ValueError: The schedule or option is unknown, or a value is not a number.
    """
    name, _, rest = text.partition(":")
    if name not in (*SCHEDULES, AUTO):
        raise ValueError(f"--compare {text}: unknown schedule {name!r}; allowed: {', '.join((*SCHEDULES, AUTO))}")
    given: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        key, value = key.strip().replace("-", "_"), value.strip()
        if key in given:
            raise ValueError(f"--compare {text}: {key} twice; allowed: once")
        if key == "overlap" and (value in ("serial", "pairs") or value.isdecimal()):
            try:
                given[key] = parse_overlap(value)
            except ValueError as error:
                raise ValueError(f"--compare {text}: {error}") from None
        elif key in _NUMBERS and value.isdecimal():
            given[key] = int(value)
        else:
            raise ValueError(
                f"--compare {text}: {part!r}; allowed: {', '.join(f'{k}=NUMBER' for k in _NUMBERS)}, overlap=serial, "
                "overlap=pairs, with commas between"
            )
    return Candidate(name, **given)
