#!/usr/bin/env bash
# torchao 0.18: nn.Linear with a bias, converted to MXFP8 training, computes without its bias, which gets no gradient.
#
# Nothing is said. The float8 class of the same module adds the bias. For all other operations, so its documentation,
# the converted weight behaves like a regular tensor.
. "$(dirname "$0")/environment" torch==2.13.0 torchao==0.18.0 numpy==2.4.6
check <<'PY'
from importlib.metadata import version

import torch
from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

print(f"torchao {version('torchao')}, torch {torch.__version__}; a bias of 5")
configs = {
    "plain": None,
    "float8": Float8TrainingOpConfig(),
    "MXFP8": MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED),
}
for name, config in configs.items():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    torch.nn.init.constant_(layer.bias, 5.0)
    if config is not None:
        quantize_(layer, config, filter_fn=lambda module, _: isinstance(module, torch.nn.Linear))
    y = layer(x)
    mean = y.float().mean().item()
    if name != "float8":  # whose backward needs a GPU
        y.backward(torch.ones_like(y))
    print(f"{name:6} mean of the output {mean:5.2f}, gradient of the bias: {layer.bias.grad is not None or 'none'}")
    if name == "MXFP8":
        assert abs(mean) < 0.1 and layer.bias.grad is None, "the bias is added now"
    else:
        assert abs(mean - 5) < 0.1
PY
