"""Are optimizers equal over layouts of ranks, with experts stacked and with each expert a matrix of its own?

    pip install pytorch-optimizer heavyball
    torchrun --nproc-per-node 2 benchmarks/optimizers.py                       # torch's
    torchrun --nproc-per-node 2 benchmarks/optimizers.py pytorch_optimizer heavyball
    DTYPE=float32 torchrun --nproc-per-node 2 benchmarks/optimizers.py heavyball --only soap,kron

One training of four steps, over dp 2 (each rank has all experts) and ep 2 (each has half), with clipping. Printed is
the largest difference of a weight, as a part of the largest change of a weight:

stacked   between the layouts, the engine's parameters as they are
apart     between the layouts, by ``parameter_groups``
rounding  on one layout, after a rounding of every gradient: what the optimizer makes of it by itself
resumed   on one layout, between a run and one that goes on from its checkpoint
other     between a run and one over the other layout that goes on from its checkpoint
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import overlap1f1b as o1
from overlap1f1b.moe import GroupedExperts, parameter_groups
from overlap1f1b.plan import NodeCosts

VOCABULARY, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, STEPS, ROWS = 32, 20, 12, 8, 2, 4, 64
DTYPE = getattr(torch, os.environ.get("DTYPE", "float64"))
Parameters = list[nn.Parameter]
Make = Callable[[list[Parameters]], list[torch.optim.Optimizer]]
"""Optimizers of groups of parameters."""


class Block(nn.Module):
    """A dense layer and experts."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = GroupedExperts(EXPERTS, HIDDEN, INTERMEDIATE, group=group)
        self.experts.reset_parameters(torch.Generator().manual_seed(3), std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        tokens = x.flatten(0, 1)
        weights, indices = self.router(tokens).softmax(-1).topk(TOP_K)
        return x + self.experts(tokens, indices, weights).view_as(x)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Layout:
    """An engine over two ranks along one dimension; every run begins with the same weights."""

    def __init__(self, dimension: str) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,))
        self.group = mesh.get_group("ep") if dimension == "ep" else None
        torch.manual_seed(1)
        blocks = [Block(self.group) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCABULARY))
        options = o1.EngineOptions(costs=NodeCosts.uniform(attention=1, experts=1, dispatch=1), timeout=120)
        program = o1.build_schedule("1f1b", microbatches=2)
        self.engine = o1.Engine(model, program, mesh=mesh, loss_fn=loss_fn, options=options)
        self.stacked = {p for m in model.modules() if isinstance(m, GroupedExperts) for p in m.parameters()}
        self.start = [p.detach().clone() for p in self.engine.parameters()]

    def run(
        self, make: Make, *, apart: bool, noise: float = 0, save: str | None = None, load: str | None = None
    ) -> list[Tensor]:
        """Return the whole weights after all steps; ``save`` or ``load`` a checkpoint in the middle."""
        parameters = list(self.engine.parameters())
        for parameter, start in zip(parameters, self.start, strict=True):
            parameter.detach().copy_(start)
            parameter.grad = None
        optimizers = make([group["params"] for group in parameter_groups(self.engine)] if apart else [parameters])
        if load is not None:
            o1.load_checkpoint(self.engine, load, optimizers)
        for step in range(0 if load is None else STEPS // 2, STEPS):
            if save is not None and step == STEPS // 2:
                o1.save_checkpoint(self.engine, save, step, optimizers)
            rows = torch.randint(VOCABULARY, (2, ROWS, 8), generator=torch.Generator().manual_seed(step))
            tokens, target = (part.chunk(2)[dist.get_rank()] for part in rows)
            self.engine.step(tokens, target=target)
            self.engine.clip_gradients(0.5)
            for number, parameter in enumerate(parameters if noise else ()):
                assert parameter.grad is not None
                source = torch.Generator().manual_seed(1000 * step + number)
                parameter.grad *= 1 + noise * torch.randn(parameter.grad.shape, generator=source)
            for optimizer in optimizers:
                torch.manual_seed(step)
                optimizer.step()
                optimizer.zero_grad()
        return [self._whole(parameter) for parameter in parameters]

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        own = parameter.detach().clone()
        if self.group is None or parameter not in self.stacked:
            return own
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts)


def compared(layouts: dict[str, Layout], make: Make) -> dict[str, str]:
    """Return the columns of an optimizer."""
    dp, ep = layouts["dp"], layouts["ep"]
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, 0)
    ends: dict[str, list[Tensor]] = {}

    def difference(one: list[Tensor], other: list[Tensor]) -> float:
        moved = max(float((a - b).abs().max()) for a, b in zip(one, dp.start, strict=True))
        return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) / max(moved, 1e-30)

    def apart() -> float:
        ends["dp"], ends["ep"] = dp.run(make, apart=True), ep.run(make, apart=True, save=f"{folders[0]}")
        return difference(ends["dp"], ends["ep"])

    columns: dict[str, Callable[[], float]] = {
        "stacked": lambda: difference(dp.run(make, apart=False), ep.run(make, apart=False)),
        "apart": apart,
        "rounding": lambda: difference(ends["dp"], dp.run(make, apart=True, noise=torch.finfo(DTYPE).eps)),
        "resumed": lambda: difference(ends["ep"], ep.run(make, apart=True, load=folders[0])),
        "other": lambda: difference(ends["ep"], dp.run(make, apart=True, load=folders[0])),
    }
    return {name: agreed(column) for name, column in columns.items()}


def agreed(column: Callable[[], float]) -> str:
    """Return the largest value of both ranks, or what the first one raised."""
    try:
        own = f"{column():.1e}"
    except Exception as error:  # whatever optimizers raise
        own = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"
    every: list[str] = [""] * 2
    dist.all_gather_object(every, own)
    return next(
        (text for text in every if ":" in text), max(every, key=lambda text: float(text) if ":" not in text else 0)
    )


def found(package: str) -> Iterator[tuple[str, Make]]:
    """Return a package's optimizers with what makes them: torch's Muon with AdamW, most others of all parameters."""
    module: Any = importlib.import_module("torch.optim" if package == "torch" else package)
    if package == "pytorch_optimizer":
        every = {name: module.load_optimizer(name) for name in module.get_supported_optimizers()}
    else:
        every = {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    if package == "heavyball":
        module.utils.compile_mode = None
    for name, kind in every.items():
        yield (
            name,
            _maker(kind, marks="muon" in name.lower() or name == "adago", mixed=package == "torch" and name == "Muon"),
        )


def _maker(kind: Any, *, marks: bool, mixed: bool) -> Make:
    def make(groups: list[Parameters]) -> list[torch.optim.Optimizer]:
        every = [p for group in groups for p in group]
        known = inspect.signature(kind).parameters
        options: dict[str, Any] = {"lr": 1e-2} if "lr" in known else {}
        matrices, vectors = ([p for p in every if (p.ndim > 1) is wanted] for wanted in (True, False))
        if mixed:
            return [kind(matrices, **options), torch.optim.AdamW(vectors, lr=1e-2)]
        if marks and "use_muon" in (kind.__doc__ or "") + inspect.getsource(kind):
            return [kind([{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}], **options)]
        return [kind([{"params": group} for group in groups if group], **options)]

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=["torch"])
    parser.add_argument("--only", default="", help="names of optimizers, by commas; all if empty")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(DTYPE)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layouts = {dimension: Layout(dimension) for dimension in ("dp", "ep")}
    for package in given.packages:
        for name, make in found(package):
            if not given.only or name.lower() in given.only.lower().split(","):
                columns = compared(layouts, make)
                if dist.get_rank() == 0:
                    print(
                        f"{package} {name}:",
                        *(f"{column} {text}" for column, text in columns.items()),
                        sep="  ",
                        flush=True,
                    )
    for layout in layouts.values():
        layout.engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
