"""Megatron-Core's forward-backward functions against a plain loop over the microbatches in one process."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import overlap1f1b as o1
from overlap1f1b.engine import split_blocks
from overlap1f1b.integrations.megatron import (
    SCHEDULES,
    ForwardBackward,
    ProcessGroups,
    custom_backward,
    deallocate_output_tensor,
    get_forward_backward_func,
    release,
)
from overlap1f1b.integrations.megatron.chunk import default_layers
from overlap1f1b.moe import GroupedExperts
from overlap1f1b.plan import NodeCosts
from tests import models
from tests.ranks import Ranks

COSTS = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1, send=1)
LAYERS = 6  # with embedding, dense block and head 9 modules
Item = tuple[Tensor, Tensor]


class Part(nn.Module):
    """A model chunk: some modules of the whole, the embedding and the head apart from the layers."""

    def __init__(self, modules: list[nn.Module], config: object, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = modules.pop(0) if first else None
        self.head = modules.pop() if last else None
        self.layers = nn.ModuleList(modules)
        self.scale = nn.Parameter(torch.ones(()))  # a parameter of no module
        self.config, self.input_tensor = config, None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        (self.input_tensor,) = tensors

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        assert x is not None
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class Listed(nn.Sequential):
    """A chunk without a forward of its own."""

    def set_input_tensor(self, tensors: list[Any]) -> None:
        assert tensors == [None]


def build(
    stages: int, group: Any = None, config: object = None, block: type[models.Block] = models.Block
) -> list[Part]:
    """The whole model in as many chunks."""
    every = list(models.build(group, layers=LAYERS, block=block))
    parts = split_blocks(every, stages)
    return [Part(part, config, first=i == 0, last=i == stages - 1) for i, part in enumerate(parts)]


def loss_func(target: Tensor, output: Tensor, non_loss_data: bool = False) -> Any:
    if non_loss_data:
        return {"logits": output.detach().clone()}
    loss = models.loss_fn(output, target)
    return loss, {"loss": loss.detach().clone()}


def sum_func(target: Tensor, output: Tensor) -> Any:
    kept = target.flatten() % 3 != 0  # every microbatch has another number of tokens
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")[kept].sum()
    return loss, kept.sum(), {"loss": loss.detach().clone()}


def forward_step(data_iterator: Iterator[Item], model: nn.Module, function: Callable[..., Any] = loss_func) -> Any:
    tokens, target = next(data_iterator)
    return model(tokens), partial(function, target)


def items(microbatches: int, *, sequence: int = 7, varied: bool = False, seed: int = 5) -> list[Item]:
    lengths = [sequence + (m % 3 if varied else 0) for m in range(microbatches)]
    drawn = [models.batch(1, sequence=length, seed=seed + m) for m, length in enumerate(lengths)]
    return list(drawn)


def plain(parts: list[Part], data: list[Item], scale: float = 1.0) -> list[Tensor]:
    """A loop over the microbatches; returns the losses."""
    losses = []
    for tokens, target in data:
        x = tokens
        for part in parts:
            part.set_input_tensor([x])
            x = part(x)
        loss = models.loss_fn(x, target)
        (loss / len(data) * scale).backward()
        losses.append(loss.detach())
    return losses


def grads_of(part: nn.Module) -> dict[str, Tensor]:
    return models.gradients(part)


def call(forward_backward: ForwardBackward, parts: list[Part], data: list[Item], **more: Any) -> list[Any]:
    iterators = [iter(data) for _ in parts]
    alone = len(parts) == 1 and "interleav" not in forward_backward.__name__
    given = {"forward_step_func": forward_step, "seq_length": 7, "micro_batch_size": 2, **more}
    return forward_backward(
        data_iterator=iterators[0] if alone else iterators,
        model=parts[0] if alone else parts,
        num_microbatches=len(data),
        **given,
    )


# ------------------------------------------------------------------------------------------------------ every schedule


def _compare(  # noqa: PLR0912
    rank: int, size: int, schedule: str, pp: int, ep: int, chunks: int, whole: bool
) -> list[str]:
    mesh = init_device_mesh("cpu", (pp, ep), mesh_dim_names=("pp", "ep"))
    at = mesh.get_coordinate()
    assert at is not None
    groups = ProcessGroups(pp=mesh.get_group("pp"), ep=mesh.get_group("ep"))
    more: dict[str, Any] = {"layers": lambda chunk: []} if whole else {}
    function = get_forward_backward_func(
        pp, chunks if "interleav" in schedule and "without" not in schedule else None,
        pg_collection=groups, schedule=schedule, costs=COSTS, timeout=30, **more,
    )  # fmt: skip
    assert function.__name__ == schedule
    parts = build(pp * chunks, mesh.get_group("ep"))
    mine = parts[at[0] :: pp]
    problems = []
    reference = build(pp * chunks)
    for step, (microbatches, sequence) in enumerate([(5, 7), (5, 9), (1, 7)]):  # other sizes with another length
        shards = [items(microbatches, sequence=sequence, seed=100 * shard + step) for shard in range(ep)]
        own: dict[int, dict[str, Tensor]] = {}
        total: dict[str, Tensor] = {}
        losses = []
        for shard, data in enumerate(shards):
            for part in reference:
                part.zero_grad()
            losses.append(plain(reference, data))
            found = {f"{i}.{name}": grad for i, part in enumerate(reference) for name, grad in grads_of(part).items()}
            own[shard] = found
            total = {name: total[name] + grad if total else grad for name, grad in found.items()}
        for part in mine:
            part.zero_grad()
        reports = call(function, mine, shards[at[1]], seq_length=sequence)
        where = f"{schedule} M={microbatches}"
        expected = losses[at[1]] if at[0] == pp - 1 else []
        if len(reports) != len(expected):
            problems.append(f"{where}: {len(reports)} reports, expected {len(expected)}")
        for report, loss in zip(reports, expected, strict=False):
            torch.testing.assert_close(report["loss"], loss, rtol=1e-5, atol=0)
        for number, part in enumerate(mine):
            for path, module in part.named_modules():
                for name, parameter in module.named_parameters(prefix=path, recurse=False):
                    label = f"{at[0] + number * pp}.{name}"
                    full = own[at[1]][label]
                    if isinstance(module, GroupedExperts):
                        held = module.local_experts
                        full = total[label][at[1] * held : (at[1] + 1) * held]
                    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    if float((grad - full).norm()) > 1e-5 * float(full.norm()):
                        problems.append(f"{where}: {label} differs by {float((grad - full).norm()):.1e}")
        before = [grads_of(part) for part in mine]
        again = call(function, mine, shards[at[1]], seq_length=sequence, forward_only=True)
        if [r["loss"] for r in again] != [r["loss"] for r in reports]:
            problems.append(f"{where}: forward_only reports other losses")
        collected = call(
            function, mine, shards[at[1]], seq_length=sequence, forward_only=True, collect_non_loss_data=True
        )
        for data, loss, (_, target) in zip(collected, expected, shards[at[1]], strict=False):
            torch.testing.assert_close(models.loss_fn(data["logits"], target), loss, rtol=1e-5, atol=0)
        if len(collected) != len(expected):
            problems.append(f"{where}: {len(collected)} collected")
        if any(models.equal(a, grads_of(part)) for a, part in zip(before, mine, strict=True)):
            problems.append(f"{where}: forward_only changed gradients")
    return problems


CASES_2 = [
    ("forward_backward_no_pipelining", 1, 2, 1),
    ("combined_1f1b_schedule_for_no_pipelining", 1, 2, 1),
    ("forward_backward_pipelining_without_interleaving", 2, 1, 1),
    ("forward_backward_pipelining_with_interleaving", 2, 1, 2),
    ("combined_1f1b_schedule_for_interleaved_pipelining", 2, 1, 2),
]
CASES_4 = [
    ("forward_backward_pipelining_without_interleaving", 2, 2, 1),
    ("forward_backward_pipelining_without_interleaving", 4, 1, 1),
    ("combined_1f1b_schedule_for_interleaved_pipelining", 2, 2, 2),
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("schedule", "pp", "ep", "chunks"), CASES_2)
def test_two_ranks(ranks2: Ranks, schedule: str, pp: int, ep: int, chunks: int, whole: bool) -> None:
    assert ranks2.run(_compare, schedule, pp, ep, chunks, whole, timeout=120) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pp", "ep", "chunks"), CASES_4)
def test_four_ranks(ranks4: Ranks, schedule: str, pp: int, ep: int, chunks: int) -> None:
    assert ranks4.run(_compare, schedule, pp, ep, chunks, False, timeout=120) == [[]] * 4


@pytest.mark.parametrize("microbatches", [1, 5])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if "interleaving" not in name])
def test_one_rank(schedule: str, microbatches: int) -> None:
    chunks = 2 if "interleaved" in schedule else 1
    function = get_forward_backward_func(schedule=schedule, costs=COSTS)
    parts, reference = build(chunks), build(chunks)
    for step in range(3):
        data = items(microbatches, seed=step)
        losses = plain(reference, data)
        reports = call(function, parts, data)
        assert [report["loss"] for report in reports] == losses
        for part, other in zip(parts, reference, strict=True):
            assert models.equal(grads_of(part), grads_of(other)) == []


def test_nodes_are_measured_where_no_costs_are_given() -> None:
    function = get_forward_backward_func(schedule="combined_1f1b_schedule_for_no_pipelining")
    parts, reference = build(1), build(1)
    for step in range(4):
        data = items(3, seed=step)
        plain(reference, data)
        call(function, parts, data)
        assert models.equal(grads_of(parts[0]), grads_of(reference[0])) == []


def test_the_choice_is_megatrons() -> None:
    assert get_forward_backward_func().__name__ == "forward_backward_no_pipelining"
    assert get_forward_backward_func(1, 2).__name__ == "forward_backward_no_pipelining"
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 4))
    choose = partial(get_forward_backward_func, pg_collection=groups)
    assert choose(4).__name__ == "forward_backward_pipelining_without_interleaving"
    assert choose(4, 2).__name__ == choose(vp_size=2).__name__ == "forward_backward_pipelining_with_interleaving"
    assert o1.integrations.megatron.get_forward_backward_func is get_forward_backward_func


# -------------------------------------------------------------------------------------------------------- config hooks


def with_config(**fields: Any) -> tuple[ForwardBackward, Part, SimpleNamespace]:
    config = SimpleNamespace(**fields)
    function = get_forward_backward_func(schedule="combined_1f1b_schedule_for_no_pipelining", costs=COSTS)
    return function, build(1, config=config)[0], config


def test_grad_scale_func_scales_gradients_and_no_report() -> None:
    function, part, _ = with_config(grad_scale_func=lambda loss: loss * 8)
    (reference,) = build(1)
    data = items(5)
    losses = plain([reference], data, scale=8.0)
    assert [report["loss"] for report in call(function, [part], data)] == losses
    assert models.equal(grads_of(part), grads_of(reference)) == []


def test_overlap_flag_plays_the_combined_program() -> None:
    function = get_forward_backward_func(costs=COSTS)
    call(function, [build(1, config=SimpleNamespace(overlap_moe_expert_parallel_comm=True))[0]], items(3))
    call(function, [build(1, config=SimpleNamespace(overlap_moe_expert_parallel_comm=False))[0]], items(3))
    programs = [prepared.engine.program.name for prepared in function._engines.values()]
    assert programs == ["combined_1f1b+1", "sequential"]


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_by_tokens(per_token: bool) -> None:
    told: list[Any] = []

    def finalize(chunks: list[nn.Module], tokens: Tensor | None, **more: Any) -> None:
        told.append((chunks, tokens, sorted(more)))

    function, part, _ = with_config(calculate_per_token_loss=per_token, finalize_model_grads_func=finalize)
    (reference,) = build(1)
    data = items(5)
    counts = []
    for tokens, target in data:
        loss, count, _ = sum_func(target, reference(tokens))
        (loss if per_token else loss / count / len(data)).backward()
        counts.append(int(count))
    reports = call(function, [part], data, forward_step_func=partial(forward_step, function=sum_func))
    assert len(reports) == 5
    assert models.equal(grads_of(part), grads_of(reference)) == []
    ((chunks, tokens, more),) = told
    assert chunks == [part]
    assert tokens is None if not per_token else int(tokens) == sum(counts)
    assert len(set(counts)) > 1
    assert more == ["force_all_reduce", "pg_collection"]
    call(function, [part], data, forward_step_func=partial(forward_step, function=sum_func), forward_only=True)
    assert len(told) == 1


def _context_parallel(rank: int, size: int) -> list[str]:
    function = get_forward_backward_func(pg_collection=ProcessGroups(cp=dist.group.WORLD), costs=COSTS)
    (part,), (reference,) = build(1), build(1)
    call(function, [part], items(3))
    plain([reference], items(3), scale=float(size))
    return models.equal(grads_of(part), grads_of(reference))


def test_context_parallel_ranks_multiply_the_loss(ranks2: Ranks) -> None:
    assert ranks2.run(_context_parallel) == [[], []]


def test_autocast() -> None:
    def dense() -> Listed:
        torch.manual_seed(0)
        return Listed(nn.Embedding(models.V, models.H), nn.Linear(models.H, models.H), nn.Linear(models.H, models.V))

    function, model, reference = get_forward_backward_func(costs=COSTS), dense(), dense()
    model.config = SimpleNamespace(enable_autocast=True, autocast_dtype=torch.bfloat16)  # type: ignore[assignment]
    data = items(3)
    losses = []
    for tokens, target in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = models.loss_fn(reference(tokens), target)
        losses.append(loss.detach())
        (loss / len(data)).backward()
    reports = call(function, [model], data)  # type: ignore[list-item]
    assert [report["loss"] for report in reports] == losses
    assert models.equal(models.gradients(model), models.gradients(reference)) == []
    collected = call(function, [model], data, forward_only=True, collect_non_loss_data=True)  # type: ignore[list-item]
    assert collected[0]["logits"].dtype is torch.bfloat16


@pytest.mark.parametrize("grad_sync", [False, True])
def test_only_last_contributions_are_outside_of_no_sync(grad_sync: bool) -> None:
    inside, synced = [0], []

    @contextmanager
    def no_sync() -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    def sync(parameters: Iterator[nn.Parameter]) -> None:
        synced.append((len(list(parameters)), inside[0], {name: len(made) for name, made in fired.items()}))

    function, part, config = with_config(no_sync_func=no_sync)
    if grad_sync:
        config.grad_sync_func = sync
    fired: dict[str, list[bool]] = {}
    for name, parameter in part.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: fired.setdefault(name, []).append(inside[0] > 0)
        )
    call(function, [part], items(5))
    assert inside == [0]
    assert fired == dict.fromkeys(dict(part.named_parameters()), [True] * 4 + [grad_sync])
    assert synced == ([(len(fired), 0, dict.fromkeys(fired, 5))] if grad_sync else [])


def test_the_first_microbatch_is_marked() -> None:
    function, part, _ = with_config()
    marked: list[int] = []
    part.set_is_first_microbatch = lambda: marked.append(1)  # type: ignore[assignment]
    call(function, [part], items(3))
    assert len(marked) == 1
    for first in (None, True, False):
        call(function, [part], items(3), forward_only=True, first_val_step=first)
    assert len(marked) == 3


def test_timers_are_started_and_stopped() -> None:
    seen: list[Any] = []

    def timers(name: str, **level: int) -> Any:
        return SimpleNamespace(start=lambda barrier: seen.append((name, barrier)), stop=lambda: seen.append(name))

    function, part, _ = with_config(timers=timers, barrier_with_L1_time=False)
    call(function, [part], items(2))
    assert seen == [("forward-backward", False), "forward-backward"]


# -------------------------------------------------------------------------------------------- what passes between ranks


def _varied(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    config = SimpleNamespace(variable_seq_lengths=True)
    function = get_forward_backward_func(pg_collection=ProcessGroups(pp=mesh.get_group("pp")), costs=COSTS, timeout=30)
    parts, reference = build(2, config=config), build(2)
    problems = []
    for step in range(3):
        data = items(5, sequence=7 + step, varied=True, seed=step)
        losses = plain(reference, data)
        reports = call(function, [parts[rank]], data)
        for report, loss in zip(reports, losses if rank else [], strict=True):
            torch.testing.assert_close(report["loss"], loss)
        for name, grad in grads_of(parts[rank]).items():
            expected = grads_of(reference[rank])[name]
            if not torch.allclose(grad, expected, rtol=1e-4, atol=1e-6):
                problems.append(name)
    return problems


def test_variable_sequence_lengths(ranks2: Ranks) -> None:
    assert ranks2.run(_varied) == [[]] * 2


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


def _translate(rank: int, size: int, by_list: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    stages = [Translator(stage) for stage in range(4)]
    torch.manual_seed(0)
    reference = [Translator(stage) for stage in range(4)]
    function = get_forward_backward_func(
        pg_collection=ProcessGroups(pp=mesh.get_group("pp")), costs=COSTS, timeout=30,
        split_rank=None if by_list else 2,
    )  # fmt: skip
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
        for name, grad in grads_of(reference[rank]).items():
            if not torch.allclose(grads_of(stages[rank])[name], grad, rtol=1e-4, atol=1e-7):
                problems.append(name)
    return problems


@pytest.mark.parametrize("by_list", [False, True])
def test_encoder_and_decoder(ranks4: Ranks, by_list: bool) -> None:
    assert ranks4.run(_translate, by_list) == [[]] * 4


# ------------------------------------------------------------------------------------------------------- cut at layers


def test_layers_become_blocks() -> None:
    function = get_forward_backward_func(costs=COSTS)
    call(function, build(1), items(1))
    (prepared,) = function._engines.values()
    # Its layers, with embedding and a parameter of its own before them, with head and loss behind.
    assert len(prepared.engine.stages[0].blocks) == 1 + (LAYERS + 1) + 1
    whole = get_forward_backward_func(costs=COSTS, layers=lambda chunk: [])
    call(whole, build(1), items(1))
    (prepared,) = whole._engines.values()
    assert len(prepared.engine.stages[0].blocks) == 1


def test_children_of_a_sequential_become_blocks() -> None:
    function = get_forward_backward_func(costs=COSTS, schedule="combined_1f1b_schedule_for_no_pipelining")
    model, reference = Listed(*models.build()), models.build()
    data = items(5)
    for tokens, target in data:
        (models.loss_fn(reference(tokens), target) / len(data)).backward()
    call(function, [model], data)  # type: ignore[list-item]
    (prepared,) = function._engines.values()
    assert len(prepared.engine.stages[0].blocks) == len(reference) + 1  # and the loss
    assert models.equal(models.gradients(model), models.gradients(reference)) == []


class Wrapped(nn.Module):
    """As a data-parallel wrapper does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def test_a_wrapped_chunk_is_looked_into() -> None:
    function = get_forward_backward_func(costs=COSTS)
    (part,), (reference,) = build(1, config=SimpleNamespace(grad_scale_func=lambda loss: loss * 2)), build(1)
    data = items(3)
    plain([reference], data, scale=2.0)
    call(function, [Wrapped(part)], data)  # type: ignore[list-item]
    (prepared,) = function._engines.values()
    assert len(prepared.engine.stages[0].blocks) == 1 + (LAYERS + 1) + 1
    assert models.equal(grads_of(part), grads_of(reference)) == []


class Skips(Part):
    """The last layer's input goes round it, too."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        assert self.head is not None
        x = early = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + early)


class Passes(Part):
    """The last layer gets an earlier tensor that is not among its arguments."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        assert self.head is not None
        x = early = self.embedding(tokens)
        for layer in self.layers[:-1]:
            x = layer(x)
        hook = self.layers[-1].register_forward_pre_hook(lambda layer, args: (args[0] + early,))
        try:
            return self.head(self.layers[-1](x))
        finally:
            hook.remove()


class Borrows(Part):
    """A layer that uses another one's parameter."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.layers[0].norm.weight.sum()  # type: ignore[operator, union-attr]


class Backwards(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Leaves(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        assert self.head is not None
        return self.head(self.layers[0](self.embedding(tokens)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Skips,
            "a tensor of an earlier layer gets a gradient from what follows layer 6 by another way than the layer's "
            "result; allowed: no such tensor, or layers=lambda chunk",
        ),
        (Passes, "a tensor of an earlier layer gets a gradient from layer 6 by another way than the layer's arguments"),
        (Borrows, "parameter .*norm.weight gets a gradient from what follows layer 6 by another way"),
        (Backwards, "comes to layer 6 after what precedes layer 0; allowed: each layer once, in order"),
        (Leaves, "ends after layer 0, without layer 1; allowed: to call each layer once"),
    ],
)
def test_gradients_that_go_round_a_layer_are_found(kind: type[Part], message: str) -> None:
    def part() -> Part:
        return kind(list(models.build(layers=LAYERS)), None, first=True, last=True)

    function = get_forward_backward_func(costs=COSTS)
    with pytest.raises(ValueError, match=message):
        call(function, [part()], items(2))
    assert torch.is_grad_enabled()
    if kind in (Skips, Passes, Borrows):  # right where the chunk is left whole
        whole = get_forward_backward_func(costs=COSTS, layers=lambda chunk: [])
        cut, reference = part(), part()
        call(whole, [cut], items(2))
        plain([reference], items(2))
        assert models.equal(grads_of(cut), grads_of(reference)) == []


# ------------------------------------------------------------------------- what a walk does that is not a gradient


class Fused(torch.autograd.Function):
    """A linear layer whose backward adds to the main gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (x,) = grads, ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.flatten(0, -2).t() @ x.flatten(0, -2))
        return grad @ ctx.weight, None


class InPlace(torch.autograd.Function):
    """A cross entropy whose backward changes what its forward has saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        probabilities = logits.softmax(-1)
        ctx.save_for_backward(probabilities, target)
        return -probabilities.gather(-1, target[..., None]).log().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (probabilities, target) = grads, ctx.saved_tensors
        probabilities.scatter_add_(-1, target[..., None], -torch.ones_like(target[..., None], dtype=torch.float32))
        return probabilities.mul_(grad / target.numel()), None


class FusedHead(nn.Linear):
    def __init__(self) -> None:
        super().__init__(models.H, models.V, bias=False)
        self.weight.main_grad = torch.zeros_like(self.weight)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return Fused.apply(x, self.weight)


def in_place_loss(target: Tensor, output: Tensor) -> Any:
    loss = InPlace.apply(output, target)
    return loss, {"loss": loss.detach().clone()}


def fused_part(layers: int) -> Part:
    modules = list(models.build(layers=layers))
    torch.manual_seed(2)
    modules[-1] = FusedHead()
    if layers == 1:
        del modules[2]  # the dense block
    return Part(modules, None, first=True, last=True)


def main_grad(part: Part) -> Tensor:
    assert isinstance(part.head, FusedHead)
    return part.head.weight.main_grad  # type: ignore[return-value]


@pytest.mark.parametrize("layers", [1, 2])
def test_head_and_loss_are_walked_once(layers: int) -> None:
    function = get_forward_backward_func(costs=COSTS, schedule="combined_1f1b_schedule_for_no_pipelining")
    part, reference = fused_part(layers), fused_part(layers)
    data = items(4)
    for tokens, target in data:
        (in_place_loss(target, reference(tokens))[0] / len(data)).backward()
    call(function, [part], data, forward_step_func=partial(forward_step, function=in_place_loss))
    assert models.equal(grads_of(part), grads_of(reference)) == []
    assert float(main_grad(reference).norm()) > 0
    assert torch.equal(main_grad(part), main_grad(reference))


def test_a_main_gradient_that_would_be_added_twice_is_refused() -> None:
    whole = get_forward_backward_func(costs=COSTS, layers=lambda chunk: [])
    with pytest.raises(
        ValueError, match="adds to main_grad in the backward of the layers behind its experts, which is walk"
    ):
        call(whole, [fused_part(2)], items(2))


class Checkpointed(nn.Module):
    """Norm and projection inside a checkpoint that runs a backward of its own, and experts if asked for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(models.H), nn.Parameter(torch.randn(models.H, models.H) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(x) @ self.weight)


class Routed(Product):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(models.E, models.H))
        self.experts = GroupedExperts(models.E, models.H, 12)
        self.experts.reset_parameters(torch.Generator().manual_seed(3), std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = super().forward(x).reshape(-1, models.H)
        indices, weights = models.top_k(tokens, tokens @ self.gate.t())
        return x + self.experts(tokens, indices, weights).view_as(x)


@pytest.mark.parametrize("inner", [Product, Routed])
def test_a_checkpoint_that_runs_a_backward_of_its_own(inner: type[Product]) -> None:
    def part() -> Part:
        torch.manual_seed(8)
        layers = [Checkpointed(inner()), Routed(), Checkpointed(Product())]
        ends = [nn.Embedding(models.V, models.H), nn.Linear(models.H, models.V)]
        return Part([ends[0], *layers, ends[1]], None, first=True, last=True)

    function = get_forward_backward_func(costs=COSTS, schedule="combined_1f1b_schedule_for_no_pipelining")
    cut, reference = part(), part()
    fired: dict[str, int] = {}
    for name, parameter in cut.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired.get(name, 0) + 1}))
    data = items(4)
    plain([reference], data)
    call(function, [cut], data)
    assert models.equal(grads_of(cut), grads_of(reference)) == []
    assert fired == dict.fromkeys(dict(cut.named_parameters()), len(data))


def test_a_chunk_that_recomputes_its_layers_is_not_cut() -> None:
    part = build(1, config=SimpleNamespace(recompute_granularity="full"))[0]
    assert default_layers(part) == []
    part.config.recompute_granularity = "selective"  # type: ignore[attr-defined]
    assert len(default_layers(Wrapped(part))) == LAYERS + 1
    part.config.mtp_num_layers = 1  # type: ignore[attr-defined]
    assert default_layers(part) == []


# -------------------------------------------------------------------------------------- what Megatron-Core keeps itself


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> SimpleNamespace:
    """A module of Megatron-Core that is imported already."""
    module = SimpleNamespace(**members)
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return module


class Attaches(Part):
    """Its output carries losses of Megatron-Core's kind; it notes their scales in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        x.register_hook(lambda grad: self.seen.append([float(scaler.main_loss_backward_scale) for scaler in self.of]))
        return x


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_attached_losses_have_megatrons_scale_for_a_step(
    monkeypatch: pytest.MonkeyPatch, per_token: bool, fails: bool
) -> None:
    before = torch.tensor(7.0)
    scalers = [SimpleNamespace(main_loss_backward_scale=before) for _ in range(3)]
    fake(monkeypatch, "megatron.core.transformer.moe.moe_utils", MoEAuxLossAutoScaler=scalers[0])
    fake(monkeypatch, "megatron.core.transformer.multi_token_prediction", MTPLossAutoScaler=scalers[1])
    fake(
        monkeypatch,
        "megatron.core.transformer.experimental_attention_variant.dsa",
        DSAIndexerLossAutoScaler=scalers[2],
    )
    config = SimpleNamespace(
        calculate_per_token_loss=per_token, grad_scale_func=lambda loss: loss * 6, num_moe_experts=8,
        mtp_num_layers=1, mtp_grad_scale_func=lambda: torch.tensor(12.0),
    )  # fmt: skip
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2))
    function = get_forward_backward_func(pg_collection=groups, costs=COSTS)
    monkeypatch.setattr("overlap1f1b.integrations.megatron.forward_backward.agreed", lambda costs, *_: costs)
    part = Attaches(list(models.build(layers=LAYERS)), config, first=True, last=True)
    part.of, part.seen = scalers, []  # type: ignore[assignment]
    if fails:
        with pytest.raises(ValueError, match="loss_func returns float"):
            call(function, [part], items(3), forward_step_func=partial(forward_step, function=lambda target, out: 1.0))
    else:
        call(function, [part], items(3))
        # The third is not in use; ranks along "cp" have a part of the first each.
        assert part.seen == [[6.0, 12.0, 7.0] if per_token else [6.0 * 2 / 3, 12.0 / 3, 7.0]] * 3
    assert all(scaler.main_loss_backward_scale is before for scaler in scalers)
    assert float(before) == 7


def test_groups_of_megatrons_parallel_state_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised = [False]
    fake(
        monkeypatch,
        "megatron.core.parallel_state",
        model_parallel_is_initialized=lambda: initialised[0],
        get_virtual_pipeline_model_parallel_world_size=lambda: 3,
    )
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 4))
    collection = SimpleNamespace(use_mpu_process_groups=lambda: groups)
    fake(monkeypatch, "megatron.core.process_groups_config", ProcessGroupCollection=collection)
    assert get_forward_backward_func().__name__ == "forward_backward_no_pipelining"
    initialised[0] = True
    function = get_forward_backward_func()
    assert (function.__name__, function.vp_size) == ("forward_backward_pipelining_with_interleaving", 3)
    assert function.groups is groups
    assert get_forward_backward_func(4).__name__ == "forward_backward_pipelining_without_interleaving"
    alone = get_forward_backward_func(pg_collection=ProcessGroups())
    assert (alone.__name__, alone.vp_size) == ("forward_backward_no_pipelining", None)


class Shared(models.Block):
    """Two ranks have one half of the tokens' features each, and put them together by collectives of their own."""

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


def _shared(rank: int, size: int, given: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    tp, ep = mesh.get_group("tp"), mesh.get_group("ep")
    groups = ProcessGroups(tp=tp, ep=ep)
    attention = 1 + 9 * tp.rank()  # each tensor rank would make another plan of its own
    costs = NodeCosts.uniform(attention=attention, experts=4, dispatch=5 - 4 * tp.rank(), counts=0.4, dense=1)
    schedule = "combined_1f1b_schedule_for_no_pipelining"
    function = get_forward_backward_func(
        pg_collection=groups, costs=costs if given else None, timeout=30, schedule=schedule
    )
    (part,), (reference,) = build(1, ep, block=Shared), build(1)
    for block in part.modules():
        if isinstance(block, Shared):
            block.tp = tp
    problems = []
    for step in range(4):
        part.zero_grad()
        reference.zero_grad()
        shards = [items(6, seed=10 * shard + step) for shard in range(2)]
        call(function, [part], shards[ep.rank()])
        plain([reference], shards[ep.rank()])
        own = grads_of(reference)
        for name, grad in grads_of(part).items():
            if "experts" not in name and not torch.allclose(grad, own[name], rtol=1e-4, atol=1e-6):
                problems.append(f"step {step}: {name}")
    (prepared,) = function._engines.values()
    plans: list[Any] = [None] * 4
    dist.all_gather_object(plans, prepared.engine.plan.fingerprint)
    return problems + ([f"plans {plans}"] if len(set(plans)) > 1 else [])


@pytest.mark.parametrize("given", [True, False])
def test_ranks_that_share_layers_play_one_plan(ranks4: Ranks, given: bool) -> None:
    assert ranks4.run(_shared, given) == [[]] * 4


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[
            ({name: value}, f"^{name}={value!r}; allowed: {allowed}$")
            for name, value, allowed in (
                ("num_microbatches_with_partial_activation_checkpoints", 1, None),
                ("defer_embedding_wgrad_compute", True, False),
                ("delay_wgrad_compute", True, False),
                ("fine_grained_activation_offloading", True, False),
                ("cpu_offloading", True, False),
                ("hybrid_context_parallel", True, False),
                ("cuda_graph_impl", "local", "none"),
                ("cuda_graph_impl", "transformer_engine", "none"),
                ("enable_cuda_graph", True, False),
                ("external_cuda_graph", True, False),
            )
        ],
        (
            {"fp8": "hybrid"},
            "^fp8='hybrid' in a chunk that is cut or holds Experts; allowed: None, or layers=lambda ch",
        ),
        (
            {"pipeline_model_parallel_size": 2},
            "^pipeline_model_parallel_size=2 with a group pp of 1 ranks; allowed: a ",
        ),
        ({"expert_model_parallel_size": 4}, "^expert_model_parallel_size=4 with a group ep of 1 ranks; allowed: a pg"),
        ({"context_parallel_size": 2}, "^context_parallel_size=2 with a group cp of 1 ranks; allowed: a pg_collection"),
        ({"tensor_model_parallel_size": 2}, "^tensor_model_parallel_size=2 with a group tp of 1 ranks; allowed: a pg"),
    ],
)
def test_options_that_would_be_ignored_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(get_forward_backward_func(), build(1, config=SimpleNamespace(**fields)), items(1))
    without = dict.fromkeys(fields) | {
        "cuda_graph_impl": "none",
        "pipeline_model_parallel_size": 1,
        "cpu_offloading": False,
    }
    assert len(call(get_forward_backward_func(), build(1, config=SimpleNamespace(**without)), items(1))) == 1


def test_costs_that_are_given_need_no_group_of_tensor_ranks() -> None:
    part = build(1, config=SimpleNamespace(tensor_model_parallel_size=2))
    assert len(call(get_forward_backward_func(costs=COSTS), part, items(2))) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0; allowed: 1 or more"),
        ({"seq_length": 0}, "seq_length=0; allowed: 1 or more"),
        ({"micro_batch_size": -1}, "micro_batch_size=-1; allowed: 1 or more"),
        ({"decoder_seq_length": 0}, "decoder_seq_length=0; allowed: 1 or more"),
        ({"model": []}, "0 model chunks for forward_backward_no_pipelining; allowed: 1"),
        ({"model": [3]}, "a model chunk of type int; allowed: nn.Module"),
        ({"model": nn.Linear(2, 2)}, "a model chunk of type Linear without set_input_tensor; allowed: with one"),
        ({"data_iterator": [iter([]), iter([])]}, "2 data iterators for 1 model chunks"),
        ({"num_microbatches": 4}, "ends before microbatch 3; allowed: one that gives 4 or more"),
        ({"p2p_communicator": 1}, "p2p_communicator of type int; allowed: None"),
        ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn with forward_backward_no_pipelining; allowed"),
        ({"pg_collection": SimpleNamespace(ep=SimpleNamespace(size=lambda: 2))}, "pg_collection with another group ep"),
        (
            {"forward_step_func": lambda iterator, model: (model(next(iterator)[0]), lambda output: 1.0)},
            r"loss_func returns float; allowed: \(loss, report\) or",
        ),
    ],
)
def test_bad_calls_are_named(more: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "forward_step_func": forward_step, "data_iterator": iter(items(3)), "model": build(1)[0],
        "num_microbatches": 3, "seq_length": 7, "micro_batch_size": 2,
    }  # fmt: skip
    function = get_forward_backward_func(costs=COSTS)
    with pytest.raises(ValueError, match=message):
        function(**{**given, **more})
    assert len(function(**{**given, "data_iterator": iter(items(3))})) == 3  # and it goes on


def test_bad_choices_are_named() -> None:
    with pytest.raises(ValueError, match="pp_size=2 with a group pp of 1 ranks; allowed: 1"):
        get_forward_backward_func(2)
    with pytest.raises(ValueError, match="vp_size=0; allowed: None or 1 or more"):
        get_forward_backward_func(1, 0)
    with pytest.raises(ValueError, match="schedule='gpipe'; allowed: forward_backward_no_pipelining, "):
        get_forward_backward_func(schedule="gpipe")
    with pytest.raises(ValueError, match="split_rank=1 with forward_backward_no_pipelining over 1 ranks"):
        get_forward_backward_func(split_rank=1)
    with pytest.raises(ValueError, match="a layer of type Linear is not at all in the chunk"):
        call(get_forward_backward_func(layers=lambda chunk: [nn.Linear(1, 1)] * 2), build(1), items(1))


# ------------------------------------------------------------------------------------------------- released outputs


def test_backward_through_a_released_output() -> None:
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    grad = torch.randn(5, 4)
    expected = torch.autograd.grad((x @ weight).tanh() * 2, (x, weight), grad)
    out = (x @ weight).tanh() * 2
    storage = out.untyped_storage()
    deallocate_output_tensor(out)
    assert out.shape == (1,)
    assert out.untyped_storage().data_ptr() != storage.data_ptr()
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.backward(out, grad)
    custom_backward(out, grad)
    assert torch.equal(x.grad, expected[0])  # type: ignore[arg-type]
    assert torch.equal(weight.grad, expected[1])  # type: ignore[arg-type]


def test_examples_of_released_outputs() -> None:
    assert doctest.testmod(release) == (0, 8)


def test_backward_of_a_scalar_needs_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    custom_backward((x * 2).sum(), None)
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_lists_and_mappings_are_released() -> None:
    outs = [torch.ones(3) * i for i in range(4)]
    deallocate_output_tensor([outs[0], None, {"a": outs[1]}])
    deallocate_output_tensor(outs[2], False)
    deallocate_output_tensor(None)
    assert [len(out) for out in outs] == [1, 1, 3, 3]


def test_bad_releases_are_named() -> None:
    with pytest.raises(ValueError, match=r"an output of shape \(2,\) that is a view; allowed"):
        deallocate_output_tensor(torch.ones(3)[:2])
    with pytest.raises(ValueError, match="an output of type str; allowed"):
        deallocate_output_tensor("x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an output of 3 elements; allowed: one element"):
        custom_backward(torch.ones(3, requires_grad=True) * 2, torch.ones(3))
    with pytest.raises(ValueError, match="grad_output of type int; allowed"):
        custom_backward(torch.ones(1, requires_grad=True) * 2, 1)  # type: ignore[arg-type]
