"""Experts: copies, and what they cannot be called with. For their values see test_layer.py and tests/engine."""

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from overlap1f1b.kernels.fp8 import check_device
from overlap1f1b.moe import Experts, GroupedExperts, MoE, RouterConfig
from tests.ranks import over

T, K, E, H = 5, 2, 4, 8
TOKENS, WEIGHTS = torch.ones(T, H), torch.ones(T, K)
INDICES = torch.arange(T * K).view(T, K) % E


@pytest.fixture
def experts() -> GroupedExperts:
    return GroupedExperts(E, H, 3)


WRONG = [
    (TOKENS[:4], INDICES, WEIGHTS, "tokens torch.float32 [4, 8] with indices [5, 2]; allowed: [5, 8]"),
    (TOKENS[:, :7], INDICES, WEIGHTS, "tokens torch.float32 [5, 7] with indices [5, 2]; allowed: [5, 8]"),
    (TOKENS[None], INDICES, WEIGHTS, "tokens torch.float32 [1, 5, 8] with indices [5, 2]; allowed: [5, 8]"),
    (TOKENS, INDICES[:, 0], WEIGHTS, "indices torch.int64 [5]; allowed: torch.int64 [T, K]"),
    (TOKENS, INDICES.float(), WEIGHTS, "indices torch.float32 [5, 2]; allowed: torch.int64 [T, K]"),
    (TOKENS, INDICES, WEIGHTS[:, :1], "weights torch.float32 [5, 1]; allowed: floating, of the indices' [5, 2]"),
    ("x", INDICES, WEIGHTS, "tokens='x'; allowed: a tensor"),
    (TOKENS, INDICES, None, "weights=None; allowed: a tensor"),
    (TOKENS, INDICES, WEIGHTS.long(), "weights torch.int64 [5, 2]; allowed: floating, of the indices' [5, 2]"),
]


@pytest.mark.parametrize(("tokens", "indices", "weights", "error"), WRONG)
def test_shapes_and_dtypes(
    experts: GroupedExperts, tokens: Tensor, indices: Tensor, weights: Tensor, error: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        experts(tokens, indices, weights)


def test_precisions_and_sizes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, precision, error in (
        ((16, 16), "fp4", "precision='fp4'; allowed: fp8, mxfp8, or None"),
        ((24, 16), "fp8", "hidden=24 with precision='fp8'; allowed: multiples of 16"),
        ((16, 40), "fp8", "intermediate=40 with precision='fp8'; allowed: multiples of 16"),
        ((32, 48), "mxfp8", "intermediate=48 with precision='mxfp8'; allowed: multiples of 32"),
    ):
        for build in (partial(GroupedExperts, E, *sizes), partial(MoE, *sizes, RouterConfig(E, K))):
            with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
                build(precision=precision)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    on_a_gpu: Any = SimpleNamespace(is_cuda=True, device="cuda")
    with pytest.raises(
        ValueError, match=r"^precision='fp8' on a GPU of compute capability 8\.0; allowed: 9\.0, or 'mxfp8'"
    ):
        check_device(on_a_gpu)


def test_shapes_are_seen_before_whatever_stands_in_for_the_forward(experts: GroupedExperts) -> None:
    """The engine puts a callable of its own there while a step lasts."""
    experts.__dict__["forward"] = lambda *_: pytest.fail("called")
    with pytest.raises(ValueError, match=r"^tokens torch\.float32 \[4, 8\]"):
        experts(TOKENS[:4], INDICES, WEIGHTS)


@pytest.mark.parametrize(("shift", "expert"), [(1, 4), (9, 12), (-2, -2), (-7, -7)])
def test_an_expert_that_is_none(experts: GroupedExperts, shift: int, expert: int) -> None:
    with pytest.raises(ValueError, match=f"^indices name expert {expert}; allowed: 0 to 3, or -1 for none$"):
        experts(TOKENS, INDICES + shift, WEIGHTS)


@over(2)
def test_a_token_without_an_expert_goes_nowhere(rank: int, size: int) -> None:
    """To the bit what is left without these tokens; on the last rank there are none but these, in some calls."""
    for real in (torch.tensor([True, False, True, True, False]), torch.zeros(5, dtype=torch.bool)):
        here = real if rank else ~real
        tokens, cotangent = torch.randn(2, 5, H)
        tokens[~here] = torch.nan
        weights, indices = torch.rand(5, E).topk(3)
        indices[0, 1] = -1  # of a token that has other experts
        found = []
        for rows, given in ((slice(None), indices.where(here[:, None], -1)), (here, indices[here])):
            for group in (dist.group.WORLD, None):
                experts = GroupedExperts(E, H, 3, group=group)
                experts.reset_parameters(torch.Generator().manual_seed(1), std=0.3)
                leaves = [t[rows].clone().requires_grad_() for t in (tokens, weights)]
                y = experts(leaves[0], given, leaves[1])
                y.backward(cotangent[rows])
                every = (y, *(leaf.grad for leaf in leaves))
                if rows is not here:
                    assert not any(t[~here].any() for t in every)
                    every = tuple(t[here] for t in every)
                found.append((*every, *(p.grad for p in experts.parameters())))
        for padded, alone in zip(found[:2], found[2:], strict=True):
            assert all(map(torch.equal, padded, alone))


@pytest.mark.parametrize("real", [0, 1, 4, 5])
def test_on_a_device_nobody_knows_how_many_tokens_have_no_expert(real: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the host does not look at indices, so there is a row for each choice, and the last ones are nobody's."""
    here = torch.arange(5).roll(2) < real
    tokens, cotangent = torch.randn(2, 5, H)
    weights, indices = torch.rand(5, E).topk(3)
    given, found = indices.where(here[:, None], -1), []
    for on_device in (False, True):
        experts = GroupedExperts(E, H, 3)
        experts.reset_parameters(torch.Generator().manual_seed(1), std=0.3)
        leaves = [t.clone().requires_grad_() for t in (tokens, weights)]
        with monkeypatch.context() as patched:
            if on_device:
                patched.setattr(torch.Tensor, "is_cpu", False, raising=False)
            y = experts(leaves[0], given, leaves[1])
            y.backward(cotangent)
        found.append([y, *(leaf.grad for leaf in leaves), *(p.grad for p in experts.parameters())])
    assert all(map(torch.equal, *found))


@over(2, timeout=60)
def test_the_same_expert_twice_counts_twice(rank: int, size: int) -> None:
    """As where the table of a model that routes by hashes is still all zeros; more often than a rank has experts."""
    indices = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 0]])
    whole, own = GroupedExperts(2, H, 3), GroupedExperts(2, H, 3, group=dist.group.WORLD)
    for experts in (whole, own):
        experts.reset_parameters(torch.Generator().manual_seed(1), std=0.3)
    tokens = torch.randn(3, H, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    wanted, got = whole(tokens, indices, weights), own(tokens, indices, weights)
    assert torch.allclose(got, wanted, atol=1e-6)
    for one, other in zip(*(torch.autograd.grad(y.sum(), (tokens, weights)) for y in (wanted, got)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "experts=0; allowed: 1 or more"),
        ({"hidden": 1.5}, "hidden=1.5; allowed: a whole number, 1 or more"),
        ({"weights_in": "input"}, "weights_in='input'; allowed: combine or activation"),
        ({"group": "ep"}, "group='ep'; allowed: ProcessGroup or None"),
        ({"dtype": "float32"}, "dtype='float32'; allowed: torch.dtype or None"),
        ({"dtype": torch.int64}, "dtype=torch.int64; allowed: a floating one, such as torch.bfloat16"),
        ({"device": "gpu0"}, "device='gpu0': Invalid device string: 'gpu0'; allowed: a torch.device, or its name"),
        ({"device": 3.5}, "device=3.5; allowed: torch.device, str, whole numbers, or None"),
        ({"intermediate": None}, "intermediate=None; allowed: a whole number, 1 or more"),
    ],
)
def test_what_experts_are_not_made_of(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        GroupedExperts(**{"experts": E, "hidden": H, "intermediate": 3, **options})


def test_a_backward_under_autocast(experts: GroupedExperts) -> None:
    tokens, weights = (torch.randn_like(t).requires_grad_() for t in (TOKENS, WEIGHTS))
    found = []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = experts(tokens, INDICES, weights)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            found.append(torch.autograd.grad(y.sum(), (tokens, weights)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=float(one.abs().max()) * 0.02)


@over(2)
def test_indices_of_any_strides(rank: int, size: int) -> None:
    experts = GroupedExperts(4, 8, 8, group=dist.group.WORLD)
    tokens, scores = torch.randn(5, 8), torch.rand(5, 4)
    weights, indices = scores.topk(2)
    turned = indices.T.contiguous().T
    assert turned.stride() != indices.stride()
    assert torch.equal(experts(tokens, turned, weights), experts(tokens, indices, weights))


@over(2, timeout=30)
def test_a_copy_has_parameters_of_its_own_and_shares_the_group(rank: int, size: int) -> None:
    """As a moving average of the weights needs it."""
    experts = GroupedExperts(E, H, 3, group=dist.group.WORLD)
    experts.reset_parameters(torch.Generator().manual_seed(rank), std=0.3)
    wanted = experts(TOKENS, INDICES, WEIGHTS)
    for copied in (deepcopy(experts), AveragedModel(experts).module):
        assert torch.equal(copied(TOKENS, INDICES, WEIGHTS), wanted)
        assert copied.group is experts.group
        assert copied.gate_up is not experts.gate_up
        assert copied.gate_up.data_ptr() != experts.gate_up.data_ptr()


class Scaled(Experts):
    """Experts of a user's own; `lost` rows are not returned."""

    def __init__(self, lost: int = 0) -> None:
        super().__init__()
        self.share(4, None)
        self.lost = lost

    def compute(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return rows[self.lost :] * 2


def test_experts_of_a_users_own_check_what_they_are_given() -> None:
    tokens, weights, indices = torch.randn(6, 8), torch.rand(6, 2), torch.randint(4, (6, 2))
    assert torch.allclose(Scaled()(tokens, indices, weights), 2 * tokens * weights.sum(1, keepdim=True))
    with pytest.raises(ValueError, match=r"^tokens torch.float32 \[5, 8\] with indices \[6, 2\]; allowed: \[6, 8\]"):
        Scaled()(tokens[1:], indices, weights)
    with pytest.raises(ValueError, match=r"^compute of Scaled returned \[11, 8\] for 12 rows; allowed: a row for each"):
        Scaled(lost=1)(tokens, indices, weights)
