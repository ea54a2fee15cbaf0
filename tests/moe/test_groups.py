"""What NCCL is told of groups beside compute. NCCL itself is not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap1f1b.moe.groups import nccl_options


def fake(**known: Any) -> Any:
    def options(is_high_priority_stream: bool = False) -> Any:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace(**known))

    policy = {"NCCL_CTA_POLICY_EFFICIENCY": 1} if "cta_policy" in known else {}
    return SimpleNamespace(Options=options, **policy)


def test_few_blocks_and_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake(min_ctas=0, max_ctas=0, cta_policy=0), raising=False)
    options = nccl_options(16)
    assert options.is_high_priority_stream
    assert vars(options.config) == {"min_ctas": 4, "max_ctas": 16, "cta_policy": 1}
    assert vars(nccl_options(2).config) == {"min_ctas": 2, "max_ctas": 2, "cta_policy": 1}


def test_an_older_nccl_knows_no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake(min_ctas=0, max_ctas=0), raising=False)
    assert vars(nccl_options(None).config) == {"min_ctas": 0, "max_ctas": 0}
