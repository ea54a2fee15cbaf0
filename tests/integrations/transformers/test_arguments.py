"""Arguments of an overlapped trainer: what stands on a command line, and what cannot be honoured."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from overlap1f1b.integrations.transformers import OverlapArguments
from overlap1f1b.integrations.transformers.arguments import REFUSED, check_arguments
from overlap1f1b.plan.node import MOST_PARTS
from tests.integrations.transformers import tiny
from tests.integrations.transformers.loops import Spec, alone, close, history, plain, shown, train
from tests.ranks import Ranks
from tests.tiers import first, wide


def test_arguments_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, OverlapArguments))
    words = ["--output_dir", "x", "--use_cpu", "--pp", "2", "--overlap", "pairs", "--parts"]
    for text, value in (("3", 3), ("auto", "auto")):
        _, found = parser.parse_args_into_dataclasses([*words, text])
        assert found == OverlapArguments(pp=2, overlap="pairs", parts=value)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses([*words, "9"])
    assert "argument --parts: invalid choice: '9' (choose from 1, 2, 3, 4, 5, 6, 7, 8, auto)" in (
        capsys.readouterr().err.replace("'auto'", "auto")
    )
    (read,) = transformers.HfArgumentParser(OverlapArguments).parse_dict({"parts": "auto", "overlap": 2})
    assert read.parts == "auto"
    assert get_args(get_type_hints(OverlapArguments)["parts"]) == (*range(1, MOST_PARTS + 1), "auto")


@pytest.mark.parametrize("name", first(REFUSED, "fp16"))
def test_arguments_that_cannot_be_honoured(name: str, tmp_path: Path) -> None:
    args, (harmless, instead) = transformers.TrainingArguments(str(tmp_path), use_cpu=True), REFUSED[name]
    check_arguments(args, OverlapArguments())
    setattr(args, name, "other" if None in harmless else True)
    with pytest.raises(ValueError, match=f"^{name}=.* under an overlapped trainer; allowed: ") as caught:
        check_arguments(args, OverlapArguments())
    assert str(caught.value).endswith(f"allowed: {instead}")
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(("recompute", "taken"), [("none", "block"), *wide(("experts", "experts"))])
def test_gradient_checkpointing_is_recomputation(
    recompute: Any, taken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of whole layers, if nothing else is asked for; what was given is as before."""
    spec = Spec(
        tmp_path, arguments={"gradient_checkpointing": True}, layout=OverlapArguments(recompute=recompute), steps=2
    )
    trainer = alone(spec)
    said = "gradient_checkpointing=True is taken as recompute='block' of OverlapArguments: "
    assert caplog.text.count(said) == (taken == "block")
    assert trainer.overlap_args == OverlapArguments(recompute=taken)  # type: ignore[arg-type]
    assert spec.layout == OverlapArguments(recompute=recompute)
    assert not trainer.model.is_activation_checkpointing
    close(history(trainer), history(plain(spec)))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_options_of_checkpointing_are_the_layers_own(ranks2: Ranks, tmp_path: Path) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    spec = Spec(tmp_path, arguments=options, layout=OverlapArguments(), rows=40, steps=2)
    expected = history(plain(spec, 2))
    for lines, checkpointed in ranks2.run(train, spec, _checkpointed):
        close(shown(lines), expected)
        assert checkpointed == [True, False]


def _checkpointed(trainer: Any) -> Any:
    layers = (module for module in trainer.model.modules() if hasattr(module, "gradient_checkpointing"))
    return trainer.state.log_history, [x.gradient_checkpointing for x in layers if hasattr(x, "self_attn")]


def test_strategies_that_differ_along_a_pipeline(tmp_path: Path) -> None:
    args = Spec(tmp_path, arguments={"train_sampling_strategy": "batch_rebalance"}).build().args
    check_arguments(args, OverlapArguments())
    with pytest.raises(ValueError, match=r"='batch_rebalance' with pp > 1; allowed: another strategy, or pp=1$"):
        check_arguments(args, OverlapArguments(pp=2))


def test_layouts_and_values_that_cannot_be_played(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(tiny.build("qwen3_moe").parameters(), lr=1e-3)
    given: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"schedule": "gpipe"}, {}, "schedule='gpipe' with pp=1 and gradient_accumulation_steps=4: "),
        ({"pp": 2}, {}, "pp=2, dp=1, ep=0 on 1 ranks; allowed: sizes from 1 whose product is 1"),
        ({"ep": -1}, {}, "ep=-1; allowed: 0 or more"),
        ({"pp": "2"}, {}, "pp='2'; allowed: a whole number, 0 or more"),
        ({"pretrained": 5}, {}, "pretrained=5; allowed: str or None"),
        ({"overlap": "much"}, {}, "overlap='much'; allowed: serial, pairs"),
        (
            {},
            {"trainer": {"optimizers": (optimizer, None)}},
            "optimizers with a SGD of the whole model; allowed: optimizer_cls_and_kwargs",
        ),
    ]
    values: list[tuple[dict[str, Any], str]] = [
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True; allowed"),
        ({"optim": "lomo"}, "optim='lomo' steps inside the backward; allowed"),
        ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise' steps inside the backward; allowed"),
    ]
    given += [({}, {"arguments": value}, message) for value, message in values]
    for layout, changes, message in given:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            Spec(tmp_path, layout=OverlapArguments(**layout), **changes).build()
        assert "allowed: " in str(caught.value)
        assert "\n" not in str(caught.value)


def test_limits_and_tries_are_the_engines(tmp_path: Path) -> None:
    layout = OverlapArguments(memory="4GB", recompute="auto", capacity=8.0, tries=1)
    trainer = alone(spec := Spec(tmp_path, layout=layout, steps=12))
    close(history(trainer), history(plain(spec)))
    assert trainer.engine.plan.peak_bytes  # nodes were counted, for the limit
