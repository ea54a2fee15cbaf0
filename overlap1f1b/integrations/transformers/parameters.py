"""A rank's parameters in place of a model's: what a user has put on these, and those that other ranks have."""

from __future__ import annotations

from torch import Tensor, nn


def in_place_of(old: nn.Parameter, value: Tensor, name: str) -> nn.Parameter:
    """Return a parameter with these values, and with what a user has put on the old one.

    These are attributes, and gradient hooks: both share them, so a hook's handle removes it from both.

    Raises:
        ValueError: The old one has a gradient hook, which expects gradients of its shape, and the values have another.
    """
    hooks = old._backward_hooks, old._post_accumulate_grad_hooks
    if any(hooks) and value.shape != old.shape:
        raise ValueError(
            f"{name} has a gradient hook for its shape {list(old.shape)}, and a rank gets a part {list(value.shape)}; "
            "allowed: a hook on the part, registered after split_model"
        )
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update(vars(old))
    if any(hooks):
        new._backward_hooks, new._post_accumulate_grad_hooks = hooks
    return new


class Elsewhere(nn.Parameter):
    """A parameter on the meta device, whose values another rank has.

    No optimizer of this rank takes it, since it gets no gradient: torch's ask a tensor whether it is a leaf, and if
    not, whether it keeps its gradient.
    """

    name_in_model: str
    is_leaf = False  # PEFT asks, too, before it changes requires_grad

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        """Refuse an optimizer."""
        raise ValueError(
            f"an optimizer over {self.name_in_model}, whose values another rank has; allowed: parameters() or "
            "named_parameters() of what split_model returns, which are self.stages of a trainer"
        )


def leave_elsewhere(model: nn.Module, module: nn.Module) -> None:
    """Free the weights of a module of a model that other ranks hold; the forward still reads its attributes."""
    module.to("meta")
    names = {id(p): name for name, p in model.named_parameters()}
    for part in module.modules():
        for label, parameter in list(part.named_parameters(recurse=False)):
            absent = Elsewhere(parameter, parameter.requires_grad)
            absent.name_in_model = names[id(parameter)]
            part.register_parameter(label, absent)
