"""Reading of files, one a rank, and of whole runs: traces of torch.profiler, records of the engine, exports of nsys."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder, decode

from overlap1f1b.plan import About, Node, Resource, parse_node
from overlap1f1b.plan.ranges import FORMAT, PREFIX, VERSION
from overlap1f1b.profiling.figures import Others, seen_by_others
from overlap1f1b.profiling.nsys import MAGIC, read_nsys
from overlap1f1b.profiling.recording import Capture, Recording, Spans, StepRecord
from overlap1f1b.profiling.steps import recording_of
from overlap1f1b.schedule.values import check_kind, counted, quoted, shortened

_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("_runtime", "_driver")  # endings of the categories of calls: cuda, hip, xpu, privateuse1
_DEVICE_RANGES = "gpu_user_annotation"


class _Event(Struct):
    ph: Any = None
    cat: Any = None
    name: Any = None


class _Call(Struct, frozen=True):
    correlation: Any = None
    stream: Any = None  # of a call on ROCm a text
    device: Any = None


class _Timed(Struct):
    ts: float
    dur: float = 0.0
    pid: Any = 0
    tid: Any = 0
    args: _Call = _Call()


def _add_events(capture: Capture, events: Sequence[Raw], seen: Callable[[float], None]) -> None:
    """Add the events that count to a capture, and tell ``seen`` which share was read; times there are microseconds.

    DecodeError for an event of another form, UnicodeDecodeError for a name that is not text, OverflowError for a time
    or a number that does not fit into 64 bits.
    """
    event_of, timed_of = Decoder(_Event).decode, Decoder(_Timed, strict=False).decode  # a time may be a text
    threads: dict[tuple[str, str], int] = {}
    texts: dict[str, int] = {}

    def number_of(value: Any) -> int:
        """Return a stream or a correlation as a number; a text, or what does not fit, gets one below -1."""
        fits = isinstance(value, int) and abs(value) < 2**63
        return value if fits else texts.setdefault(str(value), -2 - len(texts))

    for number, text in enumerate(events):
        if not number % (1 << 16):
            seen(number / len(events))
        event = event_of(text)
        category, name = event.cat, event.name if isinstance(event.name, str) else ""
        kernel, launch = category in _KERNELS, isinstance(category, str) and category.endswith(_LAUNCHES)
        ours = category != _DEVICE_RANGES and name.startswith(PREFIX)
        if event.ph != "X" or not (kernel or launch or ours):
            continue
        timed = timed_of(text)
        args, start, duration = timed.args, round(timed.ts * 1000), round(timed.dur * 1000)
        correlation = -1 if args.correlation is None else number_of(args.correlation)
        if kernel:
            copy = category != "kernel" and not name.startswith("Mem")
            stream = number_of(timed.tid if args.stream is None else args.stream)
            capture.add_kernel("Memcpy" if copy else name, args.device, correlation, stream, start, start + duration)
            continue
        thread = threads.setdefault((str(timed.pid), str(timed.tid)), len(threads))
        if not launch:
            capture.add_range(name, thread, start, start + duration)
        elif correlation != -1:
            capture.launches.extend((correlation, thread, start))


SpanKind = Literal["node", "flight", "wait", "device"]
_SECOND = 1e9
_LONGEST = 1e9  # seconds that fit into whole nanoseconds


class _StepSpans(Struct):
    """A step; spans are ``[kind, node, start, end]``, times in seconds from its start."""

    step: int
    seconds: float
    spans: list[tuple[SpanKind, str, float, float]]


class _Record(Struct):
    rank: int
    mesh: dict[str, tuple[int, int]]
    steps: list[_StepSpans]
    about: About = About()


def read_record(path: Path, text: bytes) -> Recording:
    """Return the rank of a record."""
    try:
        record = decode(text, type=_Record)
    except DecodeError as error:
        raise ValueError(f"{path}: not a record of overlap1f1b profile ({shortened(str(error))})") from None
    if not record.steps:
        raise ValueError(f"{path} has no steps; allowed: a record of one or more")
    texts = dict.fromkeys(text for step in record.steps for _, text, _, _ in step.spans)
    nodes = {text: parse_node(text) for text in texts}
    if wrong := [text for text, node in nodes.items() if node is None]:
        raise ValueError(f"{path}: not a record of overlap1f1b profile ({quoted(wrong[0])} is not a node)")
    names, index = [node for node in nodes.values() if node is not None], {text: at for at, text in enumerate(nodes)}
    steps: list[StepRecord] = []
    for step in record.steps:
        steps.append(_step(path, step, steps[-1].end if steps else 0, index, names))
    world = prod(size for _, size in record.mesh.values())
    device = any(kind == "device" for step in record.steps for kind, *_ in step.spans)
    return Recording(
        path, record.rank, record.mesh, world, tuple(names), tuple(steps), "records", device, about=record.about
    )


def _step(path: Path, step: _StepSpans, begin: int, index: Mapping[str, int], names: Sequence[Node]) -> StepRecord:
    """Return one step; its clock starts at ``begin``."""
    times = np.array([[start for _, _, start, _ in step.spans], [end for *_, end in step.spans]], float)
    if not (0 <= step.seconds < _LONGEST and (np.abs(times) < _LONGEST).all() and (times[0] <= times[1]).all()):
        raise ValueError(f"{path}: not a record of overlap1f1b profile (step {step.step} has impossible times)")
    start, end = begin + np.rint(times * _SECOND).astype(np.int64)
    every = Spans.of([index[text] for _, text, _, _ in step.spans], start, end)
    kinds = np.array([kind for kind, *_ in step.spans], "U6")
    issued, flights, waits, device = (every[kinds == kind].ordered for kind in get_args(SpanKind))
    computes = np.array([what.resource is Resource.COMPUTE for what in names], bool)
    compute = issued[computes[issued.what]]
    last = max((int(spans.end.max()) for spans in (issued, flights, waits, device) if len(spans)), default=begin)
    if len(device):
        begins = {what: start for what, start, _ in issued}  # a span was launched when the host began its node
        launched = np.array([begins.get(what, start) for what, start, _ in device], np.int64)
        device = replace(device, launched=launched)
        compute, travelled = (device[computes[device.what] == does] for does in (True, False))
        flights = (travelled + flights[~np.isin(flights.what, travelled.what)]).ordered
    until = max(begin + round(step.seconds * _SECOND), last)
    return StepRecord(step.step, begin, until, issued, compute, flights, waits)


_GZIP = b"\x1f\x8b"
ENDINGS = (".json", ".json.gz", ".sqlite", ".record")  # endings of the files that are read from a folder
MOST_RANKS = 1 << 20
_ALLOWED = (
    "allowed: a record of overlap1f1b profile, a Chrome trace of torch.profiler, or an SQLite file of nsys export"
)


@dataclass(frozen=True, eq=False)
class Recordings:
    """The ranks of one run."""

    ranks: tuple[Recording, ...]  # recordings by the number of their rank
    missing: tuple[int, ...] = ()  # numbers of the run's ranks that no file has
    left_out: tuple[str, ...] = ()  # reasons why files were left out, one line each

    @cached_property
    def others(self) -> Others:
        """What the ranks that share experts saw of each other's exchanges."""
        return seen_by_others(self.ranks)

    @property
    def partial(self) -> bool:
        """Whether some ranks are missing, or may be: a file was left out and no file says how many there are."""
        return bool(self.missing or (self.left_out and all(recording.world is None for recording in self.ranks)))


Progress = Callable[[Path, int, int], None]  # ``(file, bytes read so far, its size)``


def read(*paths: str | Path, progress: Progress = lambda *_: None) -> Recordings:
    """Read the ranks of files and folders.

    Files that cannot be read are left out if at least one can be read. If a trace and a record of one rank lie side by
    side, as ``overlap1f1b profile`` writes them, the trace is read.

    Raises:
        ValueError: No file can be read, or two files are of one rank; the message names the file.
    """
    files = files_of(*paths)
    if twice := next((file for number, file in enumerate(files) if file in files[:number]), None):
        raise ValueError(f"{twice} is given twice; allowed: one file a rank, each once")
    found: list[Recording] = []
    left_out: list[str] = []
    for file in files:
        try:
            found += [_placed(recording) for recording in read_file(file, progress)]
        except ValueError as error:
            if len(files) == 1:
                raise
            left_out.append(str(error))
    if not found:
        raise ValueError(left_out[0])
    abouts = {(r.path.parent, r.rank): r.about for r in found if r.source == "records"}  # nsys's file has none
    found = [replace(r, about=abouts.get((r.path.parent, r.rank), r.about)) for r in found]
    traced = {(r.path.parent, r.rank) for r in found if r.source != "records"}
    return _set([r for r in found if r.source != "records" or (r.path.parent, r.rank) not in traced], left_out)


def read_file(path: Path, progress: Progress = lambda *_: None) -> list[Recording]:
    """Read the ranks of one file; an export of nsys may hold several processes.

    Raises:
        ValueError: The file is missing, empty, truncated or of an unknown kind.
    """
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise ValueError(f"{path} is a report of nsys; allowed: its export by nsys export --type sqlite")
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            size = os.fstat(file.fileno()).st_size
        if not start:
            raise ValueError(f"{path} is empty; {_ALLOWED}")
        progress(path, 0, size)
        if start == MAGIC:
            return [recording_of(capture) for capture in read_nsys(path)]
        with path.open("rb") as raw:
            text: Any = mmap(raw.fileno(), 0, access=ACCESS_READ)
            if start.startswith(_GZIP):
                text = bytearray()
                with gzip.GzipFile(fileobj=raw) as packed:
                    while part := packed.read(1 << 22):
                        text += part
                        progress(path, raw.tell(), size)
            return [_read_json(path, text, lambda share: progress(path, round(share * size), size))]
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path}: it is truncated or damaged ({shortened(str(error))}); {_ALLOWED}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; {_ALLOWED}") from None


class _Distributed(Struct):
    rank: int | None = None
    world_size: int | None = None


class _File(Struct, rename={"events": "traceEvents", "distributed": "distributedInfo", "about": "overlap1f1b"}):
    format: Any = None
    version: Any = None
    events: list[Raw] | None = None
    distributed: _Distributed | None = None  # torch.profiler writes it if there is a process group
    about: About | None = None


def _read_json(path: Path, text: Any, seen: Callable[[float], None]) -> Recording:
    """Read a record of ours or a trace of torch.profiler; ValueError for another file."""
    try:
        content = decode(text, type=_File | list[Raw])
        if isinstance(content, list):
            content = _File(events=content)
        if content.format == FORMAT:
            if content.version != VERSION:
                raise ValueError(f"{path}: version {quoted(content.version)} of {FORMAT}; allowed: {VERSION}")
            return read_record(path, text)
        if content.events is None:
            raise ValueError(f"{path} has no traceEvents; {_ALLOWED}")
        distributed = content.distributed or _Distributed()
        capture = Capture(
            path, "torch.profiler", rank=distributed.rank, world=distributed.world_size, about=content.about or About()
        )
        _add_events(capture, content.events, seen)
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply; {_ALLOWED}") from None
    except (DecodeError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"{path}: {shortened(str(error))}; {_ALLOWED}") from None
    return recording_of(capture)


def _placed(recording: Recording) -> Recording:
    """Return ``recording``; raise ``ValueError`` for an impossible rank or mesh position."""
    rank, world = recording.rank or 0, recording.world
    off = [name for name, (at, size) in recording.mesh.items() if not 0 <= at < size]
    if off or rank < 0 or (world is not None and not rank < world <= MOST_RANKS):
        raise ValueError(
            f"{recording.path} is of rank {quoted(rank)} of {quoted(world)}, mesh {quoted(recording.mesh)}; "
            f"allowed: a rank and positions that are below their sizes, at most {MOST_RANKS} ranks"
        )
    return recording


def files_of(*paths: str | Path) -> list[Path]:
    """Return the files, and the files in the folders."""
    found: list[Path] = []
    for path in paths:
        check_kind("path", path, str, Path)
    if not paths:
        raise ValueError("no path; allowed: files, or folders of one file a rank")
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        try:
            files = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; allowed: a folder that can be read") from None
        if not files:
            endings = ", no *".join(ENDINGS)
            raise ValueError(f"{path} holds no *{endings}; allowed: a file, or a folder of one file a rank")
        found += files
    return found


def _set(found: list[Recording], left_out: list[str]) -> Recordings:
    """Return the ranks in order, each once; a rank without a number takes the next free one."""
    taken: dict[int, Recording] = {}
    for recording in sorted(found, key=lambda recording: recording.rank is None):
        rank, note = recording.rank, recording.notes
        if rank is None:
            rank = next(number for number in count() if number not in taken)
            note = (*note, f"no rank in it: called rank {rank}, the next free number")
        if rank in taken:
            raise ValueError(
                f"{taken[rank].path} and {recording.path} are both of rank {rank}; allowed: one file a rank, of one run"
            )
        taken[rank] = replace(recording, rank=rank, notes=note)
    ranks = tuple(recording for _, recording in sorted(taken.items()))
    worlds = {recording.world: recording.path for recording in ranks if recording.world is not None}
    if len(worlds) > 1:
        (one, file), (other, file_of_other) = list(worlds.items())[:2]
        raise ValueError(
            f"{file} is of a run over {counted(one, 'rank')}, {file_of_other} of one over {other}; "
            "allowed: files of one run"
        )
    world = max(worlds, default=0)
    return Recordings(ranks, tuple(sorted(set(range(world)) - taken.keys())), tuple(left_out))
