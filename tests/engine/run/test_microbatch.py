"""The state of a microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.engine import Microbatch, Stage, combined_forward_backward_step
from overlap1f1b.engine.run.microbatch import absent, is_absent, one, tensors
from overlap1f1b.schedule import Kind


def microbatch(**options: Any) -> Microbatch:
    return Stage([nn.Linear(2, 2)]).microbatch(torch.randn(3, 2), **options)


def test_the_loss_has_its_share_as_gradient_and_outputs_are_kept_where_wanted() -> None:
    taken = microbatch(target=torch.ones(1), loss_fn=lambda x, y: (x * y).sum(), loss_scale=0.25, keep_outputs=True)
    out = torch.ones(2, requires_grad=True) * 3
    (loss,) = taken.with_loss((out,), "block 0")
    assert loss.item() == 6
    assert [float(g) for g in taken.take_output_grads() if g is not None] == [0.25]
    (kept,) = taken.kept
    assert kept.tolist() == [3, 3]
    assert not kept.requires_grad


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda x: x, r"loss_fn returns shape \(2,\); allowed: one number"),
        (lambda x: 3, "loss_fn returns shape int; allowed: one number"),
        (lambda x: x.sum() * 1j, "loss_fn returns a number of torch.complex64; allowed: a real one"),
        (lambda x: x.detach().sum(), "the loss of block 0's outputs requires no gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss_fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        microbatch(loss_fn=loss_fn).with_loss((torch.ones(2, requires_grad=True) * 3,), "block 0")


def test_what_is_handed_over_is_let_go_of() -> None:
    taken = microbatch()
    (x,) = taken.take_activations()
    assert x.shape == (3, 2)
    with pytest.raises(AssertionError, match="microbatch 0 has no input"):
        taken.take_activations()
    taken.outputs, taken.requires_grad = (x,), (True,)
    assert taken.take_passed(Kind.F) == ((x,), (True,))
    assert taken.output is None
    taken.input_grads = (None, x)
    assert taken.take_passed(Kind.I) == ((x,), (False,))
    assert taken.input_grad is None


def test_stages_of_one_rank_pass_tensors_on_without_a_copy() -> None:
    first, second = microbatch(), Stage([nn.Linear(2, 2)], number=1).microbatch()
    second.before, first.after = first, second
    passed = torch.ones(2)
    first.outputs, first.requires_grad = (passed,), (True,)
    (leaf,) = second.take_activations()
    assert leaf is passed
    assert leaf.requires_grad
    assert (first.outputs, second.before) == (None, None)
    second.input_grads = (torch.full((2,), 4.0),)
    (grad,) = first.take_output_grads()
    assert isinstance(grad, Tensor)
    assert grad.tolist() == [4, 4]


def test_a_finished_microbatch_holds_results_alone() -> None:
    taken = microbatch(target=torch.ones(1), loss_fn=lambda x, y: x.sum())
    combined_forward_backward_step(taken, None)
    combined_forward_backward_step(None, taken)
    assert taken.finished
    assert isinstance(taken.output, Tensor)
    assert not hasattr(taken, "runs")
    taken.stop()  # nothing is left to stop
    taken.accumulate_weights()


def test_one_and_several() -> None:
    x = torch.ones(1)
    assert tensors(None) == ()
    assert tensors(x) == tensors([x]) == (x,)
    assert one((x,)) is x
    assert one((x, None)) == (x, None)
    assert is_absent(absent(x))
    assert not is_absent(torch.zeros(1, dtype=torch.bool))
