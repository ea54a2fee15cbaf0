"""Options of a config, and process groups."""

from types import SimpleNamespace
from typing import Any

import pytest

from overlap1f1b.integrations.megatron import ProcessGroups, get_forward_backward_func
from overlap1f1b.integrations.megatron.config import REFUSED
from tests.integrations.megatron.chunks import build, call, fake, items


def test_groups_of_megatrons_parallel_state_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    initialised = [False]
    fake(
        monkeypatch,
        "megatron.core.parallel_state",
        model_parallel_is_initialized=lambda: initialised[0],
        get_virtual_pipeline_model_parallel_world_size=lambda: 3,
    )
    groups = SimpleNamespace(pp=SimpleNamespace(size=lambda: 4))
    collection = SimpleNamespace(use_mpu_process_groups=lambda: groups)
    fake(monkeypatch, "megatron.core.process_groups_config", ProcessGroupCollection=collection)
    assert get_forward_backward_func().__name__ == "forward_backward_no_pipelining"
    initialised[0] = True
    function = get_forward_backward_func()
    assert (function.__name__, function.vp_size) == ("forward_backward_pipelining_with_interleaving", 3)
    assert function.groups is groups
    function = get_forward_backward_func(schedule_pg_collection=groups)  # as Megatron-LM's training.py
    assert (function.__name__, function.vp_size) == ("forward_backward_pipelining_with_interleaving", 3)
    assert function.groups is groups
    assert get_forward_backward_func(4).__name__ == "forward_backward_pipelining_without_interleaving"
    alone = get_forward_backward_func(pg_collection=ProcessGroups())
    assert (alone.__name__, alone.vp_size) == ("forward_backward_no_pipelining", None)


def test_groups_of_several_modules_are_refused() -> None:
    several = type("MultiModuleProcessGroupCollection", (), {})()
    with pytest.raises(ValueError, match=r"^schedule_pg_collection of type MultiModuleProcessGroupCollection; "):
        get_forward_backward_func(schedule_pg_collection=several)


IGNORED: list[tuple[dict[str, Any], str]] = [
    *[({name: "x"}, f"^{name}='x'; allowed: {', '.join(map(str, allowed))}$") for name, allowed in REFUSED[""].items()],
    ({"later_loss_scale_func": 3}, "^later_loss_scale_func=3; allowed: None, or one of grad_scale_func, moe_grad"),
    ({"fp8": "hybrid"}, "^fp8='hybrid' in a chunk that exchanges rows or delays weight gradients; allowed: None$"),
    ({"pipeline_model_parallel_size": 2}, "^pipeline_model_parallel_size=2 with a group pp of 1 ranks; allowed: a "),
    ({"expert_model_parallel_size": 4}, "^expert_model_parallel_size=4 with a group ep of 1 ranks; allowed: a pg"),
    ({"context_parallel_size": 2}, "^context_parallel_size=2 with a group cp of 1 ranks; allowed: a pg_collection"),
    ({"tensor_model_parallel_size": 2}, "^tensor_model_parallel_size=2 with a group tp of 1 ranks; allowed: a pg"),
]


def test_options_that_would_be_ignored_are_refused() -> None:
    for fields, message in IGNORED:
        with pytest.raises(ValueError, match=message):
            call(get_forward_backward_func(), build(1, config=SimpleNamespace(**fields)), items(1))
    without = {name: None for fields, _ in IGNORED for name in fields} | {
        "cuda_graph_impl": "none",
        "pipeline_model_parallel_size": 1,
        "cpu_offloading": False,
    }
    assert len(call(get_forward_backward_func(), build(1, config=SimpleNamespace(**without)), items(1))) == 1
