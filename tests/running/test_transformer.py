"""The model of train and bench: attention against loops, causality, names, and weights that follow from the seed."""

import cmath
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.moe import Router
from overlap1f1b.running import transformer
from overlap1f1b.running.transformer import Attention, MoEConfig, MoETransformer
from tests.ranks import over

SMALL = MoEConfig(vocabulary=13, layers=2, hidden=12, heads=2, experts=4, top_k=2, intermediate=5, sequence=9)


def tokens(batch: int = 2, sequence: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def states_equal(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


# What it computes.


def turned(x: list[float], position: int, theta: float) -> list[float]:
    """One head, each pair (i, i + D/2) as a complex number times exp(1j · angle)."""
    half = len(x) // 2
    pairs = [complex(x[i], x[i + half]) * cmath.exp(1j * position * theta ** (-2 * i / len(x))) for i in range(half)]
    return [z.real for z in pairs] + [z.imag for z in pairs]


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 4)])
def test_attention_is_that_of_the_loops(monkeypatch: pytest.MonkeyPatch, heads: int, size: int) -> None:
    B, S, H = 2, 5, heads * size
    monkeypatch.setattr(transformer, "THETA", 50.0)
    config = replace(SMALL, hidden=H, heads=heads)
    torch.manual_seed(0)
    attention = Attention(config, dtype=torch.float64, device=None)
    x = torch.randn(B, S, H, dtype=torch.float64)
    parts = attention.qkv.weight.view(3 * heads, size, H)
    want = torch.zeros(B, S, H, dtype=torch.float64)
    for b in range(B):
        for n in range(heads):
            q = [turned((parts[n] @ x[b, s]).tolist(), s, 50.0) for s in range(S)]
            k = [turned((parts[heads + n] @ x[b, s]).tolist(), s, 50.0) for s in range(S)]
            v = [parts[2 * heads + n] @ x[b, s] for s in range(S)]
            for s in range(S):
                score = [sum(i * j for i, j in zip(q[s], k[t], strict=True)) / math.sqrt(size) for t in range(s + 1)]
                total = sum(map(math.exp, score))
                for t in range(s + 1):
                    want[b, s, n * size : (n + 1) * size] += math.exp(score[t]) / total * v[t].detach()
    torch.testing.assert_close(attention(x), want @ attention.out.weight.T, rtol=1e-11, atol=1e-13)


def test_a_block_normalises_before_each_part() -> None:
    model = MoETransformer(SMALL, dtype=torch.float64)
    x = torch.randn(2, 3, SMALL.hidden, dtype=torch.float64)
    for block in (model.layer0, model.layer1):
        with torch.no_grad():
            block.attention_norm.weight.uniform_(0.5, 2)
            block.mlp_norm.weight.uniform_(0.5, 2)

        def norm(t: Tensor, layer: nn.RMSNorm) -> Tensor:
            return t / (t.square().mean(-1, keepdim=True) + transformer.EPSILON).sqrt() * layer.weight

        middle = x + block.attention(norm(x, block.attention_norm))
        want = middle + block.mlp(norm(middle, block.mlp_norm))
        torch.testing.assert_close(block(x), want, rtol=1e-12, atol=1e-14)


# Its weights.


def test_names_are_stable() -> None:
    assert list(MoETransformer(SMALL).state_dict()) == [
        "embedding.weight",
        "layer0.attention_norm.weight",
        "layer0.attention.qkv.weight",
        "layer0.attention.out.weight",
        "layer0.mlp_norm.weight",
        "layer0.mlp.router.correction_bias",
        "layer0.mlp.router.gate.weight",
        "layer0.mlp.experts.gate_up",
        "layer0.mlp.experts.down",
        "layer1.attention_norm.weight",
        "layer1.attention.qkv.weight",
        "layer1.attention.out.weight",
        "layer1.mlp_norm.weight",
        "layer1.mlp.router.correction_bias",
        "layer1.mlp.router.gate.weight",
        "layer1.mlp.experts.gate_up",
        "layer1.mlp.experts.down",
        "head.norm.weight",
        "head.out.weight",
    ]


def test_a_seed_gives_one_model() -> None:
    torch.manual_seed(1)
    a = MoETransformer(SMALL, seed=5)
    torch.manual_seed(2)
    assert states_equal(a, MoETransformer(SMALL, seed=5))
    assert not states_equal(a, MoETransformer(SMALL, seed=6))
    narrow = MoETransformer(SMALL, seed=5, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value.to(narrow[name].dtype), narrow[name]) for name, value in a.state_dict().items())


def test_deviations() -> None:
    config = MoEConfig(layers=2, hidden=64, heads=2, experts=4, intermediate=96)
    for name, parameter in MoETransformer(config).named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        residual = name.endswith(("attention.out.weight", "down.weight", "down"))
        want = 0.02 / math.sqrt(4) if residual else 0.02
        deviation = want / math.sqrt(2 * parameter.numel())
        assert abs(parameter.std().item() - want) < 5 * deviation, name


@over(2)
def test_a_seed_gives_one_model_for_every_number_of_expert_ranks(rank: int, size: int) -> None:
    part = MoETransformer(SMALL, group=dist.group.WORLD, seed=3).state_dict()
    for name, want in MoETransformer(SMALL, seed=3).state_dict().items():
        own = want.chunk(size)[rank] if ".experts." in name else want
        assert torch.equal(part[name], own), name


# Bad configurations.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence": -1}, "sequence=-1; allowed: 1 or more"),
        ({"dropout": 1.0}, "dropout=1.0; allowed: 0 to less than 1"),
        ({"hidden": 12, "heads": 4}, "hidden=12 with heads=4; allowed: multiples of 8"),
        ({"groups": 3}, "8 experts cannot be divided into groups=3; allowed: 1, 2, 4, 8"),
    ],
)
def test_bad_configurations_say_what_is_allowed(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match="allowed") as raised:
        MoEConfig(**options)
    assert str(raised.value) == message


def test_every_router_field_of_the_configuration_arrives() -> None:
    fields = {
        "experts": 6,
        "top_k": 3,
        "score": "sigmoid",
        "normalize": False,
        "scaling": 2.5,
        "groups": 3,
        "top_groups": 2,
        "aux_coefficient": 0.25,
        "z_coefficient": 0.125,
        "force_load_balance": True,
    }
    model = MoETransformer(replace(SMALL, layers=1, **fields))
    (router,) = (m for m in model.modules() if isinstance(m, Router))
    assert vars(router.config) == fields
