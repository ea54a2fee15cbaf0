"""Any mixture-of-experts causal LM of the transformers library, unmodified, as stages of the engine.

>>> stages = split_model(model, program, mesh)
>>> engine = o1.Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn)
>>> result = engine.step(input_ids, target=labels)

or in transformers' own training loop:

>>> trainer = OverlapTrainer(model, args, train_dataset=data, overlap_args=OverlapArguments(pp=2))
"""

from typing import TYPE_CHECKING, Any

from overlap1f1b.integrations.transformers.arguments import OverlapArguments
from overlap1f1b.integrations.transformers.split import SplitModel, split_model
from overlap1f1b.integrations.transformers.stage import LanguageModelStage

if TYPE_CHECKING:
    from overlap1f1b.integrations.transformers.trainer import Overlapped, OverlapTrainer

__all__ = ["LanguageModelStage", "OverlapArguments", "OverlapTrainer", "Overlapped", "SplitModel", "split_model"]


def __getattr__(name: str) -> Any:
    """Import the trainers when they are asked for: transformers' Trainer takes seconds."""
    if name in ("OverlapTrainer", "Overlapped"):
        try:
            from overlap1f1b.integrations.transformers import trainer
        except ModuleNotFoundError as error:  # as transformers' Trainer needs it
            raise ImportError(f"{name} needs {error.name}; pip install transformers") from None

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
