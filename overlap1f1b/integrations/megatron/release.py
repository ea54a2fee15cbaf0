"""Outputs whose values are freed while their graph is still needed: for code that calls this by Megatron-LM's names."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable

from overlap1f1b.schedule.values import check_kind

Outputs = Tensor | Sequence["Outputs"] | Mapping[str, "Outputs"] | None


def deallocate_output_tensor(out: Outputs, deallocate_pipeline_outputs: bool = True) -> None:
    """Free the values of an output that has been sent, and keep its graph for :func:`custom_backward`.

    ``.data`` becomes one uninitialised element, so the tensor's storage is freed unless another tensor holds it. After
    this call the tensor must not go to a function that reads its values, such as ``torch.autograd.backward``.

    Args:
        out: A tensor, or a list or mapping of tensors; None is skipped.
        deallocate_pipeline_outputs: Megatron-Core's switch; False does nothing.

    Raises:
        ValueError: The output has another type, or is a view, whose values another tensor holds.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    if isinstance(out, list | tuple | Mapping):
        for part in out.values() if isinstance(out, Mapping) else out:
            deallocate_output_tensor(part)
        return
    if not isinstance(out, Tensor):
        raise ValueError(f"an output of type {type(out).__name__}; allowed: a tensor, or a list or mapping of tensors")
    if out._base is not None:
        raise ValueError(f"an output of shape {tuple(out.shape)} that is a view; allowed: a tensor of its own storage")
    out.data = out.new_empty(1)


def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """Run the backward of a deallocated output by autograd's engine, without its check of shapes.

    >>> x = torch.ones(3, requires_grad=True)
    >>> out = x * 2
    >>> deallocate_output_tensor(out)
    >>> custom_backward(out, torch.ones(3))
    >>> out.shape, x.grad
    (torch.Size([1]), tensor([2., 2., 2.]))

    Args:
        output: A tensor after :func:`deallocate_output_tensor`, or a scalar.
        grad_output: Its gradient, in the shape that the output had before; None stands for 1.

    Raises:
        ValueError: The output has several elements, or an argument is not a tensor.
    """
    if not isinstance(output, Tensor) or output.numel() != 1:
        what = f"{output.numel()} elements" if isinstance(output, Tensor) else f"type {type(output).__name__}"
        raise ValueError(f"an output of {what}; allowed: one element, as deallocate_output_tensor leaves it")
    check_kind("grad_output", grad_output, Tensor, None)
    grad = torch.ones_like(output) if grad_output is None else grad_output
    # torch.autograd.backward would compare the gradient's shape with the remaining element.
    Variable._execution_engine.run_backward(
        (output,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
