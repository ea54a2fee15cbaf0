"""Which implementation an op takes, and a layer and an engine by each."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b import Engine, build_schedule
from overlap1f1b.engine import EngineOptions
from overlap1f1b.kernels import choice
from overlap1f1b.kernels.choice import Kernels, use_kernels
from overlap1f1b.kernels.grouped_mm import add_weight_grad_
from overlap1f1b.kernels.permute import take_rows
from overlap1f1b.kernels.slots import place_rows, place_slots
from overlap1f1b.moe import MoE, RouterConfig, SwiGLU
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from tests import models
from tests.engines import COSTS, make
from tests.kernels.against import DEVICE
from tests.ranks import over

CONFIG = MoEConfig(vocabulary=11, layers=2, hidden=32, heads=2, experts=6, intermediate=12, sequence=8, kernels="torch")


class Recording(Kernels):
    """Keeps the names of what Triton ran."""

    def __init__(self, choice: choice.Choice) -> None:
        super().__init__(choice)
        self.ran: set[str] = set()

    def uses_triton(self, op: Any, *args: Any) -> bool:
        used = super().uses_triton(op, *args)
        self.ran |= {op.__name__} if used else set()
        return used


class OnGPU(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def claimed(*tensors: Tensor) -> list[Tensor]:
    return [tensor.as_subclass(OnGPU) for tensor in tensors]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """What has been timed; Triton's kernel is faster where its first argument has fewer than 100 rows."""
    calls: list[tuple[str, tuple[Any, ...]]] = []

    def milliseconds(function: Any, args: tuple[Any, ...]) -> float:
        calls.append((function.__module__, args))
        return len(args[0]) if "triton" in function.__module__ else 100

    monkeypatch.setattr(choice, "_milliseconds", milliseconds)
    monkeypatch.setattr(choice, "triton_of", lambda op: _stand_in)
    return calls


def _stand_in(*args: Any) -> str:
    return "by Triton"


_stand_in.__module__ = "overlap1f1b.kernels.triton.permute"


def test_auto_times_a_class_of_shapes_once(timed: list[Any]) -> None:
    pytest.importorskip("triton")
    kernels = Kernels()
    for rows in (40, 40, 63, 200, 1, 4096):
        given = claimed(torch.ones(rows, 3), torch.zeros(rows, dtype=torch.int64))
        assert kernels.uses_triton(take_rows, *given)
        assert kernels(take_rows, *given) == "by Triton"
    assert len(timed) == 2  # by both
    assert len(kernels.chosen) == 1
    wide = claimed(torch.ones(200, 4), torch.zeros(200, dtype=torch.int64))
    assert not kernels.uses_triton(take_rows, *wide)  # another width
    assert len(kernels.chosen) == 2
    (indices,) = claimed(torch.zeros(8, 2, dtype=torch.int64))
    for room in (4, 5, 130):
        kernels.uses_triton(place_rows, indices, 4, 2, room, 2 * room)
    assert len(kernels.chosen) == 3
    assert not Kernels().chosen


def test_nothing_is_timed_after_the_first_step_of_an_engine(timed: list[Any]) -> None:
    pytest.importorskip("triton")
    given = claimed(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    wide = claimed(torch.ones(4, 5), torch.zeros(4, dtype=torch.int64))
    inputs, labels = torch.randint(11, (2, 4, 8))
    model = MoETransformer(MoEConfig(**{**vars(CONFIG), "kernels": "auto"}))
    kernels: Kernels = model[1].mlp.experts.kernels
    tried: list[bool] = []

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        tried.append(kernels.uses_triton(take_rows, *(given if len(tried) < 2 else wide)))
        return models.loss_fn(logits, target)

    program, options = build_schedule("combined_1f1b", microbatches=2), EngineOptions(verify=False)
    engine = Engine(model, program, loss_fn=loss_fn, options=options)
    for _ in range(3):
        engine.step(inputs, target=labels)
    assert tried == [True, True, *[False] * 4]  # what is new by then runs by the twin
    assert len(timed) == 2
    assert kernels.uses_triton(take_rows, *given)  # a choice stays
    Engine(model, build_schedule("sequential", microbatches=2), loss_fn=loss_fn).step(inputs, target=labels)
    assert len(timed) == 4


@over(2)
def test_ranks_that_compute_the_same_do_not_choose_apart(rank: int, size: int) -> None:
    """Triton runs an op in no microbatch, though it has been chosen before."""
    pytest.importorskip("triton")
    inputs, labels = torch.randint(11, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    model = MoETransformer(MoEConfig(**{**vars(CONFIG), "kernels": "auto"}))
    kernels: Kernels = model[1].mlp.experts.kernels
    given = claimed(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    used: list[bool] = []

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        used.append(kernels.uses_triton(take_rows, *given))
        return models.loss_fn(logits, target)

    with patch.object(choice, "_faster", lambda op, args: "triton"):
        assert kernels.uses_triton(take_rows, *given)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        program = build_schedule("sequential", microbatches=2)
        with Engine(model, program, mesh=mesh, loss_fn=loss_fn) as engine:
            engine.evaluate(inputs, target=labels)
            engine.step(inputs, target=labels)
    assert used == [False] * 4


def test_what_is_timed_adds_to_a_copy(timed: list[Any]) -> None:
    pytest.importorskip("triton")
    main, grad, rows, ends = claimed(torch.ones(1, 2, 3), torch.ones(4, 2), torch.ones(4, 3), torch.tensor([4]))
    assert Kernels().uses_triton(add_weight_grad_, main, grad, rows, ends)
    assert [args[0].data_ptr() == main.data_ptr() for _, args in timed] == [False, False]


def test_a_kernel_that_fails_leaves_the_twin(timed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def fails(op: Any) -> Any:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(choice, "triton_of", fails)
    given = claimed(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.warns(UserWarning, match="take_rows runs by torch, since Triton's kernel fails: out of registers"):
        assert not Kernels().uses_triton(take_rows, *given)


def test_what_is_never_tritons(timed: list[Any]) -> None:
    rows, index = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)
    assert not Kernels("torch").uses_triton(take_rows, *claimed(rows, index))
    assert not Kernels().uses_triton(take_rows, rows, index)  # on a CPU
    assert not Kernels().uses_triton(take_rows, *claimed(rows.double(), index))
    assert not Kernels().uses_triton(take_rows, *claimed(rows[:0], index[:0]))
    assert not timed


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="kernels='cuda'; allowed: 'auto', 'triton', 'torch'"):
        Kernels("cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^use_kernels of a list; allowed: a module, as nn.ModuleList\(blocks\)$"):
        use_kernels([], "torch")  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'triton' without the package triton; allowed: 'auto', 'torch'"):
        Kernels("triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about CPUs")
def test_triton_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="kernels='triton' on a CPU; allowed: 'auto', 'torch', or TRITON_INTERPRET=1"):
        Kernels("triton")(place_slots, torch.zeros(1, 1, dtype=torch.int16), 1, 1)


def test_layers_of_a_model_choose_together() -> None:
    model = nn.Sequential(SwiGLU(32, 12), MoE(32, 12, RouterConfig(6, 2), shared_intermediate=5))
    use_kernels(model, "torch")
    held = [m for m in model.modules() if hasattr(m, "kernels")]
    assert [type(m).__name__ for m in held] == ["SwiGLU", "Router", "GroupedExperts", "SwiGLU"]
    assert len({id(m.kernels) for m in held}) == 1
    use_kernels(model, "auto")
    assert {m.kernels.choice for m in held} == {"auto"}
    assert len({id(m.kernels) for m in held}) == 1


@pytest.mark.triton
@pytest.mark.parametrize(
    "options", [{}, {"score": "sigmoid", "groups": 3, "top_groups": 2, "weights_in": "activation"}]
)
def test_a_step_by_triton_is_one_by_torch(options: dict[str, Any]) -> None:
    inputs, labels = torch.randint(11, (2, 4, 8), device=DEVICE)
    results, carried = {}, options.get("weights_in") == "activation"
    for kernels in ("torch", "triton"):
        config = MoEConfig(**{**vars(CONFIG), **options, "layers": 1, "kernels": kernels})
        model = MoETransformer(config, device=DEVICE)
        program = build_schedule("combined_1f1b", ranks=1, microbatches=2)
        use_kernels(model, recording := Recording(kernels))
        engine = make(model, program, costs=COSTS, capacity=1.0 if carried else None)
        for _ in range(2):  # the second overlaps
            model.zero_grad()
            loss = engine.step(inputs, target=labels).loss
        model(inputs).square().sum().backward()  # and inside plain autograd
        results[kernels] = (loss, [p.grad for p in model.parameters()])
    torch.testing.assert_close(results["triton"], results["torch"], rtol=1e-4, atol=1e-6)

    routed = {"pack_rows", "place_slots", "expand_rows", "sum_rows", "pack_grads"} | (
        {"place_rows", "spread_rows", "take_rows", "open_grads"} if carried else {"spread_grad"}
    )
    activated = {"swiglu_rows", "swiglu_rows_backward", "route_tokens", "route_tokens_backward", "count_choices_"}
    assert recording.ran == routed | activated

    if DEVICE == "cpu":  # a GPU checks by itself, and this process could not use it any more
        bad = torch.tensor([[0], [6]])
        with pytest.raises(ValueError, match="indices name expert 6; allowed: 0 to 5, or -1 for none"):
            model[1].mlp.experts(torch.ones(2, 32), bad, torch.ones(2, 1))


@pytest.mark.triton
@pytest.mark.parametrize("real", ["some", "none"])
def test_a_mask_by_triton_is_one_by_torch(real: str) -> None:
    x, cotangent = torch.randn(2, 9, 16, 32, device=DEVICE).unbind()
    mask = torch.rand(9, 16, device=DEVICE) < (0.6 if real == "some" else 0.0)
    results = {}
    for kernels in ("torch", "triton"):
        torch.manual_seed(0)
        config = RouterConfig(6, 2, score="sigmoid", aux_coefficient=0.1, z_coefficient=0.1)
        moe = MoE(32, 12, config, shared_intermediate=5, device=DEVICE)
        use_kernels(moe, kernels)
        given = x.clone().requires_grad_()
        y = moe(given, mask)
        y.backward(cotangent)
        assert not y[~mask].any()
        results[kernels] = (y, given.grad, moe.router.load, [p.grad for p in moe.parameters()])
    torch.testing.assert_close(results["triton"], results["torch"], rtol=1e-4, atol=1e-6)


@pytest.mark.triton
def test_experts_of_transformers_by_triton() -> None:
    pytest.importorskip("transformers")
    from overlap1f1b.integrations.transformers import split_model
    from tests.integrations.transformers import tiny

    tokens, labels = (t.to(DEVICE) for t in tiny.batch(4))
    program = build_schedule("sequential", ranks=1, microbatches=1)
    results = []
    for kernels in ("torch", "triton"):
        stages = split_model(tiny.build("qwen3_moe").to(DEVICE), program, grouped=True)
        recording = Recording(kernels)
        for stage in stages.values():
            use_kernels(stage, recording)
        loss = Engine(stages, program, loss_fn=stages.loss_fn).step(tokens, target=labels).loss
        results.append((loss, [p.grad for _, p in stages.named_parameters()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
    assert recording.ran > {"swiglu_rows", "swiglu_rows_backward", "sum_rows"}
