"""The report as one HTML file: a step that can be zoomed, with the tables beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from rich.console import Console

from overlap1f1b.cli.draw import MOST_TEXTS, STYLES, tracks_of_bars
from overlap1f1b.cli.report.figures import Cell, Table, tables_of
from overlap1f1b.profiling import Bar
from overlap1f1b.terminal.output import writing

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title</title>
<link rel="icon" href="data:,">
<style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 1.5rem; color: #1f2328; }
h1 { font-size: 1.2rem; margin: 0 0 .3rem; }
main { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; }
#picture { flex: 3 1 44rem; min-width: 0; }
#tables { order: 1; flex: 1 1 26rem; min-width: 0; overflow-x: auto; }
table { border-collapse: collapse; margin: 0 0 1.2rem; font-variant-numeric: tabular-nums; font-size: 12.5px; }
caption { text-align: left; font-weight: 600; padding-bottom: .2rem; }
th, td { padding: .12rem .5rem; text-align: right; white-space: nowrap; }
th { border-bottom: 1px solid #d0d7de; font-weight: 500; }
.text { text-align: left; }
.partial { background: #fff3cd; padding: .4rem .6rem; }
</style>
</head>
<body>
<h1>$verdict</h1>
$remarks
<main>
<section id="tables">$tables</section>
<section id="picture">$picture</section>
</main>
</body>
</html>
""")
_TRACK = 26
"""Height of a track in pixels."""


def write_page(content: Mapping[str, Any], bars: Sequence[Bar], path: Path, *, title: str, screen: Console) -> None:
    """Write the page, and tell the screen."""
    page = _PAGE.substitute(
        title=escape(title),
        verdict=escape(content["verdict"]),
        remarks=_remarks(content),
        picture=_picture(bars, title),
        tables="\n".join(map(_table, tables_of(content))),
    )
    with writing("html", path, screen) as file:
        file.write_text(page, encoding="utf-8")


def _picture(bars: Sequence[Bar], title: str) -> str:
    """Return the timeline as a part of a page, with plotly.js inside."""
    try:
        from plotly import graph_objects as go
    except ImportError:
        raise ValueError("--html needs plotly; pip install 'overlap1f1b[plot]'") from None
    tracks = tracks_of_bars(bars)
    figure = go.Figure()
    for key, style in STYLES.items():
        placed = [(name, cell) for name, cells in tracks for cell in cells if cell.style == key]
        if not placed:
            continue
        figure.add_bar(
            orientation="h",
            name=style.label,
            base=[cell.start for _, cell in placed],
            x=[cell.end - cell.start for _, cell in placed],
            y=[name for name, _ in placed],
            text=[cell.text for _, cell in placed] if len(bars) <= MOST_TEXTS else None,
            customdata=[[cell.what, cell.start, cell.end] for _, cell in placed],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]:.3f} to %{customdata[2]:.3f} ms<br>%{x:.3f} ms",
            marker={"color": style.colour, "line": {"width": 0.5, "color": "white"}},
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
        )
    names = [name for name, _ in tracks]
    figure.update_layout(
        title={"text": escape(title), "font": {"size": 14}},
        barmode="overlay",
        bargap=0.15,
        height=160 + _TRACK * len(tracks),
        margin={"l": 10, "r": 10, "t": 50, "b": 40},
        legend={"orientation": "h", "y": -0.1, "yanchor": "top"},
        plot_bgcolor="white",
        dragmode="pan",
        uniformtext={"minsize": 7, "mode": "hide"},
    )
    figure.update_xaxes(title="ms from the start of the step", gridcolor="#eaeef2")
    figure.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], fixedrange=True, automargin=True, tickmode="linear"
    )
    config = {"scrollZoom": True, "displaylogo": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=True, div_id="timeline", config=config))


def _remarks(content: Mapping[str, Any]) -> str:
    lines = [*content["notes"], *(f"Try: {text}." for text in content["advice"])]
    marked = [f'<p class="partial">{escape(text)}</p>' for text in remarks(content)]
    return "\n".join([*marked, *(f"<p>{escape(text)}</p>" for text in lines)])


def remarks(content: Mapping[str, Any]) -> list[str]:
    """Return the reasons why figures are partial, one line each."""
    missing = _runs(content["missing_ranks"])
    lines = [f"no file of rank {missing}: figures are of the other ranks alone"] if missing else []
    return lines + [f"left out: {text}" for text in content["left_out"]]


def _runs(numbers: Sequence[int]) -> str:
    """Return numbers as runs, such as ``0, 2 to 511``: thousands of ranks may have no file."""
    there = set(numbers)
    begins = [number for number in numbers if number - 1 not in there]
    ends = [number for number in numbers if number + 1 not in there]
    pairs = zip(begins, ends, strict=True)
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in pairs)


def _table(table: Table) -> str:
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(cell: Cell) -> str:
    """Return the HTML of a figure, with its keys in the JSON."""
    if cell.path:
        return f'<td data-path="{escape("/".join(map(str, cell.path)))}">{escape(cell.text)}</td>'
    return f'<td class="text">{escape(cell.text)}</td>'
