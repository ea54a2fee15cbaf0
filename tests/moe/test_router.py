"""The router against loops over tokens and experts."""

import math
import pickle
import re
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlap1f1b.moe import MoE, Router, RouterConfig
from tests.ranks import over

H = 5


def make(config: RouterConfig, dtype: torch.dtype = torch.float64, bias_seed: int | None = 1) -> Router:
    torch.manual_seed(0)
    router = Router(H, config, dtype=dtype)
    if bias_seed is not None:
        router.correction_bias.copy_(
            torch.rand(config.experts, generator=torch.Generator().manual_seed(bias_seed)) - 0.5
        )
    return router


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 2) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(token: list[float], gate: list[list[float]], bias: list[float], c: RouterConfig) -> dict[int, float]:
    """The experts of one token, best first, and their weights."""
    logits = [sum(a * b for a, b in zip(token, row, strict=True)) for row in gate]
    if c.score == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = c.experts // c.groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(c.groups)]
    best_two = 1 if c.score == "softmax" else 2
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:best_two]))
    allowed = [e for group in groups[: c.top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: c.top_k]
    divisor = sum(scores[e] for e in chosen) if c.normalize and c.top_k > 1 else 1
    return {e: scores[e] / divisor * c.scaling for e in chosen}


@pytest.mark.parametrize("T", [0, 1, 37])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "options",
    [
        {"experts": 1, "top_k": 1},
        {"experts": 7, "top_k": 1},
        {"experts": 7, "top_k": 3, "normalize": False},
        {"experts": 7, "top_k": 7, "scaling": 2.5},
        {"experts": 9, "top_k": 4, "groups": 3, "top_groups": 2},
        {"experts": 10, "top_k": 2, "groups": 5, "top_groups": 1, "normalize": False, "scaling": 0.5},
        {"experts": 6, "top_k": 2, "groups": 6, "top_groups": 3},
        {"experts": 8, "top_k": 5, "groups": 2, "top_groups": 2},
    ],
)
def test_choice_and_weights_are_those_of_the_loops(options: dict, score: str, T: int) -> None:
    router = make(RouterConfig(score=score, **options))
    tokens = 3 * draw(T, H)
    indices, weights = router(tokens)
    assert indices.dtype == torch.int64
    assert indices.shape == weights.shape == (T, router.config.top_k)
    expected = [
        plain(token, router.gate.weight.tolist(), router.correction_bias.tolist(), router.config)
        for token in tokens.tolist()
    ]
    assert indices.tolist() == [list(choice) for choice in expected]
    want = torch.tensor([list(choice.values()) for choice in expected], dtype=torch.float64).view(weights.shape)
    torch.testing.assert_close(weights, want, rtol=1e-13, atol=0)  # 1e-13: nothing went through float32


@pytest.mark.parametrize("T", [0, 1, 21])
@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "scaling": 2.5}, {"groups": 7, "top_groups": 3}])
def test_a_forced_load_is_even_and_weights_are_still_scores(options: dict, T: int) -> None:
    router = make(RouterConfig(experts=7, top_k=3, force_load_balance=True, **options))
    tokens = draw(T, H)
    indices, weights = router(tokens)
    assert indices.flatten().tolist() == [choice % 7 for choice in range(3 * T)]
    assert router.load.max() - router.load.min() <= 1
    logits = tokens @ router.gate.weight.T
    scores = (logits.sigmoid() if router.config.score == "sigmoid" else logits.softmax(-1)).gather(1, indices)
    expected = scores / scores.sum(-1, keepdim=True) * router.config.scaling
    assert torch.allclose(weights, expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad((weights * draw(T, 3)).sum(), router.gate.weight)
    assert bool(gradient.any()) == (T > 0)


def test_a_group_with_negative_scores_only_is_not_mixed_up_with_dropped_groups() -> None:
    router = make(RouterConfig(6, 3, score="sigmoid", groups=2), bias_seed=None)
    router.correction_bias.fill_(-9.0)
    indices, _ = router(draw(13, H))
    assert ((indices // 3) == (indices[:, :1] // 3)).all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_of_equal_experts_the_first_are_taken(score: str) -> None:
    router = make(RouterConfig(64, 4, score=score), bias_seed=None)
    indices, weights = router(torch.zeros(9, H, dtype=torch.float64))
    assert indices.tolist() == [[0, 1, 2, 3]] * 9
    torch.testing.assert_close(weights, torch.full_like(weights, 0.25))
    grouped = make(RouterConfig(64, 4, score=score, groups=16, top_groups=2), bias_seed=None)
    grouped.correction_bias[20:] = 1.0  # groups 5 to 15 are equal, and their experts
    assert grouped(torch.zeros(9, H, dtype=torch.float64))[0].tolist() == [[20, 21, 22, 23]] * 9


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_are_float32_for_narrow_tokens_and_under_autocast(score: str) -> None:
    config = RouterConfig(33, 4, score=score, normalize=False)
    wide = make(config, torch.float32)
    narrow = make(config, torch.float32).bfloat16()
    wide.gate.weight.data.copy_(narrow.gate.weight)
    tokens = draw(50, H, dtype=torch.bfloat16)
    indices, weights = wide(tokens.float())
    for dtype, router, given in (
        (torch.bfloat16, narrow, tokens),
        (torch.bfloat16, wide, tokens),
        (torch.float32, wide, tokens.float()),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=router is wide):
            got = router(given)
        assert got[1].dtype == dtype
        assert torch.equal(got[0], indices)
        assert torch.equal(got[1], weights.to(dtype))


def test_the_bias_is_not_rounded_with_the_model() -> None:
    router = make(RouterConfig(8, 2, score="sigmoid"), torch.float32)
    bias = router.correction_bias.clone()
    assert not torch.equal(bias.bfloat16().float(), bias)
    router.bfloat16()
    assert router.gate.weight.dtype == torch.bfloat16
    assert router.correction_bias.dtype == torch.float32
    assert torch.equal(router.correction_bias, bias)
    assert router.double().correction_bias.dtype == torch.float64
    assert router.load.dtype == torch.int64


def test_one_normalised_expert_still_trains_the_gate() -> None:
    router = make(RouterConfig(4, 1, normalize=True))
    router(draw(6, H))[1].sum().backward()
    assert router.gate.weight.grad.abs().max() > 1e-3


def test_underflowed_scores_give_finite_weights_and_gradients() -> None:
    router = make(RouterConfig(4, 2, score="sigmoid"), torch.float32, bias_seed=None)
    router.gate.weight.data.fill_(-100.0)
    tokens = torch.ones(3, H, requires_grad=True)
    _, weights = router(tokens)
    weights.sum().backward()
    assert torch.equal(weights, torch.zeros(3, 2))
    assert tokens.grad.isfinite().all()


# Padding.

RULES = [{}, {"score": "sigmoid", "groups": 4, "top_groups": 2}, {"force_load_balance": True}]


@pytest.mark.parametrize("options", RULES)
@pytest.mark.parametrize("real", ["some", "all", "none"])
def test_a_mask_leaves_the_real_tokens(options: dict, real: str) -> None:
    """A product of another number of rows may round otherwise, hence the tolerance."""
    mask = torch.rand(3, 7, generator=torch.Generator().manual_seed(4)) < {"some": 0.6, "all": 2.0, "none": -1.0}[real]
    flat, found = mask.flatten(), []
    tokens, cotangent = draw(21, H), draw(21, 3, seed=5)
    tokens[~flat] = math.nan
    for padded in (True, False):
        router = make(RouterConfig(8, 3, aux_coefficient=0.3, z_coefficient=0.2, **options))
        leaf = (tokens if padded else tokens[flat]).clone().requires_grad_()
        indices, weights = router(leaf, mask) if padded else router(leaf)
        if padded:
            assert torch.equal(indices[~flat], torch.full_like(indices[~flat], -1))
            assert not weights[~flat].any()
            weights.backward(cotangent)
            assert not leaf.grad[~flat].any()
            found.append((indices[flat], weights[flat], router.load, leaf.grad[flat], router.gate.weight.grad))
        else:
            weights.backward(cotangent[flat])
            found.append((indices, weights, router.load, leaf.grad, router.gate.weight.grad))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
    assert router.load.sum() == 3 * flat.sum()


MASKS = [
    (torch.ones(6, dtype=torch.int64), "torch.int64 [6] on 'cpu'"),
    (torch.ones(5, dtype=torch.bool), "torch.bool [5] on 'cpu'"),
    (torch.ones(6, 1, 1, dtype=torch.bool), "torch.bool [6, 1, 1] on 'cpu'"),
    (torch.ones(6, dtype=torch.bool, device="meta"), "torch.bool [6] on 'meta'"),
    ([True] * 6, str([True] * 6)),
]


@pytest.mark.parametrize(("mask", "said"), MASKS)
def test_a_wrong_mask_is_one_line(mask: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match="allowed") as raised:
        make(RouterConfig(4, 1))(draw(6, H), mask)
    assert str(raised.value) == (
        f"mask {said} of tokens [6, 5]; allowed: torch.bool [6] or [B, S] with B · S = 6 on 'cpu', True for real tokens"
    )


# The load and the bias update.


def test_load_counts_choices_of_training_forwards_only() -> None:
    router = make(RouterConfig(6, 2))
    total = [0] * 6
    for seed in range(3):
        for expert in router(draw(9, H, seed=seed))[0].flatten().tolist():
            total[expert] += 1
    with torch.no_grad():  # an evaluation of a model that was left in training mode
        router(draw(9, H))
    router.eval()
    router(draw(9, H))
    assert router.load.tolist() == total
    assert sum(total) == 3 * 9 * 2
    assert set(router.state_dict()) == {"gate.weight", "correction_bias"}


def test_update_moves_each_bias_by_the_rate_towards_the_mean_load() -> None:
    router = make(RouterConfig(5, 1, score="sigmoid"), torch.float32, bias_seed=None)
    router.load.copy_(torch.tensor([2**53 + 1, 2**53 - 1, 2**53, 2**53 + 3, 2**53 - 3]))  # no float tells them apart
    router.update_correction_bias(0.25)
    assert router.correction_bias.tolist() == [-0.25, 0.25, 0.0, -0.25, 0.25]
    assert router.load.tolist() == [0] * 5


def test_an_update_between_forward_and_backward_leaves_the_gradient_alone() -> None:
    grads = []
    for update in (False, True):
        router = make(RouterConfig(6, 2, score="sigmoid", aux_coefficient=0.3, z_coefficient=0.2))
        _, weights = router(draw(9, H))
        if update:
            router.update_correction_bias(0.5)
            assert router.correction_bias.abs().max() > 0.4
        weights.square().sum().backward()
        grads.append(router.gate.weight.grad)
    assert torch.equal(*grads)


@over(2)
def test_update_sums_the_load_over_ranks(rank: int, size: int) -> None:
    router = make(RouterConfig(4, 1), torch.float32, bias_seed=None)
    router.load.copy_(torch.tensor([[6, 2, 0, 0], [0, 2, 5, 1]][rank]))  # together 6 4 5 1, mean 4
    router.update_correction_bias(0.5, dist.group.WORLD)
    assert router.correction_bias.tolist() == [-0.5, 0.0, -0.5, 0.5]


def test_copies_of_a_shared_router_know_no_ranks() -> None:
    class Counted:
        def add_up(self, load: Tensor) -> None:
            load.copy_(torch.tensor([6, 4, 5, 1]))

    counted = Counted()
    router = make(RouterConfig(4, 1), torch.float32, bias_seed=None)
    router.share(counted.add_up)
    for copied in (deepcopy(router), pickle.loads(pickle.dumps(router))):
        copied.update_correction_bias(0.5)
        assert not copied.correction_bias.any()
    router.update_correction_bias(0.5)
    assert router.correction_bias.tolist() == [-0.5, 0.0, -0.5, 0.5]
    del counted
    router.update_correction_bias(0.5)  # alone again
    assert router.correction_bias.tolist() == [-0.5, 0.0, -0.5, 0.5]


# Bad configurations.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0, "top_k": 1}, "experts=0; allowed: 1 or more"),
        ({"experts": 8, "top_k": 9}, "top_k=9 of 8 experts; allowed: 1 to 8"),
        ({"experts": 8, "top_k": 0}, "top_k=0; allowed: 1 or more"),
        ({"score": "tanh"}, "score='tanh'; allowed: softmax or sigmoid"),
        ({"groups": 3}, "8 experts cannot be divided into groups=3; allowed: 1, 2, 4, 8"),
        ({"groups": 0}, "groups=0; allowed: 1 or more"),
        ({"groups": 4, "top_groups": 5}, "top_groups=5 of 4 groups; allowed: 1 to 4"),
        ({"groups": 4, "top_groups": 0}, "top_groups=0; allowed: 1 or more"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k=3 of 2 experts in 1 of 4 groups; allowed: 1 to 2"),
        ({"top_k": 1.5}, "top_k=1.5; allowed: a whole number, 1 or more"),
        ({"scaling": 0.0}, "scaling=0.0; allowed: a finite number, more than 0"),
        ({"scaling": "2"}, "scaling='2'; allowed: a finite number, more than 0"),
        ({"z_coefficient": None}, "z_coefficient=None; allowed: a finite number, 0 or more"),
        ({"normalize": "yes"}, "normalize='yes'; allowed: True or False"),
        ({"scaling": math.nan}, "scaling=nan; allowed: a finite number, more than 0"),
        ({"aux_coefficient": -0.1}, "aux_coefficient=-0.1; allowed: a finite number, 0 or more"),
        ({"z_coefficient": -1.0}, "z_coefficient=-1.0; allowed: a finite number, 0 or more"),
    ],
)
def test_bad_configurations_say_what_is_allowed(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match="allowed") as raised:
        RouterConfig(**{"experts": 8, "top_k": 2} | options)
    assert str(raised.value) == message


def test_routers_and_tokens_of_another_kind_say_what_is_allowed() -> None:
    config = RouterConfig(experts=8, top_k=2)
    for given, message in (
        (("a", config), "hidden='a'; allowed: a whole number, 1 or more"),
        ((8, 3), "config=3; allowed: RouterConfig"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            Router(*given)
    layer = MoE(8, 16, config)
    for tokens, found in (
        (torch.zeros(3, 9), "torch.float32 [3, 9]; allowed: floating [..., 8]"),
        (torch.zeros(()), "torch.float32 []; allowed: floating [..., 8]"),
        (torch.ones(3, 8, dtype=torch.int64), "torch.int64 [3, 8]; allowed: floating [..., 8]"),
        ("x", "of type str; allowed: a tensor [..., 8]"),
    ):
        for module in (layer, layer.router):
            with pytest.raises(ValueError, match=f"^{re.escape(f'tokens {found}')}$"):
                module(tokens)
    for group in (3, "ep"):
        with pytest.raises(ValueError, match=f"^group={group!r}; allowed: ProcessGroup or None$"):
            MoE(8, 16, config, group=group)


@pytest.mark.parametrize("rate", [math.nan, math.inf, "0.1", None])
def test_a_rate_that_is_no_number_is_named(rate: object) -> None:
    with pytest.raises(ValueError, match=r"^rate=.*; allowed: a finite number$"):
        Router(8, RouterConfig(4, 2)).update_correction_bias(rate)  # type: ignore[arg-type]
