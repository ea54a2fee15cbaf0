"""`overlap1f1b bench --hf-config`: the table of a model of transformers."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.cli.inside import Verb
from tests.integrations.transformers import tiny
from tests.running.run import Run
from tests.tiers import wide


@pytest.mark.parametrize("options", [["--peers"], *wide(["--compute", "timed"])])
def test_rows_and_transformers_own_expert_parallelism(text: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers before 5.23")
    config = tmp_path / "model"
    tiny.configuration("qwen3_moe", vocab_size=256, num_hidden_layers=1).save_pretrained(config)
    sizes = ("--microbatches", 2, "--batch", 2, "--rounds", 1, "--text", text, "--hf-config", config)
    out = Run("bench", *sizes, *options, "--json", tmp_path / "json").wait(120)
    assert out[0] == 0, out
    result = json.loads((tmp_path / "json").read_text())
    assert result["workload"]["hf_config"] == str(config)
    assert len(result["rows"]) >= 6
    assert all(row["grads_equal"] for row in result["rows"])
    assert result["wire"]["bytes_sent"] > 0
    if "--peers" in options:
        assert result["peers"]["transformers all_to_all"]["loss_difference"] < 1e-5  # the same model and batch
        assert result["best_over_peers"] > 0


def test_what_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for given, error in {
        **{
            given: f"{given} with --hf-config, which describes the model; allowed: one of the two"
            for given in ("--weights-in activation", "--precision fp8", "--layers 3")
        },
        "--pp 2": "--hf-config with --pp 2 --dp 1; allowed: 1 of each",
        "--peers --compute timed": "--peers with --hf-config, --compute timed and --ep 2; allowed: real, and 2 or more",
    }.items():
        assert Verb("bench").refused(capsys, "--hf-config", "x", *given.split()) == error
