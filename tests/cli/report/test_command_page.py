"""The page in a real browser: no error, a bar a span, and the figures of the JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from overlap1f1b.cli.main import main
from overlap1f1b.cli.report.figures import tables_of
from overlap1f1b.profiling import bars_of, read
from tests.cli.inside import report
from tests.profiling.simulated import simulated, write_run
from tests.profiling.synthetic import Events, Kernel, write_chrome, write_record

Capture = pytest.CaptureFixture[str]
AWAY = [
    ("node", "attention.f[0] m0", 0.0, 0.1),
    ("node", "offload.f[0] m0", 0.1, 0.1),
    ("flight", "offload.f[0] m0", 0.1, 0.3),
    ("node", "free.f[0] m0", 0.3, 0.3),
    ("node", "fetch.b[0] m0", 0.4, 0.4),
    ("flight", "fetch.b[0] m0", 0.4, 0.5),
    ("node", "attention.b[0] m0", 0.5, 0.7),
]
"""Activations that leave to host memory, and come back."""


def open_page(browser: Any, file: Path) -> None:
    """Open a report and wait until its data is unpacked and drawn."""
    browser.get(file.as_uri())
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda window: window.execute_script("return typeof step !== 'undefined' && step"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the files and the report of two pipeline ranks × two that share experts; the last is late."""
    folder = tmp_path_factory.mktemp("report")
    run = write_run(folder / "run", simulated("combined_1f1b", 3), steps=2, experts=2)
    for path in run.iterdir():
        record = json.loads(path.read_text())
        flights = [span for step in record["steps"] for span in step["spans"] if span[0] == "flight"]
        for span in flights if record["mesh"]["ep"][0] else ():
            span[2] += min(1.5e-3, span[3] - span[2])
        record["about"] = {"bytes": {"2": dict.fromkeys((span[1] for span in flights), 3_000_000)}}
        path.write_text(json.dumps(record))
    file, figures = folder / "report.html", folder / "report.json"
    assert main(["report", str(run), "--html", str(file), "--json", str(figures), "--predicted"]) == 0
    assert file.stat().st_size < 200_000
    return folder


@pytest.fixture
def page(written: Path, browser: Any) -> dict[str, Any]:
    """The JSON of the report, open in the browser."""
    browser.get_log("browser")  # of the pages before
    open_page(browser, written / "report.html")
    content: dict[str, Any] = json.loads((written / "report.json").read_text())
    return content | {"bars": len(bars_of(read(written / "run").ranks, 2))}


def without_warnings(browser: Any) -> bool:
    return not [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_bars_and_figures(page: dict[str, Any], browser: Any) -> None:
    bars = "return step.tracks.reduce((sum, track) => sum + track.bars.length, 0)"
    assert browser.execute_script(bars) > page["bars"]  # measured and predicted
    browser.execute_script("show(1)")
    assert browser.execute_script(bars) == page["bars"]
    texts = browser.execute_script("""
        const texts = row => [...row.cells].map(cell => cell.textContent);
        return [...document.querySelectorAll("table")].map(table => [...table.rows].map(texts));
    """)
    assert texts == [[list(table.headings), *map(list, table.rows)] for table in tables_of(page)]
    assert browser.find_element("tag name", "h1").text == page["verdict"]
    pieces = browser.execute_script(
        "return [...document.querySelectorAll('.bar')].map(bar => [...bar.children].map(piece => piece.title))"
    )
    for row, rank in zip(pieces, page["ranks"], strict=True):
        causes = [f"exposed by {cause}: {time:.4g}" for cause, time in rank["exposed_by_cause_ms"].items()]
        assert [piece[: len(text)] for piece, text in zip(row[2:], causes, strict=False)] == causes
    assert without_warnings(browser)


def test_pixels_tell_hidden_from_exposed(page: dict[str, Any], browser: Any) -> None:
    """In a whole bar of the exchange that is exposed there are dark lines, in one that is hidden there are none."""
    found = browser.execute_script("""
        draw();
        const lines = bar => {
            const y = AXIS + ROW * shown.indexOf(bar.track) + 3, width = canvas.clientWidth;
            const pixels = pen.getImageData(x(bar.start, width) + 1, y, 6, 1).data; // above the text: one period
            return [...pixels].filter((value, place) => place % 4 === 0 && value < 128).length;
        };
        const bars = step.tracks.filter(track => track.marks.exposed.length).flatMap(
            track => track.bars.filter(bar => bar.style === "exchange").map(bar => ({...bar, track})));
        const share = bar => parts(bar.track.marks.exposed, bar.start, bar.end).reduce(
            (sum, [start, end]) => sum + (end - start) / (bar.end - bar.start), 0);
        return bars.filter(bar => bar.end - bar.start > 3).map(bar => [share(bar), lines(bar)]);
    """)
    assert {share > 0.999 for share, _ in found} == {True, False}
    assert all(dark > 0 for share, dark in found if share > 0.999)
    assert all(dark == 0 for share, dark in found if share < 0.001)


def test_zoom_and_hover(page: dict[str, Any], browser: Any) -> None:
    assert browser.execute_script("return from") == 0
    browser.execute_script("move(10, 20)")
    assert browser.execute_script("return [from, to]") == [10, 20]
    shown = browser.execute_script("""
        const track = step.tracks.find(track => track.name === "rank 0 exchange"), bar = track.bars[0];
        move(bar.start - 1, bar.end + 1);
        draw();
        const place = canvas.getBoundingClientRect();
        const left = place.left + x((bar.start + bar.end) / 2, place.width);
        const top = place.top + AXIS + ROW * (shown.indexOf(track) + 0.5) - frame.scrollTop;
        canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: left, clientY: top}));
        return tip.textContent;
    """)
    name, times, exposed, sent = shown.splitlines()
    assert name == "rank 0 exchange: dispatch.f[0] m0"
    assert times.endswith(" ms, 5.000 ms")
    assert exposed == "exposed 2.500 ms, order 1.000 ms, imbalance 1.500 ms"
    assert sent == "3.00 MB leave the rank, 4.80 Gbit/s"
    assert without_warnings(browser)


def test_a_long_wait_leads_to_its_place(page: dict[str, Any], browser: Any) -> None:
    rows = browser.find_elements("css selector", "tr.link")
    for row, span in zip(rows, page["longest_exposed"], strict=True):
        row.click()
        number, marked, exposed = browser.execute_script(
            "return [step.number, marked, step.ranks[marked.rank].exposed]"
        )
        assert (number, marked["rank"]) == (span["step"], span["rank"])
        assert [marked["start"], marked["end"]] in [pytest.approx(times, abs=1e-3) for times in exposed]
    browser.execute_script("chosen.value = '1-2'; chosen.oninput()")
    assert browser.execute_script("return [...new Set(shown.map(track => track.rank))]") == [1, 2]


def test_dark_and_light(page: dict[str, Any], browser: Any) -> None:
    found = {}
    for scheme in ("dark", "light"):  # the other tests of this browser have light, too
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        found[scheme] = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert found == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}


def test_a_page_needs_nothing_else(capsys: Capture, tmp_path: Path, browser: Any) -> None:
    run = write_run(tmp_path / "<run> & co", simulated("1f1b", "serial"))
    (run / "rank1.json").write_text("</script>")
    page = tmp_path / "report.html"
    assert report(capsys, run, "--html", page).status == 0
    text = page.read_text()
    assert "http" not in text
    assert '<link rel="stylesheet"' not in text
    open_page(browser, page)
    said = [line.text for line in browser.find_elements("css selector", ".partial")]
    assert said[0] == "no file of rank 1: figures are of the other ranks alone"
    assert said[1].startswith(f"left out: {run}/rank1.json: ")
    assert browser.find_element("tag name", "h1").text.startswith("Of some ranks only: No: ")


def test_what_is_held_and_the_copies_to_host_memory_have_rows(capsys: Capture, tmp_path: Path, browser: Any) -> None:
    file, page = write_record(tmp_path / "rank0.json", [AWAY]), tmp_path / "report.html"
    record = json.loads(file.read_text())
    names = "attention.f[0] m0", "free.f[0] m0", "fetch.b[0] m0", "attention.b[0] m0"
    sizes = (4e6, 4e6, 0), (-3e6, 0, 0), (3e6, 3e6, 0), (-4e6, 0, 0)
    sent = dict.fromkeys(("offload.f[0] m0", "fetch.b[0] m0"), 3_000_000)
    record["about"] = {"held": dict(zip(names, sizes, strict=True)), "bytes": {"1": sent}}
    file.write_text(json.dumps(record))
    assert "to host memory" in report(capsys, file, "--html", page).out
    open_page(browser, page)
    tracks, copied = browser.execute_script("""
        const found = name => step.tracks.find(track => track.name === name), memory = found("rank 0 memory");
        const held = found("rank 0 held").bars.map(bar => [bar.what.split(" ")[0], bar.share, Math.round(bar.end)]);
        return [held, memory.bars.map(bar => told(memory, bar).split("\\n")[2])];
    """)
    assert tracks == [["4.000", 1, 100], ["4.000", 1, 300], ["4.000", 1, 400], ["4.000", 1, 500], ["4.000", 1, 700]]
    assert copied == ["3.00 MB are copied, 0.120 Gbit/s", "3.00 MB are copied, 0.240 Gbit/s"]
    assert without_warnings(browser)


@pytest.mark.parametrize("name", ["ncclDevKernel_SendRecv", "cutlass::Kernel2"])
def test_what_was_not_measured_has_no_piece_of_a_bar(capsys: Capture, tmp_path: Path, browser: Any, name: str) -> None:
    kernels = [Kernel(7, 0, 100, 0, name="cutlass::Kernel2"), Kernel(20, 50, 150, 1, name=name)]
    trace, page = write_chrome(tmp_path / "a.json", Events([], kernels)), tmp_path / "report.html"
    assert report(capsys, trace, "--html", page).status == 0
    open_page(browser, page)
    pieces = browser.execute_script("return [...document.querySelector('.bar').children].map(piece => piece.title)")
    exchange = ["compute with hidden exchange", "exposed exchange"] * (name != "cutlass::Kernel2")
    assert [piece.split(":")[0] for piece in pieces] == ["compute alone", *exchange]
    assert without_warnings(browser)
