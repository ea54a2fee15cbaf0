"""Each expert's weights as parameters of their own: equal over layouts, one memory and one gradient with the stack."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from overlap1f1b.engine import Engine
from overlap1f1b.moe import ExpertParameter, GroupedExperts, parameter_groups
from overlap1f1b.moe.parameters import Stack
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.checkpoint.runs import placed
from tests.engines import COSTS, make
from tests.ranks import Ranks, over
from tests.tiers import wide

Made = list[torch.optim.Optimizer]


def muon(matrices: list[Any], vectors: list[Any]) -> Made:
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(vectors, lr=0.02)]


class Lars(torch.optim.Optimizer):
    """Steps of the length of their weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(group["lr"] * p.norm().clamp_min(0.1) * p.grad / (p.grad.norm() + 1e-3))


KINDS: dict[str, Any] = {
    "Muon": muon,
    "Adafactor": lambda *kinds: [torch.optim.Adafactor([p for kind in kinds for p in kind], lr=0.05)],
    "Lars": lambda *kinds: [Lars([p for kind in kinds for p in kind], {"lr": 0.05})],
}


def _trained(rank: int, size: int, layout: dict[str, int], kind: str) -> tuple[list[float], dict[int, Tensor]]:
    """Norms before clipping, and this rank's experts by their number among all ranks'."""
    mesh, group, shard = placed(layout)
    shards = layout.get("dp", 1) * layout.get("ep", 1)
    model = models.build(group, layers=2).double()  # the second layer's rows all go to the first experts
    program = build_schedule("1f1b", ranks=layout.get("pp", 1), microbatches=2)
    engine = make(model, program, mesh=mesh, costs=COSTS, timeout=30)
    experts, others = parameter_groups(engine)
    matrices = [*experts["params"], *(p for p in others["params"] if p.ndim == 2)]
    optimizers = KINDS[kind](matrices, [p for p in others["params"] if p.ndim == 1])
    norms = []
    for step in range(3):
        tokens, target = (rows.chunk(shards)[shard] for rows in models.batch(4, seed=step))
        engine.step(tokens, target=target)
        norms.append(float(engine.clip_gradients(0.5)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in engine.parameters())
    first = 0 if group is None else group.rank()
    found, count = {}, 0
    for number, block in enumerate(model):
        for stack in (m.gate_up for m in block.modules() if isinstance(m, GroupedExperts)):
            if any(p is stack for p in engine.parameters()):
                found |= {
                    100 * number + first * len(stack) + place: one.clone() for place, one in enumerate(stack.detach())
                }
                count += len(stack)
    assert count * 2 == len(experts["params"])
    return norms, found


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ({"ep": 2}, "Muon"),
        ({"ep": 2}, "Lars"),
        *wide(({"dp": 2}, "Muon"), ({"pp": 2, "ep": 2}, "Muon"), ({"ep": 4}, "Lars"), ({"ep": 4}, "Adafactor")),
    ],
)
def test_equal_over_layouts(kept: dict[int, Ranks], layout: dict[str, int], kind: str) -> None:
    size = 4 if 4 in layout.values() or len(layout) == 2 else 2
    norms, whole = _trained(0, 1, {}, kind)
    found: dict[int, Tensor] = {}
    for there, part in kept[size].run(_trained, layout, kind):
        assert there == pytest.approx(norms, rel=1e-9)
        found |= part
    assert found.keys() == whole.keys()
    for number, expert in whole.items():
        torch.testing.assert_close(found[number], expert, rtol=1e-8, atol=1e-10)


def small() -> tuple[nn.Sequential, list[ExpertParameter]]:
    model = nn.Sequential(GroupedExperts(3, 4, 5), nn.Linear(4, 4))
    experts, others = parameter_groups(model)
    assert others["params"] == [*model[1].parameters()]
    assert [list(p.shape) for p in experts["params"]] == [[10, 4]] * 3 + [[4, 5]] * 3
    return model, experts["params"]


def test_one_memory_and_one_gradient() -> None:
    model, parts = small()
    stack = model[0].gate_up
    assert all(part.grad is None for part in parts)
    stack.grad = torch.ones_like(stack)
    nn.utils.clip_grad_norm_(parts[:3], 1.0)
    assert float(stack.grad.norm()) == pytest.approx(1)
    before = stack.detach().clone()
    torch.optim.SGD(parts, lr=0.5).step()
    assert torch.equal(stack, before - 0.5 * stack.grad)
    parts[1].grad = torch.full((10, 4), 3.0)
    assert stack.grad[1].eq(3).all()
    torch.optim.SGD(parts).zero_grad(set_to_none=False)
    assert not stack.grad.any()
    model[0].down.grad = None
    parts[4].grad = torch.ones(4, 5)
    assert model[0].down.grad.sum(dim=(1, 2)).tolist() == [0, 20, 0]


def test_a_weight_that_is_none_of_the_models_is_named() -> None:
    layer = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"^stacked=\['weight'\]; allowed: a list of Parameter$"):
        parameter_groups(layer, ["weight"])  # type: ignore[list-item]
    for stacked in (layer.weight, [torch.nn.Parameter(torch.zeros(2, 3))]):
        with pytest.raises(ValueError, match=r"^stacked has .*, which the model does not train; allowed: a list of"):
            parameter_groups(layer, stacked)  # type: ignore[arg-type]


def test_a_gradient_goes_when_all_experts_have_dropped_it() -> None:
    model, parts = small()
    stack = model[0].gate_up
    for _ in range(2):
        stack.grad = torch.ones_like(stack)
        kept = parts[0].grad
        parts[0].grad = None  # as an optimizer does that has read it
        assert parts[0].grad is None
        assert kept.eq(1).all()
        assert parts[1].grad is not None
        assert stack.grad is not None
        parts[1].grad = parts[2].grad = None
        assert stack.grad is None


@pytest.mark.parametrize("accumulated", [True, False])
def test_an_expert_that_is_in_no_optimizer_is_named(accumulated: bool) -> None:
    """Its stack would keep a gradient of which others were dropped."""
    model, parts = small()
    stack, optimizer = model[0].gate_up, torch.optim.SGD([*parts[:1], *parts[2:]])
    stack.grad = torch.ones_like(stack)
    optimizer.zero_grad()
    stack.grad = stack.grad.add_(1) if accumulated else torch.ones_like(stack)
    with pytest.raises(RuntimeError, match=r"^expert 1 of a stacked weight \[3, 10, 4\] has kept its gradient where"):
        optimizer.step()


def test_a_model_that_was_moved_is_refused() -> None:
    model, parts = small()
    model.double()
    with pytest.raises(RuntimeError, match=r"^a stacked weight \[3, 10, 4\] has other memory than when its experts"):
        torch.optim.SGD(parts).step()


def test_stacked_weights_of_a_users_own() -> None:
    model = nn.ParameterDict({"stack": torch.ones(2, 3, 4), "frozen": torch.ones(2, 3)})
    model["frozen"].requires_grad_(False)
    experts, others = parameter_groups(model, [model["stack"]])
    assert ([list(p.shape) for p in experts["params"]], others["params"]) == ([[3, 4]] * 2, [])


@over(2)
def test_shards_of_fsdp(rank: int, size: int) -> None:
    """A rank has the experts of its shard; a shard inside an expert is refused."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    whole = torch.arange(24.0).view(4, 3, 2)
    stack = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    stack.grad = distribute_tensor(whole, mesh, [Shard(0)])
    parts = Stack(stack).experts
    assert [float(part.detach()[0, 0]) for part in parts] == [12.0 * rank, 12.0 * rank + 6]
    torch.optim.SGD(parts, lr=1.0).step()
    assert not stack.full_tensor().any()
    torch.optim.SGD(parts).zero_grad()
    assert stack.grad is None
    assert len(Stack(nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))).experts) == 4
    with pytest.raises(
        ValueError, match=r"\[4, 3, 2\] with placements \(Shard\(dim=1\),\); allowed: sharded by experts"
    ):
        Stack(nn.Parameter(distribute_tensor(whole, mesh, [Shard(1)])))


def test_an_engine_says_its_modules() -> None:
    model = models.build()
    engine = Engine(model, build_schedule("sequential", microbatches=2))
    assert {*engine.modules()} == {*model.modules()} - {model}


@pytest.mark.parametrize("model", [5, [torch.zeros(2)], torch.optim.SGD([torch.zeros(2)])], ids=type)
def test_what_has_no_parameters_in_modules(model: Any) -> None:
    with pytest.raises(ValueError, match=r"^model=.*; allowed: an Engine or a module$"):
        parameter_groups(model)
    with pytest.raises(ValueError, match=r"^stacked=5; allowed: a list of Parameter$"):
        parameter_groups(torch.nn.Linear(2, 2), 5)  # type: ignore[arg-type]
