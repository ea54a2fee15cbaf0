"""DualPipe and DualPipeV against one process that runs the same stages one after another."""

import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import overlap1f1b as o1
from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.dualpipe import DualPipe, DualPipeV, set_p2p_tensor_dtype, set_p2p_tensor_shapes
from overlap1f1b.moe import GroupedExperts, Router, RouterConfig
from overlap1f1b.schedule import build_schedule
from tests import models
from tests.ranks import over, run
from tests.tiers import wide

CLASSES = {"dualpipe": DualPipe, "dualpipev": DualPipeV}
MICROBATCHES = {"dualpipe": {2: 6, 4: 10}, "dualpipev": {1: 3, 2: 5, 4: 9}}
H = models.H


class Mlp(nn.Module):
    """Has a method of its own for pairs, as modules of the DualPipe repository have; it is cut as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 3 * H), nn.Linear(3 * H, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    @classmethod
    def overlapped_forward_backward(cls, *given: object) -> None:
        raise NotImplementedError


class Streams(nn.Module):
    """Two tensors in and out, and one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.a(x)) + y, self.b(x * mask), mask


class Mean(nn.Module):
    """The last stage ends in one number of each microbatch beside its output."""

    last = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = self.linear(x)
        return (y.square().mean(), y) if self.last else y


class Routed(nn.Module):
    """Experts and a router whose auxiliary loss counts for less than the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(H, RouterConfig(experts=4, top_k=2, aux_coefficient=0.3, z_coefficient=0.1))
        self.router.aux_scale = 0.125
        self.experts = GroupedExperts(4, H, 12)
        self.experts.reset_parameters(torch.Generator().manual_seed(3), std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, H)
        return x + self.experts(tokens, *self.router(tokens)).view_as(x)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "mlp": lambda group: Mlp(),
    "streams": lambda group: Streams(),
    "sequential": lambda group: nn.Sequential(Mlp(), nn.LayerNorm(H), Mlp()),
    "experts": models.Block,
    "routed": lambda group: Routed(),
    "mean": lambda group: Mean(),
}


def criterion(*values: Tensor) -> Tensor:
    *outputs, label = values
    return sum(((output - label).square().mean() for output in outputs[:2]), start=torch.zeros(()))


def stages_of(kind: str, count: int, group: Any = None) -> list[nn.Module]:
    torch.manual_seed(3)
    modules = [KINDS[kind](group) for _ in range(count)]
    modules[-1].last = kind == "mean"  # type: ignore[assignment]
    return modules


def batch(kind: str, microbatches: int, seed: int) -> tuple[list[Tensor], Tensor]:
    """Inputs and labels, in microbatches of 2 and 3 rows."""
    generator = torch.Generator().manual_seed(seed)
    several = 2 if "streams" in kind else 1
    made = [torch.randn(2 * microbatches + 1, 3, H, generator=generator) for _ in range(several + 1)]
    mask = [made[0] > 0] if several == 2 else []
    return [made[0].requires_grad_(), *made[1:several], *mask], made[-1]


class Expected:
    """What one process makes of a batch."""

    def __init__(self, modules: list[nn.Module], inputs: list[Tensor], labels: Tensor, microbatches: int) -> None:
        losses, outputs = [], []
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        parts = [x.tensor_split(microbatches) for x in (*leaves, labels)]
        for *part, label in zip(*parts, strict=True):
            values = part
            for module in modules:
                returned = module(*values)
                values = [returned] if isinstance(returned, Tensor) else list(returned)
            loss = criterion(*values, label)
            loss.backward()
            losses.append(loss.detach())
            outputs.append([value.detach() for value in values])
        self.loss = torch.stack(losses)
        # What is one number of a microbatch is returned as losses are.
        self.outputs = [torch.cat(of) if of[0].dim() else torch.stack(of) for of in zip(*outputs, strict=True)]
        self.input_grad = leaves[0].grad
        self.modules = modules


def cosine_difference(x: Tensor, y: Tensor) -> float:
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def different(found: nn.Module, expected: list[nn.Module], shard: int) -> list[str]:
    """Names of parameters whose gradients differ; experts have those of all shards."""
    problems = []
    inside = {id(p) for m in found.modules() if isinstance(m, GroupedExperts) for p in m.parameters()}
    references = [dict(module.named_parameters()) for module in expected]
    for name, parameter in found.named_parameters():
        reference = references[shard][name].grad
        if id(parameter) in inside:
            whole = torch.stack([r[name].grad for r in references]).sum(0)
            local = len(parameter)
            reference = whole[shard * local : (shard + 1) * local]
        if parameter.grad is None or cosine_difference(parameter.grad, reference) > 1e-13:
            problems.append(name)
    return problems


class Case:
    """A pipeline of this rank, what it is given, and what one process makes of it."""

    def __init__(self, name: str, kind: str, size: int, ep: int, mapping: Any) -> None:
        mesh = init_device_mesh("cpu", (size // ep, ep), mesh_dim_names=("pp", "ep"))
        position, self.shard = mesh.get_coordinate() or (0, 0)
        rank = position if mapping is None else mapping[position]
        self.microbatches = MICROBATCHES[name][size // ep]
        program = build_schedule(name, ranks=size // ep, microbatches=self.microbatches)
        self.places, stages = program.placement.places(rank), program.placement.stages
        batches = []
        self.expected: list[list[Expected]] = []  # of each pipe the shards
        for pipe in range(len(program.placement.pipes)):
            count = len(program.microbatches_of(pipe))
            batches.append([batch(kind, count, seed=10 * pipe + shard) for shard in range(ep)])
            self.expected.append([Expected(stages_of(kind, stages), *given, count) for given in batches[pipe]])
        self.begins = next((pipe for pipe, stage in self.places if stage == 0), None)
        self.ends = next((pipe for pipe, stage in self.places if stage == stages - 1), None)
        self.inputs = [None] if self.begins is None else batches[self.begins][self.shard][0]
        self.labels = [None] if self.ends is None else [batches[self.ends][self.shard][1]]
        group = mesh.get_group("ep") if ep > 1 else None
        every = stages_of(kind, stages, group)
        self.pipeline = CLASSES[name](
            [every[stage] for _, stage in self.places],
            process_group=mesh.get_group("pp"),
            rank_mapping=mapping,
            expert_group=group,
            options=EngineOptions(timeout=30),
        )
        self.close = torch.equal if ep == 1 else lambda a, b: torch.allclose(a, b, rtol=1e-12, atol=1e-12)

    def step(self, *, criterion: Any = criterion, keep: bool) -> list[str]:
        """What is wrong with losses and outputs of a step."""
        loss, outputs = self.pipeline.step(
            *self.inputs, num_chunks=self.microbatches, criterion=criterion, labels=self.labels, return_outputs=keep
        )
        problems = []
        wanted = None if self.ends is None else self.expected[self.ends][self.shard]
        if wanted is None or criterion is None:
            problems += ["a loss"] * (loss is not None)
        elif loss is None or loss.requires_grad or not self.close(loss, wanted.loss):
            problems.append(f"loss {loss}, expected {wanted.loss}")
        if wanted is None or not keep:
            problems += ["outputs"] * (outputs is not None)
        else:
            found = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            problems += ["other outputs"] * (not all(map(self.close, found, wanted.outputs)))
            problems += [f"{len(found)} outputs"] * (len(found) != len(wanted.outputs))
        return problems

    def train(self, *, keep: bool) -> list[str]:
        """What is wrong with a step and its gradients."""
        self.pipeline.zero_grad()
        if self.inputs[0] is not None:
            self.inputs[0].grad = None
        problems = self.step(keep=keep)
        for (pipe, stage), module in zip(self.places, self.pipeline.module, strict=True):
            reference = [of.modules[stage] for of in self.expected[pipe]]
            problems += [f"gradient of stage {stage}, {n}" for n in different(module, reference, self.shard)]
        if self.begins is not None:
            expected = self.expected[self.begins][self.shard].input_grad
            problems += ["gradient of the inputs"] * (cosine_difference(self.inputs[0].grad, expected) > 1e-13)
        return problems


STEPS = 3  # the first two measure; outputs are returned from all but the second


@pytest.mark.parametrize(
    ("ranks", "name", "kind", "ep", "mapping"),
    [
        (2, "dualpipe", "streams", 1, [1, 0]),
        (2, "dualpipev", "experts", 2, None),
        (2, "dualpipe", "mean", 1, None),
        *wide(*((2, "dualpipe", kind, 1, None) for kind in ("sequential", "routed"))),
        *wide(*((2, "dualpipev", kind, 1, None) for kind in ("mlp", "streams", "routed", "mean"))),
        *wide(*((4, name, "streams", 1, [2, 0, 3, 1]) for name in CLASSES)),
        *wide(*((4, name, "experts", 2, None) for name in CLASSES)),
    ],
)
@over(lambda ranks, *_: ranks)
def test_over_ranks(rank: int, size: int, ranks: int, name: str, kind: str, ep: int, mapping: list[int] | None) -> None:
    compare(ranks, name, kind, ep, mapping)


def compare(size: int, name: str, kind: str, ep: int = 1, mapping: Any = None) -> None:
    with models.default_dtype(torch.float64):
        case = Case(name, kind, size, ep, mapping)
        pipeline, problems = case.pipeline, []
        for step in range(STEPS):
            problems += [f"step {step}: {problem}" for problem in case.train(keep=step != 1)]
        before = [p.grad.clone() for p in pipeline.parameters()]
        with torch.no_grad():
            problems += [f"no_grad: {problem}" for problem in case.step(keep=True)]
        with torch.inference_mode():
            problems += [f"outputs alone: {problem}" for problem in case.step(criterion=None, keep=True)]
        problems += ["evaluation changes gradients"] * (
            not all(map(torch.equal, before, (p.grad for p in pipeline.parameters())))
        )
    assert not problems, problems


def test_a_v_on_one_rank(alone: None) -> None:
    compare(1, "dualpipev", "mlp")


def _as_plain(pipeline: DualPipeV, plain: list[nn.Module]) -> bool:
    """Whether a step on one rank, after which the pipeline is closed, gives the gradients of a plain loop."""
    x, y = torch.randn(2, 8, H).unbind()
    pipeline.step(x, num_chunks=4, criterion=criterion, labels=y)
    for part, label in zip(x.chunk(4), y.chunk(4), strict=True):
        criterion(plain[1](plain[0](part)), label).backward()
    pipeline.close()
    pairs = zip(pipeline.parameters(), nn.ModuleList(plain).parameters(), strict=True)
    return all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_sequential_keeps_what_its_call_does_beside_its_forward(alone: None) -> None:
    for name, own in models.OWN_CALLS.items():
        modules = [nn.Sequential(nn.Linear(H, H), Mlp()) for _ in range(2)]
        plain = deepcopy(modules)
        handles = [own(module) for module in (*modules, *plain)]
        assert _as_plain(DualPipeV(modules), [*plain]), name
        for handle in handles:
            if handle is not None:
                handle.remove()


@over(2)
def test_labels_are_ignored_where_no_pipe_ends(rank: int, size: int) -> None:
    pipeline = DualPipeV(stages_of("mlp", 2))
    options: dict[str, Any] = {"criterion": criterion, "labels": [torch.zeros(8, H)]} if rank == 0 else {"labels": None}
    loss, _ = pipeline.step(torch.zeros(8, H), num_chunks=4, **options)
    assert (loss is not None) == (rank == 0)


def test_a_step_under_autocast_and_after_the_end(alone: None) -> None:
    modules = stages_of("mlp", 2)
    plain = deepcopy(modules)
    pipeline = DualPipeV(modules)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _as_plain(pipeline, plain)
    with pytest.raises(RuntimeError, match="this engine is closed"):
        pipeline.step(torch.randn(8, H), num_chunks=4, criterion=criterion, labels=torch.randn(8, H))


CHANGES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {  # rows and microbatches of steps; options
    "microbatches": ([(11, 5), (21, 7), (18, 6), (11, 5)], {}),
    "sizes": ([(8, 4), (13, 4)], {"dynamic_shapes": True}),
    "a shared weight": ([(9, 4)], {}),
}


def _stages(what: str, count: int) -> list[nn.Module]:
    """The first and the last stage, which lie on one rank, may share a weight."""
    stages = stages_of("mlp", count)
    if what == "a shared weight":
        stages[-1].down.weight = stages[0].down.weight
    return stages


@pytest.mark.parametrize("what", CHANGES)
@over(2)
def test_what_may_change_from_step_to_step_and_be_shared(rank: int, size: int, what: str) -> None:
    """By one pipeline in a V, against one process."""
    (steps, options), problems = CHANGES[what], []
    with models.default_dtype(torch.float64):
        stages = _stages(what, 2 * size)
        pipeline = DualPipeV([stages[rank], stages[-1 - rank]], options=EngineOptions(timeout=30, **options))
        for rows, microbatches in steps:
            x, y = torch.randn(2, rows, H, generator=torch.Generator().manual_seed(rows))
            expected = Expected(_stages(what, 2 * size), [x], y, microbatches)
            pipeline.zero_grad()
            loss, _ = pipeline.step(x, num_chunks=microbatches, criterion=criterion, labels=[y])
            if rank == 0 and not torch.equal(loss, expected.loss):
                problems.append(f"{rows} rows in {microbatches} microbatches: loss {loss}")
            for stage, module in zip((rank, -1 - rank), pipeline.module, strict=True):
                problems += different(module, [expected.modules[stage]], 0)
    assert not problems, problems


class Failing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        raise OSError("no disk")


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@over(2)
def test_refusals(rank: int, size: int) -> None:
    modules, x = stages_of("mlp", 2), torch.zeros(8, H)
    # Made before the grid, in which the ranks meet: a group freed by one rank while the other connects fails there.
    pipeline = DualPipe(modules, options=EngineOptions(timeout=10))
    step = partial(pipeline.step, x, criterion=criterion, labels=[x])
    for call, error in (
        (partial(DualPipe, modules[:1]), "1 modules; allowed: two, of the two stages of this rank"),
        (
            partial(DualPipe, modules, rank_mapping=[0, 2]),
            "rank_mapping=[0, 2] of 2 ranks; allowed: each of 0 to 1 once",
        ),
        (
            partial(DualPipe, modules, expert_group=dist.group.WORLD),
            "pipelines [[0, 1], [0, 1]] of ranks [0, 1] that share experts; allowed: a grid, one rank of each",
        ),
        (step, "num_chunks=0; allowed: 4 or more microbatches"),
        (
            partial(step, num_chunks=5),
            "dualpipe over 2 ranks with 5 microbatches; allowed: an even number from 4 on, nearest 4 or 6",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
            call()


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "inputs": ({"inputs": [None]}, "ValueError: inputs NoneType on a rank where a pipe begins; allowed: tensors"),
    "criterion": ({"criterion": None}, "ValueError: criterion=None on a rank where a pipe ends; allowed: a function"),
    "rows": (
        {"inputs": [torch.zeros(3, H)]},
        f"ValueError: inputs of shape (3, {H}) for 4 microbatches along dimension 0; allowed: at least 4 there",
    ),
    "no labels": ({"labels": None}, "ValueError: labels NoneType on a rank where a pipe ends; allowed: a tensor, or a"),
    "label": ({"labels": ["a"]}, "ValueError: labels str on a rank where a pipe ends; allowed: a tensor, or a tuple"),
    "module": ({"failing": True}, "OSError: no disk"),
}


def _faults(rank: int, size: int) -> list[list[str]]:
    return [_fault(rank, fault) for fault in FAULTS]


def _fault(rank: int, fault: str) -> list[str]:
    """What the ranks say when rank 0 makes a mistake, and to a step after it."""
    given = {"inputs": [torch.zeros(8, H)], "criterion": criterion, "labels": [torch.zeros(8, H)], "failing": False}
    given |= FAULTS[fault][0] if rank == 0 else {}
    modules = [Failing(), Failing()] if given["failing"] else stages_of("mlp", 2)
    pipeline = DualPipeV(modules, options=EngineOptions(timeout=20))

    def step(microbatches: int) -> str:
        options = {"num_chunks": microbatches, "criterion": given["criterion"], "labels": given["labels"]}
        return _said(lambda: pipeline.step(*given["inputs"], **options))

    return [step(4), step(4), step(5)]


def test_faults_are_told_to_the_other_rank() -> None:
    for fault, of_ranks in zip(FAULTS, zip(*run(_faults, 2, timeout=60), strict=True), strict=True):
        (mine, *mine_again), (others, *others_again) = of_ranks
        expected = FAULTS[fault][1]
        assert mine.startswith(expected)
        assert "rank pp 0 failed " in others
        assert expected.split(";", maxsplit=1)[0] in others
        assert all("allowed: a new one, on all ranks" in again for again in (*mine_again, *others_again))


def test_the_original_s_settings_are_accepted() -> None:
    assert set_p2p_tensor_shapes([(3, 256, 512)]) is None
    assert set_p2p_tensor_dtype(torch.float32) is None


def test_it_is_found_from_the_package_and_loaded_late() -> None:
    code = "import sys, overlap1f1b as o1; print(dir(o1.integrations)[0], 'torch' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout == "dualpipe False\n"
    assert o1.integrations.__getattr__("dualpipe").DualPipe is DualPipe


CALLED: dict[str, Any] = {"num_chunks": 4, "criterion": torch.sum, "return_outputs": False}
"""Arguments of a step."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modules": 5}, "modules=5; allowed: a list of Module"),
        ({"modules": ("a", "b")}, "modules=('a', 'b'); allowed: a list of Module"),
        ({"batch_dim": "0"}, "batch_dim='0'; allowed: whole numbers"),
        ({"process_group": "pp"}, "process_group='pp'; allowed: ProcessGroup or None"),
        ({"rank_mapping": 5}, "rank_mapping=5; allowed: a list of whole numbers or None"),
        ({"options": 3}, "options=3; allowed: EngineOptions or None"),
        ({"num_chunks": "4"}, "num_chunks='4'; allowed: a whole number, 0 or more"),
        ({"criterion": nn.MSELoss}, "criterion=MSELoss, a class; allowed: a function, or an object such as MSELoss()"),
        ({"return_outputs": "no"}, "return_outputs='no'; allowed: True or False"),
    ],
)
def test_values_of_another_kind(alone: None, given: dict[str, Any], message: str) -> None:
    made = {"modules": stages_of("mlp", 2)} | {name: given[name] for name in given.keys() - CALLED.keys()}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DualPipeV(**made).step(
            torch.ones(4, 8), **CALLED | {name: given[name] for name in given.keys() & CALLED.keys()}
        )
