"""What changes on Megatron-Core's layers while a step lasts, so that an engine can hide and move what they do.

1. All-to-alls of its MoE layers become exchanges.
2. Its linear layers leave their weight gradients to the queue of a weight node.
3. Layers of TransformerEngine compute them in ``backward_dw``, by ``delay_wgrad_compute``. The backward of such a layer
   puts its operands into ``wgrad_store``. Each call of ``backward_dw`` takes the oldest out, computes the gradients
   and calls the hooks of Megatron-Core's data-parallel wrapper. Here the operands wait in the queue of a weight node
   instead, and are in the store only while this node calls ``backward_dw``: so several microbatches may be open, in any
   order.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlap1f1b.cut.replacement import Replacement, replaced
from overlap1f1b.cut.weights import added_to_main, split_linear
from overlap1f1b.integrations.megatron.config import KERNELS, attribute_of, class_names
from overlap1f1b.kernels.grouped_mm import has_own_products
from overlap1f1b.play.install import Installation
from overlap1f1b.transport import devices
from overlap1f1b.transport.calls import exchange, exchange_by
from overlap1f1b.transport.suspension import uncompiled

# ---------------------------------------------------------------------------------------------------------- exchanges

ALLTOALL = "MoEAlltoAllTokenDispatcher"
FLEX = "MoEFlexTokenDispatcher"
LIBRARIES = ("fused_dispatch", "fused_combine", "hybrid_ep_dispatch", "hybrid_ep_combine")
"""Functions of :data:`DISPATCHERS` by which the flex dispatcher calls DeepEP and HybridEP."""
METHODS = ("token_dispatch", "token_combine")
"""Methods of the dispatcher that exchange rows along "ep", and do nothing else with them."""
DISPATCHERS = "megatron.core.transformer.moe.token_dispatcher"
SHARED_EXPERTS = "megatron.core.transformer.moe.shared_experts"
SHARED_KIND = "SharedExpertMLP"
ORDER = "set_tensor_grad_fn_sequence_sr"
"""Function of :data:`SHARED_EXPERTS` that changes when autograd runs a node, by the number that tells its age."""


def dispatchers_of(model: nn.Module) -> list[Any]:
    """Return the dispatchers of a model's MoE layers whose exchanges can be hidden: all-to-all, and flex."""
    held = (getattr(module, "token_dispatcher", None) for module in model.modules())
    return [one for one in held if {ALLTOALL, FLEX}.intersection(class_names(one))]


def exchanging(dispatchers: Sequence[Any]) -> Iterator[Replacement]:
    """Yield what lets dispatchers exchange rows by :func:`exchange`: tokens and probabilities together.

    Flex dispatchers call their library by :func:`exchange_by`. Of Megatron-Core's modules only the functions by which
    they do so change, and one that orders autograd's nodes, which does nothing; else only these instances.
    """
    flex = [one for one in dispatchers if FLEX in class_names(one)]
    plain = [one for one in dispatchers if FLEX not in class_names(one)]
    for dispatcher in plain:
        for name in METHODS:
            yield vars(dispatcher), name, _collecting(getattr(dispatcher, name))
    shared = sys.modules.get(SHARED_EXPERTS)
    if plain and hasattr(shared, ORDER):
        yield vars(shared), ORDER, lambda *_: None
    module = sys.modules.get(DISPATCHERS)
    for name in LIBRARIES if flex else ():
        function = getattr(module, name, None)
        if function is not None and not isinstance(function, _ByLibrary):  # another chunk may have changed it
            yield vars(module), name, _ByLibrary(function, flex[0].tp_ep_group)


def overlapped_of(model: nn.Module) -> list[Any]:
    """Return the shared experts of a model that have a stream of their own, by ``moe_shared_expert_overlap``."""
    shared = (one for one in model.modules() if SHARED_KIND in class_names(one))
    return [one for one in shared if getattr(one, "stream", None) is not None]


def on_one_stream(shared: Iterable[Any], device: torch.device) -> Iterator[Replacement]:
    """Yield what lets shared experts compute on the current stream of a GPU.

    Memory of their own stream is safe only while one microbatch is open, and weight gradients are computed on the
    current stream.
    """
    gpu = devices.gpu_of(device)
    for one in () if gpu is None else shared:
        yield vars(one), "stream", gpu.current_stream(device)


class _ByLibrary:
    """A library's function whose call suspends a forward, with the arguments that require a gradient."""

    def __init__(self, function: Callable[..., Any], group: Any) -> None:
        self.function, self.group = function, group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments, names, count = [*args, *kwargs.values()], list(kwargs), len(args)
        places = [at for at, value in enumerate(arguments) if isinstance(value, Tensor) and value.requires_grad]
        sent = [arguments[at] for at in places]
        for at in places:  # the engine alone holds these
            arguments[at] = None

        def call(*tensors: Tensor) -> tuple[Any, ...]:
            """Call the library's function with these tensors in their places; return a tuple."""
            values = list(arguments)
            for at, tensor in zip(places, tensors, strict=True):
                values[at] = tensor
            returned = self.function(*values[:count], **dict(zip(names, values[count:], strict=True)))
            return returned if isinstance(returned, tuple) else (returned,)

        received = exchange_by(call, sent, self.group)
        return received if len(received) > 1 else received[0]


def _collecting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a dispatcher that makes one exchange of all its all-to-alls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        """Run the method with all-to-alls that are only noted, and make one exchange of them."""
        calls: list[tuple[Any, Tensor, Any, Any]] = []

        def collect(group: Any, rows: Tensor, receive: Any = None, send: Any = None, *_: Any, **__: Any) -> Tensor:
            calls.append((group, rows, receive, send))
            return rows

        with replaced([(vars(sys.modules[DISPATCHERS]), "all_to_all", collect)]):
            returned = method(*args, **kwargs)
        results = returned if isinstance(returned, tuple) else (returned,)
        tensors = tuple(rows for _, rows, _, _ in calls)
        if not calls or len(results) != len(calls) or any(a is not b for a, b in zip(results, tensors, strict=True)):
            kinds = ", ".join(type(result).__name__ for result in results)
            raise RuntimeError(
                f"{ALLTOALL}.{method.__name__} makes {len(calls)} all-to-alls and returns {kinds}; this version of "
                "Megatron-Core is not known: allowed: 0.16"
            )
        group, _, *sizes = calls[0]
        receive, send = (None if every is None else [int(size) for size in every] for every in sizes)
        received = exchange(tensors, send, receive, group)
        return received if isinstance(returned, tuple) else received[0]

    return call


# ------------------------------------------------------------------------------------------------------- linear layers

LINEARS = "megatron.core.tensor_parallel.layers"
KINDS = ("ColumnParallelLinear", "RowParallelLinear")
PRODUCT = "_forward_impl"
"""Method of these layers that multiplies an input by the layer's weight."""


def linears_of(model: nn.Module) -> list[Any]:
    """Return the layers with a trained weight of their own: their weight gradients can be computed apart."""
    layers: Any = sys.modules.get(LINEARS)
    kinds = tuple(getattr(layers, name) for name in KINDS) if layers is not None else ()
    return [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        and hasattr(module, PRODUCT)
        and isinstance(module.weight, nn.Parameter)
        and module.weight.requires_grad
        and not has_own_products(module.weight)
    ]


def deferring(layer: Any, installed: Callable[[], Installation]) -> Replacement:
    """Return what lets a layer leave its weight gradients to the queue in force of a stage."""
    plain = getattr(layer, PRODUCT)

    def product(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Multiply; the weight's gradient goes to the queue in force."""
        # Collectives along "tp" must not wait for a weight gradient, which may be computed at any time. A bias is
        # rarely added here, and its gradient would be summed in another order.
        differs = args or weight is not layer.weight or has_own_products(weight) or kwargs.get("bias") is not None
        if differs or kwargs.get("sequence_parallel") or kwargs.get("allreduce_dgrad") or not torch.is_grad_enabled():
            return plain(input, weight, *args, **kwargs)
        stage, parameter = installed(), layer.weight
        fused = kwargs.get("gradient_accumulation_fusion") and getattr(parameter, "main_grad", None) is not None
        add = _adding(parameter) if fused else None
        return split_linear(input, (parameter,), None, stage.put, stage.anchor, add)

    return vars(layer), PRODUCT, uncompiled(product)


def _adding(weight: Any) -> Callable[[Tensor, Tensor], Tensor | None]:
    """Return what adds a weight's gradient to ``main_grad`` by Megatron-Core's fused kernel."""
    main = weight.main_grad

    def add(grad: Tensor, rows: Tensor) -> Tensor | None:
        kernels: Any = getattr(sys.modules[LINEARS], KERNELS)
        kernel = kernels.wgrad_gemm_accum_fp32 if main.dtype == torch.float32 else kernels.wgrad_gemm_accum_fp16
        kernel(rows.contiguous(), grad.contiguous(), main)  # it reads memory without looking at strides
        return added_to_main(weight)

    return add


# --------------------------------------------------------------------------------------- layers of TransformerEngine

MARK = "skip_backward_post_hook"
"""Attribute of the parameters whose gradients ``backward_dw`` computes."""


def delayed_of(model: nn.Module) -> list[Any]:
    """Return the layers with a ``backward_dw``; ValueError if gradients could get lost or be added in another order."""
    layers = []
    for name, layer in model.named_modules():
        store = getattr(layer, "wgrad_store", None)
        if store is None or not store.delay_wgrad_compute():
            continue
        where = f"delay_wgrad_compute in {name} ({type(layer).__name__})"
        if not any(hasattr(parameter, MARK) for parameter in layer.parameters(recurse=False)):
            raise ValueError(f"{where}, which marks no parameter by {MARK}; allowed: a TransformerEngine that does")
        if layer.use_bias and layer.return_bias:  # autograd adds its gradient, and hooks wait for backward_dw
            raise ValueError(f"{where}, which returns its bias; allowed: no such bias (add_bias_linear=False)")
        if _delayed(layer):
            layers.append(layer)
    wrapper = attribute_of(model, "ddp_config")
    if layers and wrapper is not None and not getattr(wrapper, "delay_wgrad_compute", False):
        raise ValueError("delay_wgrad_compute=False in ddp_config, and True in the model's layers; allowed: the same")
    return layers


def delaying(layer: Any, installed: Callable[[], Installation]) -> Replacement:
    """Return what lets a layer call ``backward_dw`` when the queue in force of a stage is computed."""
    store, parameters = layer.wgrad_store.put, _delayed(layer)

    def put(operands: Any, function: Any) -> None:
        installed().put(parameters[0], lambda: add(operands, function))

    @torch.no_grad()
    def add(operands: Any, function: Any) -> None:
        """Compute the delayed gradients by ``backward_dw``, and add them to those of earlier microbatches."""
        store(operands, function)
        fused = [getattr(parameter, "grad_added_to_main_grad", False) for parameter in parameters]
        before = [parameter.grad for parameter in parameters]  # of earlier microbatches: backward_dw would replace it
        for parameter, added in zip(parameters, fused, strict=True):
            # Nobody reads these zeros: hooks wait for a gradient, and that of the backward may be gone with another
            # microbatch.
            parameter.grad = parameter.new_zeros(()).expand_as(parameter) if added else None
        layer.backward_dw()
        for parameter, added, grad in zip(parameters, fused, before, strict=True):
            if added:
                parameter.grad = None
            elif grad is not None:
                parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)

    return vars(layer.wgrad_store), "put", put


def _delayed(layer: Any) -> list[nn.Parameter]:
    return [p for p in layer.parameters(recurse=False) if p.requires_grad and getattr(p, MARK, False)]
