"""The schedule by itself, over modules without torchtitan: what its calls take, give and refuse."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.engine import Engine
from overlap1f1b.integrations.torchtitan import Schedule
from overlap1f1b.schedule import build_schedule
from tests.engines import make

HIDDEN, VOCABULARY, MICROBATCHES = 12, 20, 3


class Decoder(nn.Module):
    """Adds a keyword argument of its microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lm_head = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x: Tensor, shift: Tensor) -> Any:
        return self.lm_head((self.layer(x) + shift).tanh())


class Several(Decoder):
    """Returns a list, as models of multi-token prediction do."""

    def forward(self, x: Tensor, shift: Tensor) -> Any:
        logits = super().forward(x, shift)
        return [logits, 2 * logits]


def plain_loss(prediction: Any, labels: Tensor, tokens: float = 1.0) -> tuple[Tensor, dict[str, Any]]:
    outputs = prediction if isinstance(prediction, list) else [prediction]
    losses = [nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="sum") for out in outputs]
    return torch.stack(losses).sum() / tokens, {}


def schedule_of(model: nn.Module, loss_fn: Any, **options: Any) -> Schedule:
    program = build_schedule("combined_1f1b", microbatches=MICROBATCHES)

    def make_engine(stages: Mapping[int, list[nn.Module]]) -> Engine:
        return make(stages, program, **options)

    return Schedule({0: model}, program, loss_fn, make_engine)


def given() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(index + 1, 4) for index in range(MICROBATCHES)]
    return {
        "arg_mbs": [(torch.randn(*size, HIDDEN, generator=generator),) for size in sizes],
        "kwarg_mbs": [{"shift": torch.randn(HIDDEN, generator=generator)} for _ in sizes],
        "target_mbs": [torch.randint(VOCABULARY, size, generator=generator) for size in sizes],
    }


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("kind", [Decoder, Several])
def test_steps(kind: type[nn.Module], recompute: str) -> None:
    """Gradients, losses and outputs of each of two steps are those of a plain loop."""
    torch.manual_seed(0)
    model = kind()
    schedule, batch = schedule_of(model, plain_loss, recompute=recompute), given()
    for tokens in (7.0, 9.0):
        model.zero_grad()
        expected = []
        for (x,), kwargs, labels in zip(*batch.values(), strict=True):
            loss, _ = plain_loss(model(x, **kwargs), labels, tokens)
            loss.backward()
            expected.append(loss.detach())
        wanted = [grad.clone() for grad in gradients(model)]
        model.zero_grad()
        losses = [torch.zeros(())]
        assert schedule.step(**batch, losses=losses, loss_kwargs={"tokens": tokens}) is None
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert [torch.equal(a, b) for a, b in zip(gradients(model), wanted, strict=True)] == [True] * len(wanted)
        evaluated = list[Tensor]()
        schedule.eval(**batch, losses=evaluated, loss_kwargs={"tokens": tokens})
        assert torch.equal(torch.stack(evaluated), torch.stack(expected))
        assert gradients(model)[0].equal(wanted[0])


def test_outputs() -> None:
    model, batch = Decoder(), given()
    outputs = schedule_of(model, plain_loss).step(**batch, return_outputs=True)
    assert outputs.shape == (1 + 2 + 3, 4, VOCABULARY)
    assert torch.equal(outputs[1:3], model(*batch["arg_mbs"][1], **batch["kwarg_mbs"][1]))
