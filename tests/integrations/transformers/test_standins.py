"""What a loss gets in place of Trainer's accelerator."""

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from overlap1f1b.integrations.transformers import OverlapArguments
from tests.integrations.transformers.loops import Spec, train
from tests.ranks import Ranks


class Reducing(transformers.Trainer):
    """Reduces figures of each microbatch over the ranks with data."""

    reduced: Any = ()

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows, reduce = torch.tensor(float(len(inputs["input_ids"]))), self.accelerator.reduce
        longest = reduce(torch.tensor(float(inputs["input_ids"].shape[1])), "max")
        own = torch.arange(4 + self.accelerator.process_index)
        padded = [
            self.accelerator.pad_across_processes({"own": own}, pad_index=-1, pad_first=first)["own"]
            for first in (False, True)
        ]
        self.reduced = [float(figure) for figure in (reduce(rows), reduce({"rows": rows}, "mean")["rows"], longest)]
        self.reduced += [*padded[0].tolist(), *padded[1].tolist()]
        self.reduced += self.accelerator.gather_for_metrics([self.accelerator.process_index], use_gather_object=True)
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_sums_of_a_loss_over_ranks(ranks2: Ranks, ranks4: Ranks, tmp_path: Path) -> None:
    """The ranks of a first stage compute no loss, and are not waited for."""
    spec = Spec(tmp_path, kind=Reducing, steps=1)
    expected = ranks2.run(train, spec, attrgetter("reduced"))
    assert expected[0][:2] == [4.0, 2.0]
    assert expected[0][3:] == [0, 1, 2, 3, -1, -1, 0, 1, 2, 3, 0, 1]
    layout = OverlapArguments(pp=2, timeout=20.0)
    assert ranks4.run(train, replace(spec, kind=Reducing, layout=layout), attrgetter("reduced")) == [(), (), *expected]
