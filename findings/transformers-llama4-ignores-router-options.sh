#!/usr/bin/env bash
# transformers 5.24: Llama 4 documents router_aux_loss_coef, output_router_logits and router_jitter_noise, and ignores them.
#
# A training with any coefficient is the same to the bit: nothing balances the experts. Of Mixtral, whose configuration
# has the same three, each changes the gradients.
. "$(dirname "$0")/environment" torch==2.13.0 transformers==5.24.0 numpy==2.4.6
check <<'PY'
from importlib.metadata import version

import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig, MixtralConfig, MixtralForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
kinds = {
    "Mixtral": (MixtralForCausalLM, MixtralConfig, {}),
    "Llama 4": (Llama4ForCausalLM, Llama4TextConfig, {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1}),
}
options = [{"output_router_logits": True, "router_aux_loss_coef": c} for c in (0.001, 1000.0)] + [{"router_jitter_noise": 0.9}]


def trained(model_class, config_class, more, **changed):
    torch.manual_seed(0)
    model = model_class(config_class(**sizes | heads | more | changed)).train()
    tokens = torch.arange(48).view(2, 24) * 7 % 64
    torch.manual_seed(1)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


print(f"transformers {version('transformers')}, torch {torch.__version__}")
for name, (model_class, config_class, more) in kinds.items():
    documented = all(option in config_class.__doc__ for changed in options for option in changed)
    plain = trained(model_class, config_class, more)
    for changed in options:
        found = trained(model_class, config_class, more, **changed)
        same = all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
        print(f"{name}: {changed}, documented {documented}: loss and gradients {'the same bits' if same else 'change'}")
        assert documented and same == (name == "Llama 4"), "it is another behaviour now"
PY
