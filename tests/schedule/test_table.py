"""Programs written to CSV and read again, and every way in which a file can be wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from overlap1f1b.schedule import SCHEDULES, Program, build_schedule
from tests.tiers import first, wide


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.csv"


@pytest.mark.parametrize("forward_only", [False, *wide(True)])
@pytest.mark.parametrize("name", first(SCHEDULES, "sequential"))
def test_round_trip(name: str, forward_only: bool, path: Path) -> None:
    program = build_schedule(name, ranks=4, microbatches=8, forward_only=forward_only)
    program.to_csv(path)
    assert Program.from_csv(path) == program
    program.to_csv(path, header=False)
    assert Program.from_csv(str(path)) == replace(program, name="mine")


def test_header_keeps_what_is_declared(path: Path) -> None:
    program = replace(build_schedule("zb_h1", ranks=2, microbatches=3), peak_activations=(7, 8), peak_weights=())
    program.to_csv(path)
    assert path.read_text(encoding="utf-8").splitlines()[:5] == [
        "# name: zb_h1",
        "# pipes: 0 1",
        "# microbatches: 3",
        "# peak_activations: 7 8",
        "# peak_weights:",
    ]
    assert Program.from_csv(path) == program


def test_blanks_and_communication_of_torchs_tables_are_passed_over(path: Path) -> None:
    path.write_text("0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n,1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n")
    program = Program.from_csv(path)
    assert program.draw() == "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"
    assert (program.name, program.microbatches, program.peak_activations) == ("mine", 1, (1, 1))
    program.check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "line 2, column 2: '1X0' is not an action; allowed: stage, F, B, I or W, microbatch"),
        *wide(
            ("0F0,,(0F1;0B0)OVERLAP\n", r"line 1, column 3: '\(0F1;0B0\)OVERLAP' is not a pair; allowed: two actions"),
            (
                "0F0\n# ranks: 2\n",
                "line 2, column 1: '# ranks: 2' is not a header line; allowed before the first rank: # with",
            ),
            ("# microbatches: two\n0F0\n", "line 1, column 1: 'two' as microbatches: allowed: whole numbers"),
            (
                "# peak_weights: -1\n0F0\n",
                "line 1, column 1: '-1' as peak_weights: peak_weights=-1; allowed: 0 or more",
            ),
            ("# name: mine\n# peak_weights: 1 a\n0F0\n", "line 2, column 1: '1 a' as peak_weights: allowed: whole"),
            ("# pipes: 0 2\n0F0\n", r"line 1, column 1: '0 2' as pipes: stages on ranks \[0, 2\]; allowed: every rank"),
            ("", "line 1, column 1: no action; allowed: a row of actions for each rank"),
            ("0F0,0B0\n0F1,0B1\n", "0F1 is on rank 1, others of stage 0 on rank 0; allowed: one rank a stage"),
            ("0F0\n2F0\n", "pipe 0 has no action of stage 1; allowed: stages 0 to 2"),
            ("0'F0\n", "pipe 0 has no action of stage 0; allowed: stages 0 to 0"),
            ("0F0,999999999F0\n", "pipe 0 has no action of stage 1; allowed: stages 0 to 999999999"),
            ('0F0,"0B0\n', "unexpected end of data in '0F0,\"0B0'; allowed: actions between commas"),
            ("0F0\n\n1F0\n", r"stages on ranks \[0, 2\]; allowed: every rank from 0 to the last holds a stage"),
        ),
    ],
)
def test_malformed_files(text: str, message: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        Program.from_csv(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_what_is_read_and_refused_by_its_check(path: Path) -> None:
    for text, message in (
        ("# pipes: 0 1 2\n# peak_activations: 1 1\n0F0,0B0\n1F0,1B0\n", "has 2 ranks and a placement over 3; allowed"),
        (f"0F0,0B0,0F{10**30}\n", f"rank 0 has 3 actions for {10**30 + 1} microbatches; allowed: at least"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            Program.from_csv(path).check()


def test_a_spreadsheets_mark_is_passed_over(path: Path) -> None:
    for header in (True, False):
        build_schedule("zb_v", ranks=2, microbatches=4).to_csv(path, header=header)
        plain = Program.from_csv(path)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert Program.from_csv(path) == plain


@pytest.mark.parametrize(
    "text",
    [
        "0F0," + "x" * 10**6,
        *wide(
            "0F0,(" + "x" * 1000 + ";0B0)OVERLAP_F_B",
            *(("0F0," + "9" * n + "F0\n0F" + "9" * n) for n in (41, 10**6)),
            "0" + "'" * 10**5 + "F0",
            "# name: " + "x" * 10**6 + "\n0F0",
            "# microbatches: -" + "9" * 4000 + "\n0F0",
            "# peak_activations: " + "1 " * 10**6 + "a\n0F0",
            "# pipes: " + " ".join(map(str, range(1, 10**5))) + "\n0F0",
            "0F0\n" + "," * 10**5 + '"0B0',
        ),
    ],
)
def test_long_values_are_cut(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^[^\n]*allowed[^\n]*$") as error:
        Program.from_csv(path).check()
    assert len(str(error.value)) < 1000 + len(str(path))


def test_a_name_of_one_long_word(path: Path) -> None:
    path.write_text(f"# name: {'x' * 190}\n0F0,0B0\n")
    assert Program.from_csv(path).name == "x" * 190


def test_files_that_cannot_be_read(path: Path) -> None:
    program = build_schedule("1f1b", ranks=2, microbatches=4)
    program.to_csv(path)
    whole = path.read_bytes()
    allowed = "allowed: a file of Program.to_csv, or of torch's schedules$"
    for content, message in (
        (None, f"No such file or directory; {allowed}"),
        (bytes(range(256)), f" is not text; {allowed}"),
        (whole[:-5], "program '1f1b', rank 1: 1F3 lacks a backward; allowed: a whole file of to_csv, or of"),
        (whole[: len(whole) // 2], "line 5, column 1: '# peak_w' is not a header line; allowed before the first rank"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            Program.from_csv(path)
        path.touch()
    with pytest.raises(ValueError, match=rf"^{path.parent}: Is a directory; {allowed}"):
        Program.from_csv(path.parent)
    for call in (program.to_csv, Program.from_csv):
        with pytest.raises(ValueError, match=r"^path=5; allowed: str or PathLike$"):
            call(5)  # type: ignore[operator]
