#!/usr/bin/env bash
# torch 2.13.0: consolidated safetensors of a distributed checkpoint have 0 for each tensor without dimensions.
#
# HuggingFaceStorageWriter writes a file for each rank and joins them. A scale of shape [], as 8-bit weights have one,
# is right in the rank's file and 0 in the joined one, in silence; a scale of shape [1] is kept. A buffer of integers,
# such as counts of tokens, ends the joining in an error about a floating point type. One process is enough.
. "$(dirname "$0")/environment" torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
check <<'PY'
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state = {"experts.weight": torch.randn(4, 3), "experts.scale": torch.tensor(3.5), "router.scale": torch.tensor([2.5])}


def saved(folder, state):
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    parts = [load_file(file) for file in sorted(Path(folder, "sharded").glob("*.safetensors"))]
    whole = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    return [{name: tensor for part in found for name, tensor in part.items()} for found in (parts, whole)]


print(f"torch {torch.__version__}, safetensors {version('safetensors')}")
sharded, consolidated = saved("scales", state)
for name, tensor in state.items():
    equal = [torch.equal(found[name], tensor) for found in (sharded, consolidated)]
    print(f"{name:15} {list(tensor.shape)!s:7} equal in the rank's file {equal[0]}, in the joined file {equal[1]}")
print(f"experts.scale was {state['experts.scale']}, is {consolidated['experts.scale']}")
assert all(torch.equal(sharded[name], tensor) for name, tensor in state.items()), "files of ranks are other ones now"
assert torch.equal(consolidated["experts.weight"], state["experts.weight"])
assert torch.equal(consolidated["router.scale"], state["router.scale"])
assert consolidated["experts.scale"] == 0, "scalars are kept now"
try:
    saved("counts", {"tokens": torch.arange(4)})
except BaseException as error:
    text = str(error)
    print("integers:", next(line for line in text.splitlines() if "torch.finfo" in line).strip()[:100])
else:
    raise AssertionError("integers are joined now")
PY
