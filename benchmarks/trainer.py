"""transformers' Trainer with its own expert parallelism, and OverlapTrainer, over a shaped wire, with real compute.

    python benchmarks/trainer.py                              # 2 ranks, 200 Mbit/s; needs root and transformers
    python benchmarks/trainer.py --wire 100mbit --rounds 5 --json trainer.json

Both train the same Qwen3-MoE on the same rows: 8 microbatches an optimizer step. Trainer's model is loaded with
``ep_implementation="all_to_all"``, all other parameters under FSDP2, as transformers requires. Each round starts the
ranks of both anew, one after the other; a time is the median of the steps behind the first six of a run, on the slower
rank, and the hidden share of OverlapTrainer's exchange is the median of the same steps, on the rank with the least.
Losses of the last step show that both have trained the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlap1f1b.running.launch import STORE, run_ranks
from overlap1f1b.running.wire import Balanced, Wire, parse_wire
from overlap1f1b.terminal.output import check_files, write_json

RANKS, WARM = 2, 6
KINDS = ("Trainer", "OverlapTrainer")
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}


def train(kind: str, folder: Path, steps: int) -> None:
    """Train on this rank; every rank writes its times, the last loss and the hidden share."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from overlap1f1b.integrations.transformers import OverlapTrainer

    # The ranks of a wire have no port in common, so not by the environment.
    store, rank = dist.FileStore(os.environ[STORE], RANKS), int(os.environ["RANK"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    class Clock(TrainerCallback):
        """Times of the ends of steps."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    args = TrainingArguments(
        str(folder / "runs"),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        max_steps=steps,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = torch.randint(256, (RANKS * 16 * steps, 256), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    torch.manual_seed(0)
    whole = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    clock = Clock()
    if kind == "OverlapTrainer":
        trainer: Any = OverlapTrainer(whole, args, train_dataset=data, callbacks=[clock])
    else:
        from transformers.distributed.configuration_utils import DistributedConfig

        own = folder / "model"
        whole.save_pretrained(own)  # of the first rank alone
        dist.barrier()
        spread = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS, ep_implementation="all_to_all")
        model = Qwen3MoeForCausalLM.from_pretrained(own, distributed_config=spread, dtype=torch.float32)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[clock])
    trainer.train()
    step = median(after - before for before, after in pairwise(clock.ends[WARM - 1 :]))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]  # one a step
    shares = [entry["exchange_hidden"] for entry in logged[WARM:] if "exchange_hidden" in entry]
    found = {"step_ms": 1e3 * step, "loss": logged[-1]["loss"], "hidden_fraction": median(shares) if shares else None}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="200mbit", help="rate of the link (default: 200mbit)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--steps", type=int, default=16, help=f"steps of a run, more than {WARM} (default: 16)")
    parser.add_argument("--json", help="file for the results; - for the standard output")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARM:
        parser.error(f"--steps {options.steps}; allowed: {WARM + 1} or more")
    try:
        if isinstance(rate := parse_wire(options.wire), Balanced):
            raise ValueError(f"--wire {options.wire}; allowed: a rate such as 200mbit")
        check_files({"json": options.json})
    except ValueError as error:
        parser.error(str(error))
    if options.child:
        train(options.child[0], Path(options.child[1]), options.steps)
        return 0
    screen = sys.stderr if options.json == "-" else sys.stdout
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with Wire(RANKS, rate) as wire:
        for number in range(options.rounds):
            for kind in KINDS:
                with tempfile.TemporaryDirectory() as folder:
                    words = ["--steps", str(options.steps), "--child", kind, folder]
                    status = run_ranks(words, RANKS, wire=wire, command=(sys.executable, __file__))
                    if status:
                        return status
                    ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
                found[kind].append({**ranks[0], "step_ms": max(rank["step_ms"] for rank in ranks)})
                print(f"round {number + 1}: {kind} {said(found[kind][-1])}", file=screen, flush=True)
    theirs, ours = (median(run["step_ms"] for run in found[kind]) for kind in KINDS)
    hidden = median(run["hidden_fraction"] for run in found["OverlapTrainer"])
    print(
        f"{options.wire}: Trainer {theirs:.0f} ms a step, OverlapTrainer {ours:.0f} ms, {theirs / ours:.2f}×, "
        f"{hidden:.0%} of its exchange hidden",
        file=screen,
    )
    asked = {"wire": options.wire, "rounds": options.rounds, "steps": options.steps, "warm_up": WARM}
    medians = {"Trainer_ms": theirs, "OverlapTrainer_ms": ours, "speed_up": theirs / ours, "hidden_fraction": hidden}
    write_json(options.json, asked | medians | {"sizes": SIZES, "runs": found})
    return 0


def said(run: dict[str, Any]) -> str:
    """Return a run in words."""
    share = "" if run["hidden_fraction"] is None else f", {run['hidden_fraction']:.0%} of the exchange hidden"
    return f"{run['step_ms']:.0f} ms, loss {run['loss']}{share}"


if __name__ == "__main__":
    sys.exit(main())
