"""HybridModel of Megatron-LM's main branch, attention and MoE layers in turn: equal bit by bit to its own schedule."""

from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest

from tests.integrations.megatron.core import models, shim
from tests.integrations.megatron.core.cases import FULL, Case, selective
from tests.integrations.megatron.core.steps import our_step, serial_step, unlike
from tests.ranks import over
from tests.tiers import first

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core.models.hybrid") is None,
    reason="megatron-core before 0.20",
)
CASES = {
    "plain": Case({}, layers=4, ep=2),
    "two stages": Case({}, layers=4, pp=2, ep=2),
    "full recompute": Case(FULL, layers=4, ep=2),
    "MoE recomputed": Case(selective("moe"), layers=4, ep=2),
}


def build(config: Any, **_: Any) -> list[Any]:
    """Return the chunk of this rank, with the layers of a GPTModel, and torch's norms for TransformerEngine's."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=None, pp_rank=0).layer_specs
    one = layers[0].submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=one.input_layernorm, self_attention=one.self_attention, self_attn_bda=one.self_attn_bda
    )
    experts = TransformerLayerSubmodules(pre_mlp_layernorm=one.pre_mlp_layernorm, mlp=one.mlp, mlp_bda=one.mlp_bda)
    submodules = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
    )
    stages, stage = config.pipeline_model_parallel_size, parallel_state.get_pipeline_model_parallel_rank()
    with patch.object(hybrid_block, "TENorm", WrappedTorchNorm):
        chunk = HybridModel(
            config=config,
            hybrid_stack_spec=ModuleSpec(module=hybrid_block.HybridStack, submodules=submodules),
            vocab_size=models.VOCABULARY,
            max_sequence_length=models.SEQUENCE,
            hybrid_layer_pattern="|".join(["*E" * (config.num_layers // 2 // stages)] * stages),
            pre_process=stage == 0,
            post_process=stage == stages - 1,
            position_embedding_type="rope",
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
    models.fill(chunk)
    return [chunk]


@pytest.mark.parametrize("name", first(CASES, "plain"))
@over(lambda name: CASES[name].ranks)
def test_steps(rank: int, size: int, name: str) -> None:
    """By Megatron-Core's own schedule, and by this project's with its dispatcher and with ours."""
    shim.apply()
    case = CASES[name]
    with models.init_parallel(pp=case.pp, ep=case.ep), patch.object(models, "build", build):
        expected = serial_step(case)
        assert expected[0].grads
        problems = [line for rows in (False, True) for line in unlike(expected, our_step(case, 3, rows=rows))[:3]]
    assert not problems, problems
