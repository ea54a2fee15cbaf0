"""DualPipe's eight steps, spelled out for every rank as text, against the generated rows."""

from collections import Counter, deque

import pytest

from overlap1f1b.schedule import build_schedule


def spelled_out(H: int, h: int, main: int) -> str:
    """The steps in the words of their description; 0 and 1 are the two directions, & joins a pair."""
    words = ["F0"] * 2 * (H - h - 1)
    words += ["F0", "F1"] * (h + 1)
    words += ["I1", "W", "F1"] * (H - h - 1)
    words += ["F0&B1", "F1&B0"] * main
    if h == H - 1 and main:
        words[-2 * main : -2 * main + 1] = ["F0", "B1"]
    words += ["B1", "F1&B0"] * (H - h - 1)
    split = False
    for i in range(h + 1):
        split |= i == (h + 1) // 2 and h % 2 == 1
        words.append("I1" if split else "B1")
        split |= i == (h + 1) // 2 and h % 2 == 0
        words.append("I0" if split else "B0")
    words += ["W", "I0"] * (H - h - 1)
    words += ["W"] * (h + 1)
    return " ".join(words)


def numbered(text: str, stages: tuple[str, str], first: tuple[int, int]) -> list[str]:
    """The words with stages and microbatches; every W is of the oldest I that waits."""
    count: Counter[str] = Counter()
    waiting: deque[str] = deque()

    def action(word: str) -> str:
        if word == "W":
            return waiting.popleft()
        kind, way = word[0], int(word[1])
        key = ("F" if kind == "F" else "B") + word[1]
        microbatch = first[way] + count[key]
        count[key] += 1
        if kind == "I":
            waiting.append(f"{stages[way]}W{microbatch}")
        return f"{stages[way]}{kind}{microbatch}"

    return [
        f"({';'.join(map(action, word.split('&')))})OVERLAP_F_B" if "&" in word else action(word)
        for word in text.split()
    ]


@pytest.mark.parametrize("P", [2, 4, 6, 8])
def test_dualpipe(P: int) -> None:
    for M in (2 * P, 2 * P + 2, 4 * P):
        program = build_schedule("dualpipe", ranks=P, microbatches=M)
        for rank in range(P):
            h = min(rank, P - 1 - rank)
            places = [(str(rank), 0), (f"{P - 1 - rank}'", M // 2)]
            (zero, first), (one, second) = places if rank < P // 2 else places[::-1]
            want = numbered(spelled_out(P // 2, h, M // 2 - P + h + 1), (zero, one), (first, second))
            assert list(map(str, program.ranks[rank])) == want
