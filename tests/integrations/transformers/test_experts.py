"""How experts and layers are found, and which models are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")


import transformers

from overlap1f1b.integrations.transformers import split_model
from overlap1f1b.schedule import build_schedule
from tests.integrations.transformers import tiny
from tests.integrations.transformers.test_split import problems_of
from tests.ranks import over
from tests.tiers import wide

ONE = build_schedule("sequential", microbatches=1)


def takes_images() -> Any:
    """Return a model of text and images with a router's loss, which stands in the configuration of its text."""
    torch.manual_seed(3)
    sizes = tiny.configuration("qwen3_moe", output_router_logits=True).to_dict()
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen3VLMoeConfig(
        text_config=sizes,
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32},
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def dense() -> Any:
    sizes = {"vocab_size": tiny.V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))


def encoder_decoder() -> Any:
    sizes = {"vocab_size": tiny.V, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return transformers.SwitchTransformersForConditionalGeneration(
        transformers.SwitchTransformersConfig(**sizes, num_experts=2)
    )


def doubling() -> Any:
    """Return a model whose own forward doubles what each layer returns."""
    model = tiny.build("mixtral")
    own = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        layers = model.model.layers
        model.model._modules["layers"] = Doubling(layers)
        try:
            return own(*args, **kwargs)
        finally:
            model.model._modules["layers"] = layers

    model.model.forward = forward
    return model


class Doubling(nn.ModuleList):
    """Doubles what each layer returns."""

    def __getitem__(self, index: Any) -> Any:
        return [lambda x, layer=layer, **given: 2 * layer(x, **given) for layer in self]


def changed(change: Callable[[Any], object]) -> Callable[[], Any]:
    def build() -> Any:
        model = tiny.build("mixtral")
        change(model)
        return model

    return build


def in_float8(model: Any) -> None:
    weight = model.model.layers[1].self_attn.q_proj
    weight.weight = nn.Parameter(weight.weight.to(torch.float8_e4m3fn), requires_grad=False)


def fails(model: Any) -> None:
    """As transformers 5.24's Llama 4 that takes images does with every input."""
    model.model.rotary_emb.forward = lambda *_, **__: model.model.image_outputs


DEVICES = {"model.embed_tokens": 0, "model.layers": 1, "model.norm": 1, "lm_head": "cpu"}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dense": (
        dense,
        r"^LlamaForCausalLM has no experts: no module called with \(tokens, indices, weights\), .*; allowed: a mixture",
    ),
    "no head": (lambda: tiny.build("mixtral").model, "^MixtralModel returns MoeModelOutputWithPast; allowed: a causal"),
    "encoder and decoder": (encoder_decoder, "encoder-decoder"),
    # As accelerate's ``prepare`` returns it over several ranks.
    "a wrapper": (lambda: nn.DataParallel(tiny.build("mixtral")), "DataParallel has no config; allowed: a causal LM"),
    "a forward that fails": (
        changed(fails),
        r"^MixtralForCausalLM's own forward fails with input_ids alone \(AttributeError: 'Mixtral",
    ),
    "quantised": (
        changed(in_float8),
        r"quantised weights \(model\.layers\.1\.self_attn\.q_proj\.weight of float8_e4m3fn\)",
    ),
    "a quantizer": (
        changed(lambda model: setattr(model, "hf_quantizer", type("Int4Quantizer", (), {})())),
        r"quantised weights \(Int4Quantizer\)",
    ),
    "devices": (
        changed(lambda model: setattr(model, "hf_device_map", DEVICES)),
        "has device_map over 0, 1, cpu; allowed: one device",
    ),
    "split before": (changed(lambda model: split_model(model, ONE, grouped=True)), "has been split before"),
    "something between": (doubling, "gives its layer 1 another tensor than layer 0 returned"),
    "a module beside": (
        changed(lambda model: model.model.add_module("unused", nn.Linear(2, 2))),
        r"model\.unused\.weight belongs to Linear, which a call with tokens alone does not use",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_refused(case: str) -> None:
    build, message = REFUSED[case]
    model = build()
    with pytest.raises(ValueError, match=message) as caught:
        split_model(model, ONE)
    assert "\n" not in str(caught.value)


def test_programs_and_inputs_that_are_refused() -> None:
    program = build_schedule("interleaved_1f1b", ranks=1, microbatches=2, chunks=5)
    with pytest.raises(ValueError, match="4 layers for 5 stages"):
        split_model(tiny.build("mixtral"), program)
    with pytest.raises(ValueError, match=r"^inputs \['attention_mask'\]"):
        split_model(tiny.build("mixtral"), ONE, inputs=["attention_mask"])


@pytest.mark.parametrize(("pp", "ep"), [(2, 1), *wide((1, 2))])
@over(2)
def test_text_of_a_model_that_takes_images(rank: int, size: int, pp: int, ep: int, tmp_path: Path) -> None:
    """Train the text alone; the weights are read from a folder of the whole model."""
    mesh = init_device_mesh("cpu", (pp, ep), mesh_dim_names=("pp", "ep"))
    folder = tmp_path / str(rank)
    folder.mkdir()
    save_file(takes_images().state_dict(), folder / "model.safetensors")
    with torch.device("meta"):
        empty = takes_images()
    whole = takes_images()
    for model in (empty, whole):
        model.model.visual = None
    program = build_schedule("1f1b", ranks=pp, microbatches=4)
    stages = split_model(empty, program, mesh)
    stages.load_pretrained(folder)
    shards = [tiny.batch(8, seed=seed) for seed in range(ep)]
    every = [tiny.own_gradients(whole, {"input_ids": x}, y, 4, 1 / ep) for x, y in shards]
    engine = tiny.engine(stages, program, mesh)
    at = mesh["ep"].get_local_rank()
    result = engine.step(shards[at][0], target=shards[at][1])
    torch.testing.assert_close(list(result.losses), every[at][0] if result.losses else [], rtol=1e-5, atol=0)
    problems = problems_of(stages, every[-1][1], 1e-5)
    assert not problems, problems
