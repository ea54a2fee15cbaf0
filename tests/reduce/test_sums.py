"""Sums of plain gradients over ranks."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from overlap1f1b.engine import Stage
from overlap1f1b.plan import Node, Op
from overlap1f1b.reduce.sums import Reducer
from overlap1f1b.schedule import Kind, build_schedule
from overlap1f1b.transport.failures import Failures
from overlap1f1b.transport.lanes import Lane
from tests import models
from tests.engines import make
from tests.ranks import over


@over(2)
def test_blocks_are_reduced_in_the_plans_order_whatever_ends_first(rank: int, size: int) -> None:
    problems: list[str] = []
    stage = Stage([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2)], reduce_dense=True)
    apart = set(stage.dense_parameters_of(2))
    lane = Lane("reduce", Failures(limit=timedelta(seconds=20)), background=True)
    reducer = Reducer({0: stage}, dist.group.WORLD, None, lane, apart=apart)
    if not reducer.reduces or Reducer({0: stage}, None, None, lane).reduces:
        problems.append("what is reduced")
    blocks = [Node(Op.REDUCE, Kind.W, 0, block) for block in (1, 0, 2)]
    for block in range(3):
        for p in stage.dense_parameters_of(block):
            p.grad = torch.full_like(p, 100.0)  # of an earlier step
    reducer.begin(blocks)
    for block in range(3):
        for p in stage.dense_parameters_of(block):
            p.grad = torch.full_like(p, 1.0 + rank) if block or rank else None  # no token reached block 0 of rank 0
    if reducer.launch(blocks[1]):
        problems.append("a reduction has overtaken another")
    if [flight.node.block for flight in reducer.launch(blocks[0])] != [1, 0]:
        problems.append("reductions are not in the order of the plan")
    if reducer.launch(blocks[2]):
        problems.append("a parameter apart was reduced")
    reducer.settle()
    reducer.finish()
    expected = {0: 102.0, 1: 103.0, 2: 1.0 + rank}
    for block in range(3):
        for p in stage.dense_parameters_of(block):
            if p.grad is None or not bool((p.grad == expected[block]).all()):
                problems.append(f"block {block}: {p.grad}, expected {expected[block]}")
    assert not problems, problems


class Made(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = any(spec.alias_info is not None for spec in func._schema.returns)
        self.bytes += sum(t.nbytes for t in tree_iter(result) if isinstance(t, Tensor) and not views)
        return result


@over(2)
def test_gradients_are_summed_where_they_are(rank: int, size: int) -> None:
    """Large gradients and small ones, of two dtypes: no copy is made, and the sums are there."""
    stage = Stage([nn.Linear(600, 600), nn.Linear(3, 5).double(), nn.Linear(3, 600)], reduce_dense=True)
    lane = Lane("reduce", Failures(limit=timedelta(seconds=20)), background=True)
    reducer = Reducer({0: stage}, dist.group.WORLD, None, lane)
    blocks = [Node(Op.REDUCE, Kind.W, 0, block) for block in (2, 1, 0)]
    reducer.begin(blocks)
    parameters = [p for block in range(3) for p in stage.dense_parameters_of(block)]
    for p in parameters:
        p.grad = torch.arange(p.numel(), dtype=p.dtype).view_as(p) * (rank + 1)
    places = [p.grad.data_ptr() for p in parameters if p.grad is not None]
    with Made() as made:
        for node in blocks:
            reducer.launch(node)
        reducer.finish()
    problems = [] if made.bytes == 0 else [f"{made.bytes} bytes of copies"]
    factor = size * (size + 1) // 2
    for p, place in zip(parameters, places, strict=True):
        if p.grad.data_ptr() != place:
            problems.append(f"{tuple(p.shape)}: not in place")
        if not torch.equal(p.grad, torch.arange(p.numel(), dtype=p.dtype).view_as(p) * factor):
            problems.append(f"{tuple(p.shape)}: wrong sum")
    assert not problems, problems


@over(2)
def test_memory_that_others_need_is_left_alone(rank: int, size: int) -> None:
    """Gradients in memory that something else still needs, and with gaps between their elements."""
    stage = Stage([nn.Linear(4, 4)], reduce_dense=True)
    lane = Lane("reduce", Failures(limit=timedelta(seconds=20)), background=True)
    reducer = Reducer({0: stage}, dist.group.WORLD, None, lane)
    node = Node(Op.REDUCE, Kind.W, 0, 0)
    reducer.begin([node])
    weight, bias = stage.dense_parameters_of(0)
    passed_on = torch.ones(1, 4)  # as autograd passes on the gradient of a sum whose other part is a view
    weight.grad, bias.grad = torch.ones(4, 8)[:, ::2], passed_on.view(4)
    reducer.launch(node)
    reducer.finish()
    found = passed_on[0].tolist(), float(weight.grad.sum()), float(bias.grad.sum())
    assert found == ([1, 1, 1, 1], 32, 8), found


class Shared(nn.Module):
    """A sparse embedding, and two blocks with one layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        embedding = nn.Embedding(models.V, models.H, sparse=True)
        first, second = models.Block(), models.Block()
        second.experts = first.experts
        self.blocks = [embedding, first, nn.Linear(models.H, models.H), second, nn.Linear(models.H, models.V)]
        self.layers = nn.Sequential(*self.blocks)


@over(2)
def test_experts_of_two_blocks_are_summed_once_and_into_the_optimizers_buffer(rank: int, size: int) -> None:
    """Data over two ranks, three steps, gradients in one buffer: they are those of one process."""
    mesh, plain, model = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)), Shared(), Shared()
    parts = [models.batch(4, seed=seed) for seed in range(size)]
    models.of_one_process(plain.layers, parts, 4)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    for parameter, part in zip(model.parameters(), buffer.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.grad = part.view_as(parameter)
    engine = make(model.blocks, build_schedule("combined_1f1b", microbatches=4), mesh=mesh, timeout=20)
    problems = list[str]()
    model.blocks[0].weight.grad = buffer[: model.blocks[0].weight.numel()].view_as(model.blocks[0].weight).to_sparse()
    engine.step(parts[rank][0], target=parts[rank][1])  # onto a sparse gradient of an earlier backward
    model.blocks[0].weight.grad = buffer[: model.blocks[0].weight.numel()].view_as(model.blocks[0].weight)
    for _ in range(3):
        buffer.zero_()
        engine.step(parts[rank][0], target=parts[rank][1])
        expected = torch.cat([p.grad.to_dense().flatten() for p in plain.parameters() if p.grad is not None])
        if not torch.allclose(buffer, expected, rtol=1e-5, atol=1e-6):
            problems.append(f"off by {(buffer - expected).abs().max():.1e}")
    assert not problems, problems


@over(2)
def test_parameters_that_change_on_several_ranks_need_a_new_engine(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

    def freeze(model: nn.Sequential) -> None:
        model[1].requires_grad_(False)

    def replace(model: nn.Sequential) -> None:
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)

    for change in (freeze, replace):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        fully_shard(model[2], mesh=mesh)
        program = build_schedule("combined_1f1b", microbatches=2)
        engine = make(model, program, mesh=mesh, loss_fn=nn.functional.mse_loss, timeout=20)
        engine.step(torch.ones(4, 3), target=torch.zeros(4, 3))
        change(model)
        with pytest.raises(ValueError, match="trains other parameters than when the Engine was made; allowed"):
            engine.step(torch.ones(4, 3), target=torch.zeros(4, 3))
