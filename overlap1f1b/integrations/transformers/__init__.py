"""Any mixture-of-experts causal LM of the transformers library, unmodified, as stages of the engine.

>>> stages = split_model(model, program, mesh)
>>> engine = o1.Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn)
>>> result = engine.step(input_ids, target=labels)

Nothing here knows an architecture: layers, experts, embedding and head are found by what they are and how the model's
own forward uses them. transformers itself is asked for one thing alone: how a checkpoint's tensors become a model's.
"""

from overlap1f1b.integrations.transformers.expert_parallel import register
from overlap1f1b.integrations.transformers.split import SplitModel, split_model
from overlap1f1b.integrations.transformers.stage import LanguageModelStage

__all__ = ["LanguageModelStage", "SplitModel", "register", "split_model"]
