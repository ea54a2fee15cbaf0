"""List every place where a steady step reads a device's values on the host, or waits for the device."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import overlap1f1b
from overlap1f1b.transport.streams import EventMark
from tests.device import standin
from tests.device.standin import World
from tests.device.steps import Layout, batch_of, engine_of, program_of
from tests.ranks import over
from tests.tiers import first

LAYOUT = Layout(2, 2)
PACKAGE = f"{Path(overlap1f1b.__file__).parent}/"
READS = ("tolist", "numpy", "cpu", "__array__")
"""Ways to read a tensor that no dispatch mode sees on a CPU."""
OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal"}
"""Operators of ATen that give the host a value, or a size that depends on values."""
ON_A_CPU = {
    "moe/route.py _missing",
    "moe/route.py Route.__init__",
    "kernels/combine.py sum_rows",
    "kernels/grouped_mm.py ExpertRows.__getitem__",
    "cut/random.py same",
    "play/random.py take_number",
    "engine/finite.py FiniteCheck._of_losses",
}
"""Places where a GPU does not wait: it checks indices by itself, makes room for all rows that there may be, and skips
choices that are none by itself; the models of tests loop over their experts, generators and their numbers are on the
host, and losses are read once their copy is there. Ranks of tests are threads that share these generators, so that a
step compares the states only where no other rank drew from them in the steps before."""
STEP = {
    "transport/mesh.py Comparison.differ": "numbers that are on the host",
    "transport/mesh.py Comparison.extremes": "the calls of all ranks, which are on the host",
    "transport/communicators.py Communicators.settle": "the end of the step: a lost rank would hang the next read",
}
EXACT = {
    "transport/streams.py HostCopy.read": "the sizes of each dispatch",
    "moe/route.py Route.arrive": "these sizes, which are on the host",
}
CAPACITY = {
    "engine/capacity.py Capacity._lost_here": "lost rows, after the last node",
    "transport/mesh.py Mesh.sums": "their sum, which is on the host",
}
TOKENS = {
    "play/feed.py _shares": "tokens of all microbatches together; where the last stage is",
    "transport/mesh.py Mesh.sums": "their sum, which is on the host",
}
AFTER = {
    "mean_loss": {
        "transport/mesh.py Comparison.extremes": "the calls of all ranks, which are on the host",
        "engine/engine.py Engine.mean_loss": "all losses together; where the last stage is",
        "transport/mesh.py Mesh.sums": "their sum, which is on the host",
    },
    "clip_gradients": {
        "transport/mesh.py Comparison.extremes": "the calls of all ranks, which are on the host",
        "reduce/clipping.py _powers": "norms of all gradients together",
        "engine/engine.py Engine.clip_gradients": "the norm, which is on the host",
        "transport/mesh.py Mesh.sums": "their sum, which is on the host",
    },
}


class _Dispatched(TorchDispatchMode):
    """Notes operators that wait for a device."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func._schema.name in ("aten::index", "aten::index_put_") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if func._schema.name.removeprefix("aten::") in OPERATIONS or by_mask:
            self.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def _noting(found: dict[int, Counter[str]]) -> Iterator[None]:
    """Count the places of reads and waits of each rank while it is a key of ``found``."""

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            _note(found)
            return call(*args, **kwargs)

        return noting

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(Tensor, name, wrapped(getattr(Tensor, name))))
        for owner, name in ((EventMark, "synchronize"), (standin.Cuda, "synchronize")):
            stack.enter_context(patch.object(owner, name, wrapped(getattr(owner, name))))
        yield


def _note(found: dict[int, Counter[str]]) -> None:
    rank = getattr(standin._HERE, "rank", None)
    if rank is None or rank.number not in found or rank.quiet:
        return
    frame = sys._getframe(2)
    while not frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_back is None:
            return  # the test's own
        frame = frame.f_back
    file = frame.f_code.co_filename.removeprefix(PACKAGE)
    found[rank.number][f"{file} {frame.f_code.co_qualname}"] += 1


def _steps(rank: int, size: int, found: dict[int, Counter[str]], options: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the places of a fourth step, and of the calls after it."""
    program = program_of("combined_1f1b", LAYOUT.pp)
    engine, _ = engine_of(program, LAYOUT, verify=False, **options)
    inputs, target = batch_of(program, LAYOUT, rank)
    counted = {}
    with engine, _Dispatched(lambda: _note(found)):
        for _ in range(3):
            engine.step(inputs, target=target)
        result: list[Any] = []
        for name, call in {
            "step": lambda: result.append(engine.step(inputs, target=target)),
            "mean_loss": lambda: engine.mean_loss(result[0]),
            "clip_gradients": lambda: engine.clip_gradients(1.0),
        }.items():
            found[rank] = Counter()
            call()
            counted[name] = found.pop(rank)
    return counted


SETTINGS: dict[str, dict[str, Any]] = {
    "exact sizes": {},
    "capacity and tokens": {"capacity": 8.0, "count_tokens": lambda target: (target >= 0).sum()},
}


@pytest.mark.parametrize("setting", first(SETTINGS, "exact sizes"))
@over(1)
def test_a_step_waits_at_listed_places_alone(rank: int, size: int, setting: str) -> None:
    found: dict[int, Counter[str]] = {}
    with _noting(found):
        every = World(LAYOUT.size).run(_steps, found, SETTINGS[setting])
    for number, counted in enumerate(every):
        places = {name: Counter({p: n for p, n in here.items() if p not in ON_A_CPU}) for name, here in counted.items()}
        dispatches = counted["step"]["moe/route.py _missing"] // 2  # which reads the lowest and the highest index
        assert dispatches
        expected = {name: Counter(dict.fromkeys(listed, 1)) for name, listed in AFTER.items()}
        expected["step"] = Counter(dict.fromkeys(STEP, 1))
        expected["step"]["transport/mesh.py Comparison.extremes"] += 1  # whether any rank's blocks draw random numbers
        reads, arrives = EXACT
        if setting == "exact sizes":
            expected["step"] += Counter({reads: dispatches, arrives: 2 * dispatches})
        else:
            assert places["step"].pop(arrives) == dispatches  # on a CPU alone numbers of tokens travel with the counts
            expected["step"] += Counter(dict.fromkeys(CAPACITY, 1)) + Counter(dict.fromkeys(TOKENS, 1))
        if number < LAYOUT.ep:  # the first stage
            del expected["mean_loss"]["engine/engine.py Engine.mean_loss"], expected["step"]["play/feed.py _shares"]
        assert places == expected, (places, expected)
