"""Adapters of PEFT in a model: which are honoured, and how LoRA's weights are divided with the experts.

LoRA on stacked parameters of experts (``target_parameters``) is a chain of PEFT's ``ParamWrapper`` around the experts
module, one for each parameter. Of a parameter ``[E, ., .]`` the first factor ``lora_A [E·r, in]`` has its rows sorted
by expert. The second, ``lora_B [out, r·E]``, has r equal parts of its columns, each sorted by expert.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from overlap1f1b.integrations.transformers.parameters import in_place_of

CONFIG = "adapter_config.json"
"""File of a folder that holds an adapter."""


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module adds weights to a module that it holds, or to itself, as PEFT's adapters do."""
    held = (getattr(module, name, None) for name in ("base_layer", "original_module"))
    names = (*module._parameters, *module._modules)
    added = any(name.startswith("lora_") for name in names) or parametrize.is_parametrized(module)
    return added or any(isinstance(inner, nn.Module) for inner in held)


def adapter_in(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name and module of a model's first adapter: the model itself if it is one of PEFT's."""

    def adapts(module: nn.Module) -> bool:
        return is_adapter(module) or any(k.__module__.partition(".")[0] == "peft" for k in type(module).__mro__)

    return next(((name, module) for name, module in model.named_modules() if adapts(module)), None)


def base_of(model: Any) -> Any:
    """Return the model of transformers inside PEFT's model; any other model is its own."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def name_in_base(model: nn.Module, name: str) -> str | None:
    """Return the name that a tensor of a model has without adapters; None for a tensor that an adapter adds."""
    base, kept = base_of(model), list[str]()
    module: Any = model
    labels = iter(name.split("."))
    for label in labels:
        if not is_adapter(module):
            kept.append(label)
        elif label == "modules_to_save":  # trained copies of whole modules, by adapter
            module = module.get_submodule(f"{label}.{next(labels)}")
            continue
        elif label not in ("base_layer", "original_module"):
            return None
        module = getattr(module, label, None)  # a module's extra state is no attribute
        if module is base:
            kept = []
    return ".".join(kept)


def outermost(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their names; adapters as one module, without the modules inside them."""
    inside = "."  # begins no name
    for name, module in root.named_modules():
        if not name.startswith(inside):
            inside = f"{name}." if name and is_adapter(module) else inside
            yield name, module


def check_method(model: Any) -> None:
    """Raise ValueError for a method of PEFT that adds tokens or keys, or has a forward of its own around the model."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or "peft" not in sys.modules:
        return
    from peft import PEFT_TYPE_TO_TUNER_MAPPING, PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    for config in configs.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        # Without PEFT's model around it, a model has the adapters in its layers alone.
        tuner = type(model.base_model) if isinstance(model, PeftModel | PeftMixedModel) else BaseTuner
        named: Any = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
        if not issubclass(named, BaseTuner) or tuner.forward is not BaseTuner.forward:
            raise ValueError(
                f"peft_type={kind!r} changes the call of the whole model, which is divided into stages; allowed: "
                "LORA, and other methods that change single layers outside the experts"
            )


# ------------------------------------------------------------------------------------------------- LoRA of parameters


def is_wrapper(module: object) -> bool:
    """Return whether a module is PEFT's LoRA of one parameter of the module inside it."""
    layers = sys.modules.get("peft.tuners.lora.layer")  # loading PEFT takes seconds; without it there is no wrapper
    kind = getattr(layers, "ParamWrapper", None)
    return kind is not None and isinstance(module, kind)


def wrappers_around(module: Any) -> list[Any]:
    """Return the wrappers of parameters that a module begins with, outermost first."""
    return [module, *wrappers_around(module.base_layer)] if is_wrapper(module) else []


def within(module: Any) -> Any:
    """Return the module inside the wrappers of parameters that a module begins with."""
    return within(module.base_layer) if is_wrapper(module) else module


def around(model: nn.Module, name: str) -> str:
    """Return the name of the outermost wrapper of parameters around a module; its own name without one."""
    parent = name.rpartition(".")[0]
    return around(model, parent) if name and is_wrapper(model.get_submodule(parent)) else name


def other_adapter(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """Return name and module of the outermost adapter around or inside a module, wrappers of its parameters apart."""
    path = around(model, name).split(".")
    outer = (".".join(path[:length]) for length in range(len(path)))
    inner = (label for label, _ in model.get_submodule(name).named_modules(prefix=name))
    for label in (*outer, *inner):
        if is_adapter(module := model.get_submodule(label)):
            return label, module
    return None


class Addition(NamedTuple):
    """Product that an adapter adds to the weights of each expert, ``scaling · up[e] @ down[e]``."""

    down: Tensor  # [E, r, in]
    up: Tensor  # [E, out, r]
    scaling: float


def additions(module: Any) -> dict[str, list[Addition]]:
    """Return what the active adapters around an experts module add, by the name of its parameter."""
    found: dict[str, list[Addition]] = {}
    for wrapper in wrappers_around(module):
        if wrapper.disable_adapters or wrapper.merged:
            continue
        experts, dtype = wrapper.num_experts, wrapper.get_param().dtype
        for adapter in wrapper.active_adapters:
            if adapter in wrapper.lora_A:
                down = wrapper.lora_A[adapter].weight.unflatten(0, (experts, -1))
                up = by_expert(wrapper.lora_B[adapter].weight, experts).contiguous()
                added = Addition(down.to(dtype), up.to(dtype), wrapper.scaling[adapter])
                found.setdefault(wrapper.parameter_name, []).append(added)
    return found


def adapted(weight: Tensor, added: Sequence[Addition], *, transposed: bool) -> Tensor:
    """Return the weights ``[E, out, in]`` with what adapters add; ``[E, in, out]`` if they are transposed."""
    for one in added:
        pair = (one.down.mT, one.up.mT) if transposed else (one.up, one.down)
        with torch.autocast(weight.device.type, enabled=False):
            weight = torch.baddbmm(weight, *pair, alpha=one.scaling)
    return weight


def divide(module: Any, count: int, rank: int, ranks: int, name: str) -> None:
    """Keep one rank's part of the factors of all wrappers around an experts module."""
    for inside, wrapper in enumerate(reversed(wrappers_around(module)), start=1):
        if wrapper.num_experts != count:
            raise ValueError(
                f"LoRA of {name}.{wrapper.parameter_name} of shape {list(wrapper.get_param().shape)}, whose factors "
                f"have no part for each of {count} experts; allowed on several ranks along 'ep': parameters "
                f"[{count}, ., .]"
            )
        path = name.removesuffix(".base_layer" * inside)
        for adapter in wrapper.lora_A:
            for kind, columns in (("lora_A", 0), ("lora_B", count)):
                factor = getattr(wrapper, kind)[adapter]
                old = factor.weight
                mine = by_expert(by_expert(old.detach(), columns).chunk(ranks)[rank], columns, back=True).clone()
                factor.weight = in_place_of(old, mine, f"{path}.{kind}.{adapter}.weight")
        wrapper.num_experts = count // ranks


def by_expert(value: Tensor, experts: int, *, back: bool = False) -> Tensor:
    """View a second factor ``[out, r·E]`` as ``[E, out, r]``, or back; with 0 experts return the value as it is."""
    if not experts:
        return value
    if back:
        return value.permute(1, 2, 0).flatten(1)
    return value.unflatten(1, (-1, experts)).permute(2, 0, 1)


def second_factors(root: nn.Module) -> dict[str, int]:
    """Return the number of experts in each second factor of LoRA of stacked parameters, by the factor's name."""
    return {
        f"{name}.lora_B.{adapter}.weight": module.num_experts
        for name, module in root.named_modules()
        if is_wrapper(module) and module.get_param().dim() == 3
        for adapter in module.lora_B
    }


# ------------------------------------------------------------------------------------------------------------ folders


def adapter_keys(model: Any) -> dict[str, dict[int, str]]:
    """Return, for each adapter of a model, the key of each of its tensors in PEFT's files, by the tensor's id.

    The model may be PEFT's, or one of transformers with ``add_adapter``.
    """
    from peft import get_peft_model_state_dict

    state = type(model).state_dict(model, keep_vars=True)  # its own may refuse: it is a part
    return {
        name: {id(value): key for key, value in get_peft_model_state_dict(model, state, name).items()}
        for name in model.peft_config
    }


def writes_adapters(model: Any) -> bool:
    """Return whether ``save_pretrained`` of a model writes its adapters alone: PEFT's, or after ``add_adapter``."""
    alone = hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False)
    return alone and hasattr(model, "peft_config")
