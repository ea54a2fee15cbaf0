"""Fixtures that several folders of tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch: ranks and tests share the processors

from tests.plan.tries import few_tries
from tests.ranks import Ranks

# A shell ignores Ctrl-C in what it runs in the background, and so would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

FEW: dict[str, tuple[float, ...]] = {
    "checkpoint": (),
    "cli/plan": (),
    "cut": (),
    "engine": (),
    "integrations": (),
    "learn": (),
    "plan": (0.0, 0.4),
    "play": (),
    "record": (),
    "reduce": (),
    "simulation": (),
    "transport": (),
}
"""Folders whose plans are compiled with few tries, and with which: what is said of them holds for every plan."""


def pytest_collection_finish() -> None:
    """Collections would look at all that is imported, which stays anyway: Trainer alone begins one in every run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _few_tries(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans have few tries in some folders, unless a test asks for all of them."""
    path = request.path.relative_to(Path(__file__).parent).as_posix()
    patiences = next((few for folder, few in FEW.items() if path.startswith(f"{folder}/")), None)
    with nullcontext() if patiences is None else few_tries(*patiences):
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text to train on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} squared is {i * i}; " for i in range(1000)))
    return path


@pytest.fixture(scope="session")
def kept() -> Iterator[dict[int, Ranks]]:
    """Two, four and eight processes with a gloo group, kept for the session: `kept[2].run(function, *args)`."""
    workers = {2: Ranks(2), 4: Ranks(4), 8: Ranks(8, timeout=180)}
    yield workers
    for ranks in workers.values():
        ranks.close()


@pytest.fixture(scope="session")
def ranks2(kept: dict[int, Ranks]) -> Ranks:
    """Two processes of `kept`."""
    return kept[2]


@pytest.fixture(scope="session")
def ranks4(kept: dict[int, Ranks]) -> Ranks:
    """Four processes of `kept`."""
    return kept[4]


@pytest.fixture(scope="session")
def ranks8(kept: dict[int, Ranks]) -> Ranks:
    """Eight processes of `kept`."""
    return kept[8]
