"""`overlap1f1b plan` as a user runs it."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from overlap1f1b.plan import NodeCosts, parse_overlap
from overlap1f1b.schedule import SCHEDULES, Pair, Program, build_schedule
from overlap1f1b.simulation import Costs, simulate
from tests.cli.inside import plan
from tests.cli.lasting import lasting
from tests.running.fork import ROOT
from tests.tiers import first, wide

Capture = pytest.CaptureFixture[str]


def test_json_has_the_keys_of_the_design_and_the_figures_of_the_simulation(capsys: Capture) -> None:
    """tests/simulation/test_actions_closed_forms.py compares these with formulas."""
    costs, sizes = {"forward": 1.5, "backward": 2.5, "weight": 1.0, "pair": 0.8}, {"ranks": 4, "microbatches": 16}
    words = [word for name, value in (costs | sizes).items() for word in (f"--{name}", value)]
    for name, chunks in (("1f1b", 1), ("combined_1f1b", 2), ("dualpipe", 1)):
        result = plan.content(capsys, "--schedule", name, "--chunks", chunks, *words)
        program = build_schedule(name, **sizes, chunks=chunks)
        timeline = simulate(program, Costs(**costs))
        assert {"schedule", "ranks", "chunks", "microbatches", "makespan", "per_rank", "actions"} <= set(result)
        assert [result[key] for key in ("schedule", "chunks", *sizes)] == [name, chunks, *sizes.values()]
        assert result["makespan"] == timeline.makespan
        assert result["parameter_copies"] == 1 + (name == "dualpipe")
        assert result["actions"] == [[str(step) for step in steps] for steps in program.ranks]
        for rank, row in enumerate(result["per_rank"]):
            assert (row["busy"], row["bubble"]) == (timeline.busy(rank), timeline.bubble(rank))
            assert row["peak_activations"] == timeline.peak_activations(rank)
            assert row["pairs"] == sum(isinstance(step, Pair) for step in program.ranks[rank])
    result = plan.content(capsys)
    assert (result["schedule"], result["ranks"], result["chunks"], result["microbatches"]) == ("combined_1f1b", 4, 1, 8)
    assert result["makespan"] == 33


def test_it_draws_the_grid_and_the_table(capsys: Capture) -> None:
    out = plan(capsys, "--schedule", "zb_h1", "--ranks", 2, "--microbatches", 3).out
    assert [line.rstrip() for line in out.splitlines()] == [
        "zb_h1: 2 ranks, 3 microbatches, makespan 10, bubble 10.0%",
        "rank 0 F0-F1-   I0-W0-F2-I1-W1-I2-W2-",
        "rank 1    F0-I0-F1-I1-W0-F2-I2-W1-W2-",
        "time   |0    |2    |4    |6    |8    |10",
        "F forward, I input gradient, W weight gradient; the number behind is the microbatch",
        "",
        "rank  busy  bubble  share  peak activations  pairs",
        "   0     9       1  10.0%                 2      0",
        "   1     9       1  10.0%                 2      0",
    ]


def test_colours_where_it_is_a_terminal_alone(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in plan(capsys, "--ranks", 2, "--microbatches", 2).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = plan(capsys, "--schedule", "zb_h1", "--ranks", 2, "--microbatches", 2).out
    assert len({part.split("m")[0] for part in coloured.split("\x1b[")[1:] if "F0" in part or "I0" in part}) == 2


def test_long_programs_and_many_ranks_are_cut_with_a_note(capsys: Capture) -> None:
    lines = plan(capsys, "--schedule", "1f1b", "--microbatches", 100, "--width", 80).out.splitlines()
    assert all(len(line) <= 80 for line in lines[1:6])
    assert lines[7].startswith("cut at 18.25 of 309: ")
    assert "… 4 more" in plan(capsys, "--ranks", 20, "--microbatches", 20).out


def test_compare(capsys: Capture) -> None:
    others = ("1f1b", "combined_1f1b:chunks=2", "dualpipe")
    result = plan.content(capsys, "--schedule", "zb_h1", "--compare", *others, "--pair", 0.75)
    rows = {row["schedule"]: row for row in result["compare"]}
    assert list(rows) == ["zb_h1", "1f1b", "combined_1f1b", "dualpipe"]
    for text, row in zip(("zb_h1", *others), result["compare"], strict=True):
        name, _, chunks = text.partition(":chunks=")
        program = build_schedule(name, ranks=4, microbatches=8, chunks=int(chunks or 1))
        timeline = simulate(program, Costs(pair=0.75))
        assert row["makespan"] == timeline.makespan
        assert row["peak_activations"] == max(map(timeline.peak_activations, range(4)))
    assert [rows[name]["parameter_copies"] for name in rows] == [1, 1, 1, 2]
    table = plan(capsys, "--schedule", "zb_h1", "--compare", *others, "--pair", 0.75).out.split("\n\n")[-1].splitlines()
    assert table[1].split()[:4] == ["zb_h1", "1", "27", "1.000"]
    assert len(table) == 5


def test_search(capsys: Capture) -> None:
    result = plan.content(capsys, "--search", "--ranks", 4, "--microbatches", 8, "--peak-activations", 4)
    rows = result["search"]["rows"]
    assert (
        max(row["peak_activations"] for row in rows)
        <= 4
        < min(row["peak_activations"] for row in result["search"]["over_memory"])
    )
    assert (rows[0]["schedule"], rows[0]["chunks"]) == ("zb_h1", 4)
    assert result["makespan"] == rows[0]["makespan"] == min(row["makespan"] for row in rows) == 24.75
    assert result["schedule"] == "zb_h1"
    only = plan.content(capsys, "--search", "--ranks", 4, "--microbatches", 8, "--chunks", 2, "--schedule", "afab")
    assert [(row["schedule"], row["chunks"]) for row in only["search"]["rows"]] == [("afab", 2)]


def test_a_search_shows_no_program_that_costs_memory_alone(capsys: Capture) -> None:
    sizes = ("--search", "--ranks", 4, "--microbatches", 8)
    for more in ((), ("--schedule", "combined_1f1b")):
        rows, out = plan.content(capsys, *sizes, *more)["search"]["rows"], plan(capsys, *sizes, *more).out
        table, rest = out.split("left out: ")
        shown = table.splitlines()[1:]
        assert len(shown) + int(rest.split()[0]) == len(rows) > len(shown)
        figures = [tuple(line.split()) for line in shown]
        assert len(figures) == len(set(figures))
    assert "combined_1f1b" not in plan(capsys, *sizes).out  # its pairs gain nothing where they take as long
    assert "combined_1f1b" in plan(capsys, *sizes, "--pair", 0.8).out


def test_pairs_that_gain_nothing_say_what_shows_their_gain(capsys: Capture) -> None:
    hint = "a pair takes as long as both its members here; --pair 0.8 or --layers N has what it hides"
    assert plan(capsys).out.splitlines()[-1] == hint
    for words in (("--pair", 0.8), ("--layers", 1), ("--schedule", "1f1b")):
        assert hint not in plan(capsys, *words).out


def test_a_line_says_what_letters_mean(capsys: Capture) -> None:
    out = plan(capsys, *SUB_OPS, "--layers", 1, "--ranks", 1).out
    letters = "A attention, N counts, D dispatch, E experts, C combine, G aggregate"
    assert f"{letters}, a small letter backward, w weight gradient; " in out
    place = "the number behind is the microbatch"
    assert f"F forward, B backward, ‖ fused pair; {place}\n" in plan(capsys).out
    for words in (("--chunks", 2), (*SUB_OPS, "--chunks", 2)):
        assert f"; {place}, the one in front the stage\n" in plan(capsys, *words).out
    assert "attention" not in plan(capsys, *SUB_OPS, "--layers", 1, "--tables").out


def test_a_search_that_lasts_says_how_far_it_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("--search", "--schedule", "zb_h1", "--ranks", 2, "--microbatches", 4)
    quick = plan(capsys, *args, "--json", "-")
    assert "tried" not in quick.err + quick.out
    lasting(monkeypatch, "overlap1f1b.simulation.search:played")
    result = plan(capsys, *args, "--json", "-")
    count = len(json.loads(result.out)["search"]["rows"])
    said = re.findall(r"^\d:\d\d (\d+) of (\d+) schedules tried$", result.err, re.M)
    assert list(dict.fromkeys(said))[:count] == [(str(done), str(count)) for done in range(count)]


def test_a_comparison_that_lasts_says_how_far_it_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting(monkeypatch, "overlap1f1b.cli.plan.command:played")
    result = plan(capsys, "--schedule", "1f1b", "--compare", "zb_h1:chunks=2", "afab")
    assert "played" not in result.out
    said = re.findall(r"^\d:\d\d (.* of 3 programs played, now .*)$", result.err, re.M)
    names = ("1f1b", "zb_h1:chunks=2", "afab")
    expected = [f"{number} of 3 programs played, now {name}" for number, name in enumerate(names)]
    assert [line for line in dict.fromkeys(said) if "tables" not in line] == expected


def test_a_search_for_an_order_says_how_far_it_is(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting(monkeypatch, "overlap1f1b.plan.search:schedule_by_priorities")
    sizes = ("--ranks", 2, "--microbatches", 4, "--layers", 1, "--seconds", 0.02)
    result = plan(capsys, "--schedule", "auto", *sizes, "--json", "-")
    said = re.findall(
        r"^\d:\d\d 0 of 1 programs played, now auto, (\d+)% of the search for an order done$", result.err, re.M
    )
    shares = list(map(int, said))
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    assert max(shares) <= 100


def test_a_search_by_sub_ops_says_what_it_did_not_play(capsys: Capture) -> None:
    args = (*SUB_OPS, "--layers", 1, "--search", "--chunks", 1, "--overlap", 2, "--seconds", 0.02)
    asked, more, silent = (plan(capsys, *args, *top, "--json", "-") for top in (("--top", 1), ("--top", 99), ()))
    few, whole, unasked = (json.loads(found.out)["search"] for found in (asked, more, silent))
    assert few["rows"][0] == whole["rows"][0]
    assert len(few["rows"]) + len(few["pruned"]) == len(whole["rows"])
    assert not whole["pruned"]
    assert few["pruned"]
    least = min(row["bound"] for row in few["pruned"])
    assert (
        f"\nnot played: {len(few['pruned'])} that cannot be among the first 1, none takes less than {least:.6g}"
        in asked.err
    )
    assert unasked == few
    assert f"\nnot played: {len(few['pruned'])} that cannot be the fastest, none " in silent.err


def test_search_shows_the_first_rows_and_what_is_left_out(capsys: Capture) -> None:
    out = plan(capsys, "--search", "--ranks", 3, "--microbatches", 6, "--peak-activations", 2, "--top", 1).out
    assert "slower ones; --top" in out
    assert "left out, over the memory limit: " in out
    assert "impossible: 1, such as dualpipe over 3 ranks" in out


def test_programs_go_to_csv_and_back(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    for schedule in SCHEDULES:
        first = plan.content(capsys, "--schedule", schedule, "--csv", file)
        assert Program.from_csv(file) == build_schedule(schedule, ranks=4, microbatches=8)
        assert plan.content(capsys, "--from-csv", file) == first
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # with a mark at its beginning
    assert plan.content(capsys, "--from-csv", file) == first


def test_trace(capsys: Capture, tmp_path: Path) -> None:
    plan(capsys, "--schedule", "1f1b", "--ranks", 2, "--microbatches", 3, "--send", 0.5, "--trace", tmp_path / "trace")
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert len(names) == 12 + 6
    assert "0F0" in names
    assert "send of 0F0" in names


SUB_OPS = ("--ranks", 2, "--microbatches", 4, "--layers", 2, "--dispatch", 6, "--send", 1)


@pytest.mark.parametrize("overlap", ["serial", *wide("pairs", "2")])
def test_sub_ops(capsys: Capture, overlap: str, tmp_path: Path) -> None:
    files = ("--trace", tmp_path / "trace", "--csv", tmp_path / "csv")
    result = plan.content(capsys, *SUB_OPS, "--overlap", overlap, *files)
    costs = NodeCosts.uniform(attention=3, experts=4, dispatch=6, send=1)
    program = build_schedule("combined_1f1b", ranks=2, microbatches=4)
    timeline = simulate(program, costs, overlap=parse_overlap(overlap), layers=2)
    assert result["makespan"] == timeline.makespan
    assert result["overlap"] == overlap
    assert result["hidden_fraction"] == timeline.hidden_fraction
    assert (result["hidden_fraction"] == 0) == (overlap == "serial")
    for rank, row in enumerate(result["per_rank"]):
        assert row["busy"] == timeline.busy(rank) == 4 * 2 * 21
        assert row["bubble"] == timeline.makespan - row["busy"]
        assert row["exposed"] == timeline.ranks[rank].exposed
    names = {event["name"] for event in json.loads((tmp_path / "trace").read_text())["traceEvents"]}
    assert "experts.w[1] m3" in names
    assert plan.content(capsys, "--from-csv", tmp_path / "csv", *SUB_OPS[4:], "--overlap", overlap) == result


def test_sub_ops_are_drawn_on_lanes(capsys: Capture) -> None:
    drawn = plan(capsys, *SUB_OPS, "--overlap", "serial", "--width", 150).out.splitlines()
    assert drawn[0].startswith("combined_1f1b: 2 ranks, 4 microbatches, overlap serial, makespan ")
    lanes = [f"rank {rank} {lane}" for rank in (0, 1) for lane in ("compute", "exchange", "peers")]
    assert [" ".join(line.split()[:3]) for line in drawn[1:7]] == lanes
    assert drawn[1].split()[3:6] == ["A0-", "E0--", "A0-"]
    assert drawn[2].split()[3:6] == ["D0----", "C0----", "D0----"]
    tables = plan(capsys, *SUB_OPS, "--overlap", "serial", "--tables").out
    assert "exchange " not in tables.split("\n", 1)[1]


def test_sub_ops_compared_and_searched(capsys: Capture) -> None:
    result = plan.content(capsys, *SUB_OPS, "--compare", "1f1b:overlap=serial", "combined_1f1b:chunks=2,overlap=pairs")
    assert [row["overlap"] for row in result["compare"]] == ["3", "serial", "pairs"]
    assert result["compare"][0]["makespan"] < result["compare"][1]["makespan"]
    found = plan.content(capsys, *SUB_OPS, "--search", "--schedule", "combined_1f1b", "--chunks", 1, "--top", 99)
    rows = found["search"]["rows"]
    assert {row["overlap"] for row in rows} == {"serial", "pairs", 2, 3}
    assert found["makespan"] == rows[0]["makespan"] == min(row["makespan"] for row in rows)
    assert found["overlap"] == str(rows[0]["overlap"])


def test_an_order_is_found_compared_and_searched(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "auto.csv"
    sizes = ("--layers", 2, "--ranks", 2, "--microbatches", 4, "--seconds", 0.01, "--peak-activations", 3)
    found = plan.content(
        capsys, *sizes, "--schedule", "auto", "--chunks", 2, "--csv", file, "--compare", "1f1b", "auto"
    )
    searched = plan.content(capsys, *sizes, "--search", "--top", 99)
    assert found["chunks"] == 2
    assert max(row["peak_activations"] for row in found["per_rank"]) <= 3
    assert [row["schedule"] for row in found["compare"]] == ["auto", "1f1b", "auto"]
    assert found["compare"][0]["makespan"] == found["makespan"] < found["compare"][1]["makespan"]
    assert [[str(slot) for slot in slots] for slots in Program.from_csv(file).ranks] == found["actions"]
    rows = searched["search"]["rows"]
    assert {row["chunks"] for row in rows if row["schedule"] == "auto"} == {1, 2}
    assert searched["makespan"] == rows[0]["makespan"] == min(row["makespan"] for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schedule auto", "--schedule auto without --layers; allowed: with --layers, which gives costs of sub-ops"),
        ("--compare auto:chunks=2", "--compare auto:chunks=2 without --layers; allowed: with --layers, which gives co"),
        ("--layers 1 --seconds 1", "--seconds 1 alone; allowed: with --search or auto"),
        ("--layers 1 --host-link 0", "--host-link 0; allowed: more than 0, at most 1e+100"),
        ("--layers 1 --host-link 2", "--host-link 2 alone; allowed: with --activations"),
        ("--layers 1 --activations 2", "--activations 2 alone; allowed: with --host-link"),
        ("--parts 2", "--parts 2 alone; allowed: with --layers"),
        ("--layers 1 --schedule auto --peak-activations 0.5", "--peak-activations 0.5; allowed: 1 or more"),
        ("--layers 1 --schedule auto --chunks 2", "--layers 1 over 2 chunks; allowed: a multiple of 2"),
        ("--layers 2 --schedule auto --extra-warmup 1", "--extra-warmup 1 with --schedule auto, wh"),
        ("--layers 2 --schedule auto --group-size 4", "--group-size 4 with --schedule auto, wh"),
        ("--layers 2 --schedule auto --overlap 2", "--overlap 2 with --schedule auto, wh"),
        ("--layers 1 --schedule auto --forward-only", "forward_only with auto; allowed: none"),
        ("--layers 4 --schedule auto --search --chunks 3", "--layers 4 over 3 chunks; allowed: a multiple of 3"),
        ("--layers 2 --schedule auto --search --forward-only", "forward_only with auto; allowed: none"),
    ],
)
def test_bad_input_of_an_order_that_is_found(capsys: Capture, words: str, message: str) -> None:
    assert plan.refused(capsys, *shlex.split(words)).startswith(message)


@pytest.mark.parametrize("schedule", first(SCHEDULES, "sequential"))
def test_forward_only(capsys: Capture, tmp_path: Path, schedule: str) -> None:
    file = tmp_path / "plan.csv"
    sizes = ("--schedule", schedule, "--forward-only", "--forward", 2, "--send", 0.5)
    result = plan.content(capsys, *sizes, "--csv", file)
    program = build_schedule(schedule, ranks=4, microbatches=8, forward_only=True)
    assert Program.from_csv(file) == program
    assert result["actions"] == [[str(step) for step in steps] for steps in program.ranks]
    assert result["makespan"] == simulate(program, Costs(forward=2, send=0.5)).makespan
    assert {(row["busy"], row["pairs"]) for row in result["per_rank"]} == {(16, 0)}
    assert plan.content(capsys, "--from-csv", file, *sizes[3:]) == result
    drawn = plan(capsys, *sizes, "--width", 200).out.splitlines()
    assert [line.count("F") for line in drawn[1:5]] == [len(steps) for steps in program.ranks]
    assert not {"B", "I", "W"} & set("".join(drawn[1:5]))


def test_forward_only_forms_are_compared_and_searched(capsys: Capture) -> None:
    forwards = ("--forward-only", "--ranks", 2, "--microbatches", 4)
    compared = plan.content(capsys, *forwards, "--compare", "dualpipev", "combined_1f1b:chunks=2")["compare"]
    assert [row["makespan"] for row in compared] == [5, 5, 4.5]
    found = plan.content(capsys, *forwards, "--search", "--peak-activations", 1)["search"]
    assert (found["rows"][0]["schedule"], found["rows"][0]["makespan"], found["over_memory"]) == ("dualpipe", 4, [])
    assert {row["extra_warmup"] for row in found["rows"]} == {None, 0}
    by_sub_ops = plan.content(
        capsys, *forwards, "--layers", 2, "--dispatch", 6, "--schedule", "zb_v", "--compare", "1f1b"
    )
    assert [row["makespan"] for row in by_sub_ops["compare"]] == [
        simulate(
            build_schedule(name, ranks=2, microbatches=4, forward_only=True),
            NodeCosts.uniform(attention=3, experts=4, dispatch=6),
            overlap=3,
            layers=layers,
        ).makespan
        for name, layers in (("zb_v", 1), ("1f1b", 2))
    ]


def test_torch_is_not_loaded() -> None:
    code = (
        "import sys; from overlap1f1b.cli.main import main; status = main(['plan', '--search', '--width', '40']); "
        "print(status, [name for name in ('torch', 'numpy', 'matplotlib') if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr.splitlines()[-1] == "0 []"  # a slow machine says how far it is


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        *((words, "1 or more") for words in ("--ranks 0", "--microbatches -1", "--layers 2 --parts 0")),
        *((f"--forward {value}", "more than 0, at most 1e+100") for value in ("0", "nan", "inf", "-0.5", "1e+308")),
        ("--layers 2 --dispatch -1", "0 or more, at most 1e+100"),
        ("--search --peak-activations 0", "more than 0"),
        ("--width 3", "20 or more"),
    ],
)
def test_numbers_out_of_range(capsys: Capture, words: str, allowed: str) -> None:
    option, _, value = words.rpartition(" ")
    assert plan.refused(capsys, *words.split()) == f"{option.split()[-1]} {value}; allowed: {allowed}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schedule 2f2b", "unknown schedule '2f2b'; allowed: sequential, combined_1f1b, afab, 1f1b"),
        ("--schedule dualpipe --ranks 3", "dualpipe over 3 ranks; allowed: an even number, nearest 2 or 4"),
        ("--schedule 1f1b --chunks 2", "--chunks 2 with 1f1b; allowed: 1"),
        ("--extra-warmup -1", "--extra-warmup -1; allowed: 0 or more"),
        ("--compare dualpipev:chunks=1", "chunks=1 with dualpipev; allowed: 2 (chunks is an option of sequential, "),
        ("--ranks 100000000000000000000", "combined_1f1b with ranks=100000000000000000000, microbatches=8, chunks=1 h"),
        ("--compare afab:chunks=9999999", "afab with ranks=4, microbatches=8, chunks=9999999 has about 639999936"),
        (
            "--search --microbatches 100000000",
            "of 43 schedules none is possible: sequential with ranks=4, microbatches=100000000, chunks=1 has about 8",
        ),
        ("--microbatches 1000000", "combined_1f1b with ranks=4, microbatches=1000000, chunks=1 has about 8000000 act"),
        ("--ranks 1000000", "combined_1f1b with ranks=1000000, microbatches=8, chunks=1 has about 16000000 actions; a"),
        (
            "--layers 4 --microbatches 5000",
            "--ranks 4, --microbatches 5000 and --layers 4 are about 1040000 nodes; allowed: at most 1000000",
        ),
        ("--weight 2", "--weight 2 with --backward 2, which it is a part of; allowed: from 0 to below 2"),
        ("--compare 1f1b:", "--compare 1f1b:: an option is missing; allowed: chunks=NUMBER, "),
        ("--compare 1f1b:overlap=2", "overlap=2 with costs of actions; allowed: with costs of sub-ops"),
        ("--search --compare 1f1b", "--compare 1f1b with --search, which tries all; allowed: one"),
        ("--search --group-size 4", "--group-size 4 with --search"),
        (
            "--search --peak-activations 0.5",
            "--peak-activations 0.5: of 43 schedules none fits; allowed: 1 or more (sequential)",
        ),
        ("--search --chunks 9 --schedule 1f1b", "--chunks 9 with 1f1b; allowed: 1 (chunks is an option of seq"),
        ("--peak-activations 4", "--peak-activations 4 alone; allowed: with --search"),
        ("--layers 4 --forward 1", "--forward 1 with --layers 4; allowed: one of them"),
        ("--layers 3 --chunks 2", "--layers 3 over 2 chunks; allowed: a multiple of 2"),
        ("--layers 2 --overlap most", "--overlap most; allowed: serial, pairs, or a number"),
        ("--from-csv x.csv --ranks 2", "--ranks 2 with --from-csv x.csv, which sets it"),
        ("--from-csv x.csv --search", "--search with --from-csv x.csv, which sets it"),
        ("--forward-only --pair 0.8", "--pair 0.8 with --forward-only, which has no backward"),
        ("--png tests/../new --svg new", "--svg new is the file of --png tests/../new; allowed: another"),
        ("--from-csv new --svg new", "--svg new is the file of new; allowed: another file for"),
        ("--from-csv missing.csv", "--from-csv missing.csv: No such file or directory"),
        ("--top 5", "--top 5 alone; allowed: with --search"),
        ("--json no/where/plan.json", "--json no/where/plan.json: its folder does not exist; allowed: a file in a fol"),
        ("--csv -", "--csv -; allowed: a file (--json alone goes to standard output)"),
        ("--csv /", "--csv /: it is a folder; allowed: a file"),
    ],
)
def test_bad_input(capsys: Capture, words: str, message: str) -> None:
    assert plan.refused(capsys, *shlex.split(words)).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "line 1, column 2: '0X0' is not an action; allowed: stage, F, B, I or W, microbatch"),
        *wide(
            ("0F0,0B0\n1F0,1B0,1B0\n", "rank 1, position 2: 1B0 comes a second time"),
            ("0B0,0F0\n", "rank 0, position 0: 0B0 comes before 0F0, which it needs"),
            ("", "no action; allowed: a row of actions for each rank"),
            ("# microbatches: many\n0F0\n", "line 1, column 1: 'many' as microbatches: allowed: whole numbers"),
            ("\xff\xfe", "is not text; allowed: a file of Program.to_csv"),
        ),
    ],
)
def test_malformed_csv(capsys: Capture, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "plan.csv"
    file.write_bytes(text.encode("latin-1"))
    error = plan.refused(capsys, "--from-csv", file)
    assert error.startswith(f"--from-csv {file}")
    assert message in error


def test_costs_of_what_may_not_be_there_may_be_zero(capsys: Capture) -> None:
    assert plan.content(capsys, "--weight", 0, "--send", 0, "--schedule", "zb_h1", "--ranks", 1)["makespan"] == 8 * 3
    free = [word for name in ("dispatch", "combine", "counts", "send") for word in (f"--{name}", 0)]
    result = plan.content(capsys, "--schedule", "1f1b", "--layers", 2, "--overlap", "serial", *free)
    assert result["makespan"] == (8 + 3) * 2 * 21
    assert result["hidden_fraction"] is None


@pytest.mark.parametrize("option", ["png", "svg", "csv", "trace", "json"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that cannot be written")
def test_a_file_that_cannot_be_written(capsys: Capture, option: str) -> None:
    error = plan.refused(capsys, "--ranks", 1, f"--{option}", "/dev/full")
    assert error.startswith(f"--{option} /dev/full: No space left on device; allowed: a place that can be written")


@pytest.mark.parametrize("option", ["svg", *wide("csv", "trace", "json")])
def test_a_disk_that_is_full_leaves_the_file_that_was_there(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    file = tmp_path / f"plan.{option}"
    file.write_text("before")
    assert plan(capsys, "--ranks", 1, f"--{option}", file)
    written = file.read_bytes()
    assert written != b"before"

    def full(path: Path, *given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left on device" in plan.refused(capsys, "--ranks", 2, f"--{option}", file)
    assert file.read_bytes() == written
    assert list(tmp_path.iterdir()) == [file]


def test_launch_costs_show_the_host(capsys: Capture, tmp_path: Path) -> None:
    given = ("--layers", 2, "--ranks", 1, "--microbatches", 4, "--attention", 1, "--experts", 1.3, "--dispatch", 1.7)
    free, slow = plan.content(capsys, *given), plan.content(capsys, *given, "--launch", 0.5)
    assert "host_late" not in free["per_rank"][0]
    assert slow["per_rank"][0]["host_late"] > 0
    assert slow["makespan"] > free["makespan"]
    assert plan.content(capsys, *given, "--launch", 0) == free
    trace = tmp_path / "trace.json"
    drawn = plan(capsys, *given, "--launch", 0.5, "--width", 120, "--trace", trace).out
    assert "rank 0 host " in drawn
    assert "host late" in drawn
    assert any(event.get("cat") == "host" for event in json.loads(trace.read_text())["traceEvents"])
    assert "--launch 0.1 alone; allowed: with --layers" in plan.refused(capsys, "--launch", 0.1)
    assert "--launch -1; allowed: 0 or more" in plan.refused(capsys, *given, "--launch", -1)


def test_a_link_to_host_memory_is_a_lane(capsys: pytest.CaptureFixture[str]) -> None:
    """A slower link waits, or leaves activations where they are: in one order."""
    without = (*SUB_OPS, "--overlap", "serial")
    link = (*without, "--activations", 12, "--host-link")
    fast, slow, none = (plan(capsys, *words, "--json", "-").out for words in ((*link, 8), (*link, 0.1), without))
    spans = [json.loads(out)["makespan"] for out in (fast, slow, none)]
    assert spans[2] <= spans[0] <= spans[1]
    assert "O offload" in plan(capsys, *link, 8).out
    assert "O offload" not in plan(capsys, *SUB_OPS).out
