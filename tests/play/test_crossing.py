"""Tensors that cross an exchange, in whatever call they are used: gradients equal to a plain loop, bit by bit."""

import copy
import gc
import importlib
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import BaseTorchFunctionMode

from overlap1f1b import Engine, build_schedule
from overlap1f1b.cut.edges import LAST
from overlap1f1b.plan import Overlap, Recompute
from overlap1f1b.play import crossing
from overlap1f1b.play.crossing import eager, functions_cross, running_mode
from overlap1f1b.transport.calls import exchange
from tests import models
from tests.engines import make
from tests.play.plain import HIDDEN, batch, compare, engine_of
from tests.ranks import Ranks, over
from tests.tiers import wide

Exchanging = Callable[[Tensor], Tensor]
Body = Callable[["Block", Tensor, Exchanging], Tensor]


class Block(nn.Module):
    """Layers for a body that is given the block, its input, and an exchange."""

    def __init__(self, group: dist.ProcessGroup | None, body: Body) -> None:
        super().__init__()
        self.group, self.body = group, body
        self.a, self.b, self.c = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.attention = nn.MultiheadAttention(HIDDEN, 2)
        self.left: list[Tensor] = []  # terms for the loss
        self.kept: list[Tensor] = []  # made of weights, for all microbatches of a step

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x, lambda rows: exchange(rows, None, None, self.group))


class Fills(torch.autograd.Function):
    """Takes tensors in a list and a dictionary, and puts another one into the list."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filled: list[Tensor]) -> Tensor:
        filled.append(x.detach() * 2)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class Product(torch.autograd.Function):
    """Product of two tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * y, grads[0] * x


product = Product.apply
DIRECT = torch.__version__ >= "2.14"  # product is C++ itself
Pair = namedtuple("Pair", "first second")


def list_is_filled(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h, filled = s.a(x), [torch.zeros(1)]
    y = Fills.apply(ex(h), filled)
    return ex(y) + filled[1]


def tuples_and_dictionaries(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    pair, kept = Pair(s.a(x), s.b(x)), s.a(x).topk(HIDDEN)
    y = ex(s.c(x))
    return torch.stack(pair).sum(0) + torch.cat(kept[:1]) + sum(OrderedDict(a=kept.values, b=y).values())


def added_in_place(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x)
    y = ex(s.b(x))
    h += s.c(y)
    return ex(y) + h


def received_in_place(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    y = ex(s.a(x))
    y *= s.scale
    y.add_(1)
    return ex(F.relu(y, inplace=True))


def written_in_place(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x) + 0
    y = ex(s.b(x))
    h[:2] = s.c(y)[:2]
    torch._foreach_mul_([h], [y])
    return s.c(h)


def kept_apply(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x) + 0
    return product(h, ex(s.b(x)))


def inside_vmap(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x) * s.scale
    y = ex(s.b(x))
    z = torch.vmap(lambda row: (h * row.sin()).mean(0) * s.scale)(y)
    return z + torch.vmap(torch.mul)(h.clone(), y)


def used_under_a_condition(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    first = bool(x.sum() > 0)  # other microbatches on other ranks
    y = ex(s.a(x) * s.scale if first else s.a(x))
    z = ex(s.b(y) if first else y)
    return z if first else s.b(z) * s.scale


def one_weight_in_several_calls(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = F.linear(x, s.a.weight)
    y = ex(s.b(h))
    z = ex(F.linear(y, s.a.weight) * s.scale)
    return z * s.scale + s.b(z) + h @ s.a.weight


def attention_twice(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h, _ = s.attention(x, x, x, need_weights=False)
    y = ex(s.a(h))
    k, _ = s.attention(y, h, h)
    return ex(k) + h


def under_autocast(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # each use casts the weight for itself
        h = x @ s.c.weight
        y = ex(s.b(h).float())
        return (F.linear(s.b(y), s.c.weight) + h).float()


def changed_without_a_graph(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x)
    z = h + ex(s.b(x))
    with torch.no_grad():
        h.mul_(2)
    z = z + h
    h.detach().clamp_(-1, 1)
    return z + h


EQUAL: list[Body] = [
    changed_without_a_graph,
    list_is_filled,
    tuples_and_dictionaries,
    added_in_place,
    received_in_place,
    written_in_place,
    *([] if DIRECT else [kept_apply]),
    inside_vmap,
    used_under_a_condition,
    one_weight_in_several_calls,
    attention_twice,
    under_autocast,
]


@over(2, timeout=120)
def test_two_ranks(rank: int, size: int) -> None:
    group = (mesh := init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))).get_group("ep")
    models_of = {body.__name__: lambda body=body: nn.Sequential(Block(group, body)) for body in EQUAL}  # type: ignore[misc]
    verify = under_autocast.__name__  # here the engine compares, too, and finds no difference
    problems = [p for name, build in models_of.items() for p in compare(name, build, mesh, verify=name == verify)]
    assert not problems, problems


def item_behind_a_third(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x) + 0
    y = ex(s.b(x))
    h[:2] = s.c(y)[:2]
    return ex(y) + h


def view_of_what_has_changed(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x) + 0
    view = h[:3]
    y = ex(s.b(x))
    h.mul_(s.scale)
    return s.c(y) + torch.cat([view, view])


def base_of_what_has_changed(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x) + 0
    view = h[:3]
    y = ex(s.b(x))
    view.mul_(2)
    return ex(y) + h


def as_an_argument_of_vmap(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x) + 0
    return torch.vmap(torch.mul)(h, ex(s.b(x)))  # type: ignore[no-any-return]


def view_of_what_has_entered(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x)
    view = h[:3]
    z = h + ex(s.b(x))
    view.mul_(2)
    return z + h


def gradient_of_an_earlier_tensor(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    h = s.a(x)
    y = ex(h)
    return y + torch.autograd.grad(y.square().sum(), h, retain_graph=True)[0]


REFUSED: list[Body] = [
    item_behind_a_third,
    view_of_what_has_changed,
    base_of_what_has_changed,
    view_of_what_has_entered,
    gradient_of_an_earlier_tensor,
    as_an_argument_of_vmap,
    *([kept_apply] if DIRECT else []),
]


def _refused(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    told = []
    for body in REFUSED:
        engine = engine_of(nn.Sequential(Block(mesh.get_group("ep"), body)), mesh, timeout=10)
        data = batch(rank)
        engine.step(data[0], target=data[1])
        try:
            engine.step(data[0], target=data[1])
            told.append(f"{body.__name__}: no error")
        except (ValueError, RuntimeError) as error:
            told.append(str(error).splitlines()[0])
    return told


def test_uses_that_are_refused_in_one_line(ranks2: Ranks) -> None:
    wanted = (
        "block 0 (Block) changes a tensor in place behind an exchange that it made before it, and then uses ",
        "block 0 (Block) uses a tensor of AddBackward0 behind exchange 0, in a call that torch does not show",
        "a block calls torch.autograd.grad behind an exchange for a tensor that it made before it; allowed: ",
    )
    every = ranks2.run(_refused, timeout=60)
    for lines in zip(*every, strict=True):
        assert any(line.startswith(wanted) for line in lines), lines


def left_without_an_exchange(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    s.left.append(s.a(x).mean())
    return x + s.a(x)


def test_a_tensor_that_another_block_has_left() -> None:
    """A warning names it: a loss of another microbatch was taken in silence, or torch spoke of a second backward."""
    model = nn.Sequential(*(Block(None, left_without_an_exchange) for _ in range(2)))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() + model[0].left.pop()

    engine = Engine(model, build_schedule("combined_1f1b", microbatches=2), loss_fn=loss_fn)
    data = torch.randn(2, 4, HIDDEN)
    said = r"block 1 \(Block\) or the loss uses a tensor of MeanBackward0 that another block"
    with pytest.warns(UserWarning, match=said), suppress(RuntimeError):
        engine.step(data[0], target=data[1])


def left_of_a_layer(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    s.left.append(s.a(x).square().mean())
    return s.b(ex(s.c(x)))


def left_of_the_input(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    s.left.append(x.square().mean())
    return s.b(ex(s.c(x)))


def left_of_a_parameter(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    s.left.append((x * s.scale).mean())
    return s.b(ex(s.c(x)))


def left_of_received_rows(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    y = ex(s.c(x))
    s.left.append(y.square().mean())
    return s.b(ex(y))


def sum_of_weights(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    y = ex(s.a(x))
    if not s.kept:
        s.kept.append(s.b.bias + s.c.bias)
    return y + s.kept[0]


def views_of_a_weight(s: Block, x: Tensor, ex: Exchanging) -> Tensor:
    y = ex(s.a(x))
    if not s.kept:
        s.kept.append(s.attention.in_proj_weight[:HIDDEN].triu() + s.attention.in_proj_weight[:HIDDEN].triu(1).mT)
    return F.linear(y, s.kept[0])


def _left(rank: int, size: int, body: Body, place: str, overlap: Overlap, microbatches: int) -> list[str]:
    """Return what differs from a plain loop in four steps, or the error."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))

    def build() -> tuple[nn.Sequential, Block]:
        torch.manual_seed(1)
        keeps = Block(mesh.get_group("ep"), body)
        layer = [nn.Linear(HIDDEN, HIDDEN)]
        return nn.Sequential(*(layer * (place == "second")), keeps), keeps

    def loss_of(keeps: Block) -> Callable[[Tensor, Tensor], Tensor]:
        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss = (output - target).square().mean() + target.sum().exp().clamp(max=9) * sum(keeps.left)
            keeps.left.clear()
            return loss

        return loss_fn

    data, (plain, keeps) = batch(rank, microbatches), build()
    _, expected = models.plain_gradients(plain, *data, microbatches, 1 / size, loss_of(keeps))
    model, keeps = build()
    program = build_schedule("combined_1f1b", microbatches=microbatches)
    engine = engine_of(model, mesh, timeout=10, overlap=overlap, program=program, loss_fn=loss_of(keeps))
    told = list[str]()
    for _ in range(4):
        model.zero_grad()
        keeps.kept.clear()
        try:
            engine.step(data[0], target=data[1])
        except (ValueError, RuntimeError) as error:
            return [*told, str(error).splitlines()[0]]
        told += models.equal(models.gradients(model), expected)
    return told


LEAVES: list[tuple[Body, str]] = [
    (left_of_a_layer, "alone"),
    *wide((left_of_a_parameter, "alone"), (left_of_the_input, "second"), (left_of_received_rows, "alone")),
]


@pytest.mark.filterwarnings("ignore:block 1")  # the first step warns of what the block before has left
@pytest.mark.parametrize(("body", "place"), LEAVES)
def test_a_list_that_another_microbatch_has_filled(ranks2: Ranks, body: Body, place: str) -> None:
    """Several forwards are open at once: the loss of one finds what another has left, and multiplies it by its own."""
    said = re.compile(
        r"block \d \(\w+\) or the loss uses a tensor of \w+ that another microbatch has made and left in a"
    )
    every = ranks2.run(_left, body, place, 3, 8, timeout=60)
    assert any(said.match(lines[-1]) and len(lines) == 1 for lines in every), every


APART: list[tuple[Body, str, Overlap, int]] = [
    (left_of_a_layer, "alone", "serial", 3),
    (sum_of_weights, "alone", 3, 8),
    (left_of_a_layer, "alone", "pairs", 3),
    (sum_of_weights, "second", 3, 8),
    (views_of_a_weight, "alone", 3, 8),
    (views_of_a_weight, "second", 3, 8),
]


@pytest.mark.parametrize("cases", [APART[:2], *wide(APART[2:])])
@over(2, timeout=60)
def test_a_list_that_no_other_microbatch_fills(rank: int, size: int, cases: list[Any]) -> None:
    """And what is made of weights alone, which microbatches may share, as with ``parametrize.cached``."""
    problems = [line for case in cases for line in _left(rank, size, *case)]
    assert not problems, problems


class Turned(nn.Module):
    """Keeps a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight.t() if self.kept is None else self.kept
        return x @ self.weight


@pytest.mark.filterwarnings("error:block")
def test_a_view_of_a_weight_that_another_block_has_made() -> None:
    """As autocast keeps casts of weights: it may be walked any number of times."""
    model = nn.Sequential(Turned(), nn.Linear(HIDDEN, HIDDEN))
    plain = copy.deepcopy(model)
    data = torch.randn(2, 4, HIDDEN)

    def loss_of(one: nn.Sequential) -> Callable[..., Tensor]:
        return lambda output, target: (output @ one[0].kept - target).square().mean()

    Engine(model, build_schedule("sequential", microbatches=2), loss_fn=loss_of(model)).step(data[0], target=data[1])
    _, expected = models.plain_gradients(plain, *data, 2, loss_fn=loss_of(plain))
    torch.testing.assert_close(models.gradients(model), expected)


class AddsToMain(torch.autograd.Function):
    """Product with a weight, to whose ``main_grad`` its backward adds, as Megatron's fused accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad += (x * grads[0]).sum((0, 1))
        weight.grad_added_to_main_grad = True
        return grads[0] * weight, torch.full_like(weight, torch.nan)


class UsedTwice(models.Block):
    """Uses the weight of an ``nn.Linear`` on both sides of its experts, without a call of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.H, 1, bias=False)
        self.scale: Any = self.layer.weight
        self.scale.main_grad, self.scale.grad_added_to_main_grad = torch.zeros(1, models.H), False
        self.scale.register_post_accumulate_grad_hook(self._let_go)
        self.told: list[bool] = []

    def _let_go(self, scale: Any) -> None:
        self.told.append(scale.grad_added_to_main_grad)
        scale.grad, scale.grad_added_to_main_grad = None, False

    def forward(self, x: Tensor) -> Tensor:
        return AddsToMain.apply(super().forward(AddsToMain.apply(x, self.scale)), self.scale)


@pytest.mark.parametrize("overlap", ["serial", 2])
def test_a_backward_may_set_an_attribute_of_a_weight(overlap: Overlap) -> None:
    """Hooks of the weight see it, though what has entered a segment is another tensor."""

    def built() -> tuple[nn.Sequential, UsedTwice]:
        embedding, *rest = models.build()
        torch.manual_seed(1)
        block = UsedTwice()
        return nn.Sequential(embedding, block, *rest), block

    data = models.batch(3)
    plain, expected = built()
    models.plain_gradients(plain, *data, 3)
    model, block = built()
    engine = make(model, build_schedule("combined_1f1b", microbatches=3), overlap=overlap)
    for _ in range(2):
        block.scale.main_grad.zero_()
        engine.step(data[0], target=data[1])
        torch.testing.assert_close(block.scale.main_grad, expected.scale.main_grad)
    assert all(block.told)
    assert block.told


class ChangesItsInput(nn.Module):
    """Changes its input in place before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.H, models.H)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.linear(x) + x


@pytest.mark.parametrize("overlap", ["serial", "pairs", 3])
def test_full_backward_hooks_fire_once_and_an_input_may_be_changed(overlap: Overlap) -> None:
    def built() -> tuple[nn.Sequential, list[str]]:
        embedding, *rest = models.build()
        model, fired = nn.Sequential(embedding, ChangesItsInput(), *rest), list[str]()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.register_full_backward_hook(lambda *_, name=name: fired.append(name))
        return model, fired

    data = models.batch(4)
    plain, expected = built()
    _, grads = models.plain_gradients(plain, *data, 4)
    model, fired = built()
    engine = make(model, build_schedule("combined_1f1b", microbatches=4), overlap=overlap, verify=False)
    for _ in range(3):
        model.zero_grad()
        fired.clear()
        engine.step(data[0], target=data[1])
        assert not models.equal(models.gradients(model), grads)
        assert sorted(fired) == sorted(expected)


@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_an_input_that_is_needed_again_may_not_be_changed(recompute: Recompute) -> None:
    embedding, *rest = models.build()
    model = nn.Sequential(embedding, ChangesItsInput(), *rest)
    engine = make(model, build_schedule("sequential", microbatches=2), recompute=recompute)
    with pytest.raises(ValueError, match=r"input of block 1 \(ChangesItsInput\) was changed in place"):
        engine.step(*models.batch(2))


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_mode_that_comes_back_after_ctrl_c_does_nothing() -> None:
    """Torch takes a mode off while it is called, and puts it back when Python collects what was interrupted."""
    left: list[Any] = []

    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            if not left:
                left.append(running_mode())
                raise KeyboardInterrupt
            return F.linear(x * self.scale, self.linear.weight) * self.scale

    torch.manual_seed(0)
    model, x = nn.Sequential(Interrupted(), nn.Linear(HIDDEN, HIDDEN)), torch.randn(4, HIDDEN)
    engine = Engine(model, build_schedule("sequential", microbatches=2), loss_fn=F.mse_loss)
    with pytest.raises(KeyboardInterrupt):
        engine.step(x, target=x)
    assert left[0] is not None
    torch._C._push_on_torch_function_stack(left[0])
    try:
        for part in x.chunk(2):
            (F.mse_loss(model(part), part) / 2).backward()
        plain: list[Any] = [p.grad for p in model.parameters()]
        for _ in range(3):
            model.zero_grad()
            engine.step(x, target=x)
            found: list[Any] = [p.grad for p in model.parameters()]
            assert all(map(torch.equal, found, plain))
    finally:
        torch._C._pop_torch_function_stack()


def test_what_ctrl_c_has_left_of_a_step_is_not_undone_in_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finishes a generator when it collects it: Functions were called in C++ again, inside the later step."""

    step = functions_cross()
    step.__enter__()
    left = [LAST.__dict__["crossing"]]
    with monkeypatch.context() as patch:
        patch.setattr(type(left[0]), "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step.__exit__(None, None, None)
    plain = LAST.__dict__["apply"]
    with functions_cross():
        left.clear()
        gc.collect()
        assert LAST.__dict__["apply"] is not plain
    assert "apply" not in LAST.__dict__


def test_changes_that_ctrl_c_has_cut_short_are_made_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step ran without them: tensors of an earlier segment did not enter the later one."""

    with monkeypatch.context() as patch:
        patch.setattr(crossing, "applying", interrupted)
        with pytest.raises(KeyboardInterrupt):
            functions_cross().__enter__()
    with functions_cross():
        assert "apply" in LAST.__dict__


def test_a_stance_that_ctrl_c_has_left_ends_with_the_step() -> None:
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    before = eval_frame._stance

    def ends(*_: Any) -> None:
        del stance.__exit__
        interrupted()

    with functions_cross():
        segment: Any = eager(mode=True)
        segment.__enter__()
        stance: Any = LAST.__dict__["crossing"].stance
        stance.__exit__ = ends
        with pytest.raises(KeyboardInterrupt):
            segment.__exit__(None, None, None)
        assert eval_frame._stance != before
    assert eval_frame._stance == before


def test_hooks_and_modes_that_ctrl_c_has_left_end_with_the_step() -> None:
    """Later steps met them: with recompute each raised an error."""

    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch._C._autograd._push_saved_tensors_default_hooks(torch.neg, torch.neg)
            torch._C._push_on_torch_function_stack(BaseTorchFunctionMode())
            raise KeyboardInterrupt

    model, x = nn.Sequential(Interrupted(HIDDEN, HIDDEN)), torch.randn(4, HIDDEN)
    engine = Engine(model, build_schedule("sequential", microbatches=2), loss_fn=F.mse_loss)
    with pytest.raises(KeyboardInterrupt):
        engine.step(x, target=x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch._C._len_torch_function_stack()
