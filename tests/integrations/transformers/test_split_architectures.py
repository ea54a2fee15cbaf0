"""Which of transformers' architectures can be split, and that none gives other gradients than its own."""

import re
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from torch import nn

from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.integrations.transformers.experts import adopt
from overlap1f1b.plan import Overlap
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import architectures, tiny
from tests.integrations.transformers.test_split import compare, on_one_rank, own_of
from tests.ranks import Ranks
from tests.tiers import first, wide

INSTALLED = architectures.names()

REFUSED = {
    # Experts are rows of two embeddings, of which a token looks up many.
    "doge": r"has no experts: no module called with \(tokens, indices, weights\)",
    # The model runs some of its layers more than once.
    "inkling2_loop_text": "calls its layer 1 after 3 others; allowed: each once, in order",
    # The model joins states of earlier layers, and the embedding.
    "inkling2_text": "gives its layer 1 a second tensor that requires a gradient, which it has computed itself",
    # The model scales the embedding by parameters of its own.
    "zaya": "parameter model.input_hidden_states_scale belongs to ZayaModel, which holds the layers",
}
"""Pattern of the message for each refused architecture."""

UNUSUAL = ["glm_moe_dsa", "hy_v4", "jetmoe", "llama4_text"]
"""Layers that hand indices on; experts that take sorted rows, with sizes or in equal parts."""
SINGLE = {"inkling2_loop_text", "inkling2_text"}  # their own forwards fail in float64
OLD = {"aria_text", "dbrx", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"}
"""Architectures that in transformers 5.17 have other experts, or whose own forward fails with a router's loss."""
ROUNDED = {"beam", "hy_v4", "nemotron_h"}  # compute partly in float32, whatever the model's dtype
CUT = {
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "dbrx", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note", "dots3_note_text", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "flint", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3",
    "hy_v4", "inkling_text", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "llama4",
    "llama4_text", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp", "qwen4_exp_text",
    "sarvam_mla", "sarvam_moe", "solar_open",
}  # fmt: skip


FIRST = {"mixtral", *REFUSED}
"""Those of the first tier; further architectures are wide."""


@pytest.mark.parametrize("name", first(INSTALLED, *FIRST.intersection(INSTALLED)))
def test_split_or_refused(name: str) -> None:
    """Two stages on one rank, with its experts replaced, against the model's own loss and gradients."""
    if name in OLD and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("another model in this transformers")
    dtype = torch.float32 if name in SINGLE else torch.float64
    whole = _built(name, dtype)
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=2, chunks=2)
    stages, refusal = None, ""
    try:
        # The forward of one cannot take rows with one expert each.
        stages = split_model(deepcopy(whole), program, grouped=name != "longcat_flash" or None)
    except ValueError as error:
        refusal = str(error)
    if stages is None:
        assert "\n" not in refusal
        assert re.search(REFUSED.get(name, "allowed:|looked for"), refusal)
        assert name not in CUT
        return
    assert name not in REFUSED
    tokens, labels = tiny.batch(4)
    losses, expected = tiny.own_gradients(whole, {"input_ids": tokens}, labels, 2)
    result = tiny.engine(stages, program).step(tokens, target=labels)
    limit = 1e-5 if dtype is torch.float32 or name in ROUNDED else 1e-12
    for found, own in zip(result.losses, losses, strict=True):
        torch.testing.assert_close(found, own, rtol=limit, atol=0)
    parameters = dict(stages.named_parameters())
    assert {n for n, _ in whole.named_parameters()} <= parameters.keys() <= expected.keys()
    for label, parameter in parameters.items():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert tiny.difference(grad, expected[label]) < limit, label


def _built(name: str, dtype: torch.dtype) -> Any:
    """A new architecture may need sizes that nobody has thought of; one that was built before must be."""
    try:
        return architectures.build(name, dtype)
    except Exception as error:
        if name in CUT or name in REFUSED:
            raise
        pytest.skip(f"not built at a tiny size: {error}")


def test_most_are_split() -> None:
    assert len(CUT & set(INSTALLED)) >= 12


STATES = [name for name in [*UNUSUAL, "zaya"] if name in INSTALLED]
PLAYED: list[tuple[str, Overlap]] = [("sequential", "serial"), ("combined_1f1b", 3), ("dualpipev", "pairs")]


@pytest.mark.parametrize("name", [name for name in UNUSUAL if name in INSTALLED])
@pytest.mark.parametrize(("schedule", "overlap"), first(PLAYED, ("combined_1f1b", 3)))
def test_unusual_layers_are_bit_equal(name: str, schedule: str, overlap: Overlap) -> None:
    """The embedding of one is also its head: two stages sum its gradient in another order."""
    limit = 1e-6 if name == "jetmoe" else 0.0
    assert on_one_rank(partial(architectures.build, name, torch.float32), schedule, overlap, limit) == []


def _model(name: str) -> Any:
    """Return a model of a type; of Zaya without its own two parameters, for which it is refused."""
    model = architectures.build(name, torch.float64)
    if name == "zaya":
        for label, parameter in list(model.model.named_parameters(recurse=False)):
            delattr(model.model, label)
            model.model.register_buffer(label, parameter.detach())
    return model


@pytest.mark.parametrize(("pp", "ep"), [(2, 1), *wide((1, 2))])
@pytest.mark.parametrize("name", first(STATES, STATES[0]))
def test_unusual_layers_on_two_ranks(ranks2: Ranks, name: str, pp: int, ep: int) -> None:
    """Zaya's layers hand on states that require a gradient."""
    played, limit = PLAYED[1:] if pp > 1 else PLAYED[:2], 1e-5 if name in ROUNDED else 1e-12
    assert ranks2.run(compare, partial(_model, name), pp, played, limit, 1, own_of(_model(name), 4, ep)) == [[]] * 2


def _with_encoder(kind: str, *, alone: bool = False) -> Any:
    """Return a tiny model that also takes images; ``alone`` the language model that a class calls."""
    text = {
        key: value for key, value in architectures.SIZES.items() if key not in ("output_router_logits", "rotary_dim")
    }
    seen: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 64, "patch_size": 4, "image_size": 8}
    if kind == "Qwen3VLMoe":
        seen |= {"depth": 2, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    else:
        text["intermediate_size_mlp"] = 48
        seen |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vision_output_dim": 64}
        seen |= {"projector_input_dim": 64, "projector_output_dim": 64}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=seen)
    config.get_text_config()._experts_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double()
    return model.language_model if alone else model


@pytest.mark.parametrize(("pp", "ep"), [(2, 1), *wide((1, 2))])
def test_encoders_stay_in_the_first_stage(ranks2: Ranks, pp: int, ep: int) -> None:
    """They get no gradient, as in the model's own step over text."""
    build = partial(_with_encoder, "Qwen3VLMoe")
    own = own_of(build(), 4, ep)
    assert not own[1]["model.visual.patch_embed.proj.weight"].any()
    assert ranks2.run(compare, build, pp, PLAYED[1:] if pp > 1 else PLAYED[:2], 1e-12, 1, own) == [[]] * 2


def test_a_model_with_encoders_is_saved_whole(tmp_path: Path) -> None:
    program, model = build_schedule("combined_1f1b", microbatches=4, ranks=1), _with_encoder("Qwen3VLMoe")
    split_model(model, program).save_pretrained(tmp_path)
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    kept = again.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in _with_encoder("Qwen3VLMoe").state_dict().items())


def test_a_language_model_inside() -> None:
    """Llama 4's whole class does not run with tokens alone in transformers 5.24; its language model does."""
    program = build_schedule("combined_1f1b", microbatches=4, ranks=1)
    with pytest.raises(ValueError, match=r"allowed: a causal LM that runs with tokens alone, as its language_model$"):
        split_model(_with_encoder("Llama4"), program)
    assert on_one_rank(partial(_with_encoder, "Llama4", alone=True), "combined_1f1b", 3, 0.0) == []


class Experts(nn.Module):
    """Experts that compute every expert for every token, which equal parts are not."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_experts = 4
        self.weight = nn.Parameter(torch.ones(4, hidden, hidden))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.weight


def test_rows_of_another_kind_are_refused() -> None:
    experts = Experts(8)
    model = nn.Module()
    model.add_module("experts", experts)
    adopt(model, experts, 4, None, "experts", grouped=False)
    with pytest.raises(ValueError, match=r"^Experts returns \[4, 8, 8\] for sorted rows \[8, 8\]; allowed: a row"):
        experts(torch.ones(8, 8))
    with pytest.raises(ValueError, match=r"^experts called with rows \[2, 4, 8\] and sizes None; allowed: \[R, H\]"):
        experts(torch.ones(2, 4, 8))
    with pytest.raises(ValueError, match=r"^experts called with rows \[7, 8\] and sizes None; allowed: \[R, H\]"):
        experts(torch.ones(7, 8))
