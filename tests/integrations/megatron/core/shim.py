"""Let Megatron-Core train on a CPU. Only in a process of its own: CUDA is replaced there for good.

Megatron-Core asks for CUDA in a few places without need: current devices, streams, states of random numbers, and
literal devices. :func:`apply` replaces each of them. Numbers of lines are those of Megatron-Core 0.16.1.
"""

from __future__ import annotations

import contextlib
import logging
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


class _Stream:
    """Stand-in for a stream and for an event: work on a CPU is done when its call returns."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, event: object = None) -> _Stream:
        return self

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...


class _Torch(types.ModuleType):
    """The module ``torch`` for files that create tensors with the literal device "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, device: object = None, **more: Any) -> torch.Tensor:
        return torch.zeros(*size, **more)

    def ones(self, *size: Any, device: object = None, **more: Any) -> torch.Tensor:
        return torch.ones(*size, **more)


class _Distributed(types.ModuleType):
    """The module ``torch.distributed`` whose lists of tensors may differ in size, which gloo refuses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> None:
        outputs[group.rank()].copy_(tensor)
        for rank, output in zip(dist.get_process_group_ranks(group), outputs, strict=True):
            dist.broadcast(output, rank, group=group)

    def reduce_scatter(self, output: torch.Tensor, tensors: list[torch.Tensor], group: Any) -> None:
        for rank, tensor in zip(dist.get_process_group_ranks(group), tensors, strict=True):
            total = tensor.clone()
            dist.all_reduce(total, group=group)
            if rank == dist.get_rank():
                output.copy_(total)


def apply() -> None:
    """Replace what needs CUDA. Call it before the first import of ``megatron.core``; later calls do nothing."""
    if torch.cuda.Stream is _Stream:
        return
    warnings.simplefilter("ignore")  # about kernels of Apex and TransformerEngine that are not there
    # 1. Torch. jit.py compiles every fused operation, which would take seconds each.
    torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # type: ignore[assignment]
    stream = _Stream()
    for name, value in {
        "current_device": lambda: CPU,  # mappings.py:442, layers.py, router.py:90, param_and_grad_buffer.py:783, …
        "Stream": _Stream, "Event": _Stream,  # token_dispatcher.py:445, shared_experts.py:123
        "current_stream": lambda *_: stream, "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_: None,  # p2p_communication.py
        "get_rng_state": lambda *_: torch.get_rng_state(),  # random.py:235
        "manual_seed": torch.default_generator.manual_seed,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    torch.Tensor.cuda = lambda self, *_, **__: self  # language_module.py:244, tied embeddings on the last stage
    # 2. States of random numbers: those of the CPU's generator.
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # about the CPU's state inside of fork()
    # 3. Splits: moe_utils.py:1093 makes lists of tensors only if they were on a GPU.
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    name_what_is_missing()
    # 4. Literal devices: schedules.py:596, 983, 2138; moe_utils.py:998; transformer/utils.py:35, 40; later releases
    # also in token_dispatcher.py.
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import utils

    for module in (schedules, moe_utils, utils, token_dispatcher):
        module.torch = _Torch("torch")
    # 5. Rows of experts that are shared along "tp": mappings.py:150 and 193 have lists of different sizes.
    from megatron.core.tensor_parallel import mappings

    mappings.torch = _Torch("torch")
    mappings.torch.distributed = _Distributed("torch.distributed")
    # 6. Later releases ask for classes of layers for inference that only TransformerEngine defines.
    from megatron.core.transformer import multi_token_prediction

    multi_token_prediction.is_inference_column_parallel_linear = lambda module: False


def name_what_is_missing() -> None:
    """Define what Megatron-Core reads of TransformerEngine although that is not installed; on a GPU, too."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)  # moe_utils.py:1192
    if not random.HAVE_TE:  # random.py:503 asks for the state of fp8 also where fp8 is off
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()


def add_weight_gradient(rows: torch.Tensor, grad: torch.Tensor, main: torch.Tensor) -> None:
    """Add a weight's gradient ``[O, I]`` as Apex's kernel does, which reads memory without looking at strides."""
    dense_rows, dense_grad = (matrix.as_strided(matrix.shape, (matrix.shape[1], 1)) for matrix in (rows, grad))
    main.add_(dense_grad.t() @ dense_rows)


def fuse_weight_gradients() -> None:
    """Replace Apex's kernel of ``gradient_accumulation_fusion``: backwards add to ``main_grad`` (layers.py:569)."""
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add_weight_gradient)
    layers._grad_accum_fusion_available = True


def allow_sequence_parallel_norm() -> None:
    """Let torch's norm stand where sequence parallelism is on: torch_norm.py:32 refuses it.

    The weights are marked here for the sum over ranks along "tp" that ``finalize_model_grads`` makes.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    made = WrappedTorchNorm.__new__
    if getattr(made, "patched", False):
        return

    def new(cls: type, config: Any, *args: Any, **more: Any) -> Any:
        before, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = made(cls, config, *args, **more)
        finally:
            config.sequence_parallel = before
        for parameter in norm.parameters() if before else ():
            parameter.sequence_parallel = True
        return norm

    new.patched = True  # type: ignore[attr-defined]
    WrappedTorchNorm.__new__ = new
