"""The calls of RL loops and trainers on Megatron-Core, as they make them, by its own functions and by ours.

Each loop below repeats the order and the arguments of another project's calls, read in its source at the named commit:
where it asks for the function, what it passes, when it only plays forwards, and how its microbatches change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overlap1f1b.engine import EngineOptions
from overlap1f1b.integrations.megatron import ForwardBackward, get_forward_backward_func
from overlap1f1b.integrations.megatron.forward_backward import engines_of
from tests.integrations.megatron.core import models, shim
from tests.integrations.megatron.core.cases import AUX, BIAS, DDP, OVERLAP_REDUCE, SHARED, Case
from tests.integrations.megatron.core.steps import prepared
from tests.ranks import over
from tests.tiers import first

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")

Batch = dict[str, Any]
Get = Callable[..., Callable[..., list[Any]]]
Seen = list[Any]


def _varied(count: int, seed: int) -> list[Batch]:
    """Return microbatches of several lengths, as dynamic batches are."""
    found = []
    for at, batch in enumerate(models.batches(count, seed)):
        length = models.SEQUENCE - (at + seed) % 4
        mask = batch["attention_mask"][..., :length, :length]
        cut = {name: batch[name][:, :length] for name in ("input_ids", "labels", "position_ids")}
        found.append({**cut, "attention_mask": mask})
    return found


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(**{name: value for name, value in batch.items() if name not in ("labels", "seed")})


def _log_probs(logits: Tensor, batch: Batch) -> Tensor:
    return logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]


def _update(chunks: Sequence[Any]) -> dict[str, Tensor | None]:
    """Return the gradients, take a step by them, and clear them."""
    grads = models.grads(list(chunks))
    with torch.no_grad():
        for number, chunk in enumerate(chunks):
            for parameter in chunk.parameters():
                if (grad := grads[f"{number}.{parameter.place}"]) is not None:
                    parameter.sub_(0.1 * grad)
                parameter.grad = None
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
    return grads


def verl(get: Get, build: Callable[[], list[Any]]) -> Iterator[Any]:
    """verl b178a3cd, ``workers/engine/megatron/transformer_impl.py``: dynamic batches, a policy and its reference."""
    policy, reference = build(), build()

    def batch_of(chunks: list[Any], data: list[Batch], loss_function: Any, forward_only: bool) -> list[Any]:
        function = get()  # anew in every call

        def forward_step(batches: Iterator[Batch], model: nn.Module) -> Any:
            batch = next(batches)
            output: Any = _logits(model, batch)
            if output.shape[-1] == models.VOCABULARY:  # of the last stage
                output = {"log_probs": _log_probs(output.div_(1.1), batch)}
            return output, partial(postprocess, data=batch)

        def postprocess(output: Any, data: Batch) -> Any:
            loss = torch.tensor(1.0) if loss_function is None else loss_function(output, data)
            scaled = loss if loss_function is None else loss * len(data_of)
            return scaled, {"model_output": output, "loss": loss.detach().item(), "metrics": {}}

        data_of = data
        several = len(chunks) > 1
        return function(
            forward_step_func=forward_step, data_iterator=[iter(data) for _ in chunks] if several else iter(data),
            model=chunks, num_microbatches=len(data), seq_length=1, micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip

    def policy_loss(output: Any, data: Batch) -> Tensor:
        return (output["log_probs"] * (data["labels"] % 5 - 2)).mean()

    for rollout, (count, mini) in enumerate(((3, (2, 1)), (5, (3, 2)))):
        for chunks in (policy, reference):
            for chunk in chunks:
                chunk.eval()
            with torch.no_grad():
                yield batch_of(chunks, _varied(count, rollout), None, True)
        for chunk in policy:
            chunk.train()
        for number, size in enumerate(mini):
            yield batch_of(policy, _varied(size, 10 + 3 * rollout + number), policy_loss, False)
            yield _update(policy)


class DataIterator:
    """slime's, ``backends/megatron_utils/data.py``: no Python iterator; it counts its microbatches by itself."""

    def __init__(self, data: list[Batch]) -> None:
        self.data, self.offset = data, 0

    def get_next(self, keys: Sequence[str]) -> Batch:
        batch = self.data[self.offset]
        self.offset += 1
        return {key: batch[key] for key in keys}

    def reset(self) -> DataIterator:
        self.offset = 0
        return self


def slime(get: Get, build: Callable[[], list[Any]]) -> Iterator[Any]:
    """slime 624b824a, ``backends/megatron_utils/model.py``: log probabilities of all steps, then each step."""
    chunks, keys = build(), ("input_ids", "labels", "position_ids", "attention_mask")

    def log_probs(logits: Tensor, *, batch: Batch, non_loss_data: bool = True) -> Any:
        return torch.empty((0,)), {"log_probs": [_log_probs(logits, batch)]}

    def only(iterator: DataIterator, model: nn.Module, return_schedule_plan: bool = False) -> Any:
        batch = iterator.get_next(keys)
        return _logits(model, batch), partial(log_probs, batch=batch)

    def trained(iterator: DataIterator, model: nn.Module, return_schedule_plan: bool = False) -> Any:
        batch = iterator.get_next(keys)
        return _logits(model, batch), partial(loss_function, batch, step_microbatches)

    def loss_function(batch: Batch, microbatches: int, logits: Tensor) -> Any:
        loss = _log_probs(logits, batch).mean() * microbatches / 7
        return loss, torch.tensor(1), {"keys": ["loss"], "values": torch.stack([torch.tensor(0.0), loss.detach()])}

    for rollout, numbers in enumerate(((3, 2), (1, 4, 2))):
        data = _varied(sum(numbers), rollout)
        iterators = [DataIterator(data) for _ in chunks]
        for chunk in chunks:
            chunk.eval()
        function = get()
        with torch.no_grad():
            for number in numbers:
                yield function(
                    forward_step_func=only, data_iterator=iterators, model=chunks, num_microbatches=number,
                    seq_length=models.SEQUENCE, micro_batch_size=models.BATCH, forward_only=True,
                )  # fmt: skip
        for chunk in chunks:
            chunk.train()
        for iterator in iterators:
            iterator.reset()
        for step_microbatches in numbers:
            yield get()(
                forward_step_func=trained, data_iterator=iterators, model=chunks, num_microbatches=step_microbatches,
                seq_length=models.SEQUENCE, micro_batch_size=models.BATCH, decoder_seq_length=None, forward_only=False,
            )  # fmt: skip
            yield _update(chunks)


def bridge(get: Get, build: Callable[[], list[Any]]) -> Iterator[Any]:
    """Megatron-Bridge 067f987d, ``training/train.py`` and ``eval.py``: a batch that grows, evaluations between."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    chunks, groups = build(), ProcessGroupCollection.use_mpu_process_groups()
    config = chunks[0].config
    asked: Any = {"pp_size": groups.pp.size(), "vp_size": config.virtual_pipeline_model_parallel_size}

    def forward_step(data: Iterator[Batch], model: nn.Module) -> Any:
        return model(**{name: value for name, value in next(data).items() if name != "seed"}), loss_func

    def loss_func(output: Tensor, non_loss_data: bool = False) -> Any:
        return output.detach() if non_loss_data else (output.mean(), {"lm loss": output.detach().mean()})

    def given(count: int, seed: int, **more: Any) -> dict[str, Any]:
        data = models.batches(count, seed)
        communicator = P2PCommunicator(pp_group=groups.pp, config=config)
        return {
            "forward_step_func": forward_step, "model": chunks, "num_microbatches": count,
            "data_iterator": [iter(data) for _ in chunks] if len(chunks) > 1 else iter(data),
            "seq_length": models.SEQUENCE, "micro_batch_size": models.BATCH, "p2p_communicator": communicator,
            "pg_collection": groups, **more,
        }  # fmt: skip

    function = get(**asked)
    for step, count in enumerate((2, 2, 4, 4)):
        training: Any = {"decoder_seq_length": models.SEQUENCE, "adjust_tensor_shapes_fn": None}
        yield function(**given(count, step, forward_only=False, **training))
        yield _update(chunks)
        if step % 2:
            for chunk in chunks:
                chunk.eval()
            with torch.no_grad():
                evaluation = get(**asked)  # anew in every evaluation
                yield evaluation(**given(4, 20 + step, forward_only=True, adjust_tensor_shapes_fn=None))
                yield evaluation(**given(4, 30 + step, forward_only=True, collect_non_loss_data=True))
            for chunk in chunks:
                chunk.train()


VARIED = {"variable_seq_lengths": True}
LOOPS: dict[str, tuple[Callable[..., Iterator[Any]], Case]] = {
    "verl": (verl, Case({**VARIED, **SHARED, **AUX})),
    "verl, pp 2": (verl, Case(VARIED, pp=2)),
    "slime": (slime, Case({**VARIED, **BIAS}, ddp=OVERLAP_REDUCE)),
    "slime, pp 2": (slime, Case(VARIED, pp=2, ddp=DDP)),
    "Megatron-Bridge": (bridge, Case(SHARED, ddp=OVERLAP_REDUCE)),
    "Megatron-Bridge, vp 2": (bridge, Case({}, layers=4, pp=2, vp=2, ddp=DDP)),
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("name", first(LOOPS, "verl"))
@over(lambda name: LOOPS[name][1].ranks)
def test_loops_of_others(rank: int, size: int, name: str) -> None:
    """Reports, log probabilities and gradients are equal to the bit; one function and one engine a model play all."""
    shim.apply()
    from megatron.core.pipeline_parallel import get_forward_backward_func as own

    loop, case = LOOPS[name]

    @cache
    def ours(*args: Any, **kwargs: Any) -> ForwardBackward:
        options = EngineOptions(timeout=30)
        return get_forward_backward_func(*args, **kwargs, schedule="combined_1f1b", options=options)

    built = list[list[Any]]()

    def build() -> list[Any]:
        built.append(prepared(case, delayed=False, in_v=False))
        return built[-1]

    with models.init_parallel(pp=case.pp, ep=case.ep, vp=case.vp):
        pairs = [list(loop(get, build)) for get in (own, ours)]
        other = [f"result {at}" for at, pair in enumerate(zip(*pairs, strict=True)) if not _same(*pair)]
        engines = [len(engines) for chunks in built for engines in engines_of(chunks[0]).values()]
    assert not other, other
    assert set(engines) == {1}, engines
