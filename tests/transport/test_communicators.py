"""What does not fit a device is said in one line; that engines release what they made is shown in tests/device."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap1f1b.engine import Engine, EngineOptions
from overlap1f1b.schedule import build_schedule
from overlap1f1b.transport import devices
from overlap1f1b.transport import mesh as mesh_module
from overlap1f1b.transport.communicators import LEAST_CTAS, DeviceOptions
from overlap1f1b.transport.devices import Stamp
from overlap1f1b.transport.mesh import Mesh
from overlap1f1b.transport.streams import EventMark
from tests import models
from tests.ranks import Ranks

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("ctas", [LEAST_CTAS, 32, 100])
def test_all_transfers_fit_the_budget(ctas: int) -> None:
    """Rows, two sums, counts and four links."""
    budget = DeviceOptions(ctas=ctas)
    assert budget.rows + 2 * budget.sums + 1 + 4 * budget.link <= ctas


def test_more_blocks_than_multiprocessors() -> None:
    DeviceOptions(ctas=200).check(torch.device("cpu"))
    gpu = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(multi_processor_count=132))
    with patch.object(devices, "of", lambda device: gpu):
        DeviceOptions(ctas=132).check(GPU)
        with pytest.raises(ValueError, match=r"^ctas=133 on cuda:0; allowed: 16 to its 132 multiprocessors$"):
            DeviceOptions(ctas=133).check(GPU)
    with pytest.raises(ValueError, match=r"^ctas=15; allowed: 16 or more$"):
        DeviceOptions(ctas=15)


def _does_not_fit(rank: int, size: int) -> None:
    devices = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    mesh = Mesh(devices, timedelta(seconds=20))
    mesh.check_device(torch.device("cpu"))
    kinds = {id(None): "nccl", id(mesh.group("ep")): "gloo"}
    with (
        patch.object(mesh_module, "backend_of", lambda group, device: kinds[id(group)]),
        pytest.raises(ValueError, match="group along 'ep' is on gloo for a model on 'cuda:0'; allowed: nccl, as the"),
    ):
        mesh.check_device(GPU)
    with patch.object(mesh_module, "backend_of", lambda group, device: "nccl"):
        with pytest.raises(ValueError, match=r"^a mesh of 'cpu' for a model on 'cuda:0'; allowed: a mesh of 'cuda'$"):
            mesh.check_device(GPU)
        mesh.device_type = "cuda"
        mesh.check_device(GPU)

        class Bound:
            bound_device_id = torch.device("cuda", 1)

        with (
            patch.object(dist.distributed_c10d, "_get_default_group", Bound),
            pytest.raises(
                ValueError, match=r"^init_process_group\(device_id=cuda:1\) for a model on 'cuda:0'; allowed:"
            ),
        ):
            mesh.check_device(GPU)


def test_groups_and_model_on_different_devices(ranks2: Ranks) -> None:
    ranks2.run(_does_not_fit)


@pytest.mark.parametrize("done", [False, True], ids=["waits", "was aborted"])
def test_a_wait_for_a_device_looks_for_failures(done: bool) -> None:
    class Event:
        def query(self) -> bool:
            return done

    mark = EventMark(GPU, None, Stamp(Event(), deque()))
    with pytest.raises(ConnectionError, match="another rank failed"):
        mark.synchronize(timedelta(seconds=60), lambda: True)
    with nullcontext() if done else pytest.raises(TimeoutError):
        mark.synchronize(timedelta(seconds=0.01))


def _closes(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
    model, data = models.build(mesh.get_group("ep")), models.batch(2, seed=rank)
    program = build_schedule("combined_1f1b", microbatches=2)
    for _ in range(2):
        with Engine(model, program, mesh=mesh, loss_fn=models.loss_fn, options=EngineOptions(timeout=20)) as engine:
            engine.step(data[0], target=data[1])
        with pytest.raises(RuntimeError, match="this engine is closed; allowed: a new one, on all ranks"):
            engine.step(data[0], target=data[1])
        engine.close()


def test_an_engine_is_closed_on_gloo(ranks2: Ranks) -> None:
    ranks2.run(_closes)
