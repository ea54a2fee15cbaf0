"""A causal LM's own forward around its layers: the computation before and after them, and their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from overlap1f1b.cut.replacement import Replacement, replaced
from overlap1f1b.integrations.transformers.adapters import is_adapter, outermost
from overlap1f1b.integrations.transformers.experts import Found


@dataclass(frozen=True, order=True)
class Returned:
    """Value ``index`` of what a layer returns beside hidden states; in a layer's arguments it stands for this value."""

    layer: int
    index: int


class Call(NamedTuple):
    """The arguments, beside the hidden states, that the model's forward gives a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs))

    def filled(self, values: Mapping[Returned, Tensor | None]) -> Call:
        """Return the arguments with the values that earlier layers have returned."""
        if not values:
            return self
        return Call(*tree_map(lambda leaf: values[leaf] if isinstance(leaf, Returned) else leaf, tuple(self)))


class Shell:
    """A model around its layers: runs the model's own forward with stand-ins for the layers.

    So on every stage the model's own code computes masks, rotary embeddings and other arguments of a layer, and also
    norm, head and loss. A first run, on a few tokens, shows what it calls, and refuses layers that are no chain.

    Attributes:
        config: The model's configuration; of a model that also takes images, of its text.
        before: The modules outside the layers with parameters that it calls before the layers, by name in the model.
        after: The same of modules that it calls after them.
        returned: Number of values that a layer returns; the first are its hidden states.
        walk: The run of the forward in which stand-ins are called.
        carried: For each layer the values that later layers need of it and of earlier ones, beside hidden states.
    """

    walk: _Walk

    def __init__(self, model: Any, found: Found) -> None:
        self.model, self.owner, self.attribute, self.layers = model, found.owner, found.attribute, found.layers
        self.prefix, self.owner_name = found.prefix, type(found.owner).__name__
        self.config = model.config.get_text_config()
        self._stands = nn.ModuleList(_StandIn(layer, number, self) for number, layer in enumerate(self.layers))
        path = self.prefix.split(".")
        self._around = [model.get_submodule(".".join(path[:length])) for length in range(len(path))]
        self._check_outputs({})
        for self.returned in range(1, MOST_RETURNED + 1):
            try:
                self.before, self.after, self.carried = self._trace(_Walk(self))
                return
            except _UnpackedError as error:  # a batch of one is never unpacked as several values
                refusal = error
        raise ValueError(
            f"{self.owner_name} cannot run with stand-ins for its layers ({refusal}); allowed: layers that return "
            "hidden states, alone or with values that it gives to later layers unchanged"
        ) from refusal

    def _trace(self, walk: _Walk) -> tuple[dict[str, nn.Module], dict[str, nn.Module], list[list[Returned]]]:
        """Return what the attributes ``before``, ``after`` and ``carried`` are to be."""
        phases: tuple[dict[str, nn.Module], dict[str, nn.Module]] = ({}, {})
        outside = {
            name: module
            for name, module in outermost(self.model)
            if not f"{name}.".startswith(f"{self.prefix}.")
            and any(True for _ in module.parameters(recurse=bool(name) and is_adapter(module)))
        }

        def note(name: str, module: nn.Module, _: Any) -> None:
            phases[walk.ended].setdefault(name, module)

        held = dict(self.model.named_parameters())
        # Adapters may have values where the model has none.
        device = torch.device("meta") if any(p.is_meta for p in held.values()) else next(iter(held.values())).device
        alike = {name: p.to(device) for name, p in held.items() if p.device != device}
        try:
            with ExitStack() as around:
                for name, module in outside.items():
                    around.callback(module.register_forward_pre_hook(partial(note, name)).remove)
                around.enter_context(torch.random.fork_rng(devices=[]))
                around.enter_context(torch.enable_grad())
                # The stand-ins compute no router logits, from which the model would compute a loss.
                without_logits = (vars(self.config), "output_router_logits", False)
                around.enter_context(replaced([*self._stand_ins(walk), without_logits]))
                if device.type == "meta":  # then masks are made without reading values
                    around.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                inputs = {"input_ids": torch.ones(1, 4, dtype=torch.int64, device=device), "use_cache": False}
                output = torch.func.functional_call(self.model, alike, (), inputs)
        except Exception as error:
            if walk.refused:
                raise
            raise self._failure(error, device) from error
        if not walk.ended:
            raise ValueError(
                f"{self.owner_name} calls {len(walk.calls)} of its {len(self.layers)} layers; allowed: all"
            )
        for number, call in enumerate(walk.calls):
            if any(isinstance(t, Tensor) and t.requires_grad for t in call.leaves):
                raise ValueError(
                    f"{self.owner_name} gives its layer {number} a second tensor that requires a gradient, which it "
                    "has computed itself; allowed: hidden states, and what earlier layers have returned"
                )
        if getattr(output, "logits", None) is None:
            raise ValueError(
                f"{type(self.model).__name__} returns {type(output).__name__}; "
                "allowed: a causal LM with its head, which returns logits and, with labels, a loss"
            )
        before, after = phases
        for name, module in outside.items():
            holds = not name or f"{self.prefix}.".startswith(f"{name}.")
            unused = name not in before and name not in after
            if unused and not holds and self.config is not self.model.config:
                before[name] = module  # of a tower for images or sounds: kept in the first stage, as it is
            elif holds or unused:
                label = f"{name}.{next(iter(dict(module.named_parameters())))}".lstrip(".")
                raise ValueError(
                    f"parameter {label} belongs to {type(module).__name__}, which "
                    f"{'holds the layers' if holds else 'a call with tokens alone does not use'}; allowed: "
                    "beside the layers, parameters of modules that are called before or after them"
                )
        both = sorted(before.keys() & after.keys())
        if both:
            raise ValueError(f"{both[0]} is called before and after the layers; allowed: modules called on one side")
        needed = [{leaf for leaf in call.leaves if isinstance(leaf, Returned)} for call in walk.calls]
        carried = [
            sorted(value for value in set().union(*needed[number + 1 :]) if value.layer <= number)
            for number in range(len(needed))
        ]
        return before, after, carried

    def _failure(self, error: Exception, device: torch.device) -> Exception:
        """Return the error of a model whose forward fails where it is followed."""
        if isinstance(error, TypeError | ValueError):
            return _UnpackedError(error)
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        inner = [name for name, child in self.model.named_children() if hasattr(child, "lm_head")]
        without, allowed = "", "a causal LM that runs with tokens alone" + "".join(f", as its {name}" for name in inner)
        if device.type == "meta":
            without, allowed = " and without weights", f"{allowed}; one that reads values, with its weights"
        return ValueError(
            f"{type(self.model).__name__}'s own forward fails with input_ids alone{without} ({why}); allowed: {allowed}"
        )

    def routers(self, number: int) -> list[tuple[nn.Module, int]]:
        """Return modules of a layer that compute router logits, with the logits' index in each module's outputs."""
        specs = (getattr(self.owner, "_can_record_outputs", None) or {}).get("router_logits", [])
        found = []
        for spec in specs if isinstance(specs, list) else [specs]:
            kind: Any = getattr(spec, "target_class", spec)
            index = getattr(spec, "index", 1)
            within = getattr(spec, "layer_name", None)
            for name, module in self.layers[number].named_modules(prefix=f"{self.prefix}.{number}"):
                if isinstance(module, kind) and (within is None or f".{within.strip('.')}." in f"{name}."):
                    found.append((module, index))
        return found

    def begin(self, named: Mapping[str, Tensor], until: int, like: Tensor | None = None) -> tuple[Tensor, list[Call]]:
        """Run the forward up to the call of a layer; return the hidden states before layer 0, and the layers' calls.

        With ``like`` the embedding is left out: the hidden states are then zeros on its device.
        """
        walk = _Walk(self, until=until)
        changed = [*self._stand_ins(walk), *(() if like is None else self._without_embedding(like))]
        with replaced(changed):
            try:
                self.model(**named, use_cache=False)
            except _Reached:
                assert walk.first is not None
                return walk.first, walk.calls
        raise AssertionError("the last needed layer was not reached")

    def finish(self, arguments: Mapping[str, Any], hidden: Tensor, routed: Sequence[Tensor]) -> Any:
        """Run the forward after the last layer, with its arguments by name; return what the model returns.

        ``hidden [B, S, H]`` is of the last layer, ``routed`` the router logits of all, if the model asks for them.
        """
        self._check_outputs(arguments)
        own = self.owner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            output["router_logits"] = tuple(routed)
            return output

        changed = [*self._stand_ins(_Walk(self, result=hidden)), *self._without_embedding(hidden)]
        asked = arguments.get("output_router_logits") or getattr(self.config, "output_router_logits", False)
        if routed:
            changed.append((vars(self.owner), "forward", forward))
        elif asked and any(map(self.routers, range(len(self.layers)))):
            raise RuntimeError(
                "output_router_logits=True, which config did not have at split_model; allowed: set it in the config "
                "before split_model"
            )
        with replaced(changed):
            return self.model(**{**arguments, "use_cache": False})

    def _check_outputs(self, arguments: Mapping[str, Any]) -> None:
        # transformers records them where its layers are called, and stand-ins are called in their place.
        configs = [getattr(module, "config", None) for module in (self.model, self.owner)]
        for name in ("output_hidden_states", "output_attentions"):
            if value := arguments.get(name) or any(getattr(config, name, False) for config in configs):
                raise ValueError(f"{name}={value!r} of a model in stages; allowed: False")

    def _stand_ins(self, walk: _Walk) -> Iterator[Replacement]:
        yield vars(self), "walk", walk
        yield self.owner._modules, self.attribute, self._stands
        # transformers hooks the layers at a model's first call, once: at these it would hook the stand-ins.
        for module in self._around:
            yield vars(module), "_output_capturing_hooks_installed", True

    def _without_embedding(self, like: Tensor) -> Iterator[Replacement]:
        """Yield forwards of the modules before the layers that compute nothing; an embedding's has the right shape."""

        def same(x: Tensor, *_: Any, **__: Any) -> Tensor:
            return x

        def embedded(module: nn.Embedding) -> Any:
            return lambda ids: torch.zeros(
                *ids.shape, module.embedding_dim, dtype=module.weight.dtype, device=like.device
            )

        for module in self.before.values():
            inside = module.modules() if is_adapter(module) else (module,)
            embedding = next((part for part in inside if isinstance(part, nn.Embedding)), None)
            yield vars(module), "forward", same if embedding is None else embedded(embedding)


MOST_RETURNED = 3
"""Most values that a layer may return."""


class _UnpackedError(Exception):
    """The model's forward cannot use what the stand-ins for its layers return."""


class _Reached(BaseException):
    """The end of a forward after the call of the last needed layer."""


class _Walk:
    """One run of the forward, with the calls of layers so far: to the layer ``until``, or to its end.

    ``result`` is the output of the last layer; None passes the hidden states through.
    """

    def __init__(self, shell: Shell, *, until: int | None = None, result: Tensor | None = None) -> None:
        self.shell, self.until, self.result = shell, until, result
        self.calls: list[Call] = []
        self.first: Tensor | None = None
        self.passed: Tensor | None = None
        self.refused = False

    @property
    def ended(self) -> bool:
        """Whether all layers have been called."""
        return len(self.calls) == len(self.shell.layers)

    def visit(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Record the call of a layer; return the hidden states for the next layer."""
        name = self.shell.owner_name
        self.refused = True
        if number != len(self.calls):
            raise ValueError(
                f"{name} calls its layer {number} after {len(self.calls)} others; allowed: each once, in order"
            )
        hidden, *args_ = args or (kwargs.pop(next(iter(kwargs))),)
        if not isinstance(hidden, Tensor) or (self.passed is not None and hidden is not self.passed):
            raise ValueError(
                f"{name} gives its layer {number} another tensor than layer {number - 1} returned; "
                "allowed: layers that pass one tensor on"
            )
        if number == 0:
            self.first = hidden
        self.calls.append(Call(tuple(args_), kwargs))
        self.refused = False
        if number == self.until:
            raise _Reached
        self.passed = hidden
        return self.result if self.ended and self.result is not None else hidden


class _StandIn(nn.Module):
    """A stand-in for a layer, with the layer's attributes."""

    def __init__(self, layer: nn.Module, number: int, shell: Shell) -> None:
        super().__init__()
        vars(self)["_stood_for"] = layer, number, shell

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stood_for"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _, number, shell = vars(self)["_stood_for"]
        hidden = shell.walk.visit(number, args, dict(kwargs))
        more = [Returned(number, index) for index in range(1, shell.returned)]
        return (hidden, *more) if more else hidden
