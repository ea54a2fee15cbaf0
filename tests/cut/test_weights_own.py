"""Parameters whose classes have products of their own: an engine's gradients are those of a plain loop."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.moe import GroupedExperts, MoE, RouterConfig
from overlap1f1b.plan import Overlap
from overlap1f1b.schedule import build_schedule
from tests import models, products
from tests.engines import COSTS, make
from tests.ranks import over

MICROBATCHES = 3
CASES: list[tuple[str, Overlap, dict[str, Any]]] = [
    ("sequential", "serial", {}),
    ("combined_1f1b", 3, {"recompute": "experts"}),
    ("zb_h1", "pairs", {"recompute": "block"}),
    ("combined_1f1b", 3, {"capacity": 8.0}),
    ("combined_1f1b", 2, {"parts": 2, "recompute": "attention"}),
]


def build(kind: str, group: Any = None, **options: Any) -> nn.Sequential:
    model = models.build(group, **options).double()
    products.convert(model, products.KINDS[kind])
    return model


@pytest.mark.parametrize("kind", products.KINDS)
def test_products_are_their_own(kind: str) -> None:
    """On one rank to the bit, and not those of plain parameters."""
    data = models.batch(MICROBATCHES)
    _, plain = models.plain_gradients(models.build().double(), *data, MICROBATCHES)
    _, expected = models.plain_gradients(build(kind), *data, MICROBATCHES)
    # Both compute the bias behind the last product alike; some processors add it inside a product of its own.
    changed = [name for name in plain if not torch.allclose(plain[name], expected[name])]
    assert changed == [name for name in plain if name != "4.bias"]
    for name, overlap, more in CASES:
        model = build(kind)
        program = build_schedule(name, microbatches=MICROBATCHES)  # type: ignore[arg-type]
        make(model, program, overlap=overlap, costs=COSTS, **more).step(data[0], target=data[1])
        problems = models.apart(models.gradients(model), expected, 0, 1, 1e-14 if "parts" in more else 0.0)
        assert not problems, (name, more, problems)


@over(2, timeout=240)
def test_over_two_ranks(rank: int, size: int) -> None:
    """Over "ep", of which one rank gets no row in one block, and over "pp"."""
    data, problems = [models.batch(MICROBATCHES, seed=r) for r in range(size)], list[str]()
    for kind in products.KINDS:
        expected = models.of_one_process(build(kind), data, MICROBATCHES)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
        for name, overlap, more in CASES:
            model = build(kind, mesh.get_group("ep"))
            program = build_schedule(name, microbatches=MICROBATCHES)  # type: ignore[arg-type]
            options = {"mesh": mesh, "overlap": overlap, "costs": COSTS, "timeout": 30}
            make(model, program, **options, **more).step(data[rank][0], target=data[rank][1])
            found = models.apart(models.gradients(model), expected, rank, size, 1e-12)
            problems += [f"ep, {name}, {kind}, {more}: {problem}" for problem in found]
        _, expected = models.plain_gradients(build(kind), *data[0], MICROBATCHES)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))
        for name in ("1f1b", "zb_h1", "combined_1f1b"):
            model = build(kind)
            program = build_schedule(name, ranks=size, microbatches=MICROBATCHES)  # type: ignore[arg-type]
            engine = make(model, program, mesh=mesh, costs=COSTS, timeout=30)
            engine.step(data[0][0], target=data[0][1])
            found = models.apart(models.held(engine, model), expected, 0, 1, 1e-12)
            problems += [f"pp, {name}, {kind}: {problem}" for problem in found]
    assert not problems, problems


def test_a_class_that_comes_after_the_engine() -> None:
    """On one rank: the weights of every step multiply as they are then."""
    data, model = models.batch(MICROBATCHES), models.build().double()
    engine = make(model, build_schedule("combined_1f1b", microbatches=MICROBATCHES), costs=COSTS)
    engine.step(data[0], target=data[1])
    products.convert(model, products.Wrapped)
    model.zero_grad()
    _, expected = models.plain_gradients(build("wrapped"), *data, MICROBATCHES)
    for _ in range(2):
        engine.step(data[0], target=data[1])
        assert not models.equal(models.gradients(model), expected)
        model.zero_grad()


class Half(products.Wrapped):
    """A class that is lost when it is transposed."""

    KEPT = ("detach", "_to_copy")


class Foreign(products.Wrapped):
    """A class that leaves grouped products to torch, which has none of float64."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "precision", "said"),
    [
        (products.Wrapped, "mxfp8", "a weight of Wrapped in products of eight bits; allowed: precision=None, or a"),
        (Half, None, "a weight of Half, which loses its class when it is cast or transposed; allowed: a class that"),
        (
            Foreign,
            None,
            r"a weight of Foreign, for which torch\.nn\.functional\.grouped_mm fails \(Expected .*Double\);",
        ),
    ],
)
def test_what_cannot_keep_its_products_is_refused_by_its_class(kind: Any, precision: Any, said: str) -> None:
    experts = GroupedExperts(2, 32, 32, precision=precision, dtype=torch.float64)
    products.convert(experts, kind)
    tokens = torch.randn(4, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"^{said}"):
        experts(tokens, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1, dtype=torch.float64))


@pytest.mark.parametrize("what", ["experts", "linear", "Float8Linear"])
def test_torchao(what: str) -> None:
    """Its training in eight bits, emulated, is that of a plain loop to the bit, and not that in bfloat16."""
    pytest.importorskip("torchao")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common import KernelPreference

    def made(*, converted: bool) -> nn.Sequential:
        torch.manual_seed(0)
        moe = MoE(64, 64, RouterConfig(4, 2))
        model = nn.Sequential(nn.Embedding(32, 64), nn.Linear(64, 64, bias=False), moe, nn.Linear(64, 32))
        model.bfloat16()
        if converted and what == "Float8Linear":
            config = Float8LinearConfig(emulate=True)
            return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name == "1")
        options = {"kernel_preference": KernelPreference.EMULATED, "pad_token_groups_for_grouped_mm": True}
        if converted:
            quantize_(
                model,
                MXFP8TrainingOpConfig(**options),
                lambda module, _: module is (model[1] if what == "linear" else moe.experts),
            )
        return model

    def loss_fn(logits: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(logits.float().mT, target)

    tokens = torch.arange(256).view(8, 32) * 7 % 32
    model, reference, plain = made(converted=True), made(converted=True), made(converted=False)
    for one in (reference, plain):
        for part in tokens.chunk(4):
            (loss_fn(one(part), part) / 4).backward()
    engine = make(model, build_schedule("zb_h1", microbatches=4), loss_fn=loss_fn, overlap=3, costs=COSTS)
    engine.step(tokens, target=tokens)
    assert not models.equal(models.gradients(model), models.gradients(reference))
    changed = models.equal(models.gradients(model), models.gradients(plain))
    assert ("2.experts.down" if what == "experts" else "1.weight") in changed
