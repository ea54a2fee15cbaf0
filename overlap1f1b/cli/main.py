"""The command line: tyro fills dataclasses of options, ranks are started, errors become one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import tyro

from overlap1f1b import __version__
from overlap1f1b.cli.doctor import DoctorOptions, doctor
from overlap1f1b.cli.options import PlanOptions, ReportOptions
from overlap1f1b.running.launch import INSIDE, NOT_JOINED, STORE, cores, end_with, enter_nsys, run_ranks, under_torchrun
from overlap1f1b.running.options import PROFILED, BenchOptions, ProfileOptions, RunOptions, TrainOptions
from overlap1f1b.running.wire import Wire
from overlap1f1b.terminal.output import check_folder

MOST_RANKS = 32  # ranks for each processor of a machine that starts them itself; each takes some hundred megabytes
_MESSAGES: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"Unrecognized options: (.*)": lambda found: (
        ("unknown option: " if found[1].startswith("-") else "unexpected: ") + found[1].replace(", ", " ")
    ),
    r"Error parsing (\S+): no type matching (.+) could be instantiated from \[(.*)\]": r"\1 \3; allowed: \2",
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)": r"\1 \2; allowed: INT",
    r"Error parsing (\S+): could not convert string to float: (.*)": r"\1 \2; allowed: FLOAT",
    r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)": r"\2 \1; allowed: \3",
    r"Missing value for argument '(.*)'\. Expected (\d+) values": r"\1 without a value; allowed: \2 after it",
    r"allowed: (?:INT\|)?\{([\w,]+)\}(?:\|INT)?$": r"allowed: a whole number, or \1",
    r"allowed: INT$": "allowed: a whole number",
    r"allowed: \{((?:[A-Z]+ ?)+)\}$": r"allowed: \1",
    r"allowed: FLOAT$": "allowed: a number",
}
"""Patterns of tyro's messages, and the same in the words of this project's errors; applied in this order."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``overlap1f1b`` with these arguments (default: the process's own) and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options: Any = None
    try:
        options = _options(argv or ["--help"])
        options.check()
        if isinstance(options, RunOptions):
            return _run(options, argv)
        if isinstance(options, DoctorOptions):
            return doctor(options)
        if isinstance(options, PlanOptions):
            from overlap1f1b.cli.plan.command import plan

            plan(options)
        else:
            from overlap1f1b.cli.report.command import report

            report(options)
        return 0
    except ValueError as error:
        return _fail(error, options)


def _options(argv: Sequence[str]) -> Any:
    if argv == ["profile"]:
        raise ValueError(f"profile without a verb; allowed: {', '.join(PROFILED)}; see overlap1f1b profile --help")
    if argv[0] == "profile":
        about = (ProfileOptions.__doc__ or "").replace("\n    ", "\n")
        return parse(argv[1:], PROFILED, prog="overlap1f1b profile", description=about)
    if argv == ["--version"]:
        sys.stdout.write(f"overlap1f1b {__version__}\n")
        raise SystemExit(0)
    about = "Train mixture-of-experts transformers with the expert all-to-all hidden behind compute."
    verbs = {"train": TrainOptions, "bench": BenchOptions, "plan": PlanOptions}
    verbs |= {"profile": ProfileOptions, "report": ReportOptions, "doctor": DoctorOptions}
    return parse(argv, verbs, prog="overlap1f1b", description=about)


def _run(options: RunOptions, argv: Sequence[str]) -> int:
    """Be a rank, or start the ranks, each with these arguments; a single rank without a wire is this process.

    Says how to go on with a training that a signal has ended.
    """
    wire = options.wire if isinstance(options, BenchOptions) else None
    started, alone = STORE in os.environ or under_torchrun(), options.ranks == 1 and wire is None
    if isinstance(options, ProfileOptions):
        check_folder(options.out, "--out")
        if options.nsys and INSIDE not in os.environ:
            if shutil.which("nsys") is None:
                allowed = "NVIDIA Nsight Systems installed, or torch.profiler without --nsys"
                raise ValueError(f"--nsys: nsys is not on PATH; allowed: {allowed}")
            if started or alone:
                enter_nsys(options.out, argv)
    if started:
        if STORE not in os.environ and wire is not None:
            raise ValueError(f"--wire {wire} under torchrun; allowed: on ranks that bench starts itself")
        end_with(lambda: _run_rank(options))
    if options.ranks > (most := MOST_RANKS * cores()):
        raise ValueError(
            f"--pp {options.pp} --dp {options.dp} --ep {options.ep} are {options.ranks} ranks on {cores()} processors; "
            f"allowed: up to {most} on this machine, more under torchrun"
        )
    status = 0
    try:
        if alone:
            status = _run_rank(options)
        else:
            with Wire(options.ranks) if wire else nullcontext() as made:
                status = run_ranks(argv, options.ranks, wire=made, limit_s=options.timeout)
        return status
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        raise
    finally:
        folder = options.checkpoint if type(options) is TrainOptions else None  # a profile saves nothing
        if status > 128 and folder is not None:
            last = max(folder.glob("step-*"), default=None)  # torch is not loaded here
            found = f"the last checkpoint is {last}" if last else "no checkpoint was written"
            print(f"overlap1f1b: ended; {found}; resume: overlap1f1b {shlex.join(argv)}", file=sys.stderr, flush=True)


def _run_rank(options: RunOptions) -> int:
    # before torch is loaded: its profiler, which bench uses to count memory, prints much
    for name, value in (("KINETO_LOG_LEVEL", "6"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, value)
    from torch.distributed.distributed_c10d import _get_default_store as store

    from overlap1f1b.running.ranks import NotJoinedError, Rank, joined, lost, no_room

    verb: Callable[[Any, Rank], None]
    if isinstance(options, ProfileOptions):
        from overlap1f1b.cli.profile import profile as verb
    elif isinstance(options, TrainOptions):
        from overlap1f1b.running.train import train as verb
    else:
        from overlap1f1b.running.bench.command import bench as verb
    try:
        with joined((options.pp, options.dp, options.ep), options.timeout) as rank:
            try:
                verb(options, rank)
                return 0
            except ValueError as error:
                refused = error
            except RuntimeError as error:
                if KeyboardInterrupt.__name__ in "".join([str(error), *getattr(error, "__notes__", ())]):
                    return 128 + signal.SIGINT  # Ctrl-C in another rank; this one gets it soon
                if (text := no_room(error)) is None:
                    if rank.size == 1 or (how := lost(error)) is None:
                        raise
                    sys.stderr.write(f"overlap1f1b: rank {rank.rank} lost another rank: {how}\n")
                    return 1
                refused = ValueError(text)
            # All ranks see the same bad option, and one line is enough.
            return _fail(refused, options) if rank.size == 1 or store().add("overlap1f1b/errors", 1) == 1 else 2
    except NotJoinedError as error:
        if STORE not in os.environ:  # else the process that started this rank says it
            sys.stderr.write(f"overlap1f1b: {error}\n")
        return NOT_JOINED
    except ValueError as error:
        return _fail(error, options)


def _fail(error: ValueError, options: Any) -> int:
    print(f"overlap1f1b: error: {as_options(' '.join(str(error).split()), options)}", file=sys.stderr, flush=True)
    return 2


def as_options(text: str, options: Any) -> str:
    """Return an error of the library with names of options in place of its arguments', if it begins with one.

    >>> as_options("overlap='0'; allowed: serial, pairs", TrainOptions(overlap="0"))
    '--overlap 0; allowed: serial, pairs'
    >>> as_options("recompute='auto' without memory; allowed: with memory", TrainOptions(recompute="auto"))
    '--recompute auto without --memory; allowed: with --memory'
    """
    if not is_dataclass(options):
        return text
    groups = [options, *filter(is_dataclass, vars(options).values())]

    def named(found: re.Match[str]) -> str:
        value = found[2] or found[3]
        if all(str(getattr(group, found[1], "")) != value for group in groups):  # another option's, as of --compare
            return found[0]
        return f"--{found[1].replace('_', '-')} {value}"

    first, *others = (re.sub(r"^(\w+)=(?:'([^'\s;]+)'|([^'\s;:]+))", named, part) for part in text.split(" with "))
    if not first.startswith("--"):
        return text

    said, allowed, values = " with ".join([first, *others]).partition("; allowed")
    names = "|".join(name for group in groups for name in vars(group))

    def advised(found: re.Match[str]) -> str:
        name, *value = filter(None, found.groups())
        return " ".join([f"--{name.replace('_', '-')}", *value])

    alone = rf"(?:(?<=with )|(?<=without ))({names})(?=[,;]| and |$)"
    values = re.sub(rf"(?<= )({names})=(?:'(\w+)'|(\d+))", advised, values)
    return re.sub(alone, advised, said) + allowed + re.sub(alone, advised, values).removesuffix(", or None")


def parse(argv: Sequence[str], verbs: Mapping[str, type], *, prog: str, description: str) -> Any:
    """Return the options of the verb that comes first, by ``verbs``; ``--help`` is printed and ends the process."""
    first = argv[0]
    if first in ("-h", "--help"):
        width = max(map(len, verbs))
        does = [f"  {verb:{width}}  {(kind.__doc__ or '').splitlines()[0]}" for verb, kind in verbs.items()]
        print(f"usage: {prog} {{{','.join(verbs)}}} [options]", "", description.strip(), "", *does, "", sep="\n")
        print(f"{prog} VERB --help shows a verb's options and examples.")
        raise SystemExit(0)
    if first not in verbs and not first.startswith("--tyro-"):
        raise ValueError(f"unknown verb {first!r}; allowed: {', '.join(verbs)}, --help")
    if first in verbs:
        _check_names(argv[1:], verbs[first])
    said = io.StringIO()
    options: Any
    try:
        with contextlib.redirect_stderr(said):
            if first in verbs:  # alone, so that no option of another verb is suggested
                options = tyro.cli(verbs[first], args=argv[1:], prog=f"{prog} {first}")
            else:  # completion of a shell
                options = tyro.extras.subcommand_cli_from_dict(
                    dict(verbs), args=argv, prog=prog, sort_subcommands=False
                )
    except SystemExit as error:
        if not error.code or first not in verbs:
            sys.stderr.write(said.getvalue())
            raise
        raise ValueError(f"{_in_order(_one_line(said.getvalue()), verbs[first])}; see {prog} {first} --help") from None
    sys.stderr.write(said.getvalue())
    return options


def _check_names(words: Sequence[str], options: type) -> None:
    """Raise ``ValueError`` for an option by two names, an empty value, and a list that is given twice.

    The parser would keep the last in silence. One option, repeated with another value, replaces the first as usual.
    """
    hints = get_type_hints(options, include_extras=True)
    aliases = {
        alias: f"--{name.replace('_', '-')}"
        for name, hint in hints.items()
        for of in getattr(hint, "__metadata__", ())
        for alias in getattr(of, "aliases", None) or ()
    }
    lists = {f"--{name.replace('_', '-')}" for name, hint in hints.items() if "tuple[" in str(hint)}
    seen: dict[str, str] = {}
    for word, follows in zip(words, [*words, "--"][1:], strict=True):
        if (word.startswith("--") and follows == "") or word.endswith("="):
            raise ValueError(f"{word.rstrip('=')} with an empty value; allowed: one that says something")
        if word in lists and follows.startswith("--"):
            raise ValueError(f"{word} without a value; allowed: one or more after it")
    for word in (one.partition("=")[0].replace("_", "-") for one in words if one.startswith("--")):
        name = aliases.get(word, word.replace("--no-", "--", 1))
        if seen.get(name, word) != word:
            raise ValueError(f"{seen[name]} with {word}, the same option; allowed: one of them")
        if name in seen and name in lists:
            raise ValueError(f"{word} twice; allowed: once, with all its values behind it")
        seen[name] = word


def _in_order(text: str, options: type) -> str:
    """Return an error with its choices as in the help: in the order of their declaration, without None."""
    found = re.fullmatch(r"--([\w-]+) (.*; allowed: )('.*')", text)
    if found is None:
        return text
    declared = str(get_type_hints(options, include_extras=True).get(found[1].replace("-", "_")))
    choices = [choice for choice in found[3].split(", ") if choice != "'None'"]
    return f"--{found[1]} {found[2]}{', '.join(sorted(choices, key=declared.find))}"


def _one_line(box: str) -> str:
    """Return the first sentence of tyro's box, drawn in Unicode or ASCII, and the names of similar options."""
    lines = [line.strip("│ ") for line in box.strip().splitlines() if not line.startswith(("╭", "╰"))]
    paragraphs = re.split(r"\n[─-]+\n", "\n".join(lines))
    if not box.startswith("╭") and len(paragraphs) > 1:
        del paragraphs[0]  # drawn without box characters, the title is a paragraph
    paragraph, *others = paragraphs
    sentence = " ".join(paragraph.split("\n\n", 1)[0].split()).rstrip(".").replace("{None}|", "")
    for pattern, words in _MESSAGES.items():
        sentence = re.sub(pattern, words, sentence)
    similar = [text for text in others if text.startswith("Perhaps you meant")]
    found = dict.fromkeys(name for text in similar for name in re.findall(r"^--[\w-]+", text, re.MULTILINE))
    return sentence + (f"; perhaps {', '.join(found)}" if found else "")
