"""What changes on Megatron-Core's layers while a step lasts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from overlap1f1b.integrations.megatron.chunk import Chunk
from overlap1f1b.transport import devices

CPU = torch.device("cpu")


class SharedExpertMLP(nn.Module):
    """In place of Megatron-Core's class of this name."""

    stream: Any = None


class Model(nn.Module):
    """A chunk of two layers' shared experts, the first on a stream of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.overlapped, self.plain = SharedExpertMLP(), SharedExpertMLP()
        self.overlapped.stream = "their own"

    def set_input_tensor(self, tensors: Any) -> None: ...


@pytest.mark.parametrize("exchanges", [True, False])
def test_overlapped_shared_experts_compute_on_the_stream_of_the_step(
    monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Weight gradients are computed on this stream, whether or not several ranks share the routed experts."""
    model = Model()
    chunk, step = Chunk(model, 0, last=True, exchanges=exchanges), SimpleNamespace()
    with chunk.stepping(step):
        assert model.overlapped.stream == "their own"
    gpu = SimpleNamespace(current_stream=lambda device: SimpleNamespace(of=device))
    monkeypatch.setattr(devices, "gpu_of", lambda device: gpu)
    with chunk.stepping(step):
        assert model.overlapped.stream == SimpleNamespace(of=CPU)
        assert model.plain.stream is None
    assert model.overlapped.stream == "their own"
