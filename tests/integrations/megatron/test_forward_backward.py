"""Megatron-Core's forward-backward functions against a plain loop over the microbatches in one process."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlap1f1b as o1
from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import (
    SCHEDULES,
    ForwardBackward,
    ProcessGroups,
    get_forward_backward_func,
)
from overlap1f1b.integrations.megatron.forward_backward import engines_of
from overlap1f1b.learn import planner
from overlap1f1b.learn.purpose import Coming, Purpose
from overlap1f1b.learn.tuner import Tuner
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.plan import NodeCosts
from tests import models
from tests.engine.test_engine_numbers import any_number
from tests.integrations.megatron.chunks import (
    COSTS,
    Item,
    Part,
    Wrapped,
    build,
    call,
    forward_step,
    items,
    loss_func,
    plain,
    with_config,
)
from tests.ranks import Ranks, over
from tests.tiers import first, wide


def _compare(rank: int, size: int, schedule: str, pp: int, ep: int, chunks: int) -> list[str]:
    """Return the differences from a plain loop."""
    mesh = init_device_mesh("cpu", (pp, ep), mesh_dim_names=("pp", "ep"))
    references = [build(pp * chunks) for _ in range(ep)]  # one for each shard
    function = get_forward_backward_func(
        pp,
        chunks if "interleav" in schedule and "without" not in schedule else None,
        pg_collection=ProcessGroups(pp=mesh.get_group("pp"), ep=mesh.get_group("ep")),
        schedule=schedule,
        options=EngineOptions(costs=COSTS, timeout=30),
    )
    assert function.__name__ == schedule
    mine, problems = build(pp * chunks, mesh.get_group("ep"))[mesh.get_local_rank("pp") :: pp], list[str]()
    for step, (microbatches, sequence) in enumerate([(3, 7), (3, 9), (1, 7)]):  # other sizes with another length
        shards = [items(microbatches, sequence=sequence, seed=100 * shard + step) for shard in range(ep)]
        for part in (part for reference in references for part in reference):
            part.zero_grad()
        losses = list(map(plain, references, shards))[mesh.get_local_rank("ep")]
        own = [models.gradients(nn.ModuleList(reference)) for reference in references]
        data = shards[mesh.get_local_rank("ep")]
        found = _compare_step(mesh, function, mine, sequence, data, losses, own)
        problems += [f"{schedule} M={microbatches}: {problem}" for problem in found]
    return problems


def _compare_step(
    mesh: DeviceMesh,
    function: ForwardBackward,
    mine: list[Part],
    sequence: int,
    data: list[Item],
    losses: list[Tensor],
    own: list[dict[str, Tensor]],
) -> list[str]:
    """Return the differences in one step: training, evaluation, non-loss data."""
    (pp, ep), rank, shard = mesh.shape, mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    problems = []
    for part in mine:
        part.zero_grad()
    reports = call(function, mine, data, seq_length=sequence)
    expected = losses if rank == pp - 1 else []
    if len(reports) != len(expected):
        problems.append(f"{len(reports)} reports, expected {len(expected)}")
    for report, loss in zip(reports, expected, strict=False):
        torch.testing.assert_close(report["loss"], loss, rtol=1e-5, atol=0)
    for number, part in enumerate(mine):
        for path, module in part.named_modules():
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                label = f"{rank + number * pp}.{name}"
                full = own[shard][label]
                if isinstance(module, GroupedExperts):
                    full = sum(grads[label] for grads in own).chunk(ep)[shard]  # type: ignore[union-attr]
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                if float((grad - full).norm()) > 1e-5 * float(full.norm()):
                    problems.append(f"{label} differs by {float((grad - full).norm()):.1e}")
    before = [models.gradients(part) for part in mine]
    again = call(function, mine, data, seq_length=sequence, forward_only=True)
    if [r["loss"] for r in again] != [r["loss"] for r in reports]:
        problems.append("forward_only reports other losses")
    collected = call(function, mine, data, seq_length=sequence, forward_only=True, collect_non_loss_data=True)
    for made, loss, (_, target) in zip(collected, expected, data, strict=False):
        torch.testing.assert_close(models.loss_fn(made["logits"], target), loss, rtol=1e-5, atol=0)
    if len(collected) != len(expected):
        problems.append(f"{len(collected)} collected")
    if any(models.equal(a, models.gradients(part)) for a, part in zip(before, mine, strict=True)):
        problems.append("forward_only changed gradients")
    return problems


@pytest.mark.parametrize(
    "schedule", ["combined_1f1b_schedule_for_no_pipelining", *wide("forward_backward_no_pipelining")]
)
def test_experts_of_two_ranks(ranks2: Ranks, schedule: str) -> None:
    assert ranks2.run(_compare, schedule, 1, 2, 1, timeout=240) == [[]] * 2


PIPELINES = [
    ("forward_backward_pipelining_with_interleaving", 2),
    ("forward_backward_pipelining_without_interleaving", 1),
    ("combined_1f1b_schedule_for_interleaved_pipelining", 2),
]


@pytest.mark.parametrize(("schedule", "chunks"), first(PIPELINES, ("forward_backward_pipelining_with_interleaving", 2)))
def test_two_ranks(ranks2: Ranks, schedule: str, chunks: int) -> None:
    assert ranks2.run(_compare, schedule, 2, 1, chunks, timeout=240) == [[]] * 2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("schedule", "chunks", "pp", "ep"), [(*PIPELINES[1], 2, 2), (*PIPELINES[1], 4, 1), (*PIPELINES[2], 2, 2)]
)
def test_four_ranks(ranks4: Ranks, schedule: str, pp: int, ep: int, chunks: int) -> None:
    assert ranks4.run(_compare, schedule, pp, ep, chunks, timeout=240) == [[]] * 4


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if "interleaving" not in name])
def test_one_rank(schedule: str, microbatches: int) -> None:
    chunks = 2 if "interleaved" in schedule else 1
    function = get_forward_backward_func(schedule=schedule, options=EngineOptions(costs=COSTS))
    parts, reference = build(chunks), build(chunks)
    for step in range(2):
        data = items(microbatches, seed=step)
        losses = plain(reference, data)
        reports = call(function, parts, data)
        assert [report["loss"] for report in reports] == losses
        for part, other in zip(parts, reference, strict=True):
            assert models.equal(models.gradients(part), models.gradients(other)) == []


def test_the_choice_is_megatrons() -> None:
    assert get_forward_backward_func().__name__ == "forward_backward_no_pipelining"
    assert get_forward_backward_func(1, 2).__name__ == "forward_backward_no_pipelining"
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 4))
    choose = partial(get_forward_backward_func, pg_collection=groups)
    assert choose(4).__name__ == "forward_backward_pipelining_without_interleaving"
    assert choose(4, 2).__name__ == choose(vp_size=2).__name__ == "forward_backward_pipelining_with_interleaving"
    assert o1.integrations.megatron.get_forward_backward_func is get_forward_backward_func


def test_overlap_flag_plays_the_combined_program() -> None:
    function = get_forward_backward_func(options=EngineOptions(costs=COSTS))
    parts = [build(1, config=SimpleNamespace(overlap_moe_expert_parallel_comm=flag))[0] for flag in (True, False)]
    for part in parts:
        call(function, [part], items(3))
    programs = [prepared.engine.program.name for prepared in function._engines.values()]
    assert programs == ["combined_1f1b+1", "sequential"]


def _any(rank: int, size: int, steps: int, most: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("pp", "ep"))
    groups, shard = ProcessGroups(pp=mesh.get_group("pp"), ep=mesh.get_group("ep")), mesh.get_local_rank("ep")

    def player(**options: Any) -> tuple[ForwardBackward, Callable[..., Any]]:
        function = get_forward_backward_func(
            schedule="combined_1f1b", pg_collection=groups, options=EngineOptions(timeout=60, **options)
        )
        (part,) = build(size // 2, mesh.get_group("ep"))[mesh.get_local_rank("pp") :: size // 2]

        def play(number: int, **more: Any) -> Any:
            reports = call(function, [part], items(number, seed=100 * shard + number), **more)
            grads = [p.grad for p in part.parameters() if p.grad is not None]
            return [report["loss"] for report in reports] if more else (part.zero_grad(), grads)[1]

        return function, play

    expected = {}
    for number in range(1, most + 1):
        function, play = player(overlap="serial", costs=COSTS, verify=False)
        expected[number] = play(number), play(number, forward_only=True)
        function.close()
    function, play = player(tries=1)
    play(most)  # makes the engine
    (prepared,) = function._engines.values()
    return any_number(steps, expected, prepared.engine, play, partial(play, forward_only=True))


@pytest.mark.parametrize(("ranks", "steps", "most"), [(2, 12, 3), *wide((4, 16, 4), (4, 100, 9))])
def test_any_number_of_microbatches_is_played_by_one_engine(
    kept: dict[int, Ranks], ranks: int, steps: int, most: int
) -> None:
    assert kept[ranks].run(_any, steps, most, timeout=280) == [[]] * ranks


def test_chunks_of_another_place_are_refused() -> None:
    function = get_forward_backward_func(schedule="dualpipev", options=EngineOptions(costs=COSTS))
    parts = build(2)
    call(function, parts, items(4))
    parts[0].post_process = True
    with pytest.raises(ValueError, match=r"post_process=True of the chunk of stage 0 of dualpipev, .*; allowed: False"):
        call(get_forward_backward_func(schedule="dualpipev"), parts, items(4))
    with pytest.raises(ValueError, match=r"'dualpipe'; allowed: .*zb_v"):
        get_forward_backward_func(schedule="dualpipe")


@over(2)
def test_engines_end_with_their_model_with_their_function_or_by_close(rank: int, size: int) -> None:
    """And a function that was closed plays again."""
    ep = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)).get_group("ep")
    make = partial(
        get_forward_backward_func, schedule="combined_1f1b_schedule_for_no_pipelining",
        pg_collection=ProcessGroups(ep=ep), options=EngineOptions(costs=COSTS, timeout=20),
    )  # fmt: skip
    (kept,), function, data, seen = build(1, ep, layers=1), make(), items(2), []
    call(function, [kept], items(3))
    for _ in range(2):
        (part,) = build(1, ep, layers=1)
        call(function, [part], data)
        seen += [weakref.ref(part), weakref.ref(function._engines[list(function._engines)[-1]])]
        del part
        gc.collect()
    other = make()
    call(other, [kept], data)
    seen += [weakref.ref(other._engines[list(other._engines)[-1]])]
    del other
    gc.collect()
    (left,) = function._engines.values()
    function.close()
    with pytest.raises(RuntimeError, match="this engine is closed"), left.engine.guarded(str):
        pass
    assert not function._engines
    kept.zero_grad()
    call(function, [kept], data)
    (reference,) = build(1, layers=1)
    plain([reference], data)
    assert not any(ref() for ref in seen)
    torch.testing.assert_close(kept.scale.grad, reference.scale.grad, rtol=1e-5, atol=1e-6)


def test_copies_of_a_model_hold_no_engines() -> None:
    function, part, _ = with_config()
    call(function, [part], items(2))
    assert engines_of(part)
    for copied in (deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert not engines_of(copied)
        call(function, [copied], items(2))


def test_timers_are_started_and_stopped() -> None:
    seen: list[Any] = []

    def timers(name: str, **level: int) -> Any:
        return SimpleNamespace(start=lambda barrier: seen.append((name, barrier)), stop=lambda: seen.append(name))

    function, part, _ = with_config(timers=timers, barrier_with_L1_time=False)
    call(function, [part], items(2))
    assert seen == [("forward-backward", False), "forward-backward"]


class Translator(nn.Module):
    """Part of an encoder-decoder model: two encoder stages, two decoder stages."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.inputs = stage, []
        self.embedding = nn.Embedding(models.V, models.H) if stage in (0, 2) else None
        self.mix, self.cross = nn.Linear(models.H, models.H), nn.Linear(models.H, models.H)
        self.head = nn.Linear(models.H, models.V) if stage == 3 else None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.inputs = tensors

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        if self.stage < 2:
            x = self.embedding(source) if self.embedding is not None else self.inputs[0]
            return torch.tanh(self.mix(x))
        x = self.embedding(target) if self.embedding is not None else self.inputs[0]
        x = torch.tanh(self.mix(x)) + self.cross(self.inputs[-1]).mean(1, keepdim=True)
        return x if self.head is None else self.head(x)


def translate(data_iterator: Iterator[Item], model: nn.Module, by_list: bool) -> Any:
    source, target = next(data_iterator)
    output = model(source, target)
    stage = model.stage
    if by_list and stage == 2:
        output = [output, model.inputs[-1]]
    return output, partial(loss_func, target)


@pytest.mark.parametrize("by_list", [False, *wide(True)])
@over(4)
def test_encoder_and_decoder(rank: int, size: int, by_list: bool) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    stages = [Translator(stage) for stage in range(4)]
    reference = deepcopy(stages)
    function = get_forward_backward_func(
        pg_collection=ProcessGroups(pp=mesh.get_group("pp")),
        split_rank=None if by_list else 2,
        options=EngineOptions(costs=COSTS, timeout=30),
    )
    pairs = [(s, t[:, :5]) for s, t in items(5)]
    expected = []
    for source, target in pairs:
        encoded = source
        for stage in reference[:2]:
            stage.set_input_tensor([encoded])
            encoded = stage(source, target)
        x = encoded
        for stage in reference[2:]:
            stage.set_input_tensor([x, encoded])
            x = stage(source, target)
        loss = models.loss_fn(x, target)
        (loss / len(pairs)).backward()
        expected.append(loss.detach())
    problems = []
    for _ in range(2):
        stages[rank].zero_grad()
        reports = call(
            function, [stages[rank]], pairs, forward_step_func=partial(translate, by_list=by_list), decoder_seq_length=5
        )
        for report, loss in zip(reports, expected if rank == 3 else [], strict=True):
            torch.testing.assert_close(report["loss"], loss)
        for name, grad in models.gradients(reference[rank]).items():
            if not torch.allclose(models.gradients(stages[rank])[name], grad, rtol=1e-4, atol=1e-7):
                problems.append(name)
    assert not problems, problems


class Shared(models.Block):
    """Each of two ranks has half of the tokens' features; collectives inside the block combine them."""

    tp: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.tp is None else _Whole.apply(x, self.tp))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


def _summed(x: Tensor, group: Any) -> Tensor:
    half = torch.zeros_like(x)
    half[..., group.rank() :: 2] = x[..., group.rank() :: 2]
    dist.all_reduce(half, group=group)
    return half


@pytest.mark.parametrize("given", [True, *wide(False)])
@over(4)
def test_ranks_that_share_layers_play_one_plan(rank: int, size: int, given: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    tp, ep = mesh.get_group("tp"), mesh.get_group("ep")
    groups = ProcessGroups(tp=tp, ep=ep)
    attention = 1 + 9 * tp.rank()  # each tensor rank would make another plan of its own
    costs = NodeCosts.uniform(attention=attention, experts=4, dispatch=5 - 4 * tp.rank(), counts=0.4, dense=1)
    schedule = "combined_1f1b_schedule_for_no_pipelining"
    function = get_forward_backward_func(
        pg_collection=groups, schedule=schedule, options=EngineOptions(costs=costs if given else None, timeout=30)
    )
    (part,), (reference,) = build(1, ep, block=Shared, layers=2), build(1, layers=2)
    for block in part.modules():
        if isinstance(block, Shared):
            block.tp = tp
    problems, tried = [], list[str]()

    def learn(of: Tuner, step: Coming, result: Any, **more: Any) -> None:  # each tensor rank would keep another plan
        if step.purpose is Purpose.TRY:
            assert step.plan is not None
            tried.append(step.plan.fingerprint)
            mine = list(dict.fromkeys(tried)).index(tried[-1]) == tp.rank()
            result = SimpleNamespace(overlap=SimpleNamespace(makespan=1.0 if mine else 2.0))
        learned(of, step, result, **more)

    learned, within = Tuner.learn, planner.TRIED_WITHIN
    Tuner.learn, planner.TRIED_WITHIN = learn, 1e9  # type: ignore[method-assign]
    for step in range(2 if given else 12):
        part.zero_grad()
        reference.zero_grad()
        shards = [items(3, seed=10 * shard + step) for shard in range(2)]
        call(function, [part], shards[ep.rank()])
        plain([reference], shards[ep.rank()])
        own = models.gradients(reference)
        for name, grad in models.gradients(part).items():
            if "experts" not in name and not torch.allclose(grad, own[name], rtol=1e-4, atol=1e-6):
                problems.append(f"step {step}: {name}")
    (prepared,) = function._engines.values()
    plans: list[Any] = [None] * 4
    dist.all_gather_object(plans, prepared.engine.plan.fingerprint)
    Tuner.learn, planner.TRIED_WITHIN = learned, within  # type: ignore[method-assign]
    problems += [f"tried {tried}"] if len(set(tried)) < 2 and not given else []
    problems += [f"plans {plans}"] if len(set(plans)) > 1 else []
    assert not problems, problems


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"num_microbatches": 0}, "num_microbatches=0; allowed: 1 or more"),
    ({"seq_length": 0}, "seq_length=0; allowed: 1 or more"),
    ({"micro_batch_size": -1}, "micro_batch_size=-1; allowed: 1 or more"),
    ({"decoder_seq_length": 0}, "decoder_seq_length=0; allowed: 1 or more"),
    ({"model": []}, "0 model chunks for forward_backward_no_pipelining; allowed: 1"),
    ({"model": [3]}, "a model chunk of type int; allowed: nn.Module"),
    ({"model": nn.Linear(2, 2)}, "a model chunk of type Linear without set_input_tensor; allowed: one with this"),
    ({"data_iterator": [iter([]), iter([])]}, "2 data iterators for 1 model chunks"),
    ({"num_microbatches": 4}, "ends before microbatch 3; allowed: one that gives 4 or more"),
    ({"p2p_communicator": 1}, "p2p_communicator of type int; allowed: None, or one whose pp_group is the group pp"),
    ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn with forward_backward_no_pipelining; allowed"),
    ({"pg_collection": SimpleNamespace(ep=SimpleNamespace(size=lambda: 2))}, "pg_collection with another group ep"),
    (
        {"forward_step_func": lambda iterator, model: (model(next(iterator)[0]), lambda output: 1.0)},
        r"loss_func returns float; allowed: \(loss, report\) or",
    ),
]


def test_bad_calls_are_named() -> None:
    given: dict[str, Any] = {
        "forward_step_func": forward_step, "model": build(1)[0], "num_microbatches": 3, "seq_length": 7,
        "micro_batch_size": 2,
    }  # fmt: skip
    function = get_forward_backward_func(options=EngineOptions(costs=COSTS))
    for more, message in BAD_CALLS:
        with pytest.raises(ValueError, match=message):
            function(**{**given, "data_iterator": iter(items(3)), **more})
    assert len(function(**{**given, "data_iterator": iter(items(3))})) == 3  # and it goes on


@over(2)
def test_a_chunk_under_fsdp2_is_refused(rank: int, size: int) -> None:
    (part,) = build(1)
    fully_shard(part.layers[0], mesh=init_device_mesh("cpu", (size,)))
    function = get_forward_backward_func(pg_collection=ProcessGroups(dp=dist.group.WORLD))
    said = (
        r"\(Part\) under FSDP2; allowed: Megatron-Core's DistributedDataParallel, or a finalize_model_grads_func that"
    )
    with pytest.raises(ValueError, match=f"{said} sums gradients$"):
        call(function, [part], items(3))


def test_a_chunk_under_megatron_fsdp_is_refused() -> None:
    wrapped = type("MegatronFSDP", (Wrapped,), {})(build(1)[0])  # its real name: core/test_limits.py
    with pytest.raises(ValueError, match="under Megatron-FSDP; allowed: Megatron-Core's DistributedDataParallel"):
        call(get_forward_backward_func(), [wrapped], items(1))


def test_bad_choices_are_named() -> None:
    with pytest.raises(ValueError, match="pp_size=2 with a group pp of 1 ranks; allowed: 1"):
        get_forward_backward_func(2)
    with pytest.raises(ValueError, match="vp_size=0; allowed: None or 1 or more"):
        get_forward_backward_func(1, 0)
    with pytest.raises(ValueError, match="schedule='gpipe'; allowed: forward_backward_no_pipelining, "):
        get_forward_backward_func(schedule="gpipe")
    with pytest.raises(ValueError, match="split_rank=1 with forward_backward_no_pipelining over 1 ranks"):
        get_forward_backward_func(split_rank=1)
