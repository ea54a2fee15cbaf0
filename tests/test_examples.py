"""The examples run, on one rank, over two stages and as their pages say, and go on from their checkpoints."""

import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, parse_args

from tests.running.fork import Fork, torchrun_environs
from tests.tiers import wide

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def forked(script: Path, *args: str | Path, ranks: int = 1) -> str:
    """What a script writes, without the start of a Python, on ranks with what torchrun puts into their environment."""
    environ = dict(os.environ, GLOO_SOCKET_IFNAME="lo")
    for name in ("RANK", "WORLD_SIZE"):
        environ.pop(name, None)
    words, several = list(map(str, args)), torchrun_environs(ranks) if ranks > 1 else [{}]
    processes = [Fork(words, environ | mine, script) for mine in several]
    try:
        found = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [status for status, _, _ in found] == [0] * ranks, [err for _, _, err in found]
    return "".join(out for _, out, _ in found)


def losses(text: str) -> dict[int, float]:
    """Of the steps, which must be all that is printed beside held-out losses."""
    found = re.findall(
        r"^step (\d+) loss (\d+\.\d+) grad_norm \S+ tps \d+(?:, \d+% of the exchange hidden)?$", text, re.M
    )
    assert len(found) + len(re.findall(r"^held out: loss \d+\.\d+$", text, re.M)) == text.count("\n")
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize("name", ["hf", "trainer", "sft"])
def test_an_example_without_its_package_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"^train_{name}.py needs \w+; pip install [^\n]+$"):
        runpy.run_path(str(EXAMPLES / f"train_{name}.py"))


def test_train_own_on_one_rank_and_on_over_two_stages(tmp_path: Path) -> None:
    script, saved = EXAMPLES / "train_own.py", tmp_path / "saved"
    alone = losses(forked(script, "--save", saved))
    assert list(alone) == list(range(20))
    assert alone[19] < alone[0] / 4
    shutil.rmtree(saved / "step-00000020")  # as if it had been stopped then
    over_two = losses(forked(script, "--pp", "2", "--save", saved, ranks=2))
    assert over_two == {step: pytest.approx(alone[step], abs=2e-3) for step in range(10, 20)}


def test_the_program_of_the_training_page_on_one_rank_and_on_two(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    assert len(program[1].splitlines()) < 50
    assert "in range(20):" in program[1]
    (script := tmp_path / "train.py").write_text(program[1].replace("in range(20):", "in range(5):"))
    for ranks, hidden in ((1, "nan%"), (2, r"\d+%")):
        lines = re.findall(rf"^step (\d+) loss \d\.\d+ hidden {hidden}$", forked(script, ranks=ranks), re.MULTILINE)
        assert list(map(int, lines)) == list(range(5))


def config(folder: Path) -> Path:
    """A tiny model, with weights."""
    pytest.importorskip("transformers")
    from tests.integrations.transformers import tiny

    tiny.build("qwen3_moe", vocab_size=256, tie_word_embeddings=True).save_pretrained(folder)
    return folder


def test_train_hf_over_two_stages_and_on_from_a_checkpoint(tmp_path: Path) -> None:
    model = config(tmp_path / "model")
    args = (model, ROOT / "README.md", "--steps", "6", "--every", "4", "--pp", "2", "--save", tmp_path / "saved")
    steps = re.compile(r"^step (\d+) loss (\S+) grad_norm \S+ tps \d+ memory \S+ GiB( held_out \S+)?$", re.MULTILINE)
    first, again = (
        {int(step): float(loss) for step, loss, _ in steps.findall(forked(EXAMPLES / "train_hf.py", *args, ranks=2))}
        for _ in range(2)
    )
    assert list(first) == [0, 1, 2, 3, 4, 5]
    assert again == {step: first[step] for step in (4, 5)}
    assert first[5] < first[0]


@pytest.mark.parametrize(
    ("name", "package", "on", "done"),
    [("trainer", "accelerate", ("--resume_from_checkpoint", "checkpoint-10"), 2), *wide(("sft", "trl", (), 0))],
)
def test_train_with_its_defaults_and_over_two_stages(
    tmp_path: Path, name: str, package: str, on: tuple[str, ...], done: int
) -> None:
    """The second goes on from a checkpoint of the first, or begins anew."""
    pytest.importorskip(package)
    script, saved = EXAMPLES / f"train_{name}.py", ("--output_dir", tmp_path)
    logged = re.compile(r"^\{'loss': '(\S+)', 'grad_norm'", re.MULTILINE)
    alone = [float(loss) for loss in logged.findall(forked(script, *saved))]
    assert len(alone) == 4
    assert alone[-1] < alone[0] - 0.5
    options = [tmp_path / word if word.startswith("checkpoint") else word for word in on]
    over_two = [float(loss) for loss in logged.findall(forked(script, *saved, "--pp", "2", *options, ranks=2))]
    assert over_two == pytest.approx(alone[done:], abs=2e-3)
    assert (tmp_path / "config.json").exists()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone of what is committed."""
    head = ("git", "rev-parse", "HEAD")
    if shutil.which("git") is None or subprocess.run(head, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not in a git repository")
    folder = tmp_path_factory.mktemp("fresh") / "overlap1f1b"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", folder], timeout=60, check=True)
    return folder


def documented(script: Path) -> list[str]:
    """The arguments of Python in the command for several ranks that a script's docstring has."""
    (found,) = re.findall(r"^torchrun (.+?)(?:  #.*)?$", script.read_text(), re.MULTILINE)
    return str(found).split()


FEW = ("--max_steps", "2", "--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no",
       "--per_device_train_batch_size", "1")  # fmt: skip


def check_hidden(text: str) -> None:
    """Of one rank, which logs alone."""
    logged = re.findall(r"^\{'loss': '(\S+)', 'grad_norm'.*'exchange_hidden': '(\S+)'", text, re.MULTILINE)
    assert len(logged) == 2
    assert all(0 < float(loss) < 10 and 0 <= float(hidden) <= 1 for loss, hidden in logged)


def under_slurm(root: Path, folder: Path, torchrun: str) -> tuple[str, list[str]]:
    """What both nodes of a job print if `torchrun` is this line of a shell, and the program that they run."""
    command = documented(root / "examples" / "train_own.py")
    assert command == ["--nproc-per-node", "4", "examples/train_own.py", "--pp", "2", "--save", "folder"]
    program = [*command[2:6], str(folder / "saved")]
    stand_ins = {
        "scontrol": "echo localhost",
        "srun": 'shift; "$@" & first=$!; "$@" & wait $! && wait $first',
        "torchrun": torchrun,
    }
    for name, line in stand_ins.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environ = dict(
        os.environ, PATH=f"{folder}:{os.environ['PATH']}", PYTHONPATH=str(root), GLOO_SOCKET_IFNAME="lo",
        SLURM_JOB_NODELIST="two", SLURM_JOB_NUM_NODES="2", SLURM_JOB_ID="7", RANKS="1", PORT=str(port),
    )  # fmt: skip
    started = [root / "examples" / "slurm.sh", *program]
    done = subprocess.run(started, cwd=root, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, program


def test_the_agents_that_slurm_starts_on_two_nodes(tmp_path: Path) -> None:
    """By torchrun's own parser of its arguments; tests/running/test_launch_cluster.py trains over two agents."""
    agents, program = under_slurm(ROOT, tmp_path, 'echo "${*@Q}"')  # at once: lines of two agents stay apart
    lines = agents.splitlines()
    assert len(lines) == 2
    for line in lines:
        config, _, words = config_from_args(parse_args(shlex.split(line)))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 1)
        assert (config.rdzv_backend, config.run_id) == ("c10d", "7")
        assert config.rdzv_endpoint.startswith("localhost:")
        assert words[-len(program) :] == program


@pytest.mark.wide
def test_two_nodes_under_stand_ins_of_slurm_from_a_fresh_clone(clone: Path, tmp_path: Path) -> None:
    """One agent of torchrun for each of two nodes, both on this machine, with one rank each, as documented."""
    printed, _ = under_slurm(clone, tmp_path, f'exec {sys.executable} -m torch.distributed.run "$@"')
    found = losses(printed)
    assert list(found) == list(range(20))
    assert found[19] < found[0] / 4
    assert (tmp_path / "saved" / "step-00000020").exists()


@pytest.mark.parametrize(("name", "package"), [("sft", "trl"), *wide(("trainer", "accelerate"))])
def test_the_documented_ranks(name: str, package: str, tmp_path: Path) -> None:
    """The same command but for its start, on four ranks over two stages."""
    pytest.importorskip(package)
    script = EXAMPLES / f"train_{name}.py"
    command = documented(script)
    assert command == ["--nproc-per-node", "4", f"examples/{script.name}", "--pp", "2"]
    check_hidden(forked(script, *command[3:], *FEW, "--output_dir", tmp_path, ranks=int(command[1])))
    assert (tmp_path / "config.json").exists()
