"""`overlap1f1b train --hf-config` as a user runs it."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from overlap1f1b.running.options import TrainOptions
from overlap1f1b.running.workload import _hf_config
from tests.cli.inside import Verb
from tests.integrations.transformers import architectures, tiny
from tests.running.run import Run


def test_stopped_and_resumed_under_another_layout(text: Path, tmp_path: Path) -> None:
    config = tmp_path / "model"
    tiny.configuration("mixtral", vocab_size=256).save_pretrained(config)
    args = ("--hf-config", config / "config.json", "--text", text, "--steps", "4", "--batch", "4")
    saved = ("--checkpoint", tmp_path / "saved", "--checkpoint-every", "2", "--json", tmp_path / "json")
    results = []
    for layout in (("--pp", "2", "--ep", "1"), ("--pp", "1", "--ep", "1")):
        Run("train", *args, *saved, *layout).succeeds()
        results.append(json.loads((tmp_path / "json").read_text()))
        shutil.rmtree(tmp_path / "saved" / "step-00000004")  # as if it had stopped after two steps
    unbroken, resumed = results
    assert resumed["resumed_from"] == 2
    assert resumed["workload"]["hf_config"] == str(config / "config.json")
    assert resumed["losses"] == pytest.approx(unbroken["losses"], rel=1e-5)


def test_no_kind_with_experts_is_said_to_have_none(tmp_path: Path) -> None:
    for kind in architectures.names():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        TrainOptions(hf_config=str(tmp_path)).check()


def test_a_model_without_experts_by_its_name(tmp_path: Path) -> None:
    """A name has no file, so the model itself is looked at, without its weights."""
    sizes = {"vocab_size": 256, "hidden_size": 2**20, "intermediate_size": 2**20, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no experts: .*; allowed: a mixture"):
        _hf_config(str(tmp_path))


def test_bad_configurations(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(folder: Path) -> str:
        return Verb("train").refused(capsys, "--hf-config", folder, "--text", text, "--ep", 1)

    dense, small = tmp_path / "dense", tmp_path / "small"
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 2, **sizes}))
    tiny.configuration("mixtral").save_pretrained(small)
    assert refusal(dense) == f"--hf-config {dense}: llama has no experts; allowed: a mixture of experts"
    assert refusal(small) == f"--hf-config {small}: a vocabulary of 37; allowed: 256 or more, for bytes"
    for value in ("eight", 0):  # of another kind; no layer is made of it
        (dense / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_attention_heads": value, **sizes}))
        assert refusal(dense).startswith(f"--hf-config {dense}: ")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nothing answers; the hub's client would say that it tries
    text_of_a_name = refusal(Path("nobody/nothing"))
    assert text_of_a_name.startswith(
        "--hf-config nobody/nothing: no such file or folder; as a name: We couldn't connect"
    )
    none = tmp_path / "none"
    assert refusal(none).startswith(f"--hf-config {none}: no such file or folder; as a name: ")
