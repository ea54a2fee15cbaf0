"""The options of train, bench and profile. Torch is not imported, so that ``--help`` and errors come at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from overlap1f1b.cut.options import Finite, UserOptions
from overlap1f1b.running.sizes import ModelOptions
from overlap1f1b.running.wire import parse_loopback, parse_wire
from overlap1f1b.schedule import DEFAULT_CHUNKS, DEFAULT_PROGRAM, Program, build_schedule
from overlap1f1b.terminal.arguments import ABOVE_0, Range, by_default, check_ranges, texts_in_a_line
from overlap1f1b.terminal.output import check_files, check_folder
from overlap1f1b.transport.limits import COMMAND_LINE_LIMIT_S
from overlap1f1b.transport.versions import check_torch

T = TypeVar("T")
Unasked = Annotated[T, tyro.conf.Fixed, tyro.conf.Suppress]  # a field that a verb inherits and does not take
CHECKPOINT_EVERY = 50
DEFAULT_LINK = 0.03  # GB/s at which the default model exchanges about as long as it computes on two cores


@texts_in_a_line
@dataclass(frozen=True)
class RunOptions(UserOptions):
    """Options of train and bench: of the engine, of its ranks, of the model and its text."""

    capacity: Annotated[float | None, by_default("FLOAT", "exact sizes"), Range(1)] = None
    memory: Annotated[int | str | None, by_default("BYTES", "no limit")] = None
    offload_threshold: Annotated[int, Range()] = 65536
    host_link: Annotated[float | None, by_default("GB/S"), ABOVE_0] = None
    # train ends at a loss that is not finite, and timed compute of bench has no values
    finite: Annotated[Finite, by_default("{warn,raise}")] = None
    gate: Annotated[float | str | None, by_default("GATE")] = None
    timeout: Annotated[float, Range(1)] = COMMAND_LINE_LIMIT_S
    model: Annotated[ModelOptions, tyro.conf.OmitArgPrefixes] = field(default_factory=ModelOptions)
    ep: Annotated[int, tyro.conf.arg(aliases=["--ranks"]), Range(1)] = 2
    """Expert-parallel ranks. All pp × dp × ep ranks are started here; under torchrun its ranks are used instead."""
    pp: Annotated[int, Range(1)] = 1
    """Pipeline ranks."""
    dp: Annotated[int, Range(1)] = 1
    """Data-parallel ranks, which do not share their experts."""
    schedule: Annotated[str | None, by_default("NAME", f"{DEFAULT_PROGRAM}; sequential on one rank")] = None
    """Program to play. auto: an order that is found for the measured costs; with several --chunks the stages are placed
    in a V."""
    chunks: Annotated[int | None, by_default("INT", DEFAULT_CHUNKS), Range(1)] = None
    """Stages of a pipeline rank."""
    extra_warmup: Annotated[int | None, by_default("INT", "0; 1 for combined_1f1b with one chunk on one rank")] = None
    """Additional forwards before the first backward, for schedules that take them."""
    peak_activations: Annotated[float | None, by_default("FLOAT", "twice the pipeline ranks, at least 3")] = None
    """Limit of the schedule auto: how many microbatches' activations a rank may hold at once; one microbatch in half of
    a rank's layers counts 0.5."""
    microbatches: Annotated[int, Range(1)] = 8
    """Microbatches of a step."""
    batch: Annotated[int, Range(1)] = 16
    """Sequences of a step on each rank, divided evenly into microbatches."""
    sequence: Annotated[int, Range(1)] = 256
    """Bytes of a sequence."""
    kernels: Literal["auto", "triton", "torch"] = "auto"
    """Kernels of permutations, sums, activations and the router; on a GPU auto times both and keeps the faster."""
    weights_in: Literal["combine", "activation"] = "combine"
    """Place where routing weights are applied: combine, in the sum of the experts' outputs; or activation, in the
    experts' activation, as in Megatron-Core, to which each row then carries its weight."""
    precision: Literal["weights", "fp8", "mxfp8"] = "weights"
    """Of the experts' products and the rows sent to them: as the weights, or eight bits. fp8 has a scale a row; a GPU
    must have compute capability 9, a CPU multiplies the same values in float32, which gains no time. mxfp8 has a scale
    of 32 elements; a GPU computes its products in bfloat16."""
    text: Annotated[tuple[Path, ...], by_default("PATH [PATH ...]", "the standard library of this Python")] = ()
    """Files or folders to read."""
    hf_config: Annotated[str | None, by_default("NAME")] = None
    """Configuration of the transformers library: a name, a folder or a config.json. A new model of it, on bytes,
    replaces the model of the sizes above."""
    seed: Annotated[int, Range(most=2**63 - 1)] = 0
    """Seed of weights and batches."""
    json: Annotated[str | None, by_default("FILE")] = None
    """File for the results as JSON, or - for standard output."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.ep

    @property
    def alone(self) -> bool:
        """Whether nothing is exchanged."""
        return self.ranks == 1

    def program(self) -> Program:
        """Return the program that the options ask for; by default the fastest."""
        one = self.alone and self.schedule is None and self.extra_warmup is None
        name = self.schedule or ("sequential" if one else DEFAULT_PROGRAM)
        return build_schedule(
            name,
            ranks=self.pp,
            microbatches=self.microbatches,
            chunks=self.chunks,
            extra_warmup=self.extra_warmup,
            peak_activations=self.peak_activations,
        )

    def check(self) -> None:
        """Raise ``ValueError`` for values that are not allowed, before any rank starts."""
        check_torch()
        check_ranges(self)
        super().check()
        if self.batch % (count := self.microbatches):
            raise ValueError(
                f"--batch {self.batch} cannot be split into --microbatches {count}; allowed: a multiple of {count}"
            )
        if self.hf_config is None:
            self.model.check()
            experts, layers, stages = self.model.experts, self.model.layers, self.program().placement.stages
            if experts % self.ep:
                allowed = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
                raise ValueError(f"--experts {experts} cannot be divided over --ep {self.ep}; allowed: --ep {allowed}")
            if stages > layers + 2:
                raise ValueError(
                    f"--pp {self.pp} makes {stages} stages of {layers + 2} blocks: embedding, --layers {layers}, head; "
                    "allowed: at most one stage a block"
                )
        else:
            _check_experts(self.hf_config)
            chosen = vars(self.model) | {"weights_in": self.weights_in, "precision": self.precision}
            default = vars(ModelOptions()) | {"weights_in": "combine", "precision": "weights"}
            for name in (name for name in default if chosen[name] != default[name]):
                option = f"--{name.replace('_', '-')} {chosen[name]}"
                raise ValueError(f"{option} with --hf-config, which describes the model; allowed: one of the two")
        check_files({"json": self.json})


def _check_experts(name: str) -> None:
    """Raise ``ValueError`` if no file of transformers for a configuration's kind of model says a word of experts."""
    file = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    library = find_spec("transformers")
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError:
        config = {}  # the library says why
    inside = config.values() if isinstance(config, dict) else ()
    if library is None or not inside or any("model_type" in value for value in inside if isinstance(value, dict)):
        return  # a model around another one is of two kinds
    kind = Path(str(library.origin)).parent / "models" / str(config.get("model_type"))
    sources = [path.read_text() for path in kind.glob("*.py")]
    if sources and not any("expert" in source.lower() for source in sources):
        raise ValueError(f"--hf-config {name}: {kind.name} has no experts; allowed: a mixture of experts")


@texts_in_a_line
@dataclass(frozen=True)
class TrainOptions(RunOptions):
    """Train a byte-level MoE language model, its expert all-to-all hidden behind compute.

    For example
      overlap1f1b train                                    # two local ranks, an imitated link, sequential beside it
      overlap1f1b train --text my/notes --steps 500 --checkpoint runs/notes
      overlap1f1b train --pp 2 --ep 2 --schedule dualpipev --microbatches 8
      overlap1f1b train --hf-config path/to/config.json    # any mixture of experts of transformers
      torchrun --nproc-per-node 4 -m overlap1f1b train --ep 4 --experts 16
    """

    microbatches: Annotated[int, Range(1)] = 4
    """Microbatches of a step."""
    batch: Annotated[int, Range(1)] = 8
    """Sequences of a step on each rank, divided evenly into microbatches."""
    steps: Annotated[int, Range(1)] = 18
    """Optimizer steps."""
    link: Annotated[
        float | None, by_default("GB/S", f"{DEFAULT_LINK} between local CPU ranks without --checkpoint"), Range()
    ] = None
    """Rate of an imitated link between local ranks on CPUs, where bytes cost almost nothing otherwise: rows arrive when
    they would have come over it. 0 imitates none."""
    lr: Annotated[float, ABOVE_0] = 2e-3
    """Peak learning rate of AdamW, after a warm-up of a tenth of the steps; a cosine leads down to a tenth of it."""
    clip: Annotated[float, ABOVE_0] = 1.0
    """Largest norm of the gradient."""
    eval_every: Annotated[int, Range(1)] = 50
    """Steps between losses on held-out text."""
    checkpoint: Annotated[Path | None, by_default("FOLDER")] = None
    """Folder for checkpoints; a run that finds checkpoints there continues from the last."""
    checkpoint_every: Annotated[int | None, by_default("INT", CHECKPOINT_EVERY), Range(1)] = None
    """Steps between checkpoints."""
    tensorboard: Annotated[Path | None, by_default("FOLDER")] = None
    """Folder for TensorBoard: loss, gradient norm, tokens/s and the hidden share of the exchange, for every step."""
    compare: Annotated[
        tyro.conf.DisallowNone[bool | None],
        by_default(default="on where rows are exchanged, without --checkpoint, --link, sequential"),
    ] = None
    """Train the same steps with the schedule sequential too, and show both."""

    def check(self) -> None:
        super().check()
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise ValueError(f"--checkpoint-every {self.checkpoint_every} alone; allowed: with --checkpoint FOLDER")
        if self.compare and self.program().name == "sequential":
            raise ValueError("--compare with the schedule sequential, the one beside; allowed: another --schedule")
        if self.tensorboard is not None and find_spec("tensorboard") is None:
            raise ValueError("--tensorboard needs its package; pip install tensorboard")
        for name, folder in (("checkpoint", self.checkpoint), ("tensorboard", self.tensorboard)):
            if folder is not None:
                check_folder(folder, f"--{name}")


@texts_in_a_line
@dataclass(frozen=True)
class BenchOptions(RunOptions):
    """Measure the throughput of every program on one workload, rows interleaved in one process.

    For example
      overlap1f1b bench                                    # loopback, real compute
      overlap1f1b bench --wire balanced --compute timed    # a real link as slow as compute (root)
      overlap1f1b bench --wire 500mbit --rounds 7 --json bench.json
      overlap1f1b bench --ranks 1 --exchange loopback:20    # one rank, through host memory at 20 GB/s
      overlap1f1b bench --pp 2 --ep 2 --wire balanced --compute timed --peers    # beside torch's own schedules
      overlap1f1b bench --pp 2 --ep 2 --wire balanced --compute timed --schedule auto --chunks 2 --parts 2
    """

    wire: Annotated[str | None, by_default("RATE")] = None
    """Rate of a real link between the ranks (500mbit, 1gbit). balanced: the exchange takes as long as compute;
    balanced*2: twice that rate. Needs root and iproute2. Without this option the loopback is used."""
    exchange: Annotated[str | None, by_default("loopback[:GB/s]")] = None
    """loopback: with one rank, rows travel to host memory and back, as fast as possible; loopback:GB/s: at most at this
    rate."""
    compute: Literal["real", "timed"] = "real"
    """timed: instead of computing, matrix products wait for the measured time of their operations. The processor is
    then free for everything else, as beside a GPU."""
    verify: bool = False
    reduce: bool = False
    """Also sum the gradients outside the experts over the ranks, in every row. The bounds do not include it."""
    rounds: Annotated[int, Range(1)] = 5
    """Number of measurements of every row."""
    peers: bool = False
    """Also measure torch.distributed.pipelining's schedules on the same layers, with --pp from 2; with --hf-config
    transformers' own expert parallelism."""

    @property
    def alone(self) -> bool:
        """Whether nothing is exchanged."""
        return self.ranks == 1 and self.exchange is None

    def check(self) -> None:
        super().check()
        if self.wire is not None:
            parse_wire(self.wire)
            if self.ranks == 1:
                raise ValueError(f"--wire {self.wire} with 1 rank; allowed: 2 or more")
        if self.exchange is not None:
            parse_loopback(self.exchange)
            if self.ranks > 1:
                raise ValueError(f"--exchange {self.exchange} with {self.ranks} ranks; allowed: --ranks 1")
        if self.hf_config is not None:
            if self.pp * self.dp > 1:
                raise ValueError(f"--hf-config with --pp {self.pp} --dp {self.dp}; allowed: 1 of each")
            if self.peers and (self.compute == "timed" or self.ep < 2):
                others = f"--hf-config, --compute {self.compute} and --ep {self.ep}"
                raise ValueError(f"--peers with {others}; allowed: real, and 2 or more")
        elif self.peers and self.pp < 2:
            raise ValueError(f"--peers with --pp {self.pp}; allowed: 2 or more pipeline ranks, or --hf-config")
        elif self.peers and (torch := version("torch")).startswith("2.11."):
            raise ValueError(f"--peers on torch {torch}, whose V schedules cannot run on gloo; allowed: 2.12 or newer")


@texts_in_a_line
@dataclass(frozen=True)
class ProfileOptions:
    """Profile train or bench, to see where the exchange overlaps with compute and where it does not.

    Runs a warm-up and a few steps under a profiler, and writes a trace and a record for each rank.

    For example
      overlap1f1b profile train                            # then: overlap1f1b report profile/rank*.trace.json.gz
      overlap1f1b profile bench --wire balanced --compute timed --overlap pairs --out pairs
      overlap1f1b profile train --nsys                     # kernels and NVTX ranges by NVIDIA Nsight Systems
      overlap1f1b profile train --help                     # all options
    """

    out: Path = Path("profile")
    """Folder for the files, a trace and a record for each rank; it is made if it does not exist."""
    profile_warmup: Annotated[int, Range()] = 2
    """Steps by the plan before the profile; the two that measure nodes come before them."""
    profile_steps: Annotated[int, Range(1)] = 3
    """Steps in the profile."""
    nsys: bool = False
    """Trace by NVIDIA Nsight Systems, which must be on PATH, instead of torch.profiler. Each rank is started under
    nsys profile, and its command is printed."""


@dataclass(frozen=True)
class ProfileTrainOptions(ProfileOptions, TrainOptions):
    """Profile the steps of a training, which is not saved.

    For example
      overlap1f1b profile train
      overlap1f1b profile train --ep 4 --experts 16 --overlap pairs --out pairs
      torchrun --nproc-per-node 4 -m overlap1f1b profile train --ep 4
    """

    # what a profile does not do
    steps: Unasked[int] = 18
    eval_every: Unasked[int] = 50
    checkpoint_every: Unasked[int | None] = None
    tensorboard: Unasked[Path | None] = None
    compare: Unasked[bool | None] = False


@dataclass(frozen=True)
class ProfileBenchOptions(ProfileOptions, BenchOptions):
    """Profile one row of a benchmark, given by --schedule and --overlap.

    For example
      overlap1f1b profile bench --wire balanced --compute timed
      overlap1f1b profile bench --pp 2 --ep 2 --schedule dualpipev --microbatches 8
    """

    rounds: Unasked[int] = 5
    peers: Unasked[bool] = False


PROFILED = {"train": ProfileTrainOptions, "bench": ProfileBenchOptions}
