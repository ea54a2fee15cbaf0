"""One rank's profiles of several variants on a wire: what the engine's own counters say of each, beside the traces."""

import json
import os
import sys
from pathlib import Path

from overlap1f1b.record import Profile
from overlap1f1b.running.bench.measure import Bench, Variant
from overlap1f1b.running.options import BenchOptions, ModelOptions
from overlap1f1b.running.ranks import joined
from overlap1f1b.schedule import build_schedule
from tests.plan.tries import few_tries

STEPS = 3
VARIANTS = {
    "sequential": Variant(build_schedule("sequential", microbatches=4), "serial"),
    "pairs": Variant(build_schedule("combined_1f1b", microbatches=4, extra_warmup=0), "pairs", default=True),
    "three": Variant(build_schedule("combined_1f1b", microbatches=4), 3, default=True),
}


def main(folder: Path, text: Path, *names: str) -> None:
    model = ModelOptions(layers=1, hidden=128, intermediate=256)
    sizes = {"microbatches": 4, "batch": 4, "sequence": 128, "text": (text,)}
    options = BenchOptions(model=model, wire="balanced", compute="timed", **sizes)  # type: ignore[arg-type]
    with joined((1, 1, 2), 60.0) as rank:
        bench = Bench(options, rank, lambda _: None)
        with few_tries(), bench.ready([VARIANTS[name] for name in names]) as (engines, *_):
            for name in names:
                variant = VARIANTS[name]
                bench.step(engines[variant.key])
                with Profile(engines[variant.key], folder / name):
                    overlaps = [bench.step(engines[variant.key])[1].overlap for _ in range(STEPS)]
                own = [{"exchange": 1e9 * overlap.exchange, "exposed": 1e9 * overlap.exposed} for overlap in overlaps]
                (folder / f"{name}-{rank.rank}.json").write_text(json.dumps(own))


if __name__ == "__main__":
    os.environ["KINETO_LOG_LEVEL"] = "6"
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    os._exit(0)
