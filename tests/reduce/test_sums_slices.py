"""Experts of a layer of a user's own, of which each rank along "ep" has others."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from overlap1f1b.checkpoint import consolidate, load_checkpoint, save_checkpoint
from overlap1f1b.engine import Engine
from overlap1f1b.schedule import build_schedule
from tests.ranks import over
from tests.tiers import wide

H, E, MICROBATCHES, ROWS = 6, 4, 3, 5
SIZES = {2: (1, 2), 4: (2, 2)}


class Layer(nn.Module):
    """Experts by a loop, over ranks that each hold some of them; over no ranks all of them."""

    def __init__(self, mesh: DeviceMesh | None = None, kind: str = "") -> None:
        super().__init__()
        self.router = nn.Linear(H, E).double()
        whole = torch.randn(E, H, H).double() / H
        self.mesh, self.ranks = mesh, 1 if mesh is None else mesh.size()
        if mesh is None:
            self.experts = nn.Parameter(whole)
        elif kind == "a DTensor":
            self.experts = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        else:
            self.experts = nn.Parameter(whole.chunk(mesh.size())[mesh.get_local_rank()].clone())
            self.experts.allreduce = kind == "marked later"

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=E)
        if self.mesh is None:
            out = self._computed(x[order], counts[None], self.experts)
        else:
            group, arrived = self.mesh.get_group(), torch.empty_like(counts)
            dist.all_to_all_single(arrived, counts, group=group)
            send, receive = (n.view(self.ranks, -1).sum(1).tolist() for n in (counts, arrived))
            rows = all_to_all_single_autograd(x[order], receive, send, group)
            own = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
            done = self._computed(rows, arrived.view(self.ranks, -1), own)
            out = all_to_all_single_autograd(done, send, receive, group)
        return x + torch.zeros_like(x).index_add(0, order, out) * weight[:, None]

    def _computed(self, rows: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
        sizes = counts.flatten().tolist()
        parts = [part @ experts[at % len(experts)].mT for at, part in enumerate(rows.split(sizes))]
        return torch.cat(parts).tanh()


def _build(mesh: DeviceMesh | None = None, kind: str = "") -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(H, H).double(), Layer(mesh, kind), Layer(mesh, kind), nn.Linear(H, H).double())


@pytest.mark.parametrize(
    ("ranks", "kind"), [(2, "a DTensor"), *wide((4, "a DTensor"), (4, "marked allreduce=False"), (4, "marked later"))]
)
@over(lambda ranks, *_: ranks)
def test_gradients_norms_and_checkpoints(rank: int, size: int, ranks: int, kind: str, tmp_path: Path) -> None:
    """Gradients of a rank's experts are summed with the ranks that have the same experts alone."""
    mesh = init_device_mesh("cpu", SIZES[size], mesh_dim_names=("dp", "ep"))
    model, plain, loss_fn = _build(mesh["ep"], kind), _build(), nn.functional.mse_loss
    rows = torch.randn(size, 2, MICROBATCHES * ROWS, H, generator=torch.Generator().manual_seed(2)).double()
    problems: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Engine(
        model, build_schedule("combined_1f1b", microbatches=MICROBATCHES), mesh=mesh, loss_fn=loss_fn
    ) as engine:
        for layer in (module for module in model if isinstance(module, Layer) and kind == "marked later"):
            layer.experts.allreduce = False
        for step in range(4):
            model.zero_grad()
            plain.zero_grad()
            engine.step(rows[rank, 0], target=rows[rank, 1])
            loss_fn(plain(rows[:, 0].flatten(0, 1)), rows[:, 1].flatten(0, 1)).backward()
            for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                found, wanted = own.grad.to_local() if isinstance(own.grad, DTensor) else own.grad, other.grad
                if name.endswith("experts"):
                    wanted = wanted.chunk(2)[mesh.get_local_rank("ep")]
                if not torch.allclose(found, wanted, rtol=1e-12, atol=1e-14):
                    problems.append(f"step {step}: {name} differs by {float((found - wanted).abs().max()):.1e}")
            norm, wanted = engine.clip_gradients(1e9), nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            if not torch.allclose(norm, wanted, rtol=1e-12):
                problems.append(f"step {step}: norm {float(norm)}, expected {float(wanted)}")
        hidden = sum(node.op.value == "dispatch" for node in engine.plan.ranks[0])
        problems += [] if hidden == 2 * 2 * MICROBATCHES else [f"{hidden} dispatches in the plan"]
        optimizer.step()
        save_checkpoint(engine, tmp_path, 1, optimizer)
        whole = [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer.state.clear()
        load_checkpoint(engine, tmp_path, optimizer)
        for parameter, before in zip(model.parameters(), whole, strict=True):
            now = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            problems += [] if torch.equal(now, before) else ["a parameter was not restored"]
        shapes = {tuple(optimizer.state[p]["momentum_buffer"].shape) for p in model.parameters()}
        problems += [] if (E // 2 if kind != "a DTensor" else E, H, H) in shapes else [f"momentum of {shapes}"]
    if rank == 0:
        consolidate(tmp_path, tmp_path / "whole")
        stored = {name: t for file in (tmp_path / "whole").glob("*.safetensors") for name, t in load_file(file).items()}
        problems += [f"{name}: {t.shape}" for name, t in stored.items() if "experts" in name and len(t) != E]
    assert not problems, problems
