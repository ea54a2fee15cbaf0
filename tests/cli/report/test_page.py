"""The page in a real browser: no error, a bar a span, and the figures of the JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.cli.report.figures import figure
from overlap1f1b.profiling import bars_of, read
from tests.cli.report.run import refused, report
from tests.profiling.simulated import simulated, write_run

Capture = pytest.CaptureFixture[str]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    pytest.importorskip("plotly")
    webdriver = pytest.importorskip("selenium.webdriver", reason="drives the browser with selenium")
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if found is None or driver is None:
        pytest.skip("no Chromium with its driver here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1600,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield window
    window.quit()


def test_bars_figures_zoom_and_hover(capsys: Capture, tmp_path: Path, browser: Any) -> None:
    run = write_run(tmp_path / "run", simulated("combined_1f1b", 3), steps=2)
    page, figures = tmp_path / "report.html", tmp_path / "report.json"
    assert report(capsys, run, "--html", page, "--json", figures, "--predicted").status == 0
    browser.get(page.as_uri())
    bars = browser.execute_script("return document.querySelectorAll('#timeline .bars .point path').length")
    assert bars == 2 * len(bars_of(read(run).ranks, 2))  # measured and predicted
    cells = browser.execute_script(
        "return [...document.querySelectorAll('td[data-path]')].map(cell => [cell.dataset.path, cell.innerText])"
    )
    content = json.loads(figures.read_text())
    assert len(cells) > 100
    for path, text in cells:
        value: Any = content
        *_, last = keys = path.split("/")
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        assert text == (str(value) if last in ("rank", "step") else figure(last, value)), path
    assert browser.find_element("tag name", "h1").text == content["verdict"]
    before, after = browser.execute_async_script("""
        const [done] = arguments, plot = document.getElementById('timeline');
        const span = () => plot._fullLayout.xaxis.range.slice();
        const before = span();
        Plotly.relayout(plot, {'xaxis.range': [10, 20]}).then(() => done([before, span()]));
    """)
    assert before[0] < 10
    assert before[1] > 20
    assert after == [10, 20]
    shown = browser.execute_script("""
        const plot = document.getElementById('timeline');
        Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: 0}]);
        return plot.querySelector('.hoverlayer').textContent;
    """)
    assert "attention.f[0] m0" in shown
    assert "ms" in shown
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_a_page_needs_nothing_else(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    run = write_run(tmp_path / "<run> & co", simulated("1f1b", "serial"))
    (run / "rank1.json").unlink()
    page = tmp_path / "report.html"
    assert report(capsys, run, "--html", page).status == 0
    text = page.read_text()
    assert '<script src="http' not in text
    assert '<link rel="stylesheet"' not in text
    assert '<p class="partial">no file of rank 1: figures are of the other ranks alone</p>' in text
    assert "<h1>Of some ranks only: No: " in text


def test_without_plotly(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", simulated("1f1b", "serial"))
    monkeypatch.setitem(sys.modules, "plotly", None)
    message = refused(capsys, run, "--html", tmp_path / "report.html")
    assert message == "--html needs plotly; pip install 'overlap1f1b[plot]'"
