"""Cases of the engine: against the plain loop, and to the bit against the same program played serially."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from overlap1f1b import load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine, EngineOptions, split_blocks
from overlap1f1b.plan import NodeCosts, compile
from tests.campaign import plain
from tests.campaign.build import batch, build, count_tokens, joined, loss_fn
from tests.campaign.compare import Values, apart, limit_of, paused, unequal, values_of
from tests.campaign.draw import Case, Layout
from tests.engines import calls_of, said_of
from tests.reduce import test_fsdp
from tests.reduce.test_ties import Stage

TIMEOUT_S = 90.0


def play(rank: int, size: int, case: Case) -> list[str]:
    """Return the problems of a case on this rank."""
    expected = plain.on_first_rank(lambda: plain.train(case)) if case.deterministic else []
    with paused(case, rank):
        found, problems = train(case, expected)
    again, _ = train(replace(case, layouts=tuple(map(serial, case.layouts))), [])
    problems += [f"{name} is not that of a serial step" for name in unequal(found, again)]
    return problems + (differ(rank, case) if case.calls else [])


def differ(rank: int, case: Case) -> list[str]:
    """One rank makes another call than all others behind a step: all of them must hear of both, at once."""
    training = Training(case, case.layout(0))
    engine, (inputs, target) = training.engine, training.batch(0)
    with plain.autocast(case):
        result = engine.step(inputs, target=target)
    with folder_of_all() as folder:
        calls = calls_of(engine, result, (inputs, target), folder, training.optimizer)
        try:
            with plain.autocast(case):
                calls[case.calls[0 if rank == case.alone else 1]]()
        except RuntimeError as error:
            said = said_of(error)
            wanted = [f"{call} on rank " for call in case.calls]
            return [] if all(one in said for one in wanted) else [f"calls {case.calls} are not named in: {said}"]
    return [f"calls {case.calls} differ without an error"]


def serial(layout: Layout) -> Layout:
    """The same program without anything that hides or saves, whose sums have the same order."""
    # Under a capacity a step's gradients are summed apart from those before it.
    room = float(layout.ep) if layout.capacity else 0.0
    return replace(layout, overlap="serial", recompute="none", offload=False, capacity=room, planned=False)


def train(case: Case, expected: Sequence[plain.Expected]) -> tuple[Values, list[str]]:
    """All values of a training, the checkpoint in its middle included, and which are not as expected."""
    found: Values = {}
    problems: list[str] = []
    torch.manual_seed(case.seed)
    training = Training(case, case.layout(0))
    for step in range(len(case.updates)):
        if case.layout(step) is not training.layout:
            training = resumed(training, step)
        values = training.step(step)
        found |= values
        if expected:
            problems += training.unlike(step, values, expected[step])
    return found, problems


def resumed(training: Training, step: int) -> Training:
    """The training in the layout of a step, which goes on from a checkpoint."""
    with folder_of_all() as folder:
        save_checkpoint(training.engine, folder, step, training.optimizer)
        other = Training(training.case, training.case.layout(step))
        load_checkpoint(other.engine, folder, other.optimizer)
    return other


@contextmanager
def folder_of_all() -> Iterator[Path]:
    """A new folder for the checkpoints of all ranks, until each of them has left the body."""
    folder = Path(plain.on_first_rank(lambda: tempfile.mkdtemp(prefix="campaign-")))
    yield folder
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


class Training:
    """An engine over a case's model in one layout."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self.case, self.layout, self.program = case, layout, layout.program(case.data.microbatches)
        self.mesh = mesh = init_device_mesh("cpu", (layout.pp, layout.dp, layout.ep), mesh_dim_names=("pp", "dp", "ep"))
        self.blocks = build(case, mesh.get_group("ep"))
        if layout.sharded:
            self._shard(mesh)
        costs = costs_of(Random(case.seed))
        self.engine = Engine(
            self._model(),
            self.program,
            mesh=None if dist.get_world_size() == 1 else mesh,
            loss_fn=loss_fn,
            options=EngineOptions(
                overlap=layout.overlap,
                recompute=layout.recompute,
                offload=layout.offload,
                offload_threshold=0,
                capacity=layout.capacity or None,
                costs=None if layout.measured else costs,
                count_tokens=count_tokens if case.data.ignored else None,
                dynamic_shapes=case.data.varying == "steps",
                timeout=TIMEOUT_S,
            ),
        )
        if layout.planned:
            self.engine.plan = compile(self.program, self.engine.shapes, costs_of(Random(-case.seed)), layout.overlap)
        self.optimizer = plain.optimizer_of(case, self.engine.parameters())
        held = set(self.engine.parameters())
        self.held = [(name, parameter) for name, parameter in plain.named(self.blocks) if parameter in held]
        self.shard = mesh.get_local_rank("dp") * layout.ep + mesh.get_local_rank("ep")

    def _shard(self, mesh: DeviceMesh) -> None:
        """Experts over the ranks that hold the same, all else over those that hold the same stages."""
        every, same = (test_fsdp.joined(mesh, self.program, *names) for names in (("dp", "ep"), ("dp",)))
        for block in self.blocks:
            for experts in getattr(block, "experts", ()):
                fully_shard(experts, mesh=same)
            fully_shard(block, mesh=every)

    def _model(self) -> Any:
        """The whole model, or this rank's stages where the first and the last hold copies of one parameter."""
        placement = self.program.placement
        if not self.case.model.tied or placement.stages == 1:
            return self.blocks
        first, last = self.blocks[0], self.blocks[-1]
        last.weight = nn.Parameter(first.weight.detach().clone())
        parts = split_blocks(self.blocks, placement.stages)
        ties: dict[int, dict[str, nn.Parameter]] = {
            0: {"weight": first.weight}, placement.stages - 1: {"weight": last.weight}
        }  # fmt: skip
        rank = self.mesh.get_local_rank("pp")
        return {stage: Stage(parts[stage], ties.get(stage, {})) for _, stage in placement.places(rank)}

    def batch(self, step: int) -> Iterator[Any]:
        """Return inputs and targets of this rank in a step."""
        return (joined(part, self.case) for part in zip(*batch(self.case, step, self.shard), strict=True))

    def step(self, step: int) -> Values:
        """A step with all that belongs to it: losses, gradients, and parameters where the optimizer follows."""
        case, engine = self.case, self.engine
        inputs, target = self.batch(step)
        found: Values = {}
        with plain.autocast(case):
            if case.evaluated:
                before = engine.evaluate(inputs, target=target)
                found |= self._losses(f"step {step} evaluated ", before.losses)
            result = engine.step(inputs, target=target, loss_scale=case.loss_scale)
        found |= self._losses(f"step {step} loss ", result.losses)
        found |= values_of(self.held, f"step {step} gradient ", grad=True)
        if case.updates[step]:
            if case.max_norm:
                found[f"step {step} norm"] = engine.clip_gradients(case.max_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            found |= values_of(self.held, f"step {step} ", grad=False)
            biases, held = plain.balanced(case, self.blocks, step), {name.rpartition(".")[0] for name, _ in self.held}
            found |= {name: b for name, b in biases.items() if f"{name.split()[-1].rpartition('.')[0]}.gate" in held}
        return found

    def _losses(self, prefix: str, losses: Sequence[Tensor]) -> Values:
        """Name losses by their microbatches; pipes that end on this rank give theirs in turn."""
        placement, program = self.program.placement, self.program
        ends = [
            index
            for pipe, stage in placement.places(self.mesh.get_local_rank("pp"))
            if stage == placement.stages - 1
            for index in program.microbatches_of(pipe)
        ]
        return {f"{prefix}{index}": loss for index, loss in zip(ends, losses, strict=True)}

    def unlike(self, step: int, values: Values, expected: plain.Expected) -> list[str]:
        """Return the names of values that differ from the plain loop."""
        wanted = dict(expected.values)
        wanted |= {f"step {step} loss {i}": loss for i, loss in enumerate(expected.losses[self.shard])}
        if expected.before:
            wanted |= {f"step {step} evaluated {i}": loss for i, loss in enumerate(expected.before[self.shard])}
        kinds = ("gradient ", "loss ", "evaluated ", "norm", "")
        by_kind: dict[str, Values] = {kind: {} for kind in kinds}
        for name, value in values.items():
            kind = next(kind for kind in kinds if name.startswith(f"step {step} {kind}"))
            by_kind[kind][name] = value
        shard, limit = self.mesh.get_local_rank("ep"), limit_of(self.case)
        return [problem for group in by_kind.values() for problem in apart(group, wanted, shard, limit)]


def costs_of(random: Random) -> NodeCosts:
    """Return costs in proportions that no machine has."""
    return NodeCosts.uniform(
        **{
            name: random.choice((0.1, 1.0, 3.0, 10.0)) * random.uniform(0.5, 1.0)
            for name in ("attention", "experts", "dispatch", "counts", "aggregate", "dense", "reduce", "send")
        }
    )
