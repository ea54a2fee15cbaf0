"""Megatron-Core's forward-backward functions against a plain loop over the microbatches in one process."""

import gc
import pickle
import re
import weakref
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlap1f1b as o1
from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import SCHEDULES, ProcessGroups, get_forward_backward_func
from overlap1f1b.integrations.megatron.forward_backward import engines_of
from overlap1f1b.plan import NodeCosts
from tests import models
from tests.integrations.megatron.chunks import (
    COSTS,
    Item,
    Wrapped,
    build,
    call,
    engine_of,
    forward_step,
    items,
    loss_func,
    plain,
    with_config,
)
from tests.ranks import over
from tests.tiers import wide


@over(2)
def test_two_stages_of_two_chunks(rank: int, size: int) -> None:
    """Also with another sequence length, which is another size between stages; core/ has real models and more ranks."""
    pp = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)).get_group("pp")
    options = EngineOptions(costs=COSTS, timeout=30)
    function = get_forward_backward_func(size, 2, pg_collection=ProcessGroups(pp=pp), options=options)
    reference, mine = build(2 * size), build(2 * size)[rank::size]
    for step, (microbatches, sequence) in enumerate([(3, 7), (3, 9), (1, 7)]):
        data = items(microbatches, sequence=sequence, seed=step)
        for part in (*reference, *mine):
            part.zero_grad()
        expected = plain(reference, data) if rank == size - 1 else plain(reference, data)[:0]
        reports = call(function, mine, data, seq_length=sequence)
        torch.testing.assert_close([report["loss"] for report in reports], expected, rtol=1e-5, atol=0)
        grads = [models.gradients(part) for part in mine]
        for found, part in zip(grads, reference[rank::size], strict=True):
            for name, grad in models.gradients(part).items():
                torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=f"step {step}: {name}")
        again = call(function, mine, data, seq_length=sequence, forward_only=True)
        assert [report["loss"] for report in again] == [report["loss"] for report in reports]
        collected = call(function, mine, data, seq_length=sequence, forward_only=True, collect_non_loss_data=True)
        found = [models.loss_fn(one["logits"], target) for one, (_, target) in zip(collected, data, strict=False)]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        for before, part in zip(grads, mine, strict=True):
            assert not models.equal(before, models.gradients(part)), "forward_only changed gradients"


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
    assert [engine_of(function, part).program.name for part in parts] == ["combined_1f1b+1", "sequential"]


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
        seen += [weakref.ref(part), weakref.ref(engine_of(function, part))]
        del part
        gc.collect()
    other = make()
    call(other, [kept], data)
    seen += [weakref.ref(engine_of(other, kept))]
    del other
    gc.collect()
    left = engine_of(function, kept)
    function.close()
    with pytest.raises(RuntimeError, match="this engine is closed"), left.guarded("another call"):
        pass
    assert not engines_of(kept)
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


@over(4)
def test_tensor_ranks_play_one_plan(rank: int, size: int) -> None:
    """With costs by which each of two would make a plan of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    tp, ep = mesh.get_group("tp"), mesh.get_group("ep")
    costs = NodeCosts.uniform(attention=1 + 9 * tp.rank(), experts=4, dispatch=5 - 4 * tp.rank(), counts=0.4, dense=1)
    function = get_forward_backward_func(
        pg_collection=ProcessGroups(tp=tp, ep=ep), schedule="combined_1f1b_schedule_for_no_pipelining",
        options=EngineOptions(costs=costs, timeout=30),
    )  # fmt: skip
    (part,), plans = build(1, ep, layers=2), [""] * size
    for _ in range(2):
        call(function, [part], items(3))
    dist.all_gather_object(plans, engine_of(function, part).plan.fingerprint)
    assert len(set(plans)) == 1, plans


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"num_microbatches": 0}, "num_microbatches=0; allowed: 1 or more"),
    ({"seq_length": 0}, "seq_length=0; allowed: 1 or more"),
    ({"micro_batch_size": -1}, "micro_batch_size=-1; allowed: 1 or more"),
    ({"decoder_seq_length": 0}, "decoder_seq_length=0; allowed: 1 or more"),
    ({"model": []}, "0 model chunks for forward_backward_no_pipelining; allowed: 1"),
    ({"model": [3]}, r"model\[0\]=3; allowed: Module"),
    ({"model": nn.Linear(2, 2)}, "a model chunk of type Linear without set_input_tensor; allowed: one with this"),
    ({"data_iterator": [iter([]), iter([])]}, "2 data iterators for 1 model chunks"),
    ({"num_microbatches": 4}, "ends before microbatch 3; allowed: one that gives 4 or more"),
    ({"p2p_communicator": 1}, "p2p_communicator of type int; allowed: None, or one whose pp_group is the group pp"),
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
    with pytest.raises(ValueError, match="vp_size=0; allowed: 1 or more"):
        get_forward_backward_func(1, 0)
    with pytest.raises(ValueError, match="schedule='gpipe'; allowed: forward_backward_no_pipelining, "):
        get_forward_backward_func(schedule="gpipe")
    with pytest.raises(ValueError, match="split_rank=1 with forward_backward_no_pipelining over 1 ranks"):
        get_forward_backward_func(split_rank=1)
    for given, message in (
        ({"vp_size": "2"}, "vp_size='2'; allowed: a whole number, 1 or more"),
        ({"split_rank": "1"}, "split_rank='1'; allowed: a whole number, 1 or more"),
        ({"options": {"overlap": 2}}, "options={'overlap': 2}; allowed: EngineOptions or None"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            get_forward_backward_func(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^seq_length='7'; allowed: a whole number, 1 or more$"):
        call(get_forward_backward_func(), build(1), items(1), seq_length="7")
