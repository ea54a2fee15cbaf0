"""What the fork server of the tests imports, once for all its forks: `tests.ranks`, `tests.running.fork`."""

# ruff: noqa: F401
import gc
import os
from contextlib import suppress

os.environ |= {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as `overlap1f1b` has them before torch

import hypothesis
import pytest
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor

import overlap1f1b.cli.main
import overlap1f1b.cli.profile
import overlap1f1b.running.bench.command
import overlap1f1b.running.train

with suppress(ImportError):
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    import overlap1f1b.integrations.transformers.trainer

gc.collect()
gc.freeze()  # what stays anyway: collections in the forks are short then, and leave its pages shared
