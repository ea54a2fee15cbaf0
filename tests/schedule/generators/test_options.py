"""Options of schedules: their names, and what is refused."""

import re

import pytest

from overlap1f1b.schedule import OPTIONS, schedule_of


def test_options_are_the_fields_of_a_class() -> None:
    taken = {name: [option for option in OPTIONS if schedule_of(name).takes(option)] for name in ("zb_v", "1f1b")}
    assert taken == {"zb_v": [], "1f1b": ["extra_warmup"]}
    assert [option for option in OPTIONS if schedule_of("Combined_1F1B").takes(option)] == [*OPTIONS]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("chunks", 0, "chunks=0; allowed: 1 or more"),
        ("group_size", 1.5, "group_size=1.5; allowed: a whole number, 1 or more"),
        ("extra_warmup", -1, "extra_warmup=-1; allowed: 0 or more"),
    ],
)
def test_numbers_out_of_range(option: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        schedule_of("combined_1f1b")(**{option: value})
