"""The model's own forward around its layers: what it records there, and calls of the whole model."""

import pytest
import torch

pytest.importorskip("transformers")

from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.integrations.transformers.test_split import AUXILIARY


def test_the_routers_loss_asked_for_after_the_split() -> None:
    program = build_schedule("sequential", microbatches=1)
    stages = split_model(tiny.build("qwen3_moe"), program)
    stages.model.config.output_router_logits = True
    with pytest.raises(RuntimeError, match="allowed: set it in the config before split_model"):
        tiny.engine(stages, program).step(*tiny.batch(2))


def test_a_model_on_one_rank_is_called_as_before() -> None:
    """To generate, for example: transformers records router logits, although it saw stand-ins for the layers first."""
    tokens, labels = tiny.batch(2)
    program = build_schedule("sequential", microbatches=1)
    stages = split_model(tiny.build("qwen3_moe", **AUXILIARY), program)
    tiny.engine(stages, program).evaluate(tokens, target=labels)
    with torch.no_grad():
        found, expected = stages.model(tokens), tiny.build("qwen3_moe", **AUXILIARY)(tokens)
    assert torch.equal(found.aux_loss, expected.aux_loss)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_layers_are_refused(name: str) -> None:
    """They were empty: transformers records them in layers, which run elsewhere."""
    program = build_schedule("sequential", microbatches=1)
    message = f"{name}=True of a model in stages; allowed: False"
    asking = tiny.build("qwen3_moe", attn_implementation="eager")
    setattr(asking.config, name, True)
    with pytest.raises(ValueError, match=message):
        split_model(asking, program)
    stages = split_model(tiny.build("qwen3_moe", attn_implementation="eager"), program)
    setattr(stages.model.config, name, True)
    with pytest.raises(ValueError, match=message):
        tiny.engine(stages, program).step(*tiny.batch(2))
