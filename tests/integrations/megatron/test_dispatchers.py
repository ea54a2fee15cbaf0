"""What changes on dispatchers of Megatron-Core while a step lasts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from overlap1f1b.engine.run.replaced import replaced
from overlap1f1b.integrations.megatron.dispatchers import exchanging
from overlap1f1b.transport import streams

CPU = torch.device("cpu")


class MoEAlltoAllTokenDispatcher:
    """In place of Megatron-Core's class of this name, with shared experts on a stream of their own."""

    def __init__(self) -> None:
        self.shared_experts = nn.Module()
        self.shared_experts.stream = "their own"  # type: ignore[assignment]

    def token_dispatch(self) -> None: ...
    def token_combine(self) -> None: ...


def test_overlapped_shared_experts_compute_on_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several microbatches are open, so their own stream would write to memory that compute still reads."""
    dispatcher, alone = MoEAlltoAllTokenDispatcher(), MoEAlltoAllTokenDispatcher()
    alone.shared_experts = None  # type: ignore[assignment]
    with replaced(exchanging([dispatcher, alone], CPU)):
        assert dispatcher.shared_experts.stream == "their own"
    monkeypatch.setattr(streams, "is_queued", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(of=device))
    with replaced(exchanging([dispatcher, alone], CPU)):
        assert dispatcher.shared_experts.stream == SimpleNamespace(of=CPU)
    assert dispatcher.shared_experts.stream == "their own"
