"""The result of a step."""

import pytest
import torch

from overlap1f1b.plan import Node, Op, Span
from overlap1f1b.play.result import StepResult
from overlap1f1b.play.times import Times
from overlap1f1b.schedule import Kind


class Spans(Times):
    """Times that somebody has measured already."""

    def __init__(self, *spans: Span) -> None:
        super().__init__([], None)
        self._spans, self.asked = spans, 0

    def spans(self) -> tuple[Span, ...]:
        self.asked += 1
        return self._spans


def result(*losses: float, shares: tuple[float, ...]) -> StepResult:
    return StepResult(tuple(map(torch.tensor, losses)), shares, (), Spans(), 0, 0)


def test_the_loss_is_the_mean_by_shares() -> None:
    assert result(1.0, 3.0, shares=(0.5, 0.5)).loss.item() == 2
    assert result(1.0, 3.0, shares=(0.25, 0.75)).loss.item() == 2.5
    with pytest.raises(ValueError, match="no microbatch ends on this rank"):
        _ = result(shares=()).loss


def test_the_overlap_is_evaluated_once_and_when_it_is_looked_at() -> None:
    times = Spans(Span(Node(Op.COMBINE, Kind.F, 0, 0), 0.0, 2.0), Span(Node(Op.EXPERTS, Kind.F, 1, 0), 1.0, 2.0))
    found = StepResult((), (), (), times, 0, 0)
    assert not times.asked
    assert found.overlap.hidden_fraction == 0.5
    assert found.overlap.exposed == 1
    assert times.asked == 1


def test_metrics_are_numbers_by_name() -> None:
    spans = (
        Span(Node(Op.EXPERTS, Kind.F, 1, 0), 0.0, 2.0),
        Span(Node(Op.COMBINE, Kind.F, 0, 0), 1.0, 4.0),
        Span(Node(Op.DISPATCH, Kind.I, 0, 0), 3.0, 5.0),
    )
    whole = StepResult(
        (torch.tensor(2.5, requires_grad=True),), (1.0,), (), Spans(*spans), 1, 0, peak_bytes=7, others=({},)
    )
    metrics = whole.metrics(tokens=20)
    causes = {key: metrics.pop(key) for key in list(metrics) if key.startswith("exposed_by_cause_ms/")}
    assert causes == {f"exposed_by_cause_ms/{cause}": time for cause, time in
                      {"order": 2000, "imbalance": 0, "host": 1000, "link": 0, "pipeline": 0}.items()}  # fmt: skip
    assert metrics == {
        "loss": 2.5, "step_ms": 5000, "tokens_per_s": 4, "hidden_fraction": 0.25, "exposed_ms": 3000,
        "exposed_ms/combine.f": 2000, "exposed_ms/dispatch.b": 2000, "peak_bytes": 7,
    }  # fmt: skip
    assert StepResult((), (), (), Spans(spans[0]), 1, 0).metrics(tokens=20) == {"step_ms": 2000, "tokens_per_s": 10}
