"""The ranks of these tests."""

import pytest
import torch

HERE = "tests/nccl/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
