"""torch's own schedules played by the engine against the same schedules played by torch."""

from __future__ import annotations

import doctest
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec

import overlap1f1b as o1
from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations import torch_pipelining
from overlap1f1b.integrations.torch_pipelining import overlapped
from overlap1f1b.moe import set_auxiliary_scale
from overlap1f1b.plan import Overlap
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.transport.exchange import own_exchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.engines import COSTS
from tests.ranks import over
from tests.tiers import wide

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="its V schedules send to themselves, not on gloo")
SINCE_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="what torch's own schedules refuse before")
CPU = torch.device("cpu")
LAYERS = 4
STAGES = ((0, 2), (2, 4), (4, 5), (5, 7))  # of the 7 children: uneven, the second with a dense block
V, LOOP, ONE = ((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0,), (1,))  # stages of each pipeline rank


class Step:
    """Losses, outputs and gradients of a step of one rank."""

    def __init__(self, schedule: Any, stages: list[PipelineStage], data: tuple[Tensor, Tensor], **kwargs: Any) -> None:
        for stage in stages:
            stage.submod.zero_grad()
        self.first, self.last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
        losses: list[Tensor] = []
        self.output = schedule.step(
            *data[:1] if self.first else (), target=data[1] if self.last else None, losses=losses, **kwargs
        )
        self.losses = [loss.detach() for loss in losses]
        self.gradients = gradients_of(stages)
        assert (len(losses) > 0) == self.last

    def differs(self, other: Step) -> list[str]:
        """Return the names of values that are not bit-equal."""
        found = models.equal(other.gradients, self.gradients)
        if (self.output is None) != (other.output is None) or (
            self.output is not None and not torch.equal(self.output, other.output)
        ):
            found.append("output")
        pairs = zip(self.losses, other.losses, strict=True)
        return found + [f"loss {i}" for i, pair in enumerate(pairs) if not torch.equal(*pair)]


def gradients_of(stages: list[PipelineStage]) -> dict[str, Tensor]:
    return {f"{s.stage_index}.{n}": g for s in stages for n, g in models.gradients(s.submod).items()}


def mesh_of(size: int, ep: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Return the mesh, and the expert group of this rank."""
    mesh = init_device_mesh("cpu", (size // ep, ep), mesh_dim_names=("pp", "ep"))
    return mesh, mesh.get_group("ep") if ep > 1 else None


def stages_of(
    mesh: DeviceMesh, parts: list[nn.Module], placement: tuple[tuple[int, ...], ...] = V
) -> list[PipelineStage]:
    group = mesh.get_group("pp")
    return [PipelineStage(parts[i], i, len(parts), CPU, group=group) for i in placement[group.rank()]]


def cut(model: nn.Sequential) -> list[nn.Module]:
    return [model[a:b] for a, b in STAGES]


@pytest.mark.parametrize(
    ("name", "ep", "microbatches", "overlap"),
    [
        ("ScheduleDualPipeV", 2, 4, "pairs"),
        ("ScheduleInterleavedZeroBubble", 1, 4, 3),
        *wide(
            ("ScheduleDualPipeV", 2, 7, 3),
            ("ScheduleInterleaved1F1B", 2, 4, 3),
            ("ScheduleZBVZeroBubble", 2, 4, 2),
            ("Schedule1F1B", 2, 4, 3),
            ("ScheduleGPipe", 1, 4, 3),
        ),
    ],
)
@over(lambda name, ep, *_: 2 * ep)
def test_steps(rank: int, size: int, name: str, ep: int, microbatches: int, overlap: Overlap) -> None:
    """All steps until the engine has chosen its plan, and one more, against torch's step."""
    mesh, group = mesh_of(size, ep)
    model = models.build(group, layers=LAYERS)
    if name in ("Schedule1F1B", "ScheduleGPipe"):
        stages = stages_of(mesh, [model[:3], model[3:]], ONE)
        schedule = getattr(torch_schedules, name)(stages[0], microbatches, models.loss_fn)
    else:
        stages = stages_of(mesh, cut(model), LOOP if "Interleaved" in name else V)
        schedule = getattr(torch_schedules, name)(stages, microbatches, models.loss_fn)
    data = models.batch(microbatches, seed=rank % ep)
    expected = Step(schedule, stages, data)
    exchange = Delayed(own_exchange(group), seed=rank)
    ours = overlapped(
        schedule, mesh=mesh, exchange=exchange, options=EngineOptions(overlap=overlap, tries=1, timeout=20)
    )
    problems: list[str] = []
    while ours.result is None or ours.engine.tuner.settling:
        problems += [f"measured: {what}" for what in Step(ours, stages, data).differs(expected)]
    output = ours.eval(*data[:1] if expected.first else (), target=data[1] if expected.last else None)
    if (output is None) == expected.last or (expected.last and not torch.equal(output, expected.output)):
        problems.append("eval between steps")
    problems += [f"{what} after eval" for what in models.equal(expected.gradients, gradients_of(stages))]
    problems += Step(ours, stages, data).differs(expected)
    assert not problems, problems


@over(2)
def test_torch_plays_our_program(rank: int, size: int, tmp_path: Path) -> None:
    """In a table that torch has loaded."""
    path = tmp_path / "table.csv"
    mesh, group = mesh_of(size, size // 2)
    program = o1.build_schedule("combined_1f1b", ranks=2, microbatches=5, chunks=2)
    if rank == 0:
        path.write_text("\n".join(",".join(map(str, row)) for row in program.ranks))
    dist.barrier()
    stages = stages_of(mesh, cut(models.build(group, layers=LAYERS)), LOOP)
    schedule = torch_schedules._PipelineScheduleRuntime(stages, 5, models.loss_fn)
    schedule._load_csv(str(path))
    data = models.batch(5)
    expected = Step(schedule, stages, data)
    ours = overlapped(schedule, mesh=mesh, options=EngineOptions(costs=COSTS, timeout=20))
    assert ours.program.ranks == program.ranks
    problems = Step(ours, stages, data).differs(expected)
    assert not problems, problems


test_torch_plays_our_program_over_experts = pytest.mark.wide(over(4)(test_torch_plays_our_program.body))


class Whole(nn.Module):
    """Layers in one module, with another argument on the first stage and a keyword argument on each."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, shift: Tensor | None = None, *, factor: Tensor) -> Tensor:
        return self.part(x if shift is None else x + shift) * factor.mean()


@SINCE_2_13
@over(2)
def test_options_of_a_step(rank: int, size: int) -> None:
    """Further arguments, a loss with options, sums of losses, no outputs, auxiliary losses, two steps."""
    mesh, group = mesh_of(size, size // 2)
    config = MoEConfig(vocabulary=models.V, layers=4, hidden=16, heads=2, experts=8, intermediate=12, sequence=8)
    model = MoETransformer(config, group=group)
    set_auxiliary_scale(model, 0.7)
    parts = [list(model)[a:b] for a, b in ((0, 2), (2, 3), (3, 4), (4, 6))]
    stages = stages_of(mesh, [Whole(torch.nn.Sequential(*part)) for part in parts])

    def loss_fn(logits: Tensor, target: Tensor, weight: float) -> Tensor:
        return weight * models.loss_fn(logits, target)

    schedule = ScheduleDualPipeV(stages, 4, loss_fn, scale_grads=False)
    inputs, target = models.batch(4)
    first = mesh.get_local_rank("pp") == 0
    steps: list[list[Tensor]] = []
    for played in (schedule, overlapped(schedule, mesh=mesh, options=EngineOptions(costs=COSTS, timeout=20))):
        model.zero_grad()
        found, losses = [], []
        for _ in range(2):
            output = played.step(
                *((inputs, torch.zeros_like(inputs)) if first else ()),
                factor=torch.arange(8.0),
                target=target if first else None,
                losses=losses,
                loss_kwargs={"weight": 0.3},
                return_outputs=False,
            )
            assert output is None
            found += [loss.detach() for loss in losses]
        steps.append(found + [g for s in stages for g in models.gradients(s.submod).values()])
    assert any(float(g.abs().max()) > 0 for g in steps[1])
    problems = [str(i) for i, (a, b) in enumerate(zip(*steps, strict=True)) if not torch.equal(a, b)]
    assert not problems, problems


test_options_of_a_step_over_experts = SINCE_2_13(pytest.mark.wide(over(4)(test_options_of_a_step.body)))


def other_loss(logits: Tensor, target: Tensor) -> Tensor:
    return logits.square().mean() + 0.3 * models.loss_fn(logits, target)


@SINCE_2_13
@pytest.mark.parametrize(
    "name", ["ScheduleDualPipeV", *wide("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")]
)
@over(2)
def test_what_a_loop_sets_between_steps(rank: int, size: int, name: str) -> None:
    """Loss, chunk specs, scale and number of microbatches, here or at torch's schedule; sizes between stages."""
    mesh, model, kind = mesh_of(size, 1)[0], models.build(layers=LAYERS), getattr(torch_schedules, name)
    single = name == "Schedule1F1B"
    parts = [model[:3], model[3:]] if single else cut(model)
    stages = stages_of(mesh, list(map(Whole, parts)), ONE if single else LOOP if "Interleaved" in name else V)
    given = stages[0] if single else stages
    torchs = kind(given, 4, models.loss_fn)
    ours, data, factor = overlapped(torchs, mesh=mesh), models.batch(4), torch.rand(8)
    Step(ours, stages, data, factor=factor)
    for place, changed in (
        (ours, {"_loss_fn": other_loss}),
        (torchs, {"_loss_fn": models.loss_fn, "_kwargs_chunk_spec": {"factor": TensorChunkSpec(1)}}),
        (
            ours,
            {"_n_microbatches": 6, "_stage_forward_initialized" if single else "_stages_forward_initialized": False},
        ),
        (ours, {"scale_grads": False, "_args_chunk_spec": (TensorChunkSpec(0),)}),
        (ours, {"_n_microbatches": 4, "_loss_fn": other_loss}),
    ):
        for key, value in changed.items():
            setattr(place, key, value)
        count, by_row = ours._n_microbatches, ours._kwargs_chunk_spec is None
        (inputs, target), factor = models.batch(count), torch.rand(2 * count) if by_row else torch.rand(3, 2 * count)
        cut_off = 3 if count == 6 else inputs.shape[1]
        data = inputs[:, :cut_off], target[:, :cut_off]
        specs = ours._args_chunk_spec, ours._kwargs_chunk_spec
        fresh = kind(given, count, ours._loss_fn, *specs, scale_grads=ours.scale_grads)
        for _ in range(2):
            problems = Step(ours, stages, data, factor=factor).differs(Step(fresh, stages, data, factor=factor))
            assert not problems, (changed, problems)


@pytest.mark.skipif(find_spec("nemo_automodel") is None, reason="nemo-automodel is not installed")
@over(2)
def test_nemo_automodel(rank: int, size: int) -> None:
    """Its AutoPipeline, with the line of docs/recipes.md; a loss that is set between steps, as of its recipes."""
    from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline

    mesh, found = mesh_of(size, 1)[0], list[list[Tensor]]()
    inputs, target = models.batch(4)
    for plays in (False, True):
        stages = stages_of(mesh, cut(models.build(layers=LAYERS)), LOOP)
        pp = AutoPipeline(world_mesh=mesh, device=CPU)
        pp.info.schedule = torch_schedules.ScheduleInterleaved1F1B(stages, 4, models.loss_fn)
        pp.info.stages, pp.info.model_parts = stages, [stage.submod for stage in stages]
        pp.info.has_first_stage, pp.info.has_last_stage = rank == 0, rank == 1
        if plays:
            pp.info.schedule = overlapped(pp.info.schedule, mesh=mesh)
        steps: list[Tensor] = []
        for step in range(4):
            if step == 2:
                pp.info.schedule._loss_fn = other_loss
            losses: list[Tensor] = []
            pp.step(inputs, target=target if rank == 1 else None, losses=losses)
            steps += [loss.detach() for loss in losses] + [g.clone() for g in gradients_of(stages).values()]
        found.append(steps)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@over(2)
def test_looped_bfs(rank: int, size: int) -> None:
    """torch adds the gradients of the last microbatch first, the engine and a plain loop in their order."""
    mesh, model, data = mesh_of(size, 1)[0], models.build(layers=LAYERS), models.batch(4)
    stages = stages_of(mesh, cut(model), LOOP)
    losses, _ = models.plain_gradients(model, *data, 4)
    expected = gradients_of(stages)
    ours = overlapped(torch_schedules.ScheduleLoopedBFS(stages, 4, models.loss_fn), mesh=mesh)
    step = Step(ours, stages, data)
    different = [n for n in expected if not torch.allclose(step.gradients[n], expected[n], rtol=1e-5, atol=1e-7)]
    problems = different + ([] if step.losses in ([], losses) else ["losses"])
    assert not problems, problems


# ------------------------------------------------------------------------------------------------- one process


def built(*parts: nn.Module, loss_fn: Any = models.loss_fn) -> ScheduleDualPipeV:
    """Return a schedule of one rank."""
    parts = parts or (models.build()[:2], models.build()[2:])
    return ScheduleDualPipeV([PipelineStage(part, i, len(parts), CPU) for i, part in enumerate(parts)], 4, loss_fn)


def test_a_stage_keeps_what_its_call_does_beside_its_forward(alone: None) -> None:
    for name, own in models.OWN_CALLS.items():
        model, data = models.build(), models.batch(4)
        parts = model[:3], model[3:]
        handle, schedule = own(parts[1]), built(*parts)
        expected = Step(schedule, schedule._stages, data)
        assert not Step(overlapped(schedule), schedule._stages, data).differs(expected), name
        if handle is not None:
            handle.remove()


def test_microbatches_in_lists(alone: None) -> None:
    """As of torch 2.14 a batch may be split already; one that is split by the schedule gives the same."""
    model, (inputs, target), scale = models.build(), models.batch(4), torch.rand(8)
    schedule = built(Whole(model[:2]), Whole(model[2:]))
    expected = Step(schedule, schedule._stages, (inputs, target), factor=scale)
    ours, losses = overlapped(schedule), list[Tensor]()
    assert not Step(ours, schedule._stages, (inputs, target), factor=scale).differs(expected)
    lists = {"kwarg_mbs": [{"factor": part} for part in scale.chunk(4)], "target_mbs": target.chunk(4)}
    output = ours.step(arg_mbs=[(x,) for x in inputs.chunk(4)], **lists, losses=losses)
    assert torch.equal(output, expected.output)
    assert torch.equal(torch.stack(losses), torch.stack(expected.losses))
    with pytest.raises(ValueError, match=r"^a whole batch, and lists of microbatches; allowed: one of them"):
        ours.step(inputs, **lists)
    for changed, message in (
        ({}, "no arg_mbs on a rank that needs them; allowed: a list of 4"),
        ({"arg_mbs": [(inputs,)] * 4, "target_mbs": None}, "no target_mbs on a rank that needs them; allowed: a list"),
        ({"kwarg_mbs": [{}] * 3}, "kwarg_mbs of 3 microbatches; allowed: 4"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ours.step(**{**lists, **changed})


def test_a_schedule_without_a_loss_plays_forwards(alone: None) -> None:
    model, (inputs, _) = models.build(), models.batch(4)
    ours = overlapped(built(model[:2], model[2:], loss_fn=None))
    with torch.no_grad():
        assert torch.equal(ours.step(inputs), torch.cat([model(x) for x in inputs.chunk(4)]))
    assert all(p.grad is None for p in model.parameters())


def test_what_is_refused(alone: None) -> None:
    schedule = built()
    schedule._stages[1].dw_builder = lambda: lambda: None
    with pytest.raises(ValueError, match=r"^a ScheduleDualPipeV with a dw_builder; allowed: "):
        overlapped(schedule)
    schedule = built()
    schedule._stages[1] = models.build()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^a ScheduleDualPipeV with a stage of type Sequential; allowed: "):
        overlapped(schedule)
    with pytest.raises(ValueError, match=r"^a Sequential with a stage of type NoneType; allowed: "):
        overlapped(models.build())
    for given in ({"mesh": "cpu"}, {"options": {"overlap": 2}}, {"exchange": 5}):
        ((name, value),) = given.items()
        with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))}; allowed: "):
            overlapped(built(), **given)
    for args, losses, message in (
        (("x",), None, "args[0]='x'; allowed: Tensor"),
        (([[1]],), None, "args[0]=[[1]]; allowed: Tensor"),
        ((torch.ones(4),), 5, "losses=5; allowed: list or None"),
    ):
        with pytest.raises(ValueError, match=f"(?m)^{re.escape(message)}"):
            overlapped(built()).step(*args, target=models.batch(4)[1], losses=losses)
    single = torch_schedules._ScheduleForwardOnly(PipelineStage(models.build(), 0, 1, CPU), 4)
    with pytest.raises(ValueError, match=r"^a _ScheduleForwardOnly without a table of actions; allowed: "):
        overlapped(single)
    ours, (inputs, target) = overlapped(built()), models.batch(4)
    with pytest.raises(ValueError, match=r"^keyword arguments that require a gradient; allowed: "):
        ours.step(inputs, target=target, scale=torch.ones(8, requires_grad=True))


class OwnLoss(ScheduleDualPipeV):
    """A schedule whose loss is a method."""

    def _compute_loss(self, output: Any, target: Any, *more: Any) -> Any:
        return other_loss(output, target)


class OwnSteps(ScheduleDualPipeV):
    """A schedule that plays otherwise."""

    def _step_microbatches(self, *given: Any, **more: Any) -> Any:
        return super()._step_microbatches(*given, **more)


def test_what_a_loop_reads_and_sets(alone: None) -> None:
    """Methods that torch's schedule calls are the schedule's own; what is not followed is refused by name."""
    model, data = models.build(), models.batch(4)
    stages = [PipelineStage(part, i, 2, CPU) for i, part in enumerate((model[:2], model[2:]))]
    schedule = OwnLoss(stages, 4, models.loss_fn)
    expected, ours = Step(schedule, stages, data), overlapped(schedule)
    assert not Step(ours, stages, data).differs(expected)
    for name in ("_loss_fn", "_n_microbatches", "_stages", "_num_stages", "rank", "pipeline_order", "scale_grads"):
        assert getattr(ours, name) == getattr(schedule, name), name
    assert ours._stages_forward_initialized
    assert not hasattr(ours, "_stage_forward_initialized")  # torch's of one stage a rank
    for name in ("_load_csv", "register_custom_function", "_step_microbatches", "_internal_losses"):
        with pytest.raises(AttributeError, match=f"^{name} of a OwnLoss that the engine plays; allowed: to read and "):
            getattr(ours, name)
    for name in ("_stages", "pipeline_order", "_step_microbatches", "loss_fn", "step"):
        with pytest.raises(AttributeError, match=f"^{name} is set on a OwnLoss that the engine plays; allowed: to "):
            setattr(ours, name, None)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ours.nothing
    custom = built()
    custom.register_custom_function(torch_schedules.FORWARD, lambda action, context: None)
    for refused, what in ((OwnSteps(stages, 4), "_step_microbatches"), (custom, "register_custom_function")):
        with pytest.raises(ValueError, match=f" with {what} of its own; allowed: torch's, which the engine plays"):
            overlapped(refused)


def test_the_example_runs() -> None:
    assert doctest.testmod(torch_pipelining).failed == 0
    assert o1.integrations.torch_pipelining.overlapped is overlapped
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = o1.integrations.nothing
