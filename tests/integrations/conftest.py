"""A group of this process alone."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
