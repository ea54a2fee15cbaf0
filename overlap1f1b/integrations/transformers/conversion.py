"""Between a model's layout and that of its checkpoints: transformers' own rules, for a part of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor


class Conversion:
    """How transformers makes a model's tensors of those in a checkpoint.

    >>> name, pattern = conversion.target("model.layers.0.mlp.experts.3.up_proj.weight")
    >>> name  # the first of the tensors that are made of it
    'model.layers.0.mlp.experts.gate_up_proj'

    Args:
        model: Of the transformers library.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model, self._prefix = model, getattr(model, "base_model_prefix", "")
        self._names = model.state_dict()
        self._rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in self._rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]

    @staticmethod
    def ordered(keys: Iterable[str]) -> list[str]:
        """In the order in which rules expect them: experts by their number."""
        from transformers.core_model_loading import dot_natural_key

        return sorted(keys, key=dot_natural_key)

    def target(self, key: str) -> tuple[str, str | None]:
        """The first tensor of the model that a checkpoint's is part of, and the pattern of the rule that makes it."""
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._names)
        if name not in self._names and key in self._names:
            return key, None  # laid out as the model is
        return name, pattern

    def convert(self, name: str, sources: Sequence[tuple[str, str | None, Tensor]]) -> Mapping[str, Tensor]:
        """The model's tensors that are made of a checkpoint's, given as (key, pattern, tensor) in order."""
        key, pattern, tensor = sources[0]
        if pattern is None:
            return {name: tensor}
        rule: Any = deepcopy(next(rule for rule in self._converters if pattern in rule.source_patterns))
        for key, pattern, tensor in sources:
            rule.add_tensor(name, key, pattern, tensor)
        made = rule.convert(name, model=self._model, config=self._model.config)
        return {label: value[0] if isinstance(value, list) else value for label, value in made.items()}

    def remember(self) -> None:
        """Notes the rules that were used with the model, for :func:`reverted`, as ``from_pretrained`` does."""
        self._model._weight_conversions = [rule for rule in self._rules if rule.was_used()]


def reverted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors in the layout of its checkpoints."""
    from transformers.core_model_loading import revert_weight_conversion

    result: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return result
