"""A rank's parameters in place of a model's: what users have put on these goes along, and optimizers of these fail."""

from typing import Any, NoReturn

from torch import Tensor, nn


def _refuse(parameter: Any) -> NoReturn:
    raise ValueError(
        f"{parameter.name_in_model} of the whole model, of which this rank has no gradient, in an optimizer; allowed: "
        "parameters() or named_parameters() of what split_model returns (self.stages of a trainer), after any "
        "load_pretrained"
    )


class Elsewhere(nn.Parameter):
    """A parameter on the meta device, whose values another rank has.

    No optimizer takes it: torch's ask a tensor whether it is a leaf, and if not, whether it keeps its gradient.
    """

    name_in_model = "a parameter"  # of a copy
    is_leaf = False  # PEFT asks, too, before it changes requires_grad
    retains_grad: Any = property(_refuse)


class Replaced(Elsewhere):
    """A parameter that no module has any more: an optimizer that was made before asks in vain for its gradient."""

    grad: Any = property(_refuse)


def in_place_of(old: nn.Parameter, value: Tensor, name: str, *, both: bool = False) -> nn.Parameter:
    """Return a parameter with these values, and with what a user has put on the old one.

    These are attributes, and gradient hooks: the parameters share them, so a hook's handle removes it from both. With
    ``both`` the old one stays, too; ``name`` is its name for messages.
    """
    hooks = old._backward_hooks, old._post_accumulate_grad_hooks
    if any(hooks) and value.shape != old.shape:
        raise ValueError(
            f"{name} has a gradient hook for its shape {list(old.shape)}, and a rank gets a part {list(value.shape)}; "
            "allowed: a hook on the part, registered after split_model"
        )
    new = nn.Parameter(value, requires_grad=old.requires_grad)
    vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})  # a class's own stay
    if any(hooks):
        new._backward_hooks, new._post_accumulate_grad_hooks = hooks
    if not both:
        _replace(old, name)
    return new


def leave_elsewhere(model: nn.Module, module: nn.Module) -> None:
    """Free the weights of a module of a model that other ranks hold; the forward still reads its attributes."""
    names = {id(p): name for name, p in model.named_parameters()}
    for part in module.modules():
        for label, old in list(part.named_parameters(recurse=False)):
            if type(old) is not Elsewhere:
                new = Elsewhere(old.detach().to("meta"), old.requires_grad)
                new.name_in_model = names[id(old)]
                part.register_parameter(label, new)
                _replace(old, names[id(old)])
    module.to("meta")  # buffers, too


def _replace(old: nn.Parameter, name: str) -> None:
    old.__class__ = Replaced
    assert isinstance(old, Replaced)
    old.name_in_model = name
