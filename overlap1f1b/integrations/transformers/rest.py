"""The model that Trainer's own code calls for the loss: what is left to run after the last layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Self

import torch
from torch import nn

from overlap1f1b.integrations.transformers.adapters import base_of
from overlap1f1b.integrations.transformers.ahead import Batch


class RestOfModel(nn.Module):
    """The model after its last layer, called as the whole model with the inputs of one microbatch.

    It has the attributes of the whole ``model``. Layers have run through the inputs ``names`` of the ``batch``,
    ``finish`` runs the rest with the arguments of a call, and ``caller`` names the trainer in messages.
    """

    def __init__(
        self, model: Any, names: Sequence[str], batch: Batch, finish: Callable[[Mapping[str, Any]], Any], caller: str
    ) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # not a module of this one
        self.names, self.batch, self.finish, self.caller = names, batch, finish, caller
        self._read = self._versions()
        self.training = model.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    @property
    def device(self) -> torch.device:
        """Device of the batch; the whole model's is that of its first parameter, which may be on another rank."""
        found: torch.device = self.batch[self.names[0]].device
        return found

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the modules of the rank's stages have theirs already."""
        self.training = mode
        return self

    def _whole(self, *_: Any, **__: Any) -> Any:
        """Refuse what would be a term of the loss that misses most of the model, and whose gradient is lost."""
        raise ValueError(
            "parameters or modules of the model in a loss, of which a rank has a part and whose gradients would be "
            "lost; allowed: calling the model, its config, or weight_decay"
        )

    parameters = named_parameters = state_dict = modules = named_modules = children = _whole

    def _versions(self) -> dict[str, int]:
        """Return how often each input was changed in place."""
        given = {name: self.batch.get(name) for name in self.names}
        return {name: 0 if value is None or value.is_inference() else value._version for name, value in given.items()}

    def _get_name(self) -> str:
        # Trainer asks for the class inside PEFT's model, but of PEFT's class alone.
        return type(base_of(self.__dict__["_model"])).__name__

    def forward(self, *positional: Any, **arguments: Any) -> Any:
        if positional:
            arguments = {**signature(self.__dict__["_model"].forward).bind_partial(*positional).arguments, **arguments}
        versions = self._versions()
        for name in self.names:
            if arguments.get(name) is not self.batch.get(name) or versions[name] != self._read[name]:
                raise ValueError(
                    f"{self.caller} calls the model with another {name} than the batch has; "
                    "allowed: the inputs of the batch, through which its layers have already run"
                )
        allowed = (*self.names, "labels", "shift_labels")  # inputs, and what the loss takes
        for name in (arguments.keys() & self.batch.keys()) - {*allowed}:  # layers ran without it
            raise ValueError(f"a batch with {name}, given to the model; allowed: {', '.join(allowed)}")
        return self.finish(arguments)
