"""torch's own schedules with the engine registered against the same schedules without it."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

import overlap1f1b as o1
from overlap1f1b.integrations.torch_pipelining import register, registration
from overlap1f1b.moe import MoEConfig, MoETransformer, set_auxiliary_scale
from overlap1f1b.plan import Overlap
from overlap1f1b.transport.exchange import own_exchange
from tests import models
from tests.engine.test_engine import Delayed
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="its V schedules send to themselves, not on gloo")
SINCE_2_13 = pytest.mark.skipif(torch.__version__ < "2.13", reason="what torch's own schedules refuse before")
CPU = torch.device("cpu")
LAYERS = 4
STAGES = ((0, 2), (2, 4), (4, 5), (5, 7))  # of the 7 children: uneven, the second with a dense block
V, LOOP = ((0, 3), (1, 2)), ((0, 2), (1, 3))  # stages of each pipeline rank


class Step:
    """Losses, outputs and gradients of a step of one rank."""

    def __init__(self, schedule: Any, stages: list[PipelineStage], data: tuple[Tensor, Tensor], **kwargs: Any) -> None:
        for stage in stages:
            stage.submod.zero_grad()
        first, last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
        losses: list[Tensor] = []
        torch.manual_seed(7)
        self.output = schedule.step(
            *data[:1] if first else (), target=data[1] if last else None, losses=losses, **kwargs
        )
        self.losses = [loss.detach() for loss in losses]
        self.gradients = {f"{s.stage_index}.{n}": g for s in stages for n, g in models.gradients(s.submod).items()}
        assert (len(losses) > 0) == last

    def differs(self, other: Step) -> list[str]:
        """Return the names of values that are not bit-equal."""
        found = models.equal(self.gradients, other.gradients)
        if (self.output is None) != (other.output is None) or (
            self.output is not None and not torch.equal(self.output, other.output)
        ):
            found.append("output")
        pairs = zip(self.losses, other.losses, strict=True)
        return found + [f"loss {i}" for i, pair in enumerate(pairs) if not torch.equal(*pair)]


def mesh(size: int, ep: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the pipeline group and the expert group of this rank."""
    both = init_device_mesh("cpu", (size // ep, ep), mesh_dim_names=("pp", "ep"))
    return both.get_group("pp"), both.get_group("ep") if ep > 1 else None


def stages_of(
    group: dist.ProcessGroup, parts: list[nn.Module], placement: tuple[tuple[int, ...], ...] = V
) -> list[PipelineStage]:
    return [PipelineStage(parts[i], i, len(parts), CPU, group=group) for i in placement[group.rank()]]


def cut(model: nn.Sequential) -> list[nn.Module]:
    return [model[a:b] for a, b in STAGES]


def _equal(
    rank: int,
    size: int,
    ep: int,
    name: str,
    microbatches: int,
    overlaps: tuple[Overlap, ...],
    options: dict[str, Any],
) -> list[str]:
    """Return the differences of steps with the engine, and of one with it removed, from a step without it."""
    pp, group = mesh(size, ep)
    parts = cut(models.build(group, layers=LAYERS, **options))
    stages = stages_of(pp, parts, LOOP if "Interleaved" in name or "Looped" in name else V)
    schedule = getattr(torch_schedules, name)(stages, microbatches, models.loss_fn)
    data = models.batch(microbatches, seed=rank % ep)
    expected = Step(schedule, stages, data)
    exchange = Delayed(own_exchange(group), seed=rank)
    problems: list[str] = []
    for overlap in overlaps:
        registered = register(schedule, overlap=overlap, exchange=exchange, timeout=20)
        for step in range(2 if overlap == overlaps[-1] else 1):
            differs = Step(schedule, stages, data).differs(expected)
            problems += [f"overlap {overlap}, step {step}: {what}" for what in differs]
        registered.remove()
        assert not schedule._comp_type_to_function_map
    return problems + [f"removed: {what}" for what in Step(schedule, stages, data).differs(expected)]


def test_dualpipev_on_two_ranks(ranks2: Ranks) -> None:
    assert ranks2.run(_equal, 1, "ScheduleDualPipeV", 5, ("serial", 1, 2, "pairs"), {}) == [[], []]


@pytest.mark.parametrize(
    ("microbatches", "overlaps", "model"), [(7, ("serial", 2), {}), (4, ("pairs",), {"dropout": 0.3})]
)
def test_dualpipev_with_shared_experts(
    ranks4: Ranks, microbatches: int, overlaps: tuple[Overlap, ...], model: dict[str, Any]
) -> None:
    """Dropout draws what torch draws."""
    assert ranks4.run(_equal, 2, "ScheduleDualPipeV", microbatches, overlaps, model) == [[]] * 4


@pytest.mark.parametrize("name", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_schedules_without_pairs(ranks4: Ranks, name: str) -> None:
    assert ranks4.run(_equal, 2, name, 4, (1,), {}) == [[]] * 4


@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS"])
def test_schedules_without_pairs_on_two_ranks(ranks2: Ranks, name: str) -> None:
    assert ranks2.run(_equal, 1, name, 4, (1,), {}) == [[], []]


def _table(rank: int, size: int, text: str | None, path: str) -> list[str]:
    """Return the differences of a step from torch's, with a table: one of our programs, or a text of rows."""
    pp, group = mesh(size, 2)
    chunks = 1 if text else 2
    program = o1.build_schedule("combined_1f1b", ranks=2, microbatches=5, chunks=2)
    if rank == 0:
        Path(path).write_text(text or "\n".join(",".join(map(str, row)) for row in program.ranks))
    dist.barrier()
    children = list(models.build(group, layers=LAYERS))
    cuts = STAGES if chunks == 2 else ((0, 3), (3, 7))
    parts: list[nn.Module] = [nn.Sequential(*children[a:b]) for a, b in cuts]
    stages = stages_of(pp, parts, LOOP if chunks == 2 else ((0,), (1,)))
    schedule = torch_schedules._PipelineScheduleRuntime(stages, 3 if text else 5, models.loss_fn)
    schedule._load_csv(path)
    for stage in stages:  # as under TORCH_DISTRIBUTED_DEBUG=DETAIL
        stage._runtime_validate = True
    actions = schedule.pipeline_order_with_comms[pp.rank()]
    assert any(action.computation_type is torch_schedules.OVERLAP_F_B for action in actions)
    data = models.batch(3 if text else 5, seed=rank % 2)
    expected = Step(schedule, stages, data)
    register(schedule, timeout=20)
    return Step(schedule, stages, data).differs(expected)


def test_torch_plays_our_program(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(_table, None, str(tmp_path / "table.csv")) == [[]] * 4


def test_pairs_of_input_gradients_and_of_one_microbatch(ranks4: Ranks, tmp_path: Path) -> None:
    """``(1F0;1B0)`` cannot overlap: its members run one after the other, as torch runs them."""
    first = "0F0,0F1,(0F2;0I0)OVERLAP_F_B,0I1,0W0,0W1,0B2"
    last = "(1F0;1B0)OVERLAP_F_B,1F1,(1F2;1I1)OVERLAP_F_B,1W1,1B2"
    assert ranks4.run(_table, f"{first}\n{last}\n", str(tmp_path / "table.csv")) == [[]] * 4


class Whole(nn.Module):
    """Layers in one module, with another argument on the first stage and a keyword argument on each."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, shift: Tensor | None = None, *, factor: Tensor) -> Tensor:
        return self.part(x if shift is None else x + shift) * factor.mean()


def _modules(rank: int, size: int) -> list[str]:
    """Single modules with arguments, a loss with options, sums of losses, no outputs, auxiliary losses, two steps."""
    pp, group = mesh(size, 2)
    config = MoEConfig(vocabulary=models.V, layers=4, hidden=16, heads=2, experts=8, intermediate=12, sequence=8)
    model = MoETransformer(config, group=group)
    set_auxiliary_scale(model, 0.7)
    stages = stages_of(pp, [Whole(model[a:b]) for a, b in ((0, 2), (2, 3), (3, 4), (4, 6))])

    def loss_fn(logits: Tensor, target: Tensor, weight: float) -> Tensor:
        return weight * models.loss_fn(logits, target)

    schedule = ScheduleDualPipeV(stages, 4, loss_fn, scale_grads=False)
    inputs, target = models.batch(4, seed=rank % 2)
    first = pp.rank() == 0
    problems: list[str] = []
    steps: list[list[Tensor]] = []
    for turn in range(2):
        for part in model.modules():
            part.zero_grad()
        found, losses = [], []
        for _ in range(2):
            torch.manual_seed(3)
            output = schedule.step(
                *((inputs, torch.zeros_like(inputs)) if first else ()),
                factor=torch.arange(8.0),
                target=target if first else None,
                losses=losses,
                loss_kwargs={"weight": 0.3},
                return_outputs=False,
            )
            assert output is None
            assert not any(stage.output_chunks for stage in stages)
            found += [loss.detach() for loss in losses]
        steps.append(found + [g for s in stages for g in models.gradients(s.submod).values()])
        if not turn:
            register(schedule, timeout=20)
    problems += [str(i) for i, (a, b) in enumerate(zip(*steps, strict=True)) if not torch.equal(a, b)]
    assert any(float(g.abs().max()) > 0 for g in steps[1])
    return problems


@SINCE_2_13
def test_single_modules_and_options_of_a_step(ranks4: Ranks) -> None:
    assert ranks4.run(_modules) == [[]] * 4


class Two(nn.Module):
    """Passes two tensors on; every second stage uses the second one."""

    def __init__(self, part: nn.Module, stage: int) -> None:
        super().__init__()
        self.part, self.stage = part, stage

    def forward(self, x: Tensor, beside: Tensor) -> Any:
        x = self.part(x if self.stage % 2 else x + beside.to(x.dtype))
        if self.stage == 3:
            return x * beside.mean()
        return x, beside.expand(*x.shape).clone() if self.stage == 0 else beside * x


def _two_tensors(rank: int, size: int) -> list[str]:
    pp, group = mesh(size, 2)
    model = models.build(group, layers=LAYERS)
    parts = [Two(part, stage) for stage, part in enumerate(cut(model))]
    parts[0].part = nn.Sequential(nn.Linear(models.H, models.H), *list(parts[0].part)[1:])
    stages = stages_of(pp, list(parts))
    schedule = ScheduleDualPipeV(stages, 5, models.loss_fn)
    x = torch.randn(10, 7, models.H, generator=torch.Generator().manual_seed(rank % 2))
    steps = []
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        losses: list[Tensor] = []
        schedule.step(
            *((x, torch.ones(10, 1, 1)) if pp.rank() == 0 else ()),
            target=models.batch(5, seed=rank % 2)[1] if pp.rank() == 0 else None,
            losses=losses,
        )
        steps.append({f"{s.stage_index}.{n}": g for s in stages for n, g in models.gradients(s.submod).items()})
        steps[-1] |= {str(i): loss.detach() for i, loss in enumerate(losses)}
        if len(steps) == 1:
            register(schedule, timeout=20)
    return models.equal(*steps)


@SINCE_2_13
def test_two_tensors_cross_a_boundary(ranks4: Ranks) -> None:
    assert ranks4.run(_two_tensors) == [[]] * 4


def _evaluated(rank: int, size: int, name: str) -> bool:
    """Whether ``eval`` between steps returns the right outputs and changes no gradient."""
    pp, group = mesh(size, 2)
    model = models.build(group, layers=LAYERS)
    stages = stages_of(pp, cut(model), V if name == "ScheduleDualPipeV" else LOOP)
    schedule = getattr(torch_schedules, name)(stages, 4, models.loss_fn)
    data = models.batch(4, seed=rank % 2)
    with torch.no_grad():
        expected = torch.cat([model(x) for x in data[0].chunk(4)])
    registered = register(schedule, timeout=20)
    before = Step(schedule, stages, data)
    first, last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
    schedule.scale_grads = False  # torch scales gradients in eval, too
    output = schedule.eval(*data[:1] if first else (), target=data[1] if last else None)
    schedule.scale_grads = True
    same = all(
        torch.equal(g, before.gradients[f"{s.stage_index}.{n}"])
        for s in stages
        for n, g in models.gradients(s.submod).items()
    )
    assert not any(stage.runs for stage in registered._stages.values())
    return same and (torch.equal(output, expected) if last else output is None)


@pytest.mark.parametrize("name", ["ScheduleDualPipeV", "ScheduleInterleaved1F1B"])
def test_eval_between_steps(ranks4: Ranks, name: str) -> None:
    assert ranks4.run(_evaluated, name) == [True] * 4


def against_plain(rank: int, model: nn.Sequential, stages: list[PipelineStage]) -> list[str]:
    """Return the differences from plain autograd, for cases in which torch's own runtime fails."""
    data = models.batch(4)
    losses, _ = models.plain_gradients(model, *data, 4)
    expected = {f"{s.stage_index}.{n}": g for s in stages for n, g in models.gradients(s.submod).items()}
    schedule = ScheduleDualPipeV(stages, 4, models.loss_fn)
    register(schedule)
    step = Step(schedule, stages, data)
    different = [n for n in expected if not torch.allclose(step.gradients[n], expected[n], rtol=1e-5, atol=1e-7)]
    return different + ([] if step.losses == ([] if rank else losses) else ["losses"])


def _frozen(rank: int, size: int) -> list[str]:
    """No parameter of the first stage is trained, and one block of the last is not.

    torch's own runtime computes no weight gradients after the BACKWARD_INPUT of a stage whose input requires none.
    """
    pp, _ = mesh(size, 1)
    model = models.build(layers=LAYERS)
    model[:2].requires_grad_(False)
    model[5].requires_grad_(False)
    return against_plain(rank, model, stages_of(pp, cut(model)))


@SINCE_2_13
def test_frozen_stages(ranks2: Ranks) -> None:
    assert ranks2.run(_frozen) == [[], []]


class Expanding(nn.Module):
    """Its input's gradient has stride 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * torch.ones(2, 7, models.H) / x.numel()


def _stride_0(rank: int, size: int) -> list[str]:
    """Send a gradient of stride 0 between stages; torch's own runtime passes it to gloo, which refuses it."""
    pp, _ = mesh(size, 1)
    parts = cut(models.build(layers=LAYERS))
    parts[1] = nn.Sequential(Expanding(), *parts[1])
    hidden, logits = (torch.empty(2, 7, width, requires_grad=True) for width in (models.H, models.V))
    inputs = [torch.zeros(2, 7, dtype=torch.int64), hidden, hidden, hidden]
    outputs = [hidden, hidden, hidden, logits]
    stages = [
        PipelineStage(parts[i], i, 4, CPU, input_args=inputs[i], output_args=outputs[i], group=pp) for i in V[rank]
    ]
    return against_plain(rank, nn.Sequential(*parts), stages)


def test_a_gradient_of_stride_0_is_sent(ranks2: Ranks) -> None:
    assert ranks2.run(_stride_0) == [[], []]


# ------------------------------------------------------------------------------------------------- one process


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(*parts: nn.Module, microbatches: int = 4) -> ScheduleDualPipeV:
    """Return a schedule of one rank."""
    parts = parts or (models.build()[:2], models.build()[2:])
    stages = [PipelineStage(part, i, len(parts), CPU) for i, part in enumerate(parts)]
    return ScheduleDualPipeV(stages, microbatches, models.loss_fn)


def test_one_rank_plays_every_pair(alone: None) -> None:
    schedule, data = built(), models.batch(4)
    expected = Step(schedule, schedule._stages, data)
    register(schedule)
    assert not Step(schedule, schedule._stages, data).differs(expected)


def test_a_stage_that_raises_leaves_nothing_behind(alone: None) -> None:
    model, data = models.build(), models.batch(4)
    schedule = built(model[:2], model[2:])
    expected = Step(schedule, schedule._stages, data)
    registered = register(schedule)
    calls: list[None] = []

    def fail(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("third")

    handle = model[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="third"):
        Step(schedule, schedule._stages, data)
    handle.remove()
    assert not any(stage.runs for stage in registered._stages.values())
    schedule._internal_losses.clear()  # torch's, which a step that fails leaves
    assert not Step(schedule, schedule._stages, data).differs(expected)


def test_hooks_on_a_list_of_blocks_run(alone: None) -> None:
    model, seen = models.build(), []
    schedule = built(model[:2], model[2:])
    schedule._stages[0].submod.register_forward_hook(lambda *_: seen.append(1))
    register(schedule)
    Step(schedule, schedule._stages, models.batch(4))
    assert len(seen) == 5  # torch looks at the shapes once


@pytest.mark.parametrize("own", models.OWN_CALLS)
def test_a_stage_keeps_what_its_call_does_beside_its_forward(alone: None, own: str) -> None:
    model = models.build()
    parts = model[:3], model[3:]
    handle = models.OWN_CALLS[own](parts[1])
    try:
        schedule, data = built(*parts), models.batch(4)
        expected = Step(schedule, schedule._stages, data)
        register(schedule)
        assert not Step(schedule, schedule._stages, data).differs(expected)
    finally:
        if handle is not None:
            handle.remove()


def test_schedules_that_cannot_register(alone: None) -> None:
    single = Schedule1F1B(PipelineStage(models.build(), 0, 1, CPU), 4, models.loss_fn)
    with pytest.raises(ValueError, match=r"^a schedule of type Schedule1F1B; allowed: one of several stages"):
        register(single)  # type: ignore[arg-type]
    schedule = built()
    register(schedule)
    with pytest.raises(RuntimeError, match=r"^the schedule has functions for FORWARD, .* already; allowed: one"):
        register(schedule)
    other = built()
    other.register_custom_function(torch_schedules.OVERLAP_F_B, lambda action, ctx: None)
    with pytest.raises(RuntimeError, match="for OVERLAP_F_B already"):
        register(other)
    with pytest.raises(ValueError, match="overlap"):
        register(built(), overlap="none")  # type: ignore[arg-type]


def test_stages_that_are_not_ours(alone: None) -> None:
    model = models.build()
    with pytest.raises(ValueError, match=r"^no stage of this rank holds GroupedExperts; allowed: "):
        register(built(model[:1], model[4:]))
    with pytest.raises(ValueError, match=r"^stage 1 holds a module under DistributedDataParallel; allowed: "):
        register(built(model[:2], DistributedDataParallel(models.build()[2:])))
    with pytest.raises(ValueError, match=r"^stage 0 holds a module under FSDP; allowed: "):
        register(built(fully_shard(models.build()[:2], mesh=init_device_mesh("cpu", (1,))), model[2:]))
    schedule = built()
    schedule._stages[1].dw_builder = lambda: lambda: None
    with pytest.raises(ValueError, match=r"^stage 1 has a dw_builder; allowed: none"):
        register(schedule)
    schedule = built()
    schedule._stages[1] = models.build()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^stage \? is a Sequential; allowed: .*PipelineStage$"):
        register(schedule)


def test_inputs_that_are_not_ours(alone: None) -> None:
    data = models.batch(4)
    schedule = built()
    register(schedule)
    schedule._initialize_stages = lambda *_, **__: None  # type: ignore[method-assign]  # torch would refuse first
    with pytest.raises(ValueError, match=r"^stage 0 is a list of blocks and is given mask; allowed: "):
        schedule.step(data[0], target=data[1], mask=torch.ones(8))
    with pytest.raises(ValueError, match=r"^stage 0 is given nothing; allowed: one tensor or several$"):
        schedule.step(target=data[1])
    whole = built(Whole(models.build()[:2]), Whole(models.build()[2:]))
    register(whole)
    with pytest.raises(ValueError, match=r"^stage 0 is given keyword arguments that require a gradient; allowed: "):
        whole.step(data[0], target=data[1], factor=torch.ones(8, requires_grad=True))


def test_the_example_runs() -> None:
    assert doctest.testmod(registration).failed == 0
    assert o1.integrations.torch_pipelining.register is register
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = o1.integrations.nothing
