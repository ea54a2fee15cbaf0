"""Any mixture-of-experts causal LM of the transformers library, unmodified, as stages of the engine.

>>> stages = split_model(model, program, mesh)
>>> engine = o1.Engine(stages, program, mesh=mesh, loss_fn=stages.loss_fn)
>>> result = engine.step(input_ids, target=labels)

This code knows no architecture: it finds layers, experts, embedding and head by their structure and by the calls of the
model's own forward. The conversion between a checkpoint's tensors and a model's tensors is transformers' own code.
"""

from overlap1f1b.integrations.transformers.experts import register
from overlap1f1b.integrations.transformers.split import SplitModel, split_model
from overlap1f1b.integrations.transformers.stage import LanguageModelStage

__all__ = ["LanguageModelStage", "SplitModel", "register", "split_model"]
