"""A model's own experts: finding them and the layers that hold them, and sharing them between ranks."""

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap1f1b.cut.replacement import replaced
from overlap1f1b.integrations.transformers import adapters
from overlap1f1b.integrations.transformers.parameters import in_place_of
from overlap1f1b.kernels.grouped_mm import KnownRows, multiplied
from overlap1f1b.kernels.swiglu import swiglu
from overlap1f1b.moe import Experts

# ------------------------------------------------------------------------------------------------------------- finding


class Found(NamedTuple):
    """The parts of a model."""

    owner: nn.Module  # calls the layers
    attribute: str  # name of its child with the layers
    prefix: str  # name of this child in the model, such as ``model.layers``
    layers: list[nn.Module]
    experts: dict[str, tuple[nn.Module, int]]  # each experts module and its number of experts, by name in the model


def find(model: nn.Module) -> Found:
    """Return the decoder layers and the experts of a causal LM, without knowing its architecture."""
    _refuse(model)
    adapters.check_method(model)
    experts = {name: (module, count) for name, module in model.named_modules() if (count := _count(module))}
    if not experts:
        raise ValueError(
            f"{type(model).__name__} has no experts: no module called with (tokens, indices, weights), (sorted rows, "
            "sizes) or (rows in equal parts), with a part of its parameters for each; allowed: a mixture of experts"
        )
    named = {name: len(routing_names(module) or ()) for name, (module, _) in experts.items()}
    experts = {name: pair for name, pair in experts.items() if named[name] == max(named.values())}
    holders = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(expert.startswith(f"{name}.") for expert in experts)
    ]
    if not holders:
        raise ValueError(
            f"{type(model).__name__}: looked for one ModuleList whose elements hold all experts; "
            f"found experts at {', '.join(list(experts)[:4])}"
        )
    prefix, layers = holders[0]
    parent, _, attribute = prefix.rpartition(".")
    return Found(model.get_submodule(parent), attribute, prefix, list(layers), experts)


def _refuse(model: nn.Module) -> None:
    """Raise ValueError for a model whose layers cannot be split over ranks."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    if config is None:  # DistributedDataParallel, for example
        raise ValueError(f"{kind} has no config; allowed: a causal LM of transformers, as it was built or loaded")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder model; allowed: a causal LM, whose layers form one chain")
    if len(devices := dict.fromkeys(map(str, (getattr(model, "hf_device_map", None) or {}).values()))) > 1:
        raise ValueError(  # accelerate's hooks would move what layers are given, also when the layers have moved
            f"{kind} has device_map over {', '.join(devices)}; allowed: one device, each rank moves its part to its own"
        )
    if any(isinstance(module, Experts) for module in model.modules()):
        raise ValueError(f"{kind} has been split before, or has experts of this library; allowed: an unchanged model")
    quantised = [type(quantizer).__name__] if (quantizer := getattr(model, "hf_quantizer", None)) else []
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            quantised.append(f"{name} of {str(parameter.dtype)[6:]}")
    if quantised:
        raise ValueError(f"{kind} has quantised weights ({quantised[0]}); allowed: floating-point weights, which train")


def routing_names(module: nn.Module) -> tuple[str, ...] | None:
    """Return the argument names of an experts module's forward, else None.

    Forwards take (tokens, indices, weights), or rows that are sorted by expert: with the number of each expert's rows,
    or with equally many for all experts.
    """
    _, *arguments = inspect.signature(type(module).forward).parameters.values()
    named = [one.name for one in arguments if one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(named) == 3:
        _, indices, weights = named
        if ("ind" in indices or "expert" in indices) and ("weight" in weights or "score" in weights):
            return tuple(named)
    elif len(named) == 1 or (len(named) == 2 and any(word in named[1] for word in ("size", "count", "per_expert"))):
        parameters = list(module.parameters())
        parts = {p.shape[0] for p in parameters if p.dim() > 2}
        if len(parts) == 1 and all(p.dim() > 2 for p in parameters) and parts <= {n for _, n in _counters(module)}:
            return tuple(named)
    return None


def _count(module: nn.Module) -> int:
    """Return the number of experts in a module; 0 for what is none."""
    sizes = {p.shape[0] for p in module.parameters() if p.dim()}
    if not sizes or routing_names(module) is None:
        return 0
    if any(p.dim() > 2 for p in module.parameters()):
        return max(sizes)
    named = {value for m in module.modules() for _, value in _counters(m)}
    dividing = [value for value in named if value > 1 and all(size % value == 0 for size in sizes)]
    return max(dividing, default=max(sizes))


def _counters(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, value in vars(module).items():
        if type(value) is int and "expert" in name:
            yield name, value


# ------------------------------------------------------------------------------------------------------------ adopting

GROUPED = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
"""Flags that transformers' ``use_experts_implementation`` sets for the usual layout; before 5.23 some are missing."""

SILU = ("SiLU", "SiLUActivation")


class OwnExperts(Experts):
    """Base class that :func:`adopt` adds to the class of a model's experts module.

    A rank runs the model's own forward on the rows that it received, each row with one local expert and weight one. The
    routing weights are applied on the rank that sent the token. With weights in the usual layout, grouped matrix
    products compute the same result, with separate weight gradients.
    """

    own_class: ClassVar[type[nn.Module]]
    own_names: tuple[str, ...]
    grouped: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(self.own_names, args, strict=False)) | kwargs
        if set(arguments) != set(self.own_names):
            raise ValueError(f"experts called with {sorted(arguments)}; allowed: {', '.join(self.own_names)}")
        if self.takes_sorted:
            return self._of_sorted(*(arguments[name] for name in self.own_names))
        tokens, indices, weights = (arguments[name] for name in self.own_names)
        flat = tokens.reshape(-1, tokens.shape[-1])
        if indices.shape != weights.shape or indices.dim() != 2 or len(indices) != len(flat):
            raise ValueError(
                f"experts called with tokens {list(tokens.shape)}, indices {list(indices.shape)} and weights "
                f"{list(weights.shape)}; allowed: [T, H], [T, K] and [T, K]"
            )
        return super().__call__(flat, indices.long(), weights).view_as(tokens)

    def _of_sorted(self, rows: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return the results of rows ``[R, H]``, sorted by expert; without sizes each expert has equally many."""
        if rows.dim() != 2 or not isinstance(sizes, list | None) or (sizes is None and len(rows) % self.experts):
            raise ValueError(
                f"experts called with rows {list(rows.shape)} and sizes {sizes}; allowed: [R, H], sorted by expert, "
                f"with a list of {self.experts} sizes, or in {self.experts} equal parts"
            )
        each = [len(rows) // self.experts] * self.experts if sizes is None else sizes
        indices, weights = _one_expert_a_row(rows, each)
        return super().__call__(rows, indices, weights)

    @property
    def takes_sorted(self) -> bool:
        """Whether the model's own forward takes rows that are sorted by expert."""
        return len(self.own_names) < 3

    def answer(self, tokens: Tensor) -> Tensor | None:
        return None if self.takes_sorted else super().answer(tokens)  # a module may be one of several products

    @property
    def reads_counts_late(self) -> bool:
        return self.grouped

    def weights(self) -> Iterator[nn.Parameter]:
        return adapters.within(self).parameters()

    def compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the model's own experts' result for rows ``[R, H]`` that are sorted by expert."""
        own, added = adapters.within(self), adapters.additions(self)
        if self.grouped:
            gate_up = self._product(rows, own.gate_up_proj, counts, added.get("gate_up_proj", ()))
            # No flag of the module names SwiGLU. Kernels compute SwiGLU; torch's ops give equal results.
            plain = own._apply_gate.__name__ == "_default_apply_gate" and type(own.act_fn).__name__ in SILU
            gated = swiglu(gate_up, self.kernels) if plain else own._apply_gate(gate_up)
            return self._product(gated, own.down_proj, counts, added.get("down_proj", ()))
        if not len(rows) and len(self.own_names) != 2:  # some models' forwards fail without rows
            # As with rows, the result requires a gradient: so do the rows that come back, which others have computed.
            trained = [p.flatten()[:0].sum() for p in self.parameters() if p.requires_grad]
            return rows + sum(trained, rows.sum())
        transposed = getattr(own, "is_transposed", False)
        weights = (  # found before the parameters of these names
            (vars(own), name, adapters.adapted(getattr(own, name), several, transposed=transposed))
            for name, several in added.items()
        )
        with replaced(weights):
            if not self.takes_sorted:
                return self.own_class.forward(own, rows, *_one_expert_a_row(rows, counts)).reshape(rows.shape)
            result: Tensor = self.own_class.forward(own, rows, *([list(counts)] if len(self.own_names) == 2 else []))
        if result.dim() != 2 or len(result) != len(rows):
            raise ValueError(
                f"{self.own_class.__name__} returns {list(result.shape)} for sorted rows {list(rows.shape)}; "
                "allowed: a row for each"
            )
        return result

    def _product(
        self, rows: Tensor, weight: Tensor, counts: Sequence[int], added: Sequence[adapters.Addition]
    ) -> Tensor:
        result = self.product(rows, weight, counts)
        for one in added:  # never the weights' sum, which is as large as the weights, and its gradient
            inner = multiplied(rows, one.down, counts) * one.scaling
            result = result + multiplied(inner, one.up, counts)
        return result


def _one_expert_a_row(rows: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return indices and weights ``[R, 1]`` that route rows, sorted by expert, to their local experts."""
    local = torch.arange(len(counts), device=rows.device)
    on_device = counts.rows.counts if isinstance(counts, KnownRows) else torch.tensor(counts, device=rows.device)
    indices = local.repeat_interleave(on_device, output_size=len(rows))
    return indices[:, None], rows.new_ones(len(rows), 1)


def adopt(
    model: nn.Module, module: nn.Module, count: int, group: dist.ProcessGroup | None, name: str, *, grouped: bool
) -> None:
    """Make a module of ``count`` experts one of the engine's, and keep this rank's part of its weights.

    LoRA of its parameters goes with it: the outermost of PEFT's wrappers becomes the experts module of the engine. If
    it is ``grouped``, usual weights, ``gate_up_proj [E, 2·I, H]`` and ``down_proj [E, H, I]``, compute by grouped
    products.
    """
    if (other := adapters.other_adapter(model, name)) is not None:
        raise ValueError(
            f"{other[0]} ({type(other[1]).__name__}) is an adapter that changes the call of experts; allowed: LoRA of "
            "their stacked parameters (target_parameters), adapters of other layers, or merged into the experts"
        )
    names = routing_names(module)
    assert names is not None
    own: Any = type(module)
    module = model.get_submodule(adapters.around(model, name))
    kind: Any = type(module)
    module.__class__ = _kind_of(kind, own)
    assert isinstance(module, OwnExperts)
    inside = adapters.within(module)
    module.own_names = names
    module.grouped = (
        grouped
        and all(getattr(inside, flag, False) is wanted for flag, wanted in GROUPED.items())
        and {label: p.dim() for label, p in inside.named_parameters()} == {"gate_up_proj": 3, "down_proj": 3}
    )
    try:
        module.share(count, group)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if (ranks := module.exchange.ranks) > 1:
        adapters.divide(module, count, module.exchange.rank, ranks, name)
        _shard(inside, count, module.exchange.rank, ranks, name)


@cache
def _kind_of(kind: Any, own: Any) -> Any:
    """Return the class of the engine's experts; one for all layers, or a compiler compiles each layer's graph anew."""
    return type(kind.__name__, (OwnExperts, kind), {"__module__": kind.__module__, "own_class": own})


def _shard(module: nn.Module, count: int, rank: int, ranks: int, name: str) -> None:
    """Keep this rank's experts of a module, and count these alone."""
    for part in module.modules():
        for label, parameter in part.named_parameters(recurse=False):
            size = parameter.shape[0] if parameter.dim() else 0
            if not size or size % count:
                raise ValueError(
                    f"{name}.{label} of shape {list(parameter.shape)} has no part for each of {count} experts; "
                    "allowed on several ranks along 'ep': one that has"
                )
            mine = parameter.detach().chunk(ranks)[rank].clone()
            part.register_parameter(label, in_place_of(parameter, mine, f"{name}.{label}"))
        for attribute, value in list(_counters(part)):
            if value == count and attribute not in ("experts", "local_experts"):  # our own, of all ranks and of this
                setattr(part, attribute, count // ranks)
