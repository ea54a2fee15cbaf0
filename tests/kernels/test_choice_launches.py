"""List what the host does for one layer and microbatch of a steady step: launches, kernels of Triton, calls of Python.

The difference of two models, of which one has a layer more, by the microbatches of a step. Triton's interpreter runs
the kernels, and what it does is not counted. A GPU runs other operators in a few places, see :data:`LAYER`.
"""

import sys
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.kernels import grouped_mm
from overlap1f1b.moe import route as route_module
from overlap1f1b.plan import NodeCosts
from overlap1f1b.running.transformer import MoEConfig, MoETransformer
from overlap1f1b.schedule import build_schedule
from tests.kernels.against import DEVICE

MICROBATCHES = 2
ALLOCATES = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
VIEWS = {"_unsafe_view", "detach", "_reshape_alias", "promote_types"}
"""Operators that launch nothing, though their schema does not say that they are views."""
LAYER = {  # before they were counted there were 84, and 18 more where rows of several ranks are grouped
    "mm": 9,  # heads, their output and the gate: forward, and two gradients each
    "_grouped_mm": 6,  # both products of the experts, likewise
    "attention": 2,  # forward and backward
    "norm": 4,  # two, forward and backward
    "add": 6,  # residuals 2; gradients of what has two uses: residuals 2, tokens 1, rotary positions 1
    "add_": 8,  # gradients of seven parameters; rotary positions 1
    "_to_copy": 8,  # rotary positions 4; router 4, on a GPU in the backward alone
    "cat": 4,  # rotary positions: halves 1, and their gradient 1; the gradients of heads 2
    "mul": 5,  # rotary positions 4; balance 1
    "zeros_like": 1,  # choices for the balance
    "clone": 2,  # weights that carry the balance; the gradient of heads, whose order changes
}
"""Launches by operator. On one rank of a GPU four more look if all indices name an expert, or none."""
TRITON = {
    "_route": 1,
    "_route_backward": 1,
    "_add_choices": 2,  # the load, and the balance
    "_pack": 1,  # rows to send
    "_count": 1,  # three for the places of choices: a sort by counting
    "_offsets": 1,
    "_place": 1,
    "_spread": 1,
    "_forward": 1,
    "_backward": 1,
    "_sum": 2,  # of a row's results, and of their gradients
    "_spread_grad": 1,
}
CALLS = 900
"""Calls of Python functions without those of Triton's launches, by Python 3.11; later ones make fewer."""


class Counting(TorchDispatchMode):
    """Counts operators that launch a kernel on a GPU, and Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.triton = Counter[str](), Counter[str]()
        self.quiet = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        number = isinstance(result, Tensor) and not result.dim()  # a loss, or a number on the host
        if not (self.quiet or number or func.is_view or name in ALLOCATES | VIEWS):
            self.found["attention" if "attention" in name else "norm" if "norm" in name else name] += 1
        return result


def _steps(layers: int) -> tuple[Counter[str], Counter[str], int]:
    """Return launches by operator and by Triton's kernel of a second step, and the calls of a third."""
    from overlap1f1b.kernels.triton.launch import Kernel

    config = MoEConfig(
        vocabulary=32, layers=layers, hidden=32, heads=2, experts=8, intermediate=16, sequence=8, kernels="triton"
    )
    model = MoETransformer(config, dtype=torch.bfloat16, device=DEVICE)
    for block in model.children():
        for name in ("attention_norm", "mlp_norm"):
            if hasattr(block, name):  # one operator on a CPU too
                setattr(block, name, nn.LayerNorm(32, bias=False, dtype=torch.bfloat16, device=DEVICE))
    program = build_schedule("combined_1f1b", ranks=1, microbatches=MICROBATCHES)
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=5, counts=0.4, aggregate=0.2, dense=1)

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    options = EngineOptions(costs=costs, overlap=3, verify=False)
    inputs, target = torch.randint(32, (2, MICROBATCHES, 8), device=DEVICE)
    counting, calls, launched = Counting(), 0, Kernel.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        quiet, profile, counting.quiet = counting.quiet, sys.getprofile(), True
        sys.setprofile(None)
        launched(self, *args, **kwargs)
        sys.setprofile(profile)
        counting.quiet = quiet
        counting.triton[self.function.__name__] += not quiet

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    with ExitStack() as stack:
        stack.enter_context(patch.object(Kernel, "__call__", launch))
        if DEVICE == "cpu":  # where torch has the grouped product, too, and nothing is to look at indices
            stack.enter_context(patch.object(grouped_mm, "_has_kernel", lambda rows: True))
            stack.enter_context(patch.object(grouped_mm, "_zeroed_", lambda product, ends: product))
            stack.enter_context(patch.object(route_module, "_missing", lambda indices, experts: 0))
        engine = Engine(model, program, loss_fn=loss_fn, options=options)
        with counting:
            for step in range(2):
                counting.quiet = step < 1
                engine.step(inputs, target=target)
        counting.quiet = True
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            engine.step(inputs, target=target)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        engine.close()
    return counting.found, counting.triton, calls


@pytest.mark.triton
def test_a_layer_launches_what_is_listed() -> None:
    (found, triton, calls), (fewer, fewer_triton, before) = _steps(2), _steps(1)
    found.subtract(fewer)
    triton.subtract(fewer_triton)
    assert {name: number / MICROBATCHES for name, number in triton.items()} == TRITON
    if DEVICE == "cpu":
        assert {name: number / MICROBATCHES for name, number in found.items() if number} == LAYER
        assert (calls - before) / MICROBATCHES < CALLS
    else:
        assert found.total() / MICROBATCHES < sum(LAYER.values()) + 8, found
