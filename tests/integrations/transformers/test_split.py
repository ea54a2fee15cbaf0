"""Models of transformers under the engine, against their own forward and backward in one process."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

pytest.importorskip("transformers")

import transformers

from overlap1f1b.integrations.transformers import SplitModel, split_model
from overlap1f1b.moe import Experts
from overlap1f1b.plan import Overlap, Recompute
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport.exchange import PeerExchange
from tests import models
from tests.integrations.transformers import tiny
from tests.ranks import Ranks, over
from tests.tiers import first, wide

PLAYED: list[tuple[str, Overlap]] = [("sequential", "pairs"), ("combined_1f1b", 3), ("dualpipev", "pairs")]
MICROBATCHES = 4


def parts_of(stages: SplitModel) -> dict[str, tuple[int, int]]:
    """Return this rank's index and the number of ranks that share a parameter's experts."""
    return {
        f"{path}.{label}": (module.exchange.rank, module.exchange.ranks)
        for stage in stages.values()
        for path, module in stage.named_modules()
        if isinstance(module, Experts)
        for label, _ in module.named_parameters()
    }


def problems_of(stages: SplitModel, expected: dict[str, Tensor], limit: float) -> list[str]:
    """Return the names of this rank's gradients that differ from one process's."""
    found, parts = dict(stages.named_parameters()), parts_of(stages)
    problems = [f"{name} is not a parameter of the model" for name in found.keys() - expected.keys()]
    for name in found.keys() & expected.keys():
        grad = found[name].grad
        grad = torch.zeros_like(found[name]) if grad is None else grad
        rank, ranks = parts.get(name, (0, 1))
        error = tiny.difference(grad, expected[name].chunk(ranks)[rank])
        if not error <= limit:  # also not a number
            problems.append(f"{name} differs by {error:.1e} from one process")
    return problems


def on_one_rank(build: Callable[[], Any], schedule: str, overlap: Overlap, several: float) -> list[str]:
    """Return what differs from a model's own step; ``several`` is the limit where it has more stages than one."""
    tokens, labels = tiny.batch(8)
    losses, expected = tiny.own_gradients(build(), {"input_ids": tokens}, labels, MICROBATCHES)
    program = build_schedule(schedule, ranks=1, microbatches=MICROBATCHES)
    stages = split_model(build(), program)
    result = tiny.engine(stages, program, overlap=overlap).step(tokens, target=labels)
    problems = problems_of(stages, expected, 0.0 if len(stages) == 1 else several)
    return problems + ["losses"] * (list(result.losses) != losses)


@pytest.mark.parametrize(
    ("name", "schedule", "overlap"), [(n, *PLAYED[at]) for n, at in zip(tiny.MODELS, (1, 0, 2, 1), strict=True)]
)
def test_one_rank_is_bit_equal(name: str, schedule: str, overlap: Overlap) -> None:
    """Of several stages sums over router logits have another order."""
    options = {"output_router_logits": True} if name != "deepseek_v3" else {}
    assert on_one_rank(partial(tiny.build, name, **options), schedule, overlap, 1e-6) == []


@pytest.mark.parametrize(  # four layers on one stage, and on two
    ("name", "schedule"),
    first(
        zip(tiny.MODELS, ["sequential", "dualpipev", "dualpipev", "sequential"], strict=True), ("mixtral", "sequential")
    ),
)
def test_recomputed_layers_are_bit_equal(name: str, schedule: str) -> None:
    tokens, labels = tiny.batch(8)
    program = build_schedule(schedule, ranks=1, microbatches=MICROBATCHES)
    expected: dict[str, Tensor] = {}
    modes: list[Recompute] = ["none", "block", "experts", "attention"]
    for mode in modes:
        stages = split_model(tiny.build(name), program, grouped=True)
        tiny.engine(stages, program, recompute=mode).step(tokens, target=labels)
        found = {label: p.grad for label, p in stages.named_parameters() if p.grad is not None}
        expected = expected or found
        assert models.equal(found, expected) == [], mode


@pytest.mark.parametrize("name", ["mixtral", *wide("deepseek_v3")])
@over(2)
def test_checkpoints_of_layers_exchange_nothing_twice(rank: int, size: int, name: str) -> None:
    """All layers, or every second; gradients are equal to the bit."""
    mesh, problems = init_device_mesh("cpu", (1, size), mesh_dim_names=("pp", "ep")), list[str]()
    program = build_schedule("combined_1f1b", microbatches=MICROBATCHES)
    expected: dict[str, Tensor] = {}
    for every in (0, 1, 2):
        model, calls = tiny.build(name), [0] * 4
        if every:
            model.activation_checkpointing_enable(every_n_layers=every)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_pre_hook(partial(_count, calls, number))
        stages = split_model(model, program, mesh)
        with patch.object(PeerExchange, "rows", autospec=True, side_effect=PeerExchange.rows) as travelled:
            tiny.engine(stages, program, mesh, verify=False).step(*tiny.batch(8, seed=rank))
        found = {label: p.grad for label, p in stages.named_parameters() if p.grad is not None}
        found["rows"] = torch.tensor(travelled.call_count)
        expected = expected or found
        problems += [f"{every}: {label}" for label in models.equal(found, expected)]
        again = [MICROBATCHES * (1 + (every > 0 and number % every == 0)) for number in range(4)]
        problems += [f"{every}: attention ran {calls} times, not {again}"] * (calls != again)
    assert not problems, problems


def _count(calls: list[int], number: int, *_: Any) -> None:
    calls[number] += 1


Own = tuple[list[list[Tensor]], dict[str, Tensor]]
"""Losses of a model's own forward for the data of each expert rank, and the gradients of all of it."""


def own_of(whole: Any, microbatches: int, ep: int) -> Own:
    """Return what one process computes for the data of all expert ranks."""
    shards = [tiny.batch(8, seed=seed) for seed in range(ep)]
    every = [tiny.own_gradients(whole, {"input_ids": x}, y, microbatches, 1 / ep) for x, y in shards]
    return [losses for losses, _ in every], every[-1][1]


def compare(
    rank: int,
    size: int,
    build: Callable[[], Any],
    pp: int,
    played: list[tuple[str, Overlap]],
    limit: float,
    parts: int,
    own: Own,
) -> list[str]:
    """Return what differs from one process over stages and expert ranks; overlaps of 3 play in ``parts``."""
    mesh = init_device_mesh("cpu", (pp, size // pp), mesh_dim_names=("pp", "ep"))
    ep_rank = mesh["ep"].get_local_rank()
    (tokens, labels), (every, expected), problems = tiny.batch(8, seed=ep_rank), own, list[str]()
    for schedule, overlap in played:
        program = build_schedule(schedule, ranks=pp, microbatches=MICROBATCHES)
        stages = split_model(build(), program, mesh)
        engine = tiny.engine(stages, program, mesh, overlap=overlap, parts=parts if overlap == 3 else 1)
        result = engine.step(tokens, target=labels)
        found = problems_of(stages, expected, limit)
        for loss, wanted in zip(result.losses, every[ep_rank], strict=bool(result.losses)):
            if not tiny.difference(loss, wanted) <= limit:
                found.append(f"loss {float(loss)} instead of {float(wanted)}")
        problems += [f"{schedule} {overlap}: {problem}" for problem in found]
    return problems


AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CASES = [
    ("mixtral", {**AUXILIARY, "tie_word_embeddings": True}),
    ("qwen3_moe", AUXILIARY),
    ("deepseek_v3", {}),
    ("gpt_oss", AUXILIARY),
]


TWO = {"qwen3_moe": PLAYED[2:], "deepseek_v3": PLAYED[1:2]}
"""What is played over stages and expert ranks of a model, where it is not all."""


@pytest.mark.parametrize(  # four ranks are two stages and two expert ranks, in float64
    ("number", "ranks", "pp"),
    [(0, 2, 2), *wide((1, 2, 1), (2, 2, 1), (3, 2, 2), *((number, 4, 2) for number in range(len(CASES))))],
)
def test_over_ranks(kept: dict[int, Ranks], number: int, ranks: int, pp: int) -> None:
    name, options = CASES[number]
    build = partial(tiny.build, name, double=ranks == 4, **options)
    own, limit = own_of(build(), MICROBATCHES, ranks // pp), 1e-12 if ranks == 4 else 1e-5
    played = TWO.get(name, PLAYED[1:]) if ranks == 4 else PLAYED[1:]
    assert kept[ranks].run(compare, build, pp, played, limit, 2, own) == [[]] * ranks


def _inputs(rows: int) -> dict[str, dict[str, Tensor]]:
    """Return other arguments of a model: padding on the right, sequences packed in one row."""
    right, positions = torch.ones(rows, tiny.S), torch.arange(tiny.S).repeat(rows, 1)
    for row in range(rows):
        right[row, tiny.S - row % 3 :] = 0
        positions[row, 2 + row % 5 :] = torch.arange(tiny.S - 2 - row % 5)
    return {"padded right": {"attention_mask": right}, "packed": {"position_ids": positions}}


@pytest.mark.parametrize(
    ("name", "case"), [("qwen3_moe", "padded right"), ("deepseek_v3", "packed"), ("gpt_oss", "packed")]
)
def test_masks_and_positions(name: str, case: str) -> None:
    """Padding on the left stands in ``test_stage.py``."""
    (tokens, labels), more = tiny.batch(6), _inputs(6)[case]
    if "attention_mask" in more:
        labels = labels.masked_fill(more["attention_mask"] == 0, -100)
    options = {"num_hidden_layers": 2, **(AUXILIARY if name != "deepseek_v3" else {})}
    whole = tiny.build(name, **options)
    losses, expected = tiny.own_gradients(whole, {"input_ids": tokens, **more}, labels, 3)
    without, _ = tiny.own_gradients(whole, {"input_ids": tokens}, labels, 3)
    assert losses[1:] != without[1:]
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=3, chunks=2)
    stages = split_model(tiny.build(name, **options), program, inputs=["input_ids", *more], grouped=True)
    result = tiny.engine(stages, program).step((tokens, *more.values()), target=labels)
    torch.testing.assert_close(torch.stack(result.losses), torch.stack(losses), rtol=1e-6, atol=0)
    assert problems_of(stages, expected, 1e-5) == []


def test_a_mean_over_tokens_and_stages_as_a_module() -> None:
    """A microbatch has fewer labels than the others, and one has none."""
    tokens, labels = tiny.batch(6)
    labels[:2, :6] = -100
    labels[4:] = -100
    model, plain = tiny.build("mixtral"), tiny.build("mixtral")
    loss = plain(tokens, labels=labels, use_cache=False).loss
    loss.backward()
    program = build_schedule("combined_1f1b", microbatches=3)
    stages = split_model(model, program).train()
    engine = tiny.engine(stages, program, count_tokens=stages.count_tokens)
    torch.testing.assert_close(engine.step(tokens, target=labels).loss, loss.detach())
    assert problems_of(stages, tiny.gradients(plain), 1e-5) == []
    stages.eval()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "x"}, "model='x'; allowed: Module"),
        ({"program": "1f1b"}, "program='1f1b'; allowed: Program"),
        ({"program": build_schedule("1f1b", ranks=2, microbatches=4)}, "program '1f1b' over 2 pipeline ranks on a me"),
        ({"mesh": "cpu"}, "mesh='cpu'; allowed: DeviceMesh or None"),
        ({"inputs": "input_ids"}, "inputs='input_ids'; allowed: a list of str"),
        ({"inputs": 5}, "inputs=5; allowed: a list of str"),
        ({"block_weights": "11"}, "block_weights='11'; allowed: a list of numbers or None"),
        ({"grouped": "yes"}, "grouped='yes'; allowed: True, False, or None"),
    ],
)
def test_values_of_another_kind(given: dict[str, Any], message: str) -> None:
    program = build_schedule("sequential", microbatches=2)
    model = transformers.AutoModelForCausalLM.from_config(tiny.configuration("mixtral"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        split_model(**{"model": model, "program": program} | given)


@pytest.mark.parametrize(("head", "labels"), [("Sequence", [1]), ("Token", [[1] + [-100] * 7])])
def test_labels_that_are_not_next_tokens_are_refused(head: str, labels: Any) -> None:
    """A row with one label had a loss of zero."""
    kind = getattr(transformers, f"AutoModelFor{head}Classification")
    program = build_schedule("sequential", microbatches=2)
    stages = split_model(kind.from_config(tiny.configuration("mixtral", num_labels=3)), program)
    tokens, target = tiny.batch(2)[0], torch.tensor([*labels, *labels])
    message = rf"^MixtralFor{head}Classification, whose labels are not next tokens; allowed: a causal LM, or a loss_fn"
    for options in ({"loss_fn": stages.loss_fn}, {"loss_fn": _own, "count_tokens": stages.count_tokens}):
        with pytest.raises(ValueError, match=message):
            tiny.engine(stages, program, **options).step(tokens, target=target)
    assert tiny.engine(stages, program, loss_fn=_own).step(tokens, target=target).loss > 0


def _own(loss: Any, *_: Any) -> Any:
    return loss


@pytest.mark.parametrize("counts", [False, *wide(True)])
@over(4)
def test_a_rank_without_labels(rank: int, size: int, counts: bool) -> None:
    """Of two with data: its losses are zero, and its tokens at the other's experts change no gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    tokens, labels = tiny.batch(4)
    whole = tiny.build("mixtral")
    _, expected = tiny.own_gradients(whole, {"input_ids": tokens}, labels, 2, 1.0 if counts else 0.5)
    program = build_schedule("combined_1f1b", ranks=2, microbatches=2)
    stages = split_model(tiny.build("mixtral"), program, mesh)
    options: dict[str, Any] = {"count_tokens": stages.count_tokens} if counts else {}
    engine = tiny.engine(stages, program, mesh, **options)
    if mesh["ep"].get_local_rank() == 1:
        tokens, labels = tiny.batch(4, seed=6)[0], torch.full_like(labels, -100)
    result = engine.step(tokens, target=labels)
    losses = [float(loss) for loss in result.losses]
    assert losses == {0: [], 1: [], 2: losses, 3: [0.0, 0.0]}[rank]  # the first two are of the first stage
    assert rank != 2 or min(losses) > 0
    problems = problems_of(stages, expected, 1e-5)
    assert not problems, problems


def test_a_loss_of_ones_own_sees_the_logits() -> None:
    tokens, labels = tiny.batch(4)
    program = build_schedule("sequential", microbatches=2)
    stages = split_model(tiny.build("qwen3_moe"), program)

    def loss_fn(own: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        assert logits.shape == (*target.shape, tiny.V)
        return own + logits.square().mean()

    result = tiny.engine(stages, program, loss_fn=loss_fn).step(tokens, target=labels, return_outputs=True)
    model = tiny.build("qwen3_moe")
    for loss, (own, logits), x, y in zip(result.losses, result.outputs, tokens.chunk(2), labels.chunk(2), strict=True):
        output = model(x, labels=y, use_cache=False)
        assert torch.equal(own, output.loss)
        assert torch.equal(logits, output.logits)
        assert torch.equal(loss, own + logits.square().mean())


def test_names_and_memory() -> None:
    """The parts of all ranks make up the model; parts of other ranks take no memory."""
    whole = tiny.build("mixtral", tie_word_embeddings=True)
    program = build_schedule("1f1b", ranks=2, microbatches=2)
    names = set()
    for rank in range(2):
        mesh: Any = _OneOf(rank)
        model = tiny.build("mixtral", tie_word_embeddings=True)
        stages = split_model(model, program, mesh)
        assert list(stages) == [rank]
        state = stages.state_dict()
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in state.items())
        names |= state.keys()
        held = {n for n, p in model.named_parameters(remove_duplicate=False) if not p.is_meta}
        assert held == state.keys()
    assert names == whole.state_dict().keys()


class _OneOf(DeviceMesh):
    """Stands in for a mesh of two pipeline ranks."""

    mesh_dim_names, shape = ("pp",), (2,)  # type: ignore[assignment]

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_coordinate(self) -> list[int]:
        return [self.rank]


@over(2)
def test_experts_that_are_not_divisible(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    with pytest.raises(ValueError, match="experts") as caught:
        split_model(tiny.build("mixtral", num_local_experts=3), build_schedule("sequential", microbatches=1), mesh)
    assert str(caught.value) == "model.layers.0.mlp.experts: 3 experts cannot be divided over 2 ranks; allowed: 1, 3"
