"""What --wire takes."""

from __future__ import annotations

import pytest

from overlap1f1b.cli.wire import Balanced, parse_rate, parse_wire

RATES = {"500mbit": 500e6, "1gbit": 1e9, "2.5gbit": 2.5e9, "100kbit": 1e5, "0.5Mbit": 5e5, "10kbit": 1e4}
NOT_RATES = ["", "fast", "500", "mbit", "500 mbit", "500mbit\n", "500mbps", "500mb", "٥mbit", "1.gbit"]
NOT_RATES += ["1e3mbit", "nanmbit", "-1gbit", "0gbit", "9kbit", "500mbit*2"]
NOT_BALANCED = ["balancedfoo", "balanced2", "balanced*", "balanced*x", "balanced*0", "balanced*-1", "balanced*nan"]
NOT_BALANCED += ["balanced*inf", "balanced*2*2", "Balanced", " balanced"]


@pytest.mark.parametrize(("text", "rate"), RATES.items())
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == parse_wire(text) == rate


@pytest.mark.parametrize(
    ("text", "factor"), [("balanced", 1.0), ("balanced*2", 2.0), ("balanced*0.5", 0.5), ("balanced*1", 1.0)]
)
def test_balanced(text: str, factor: float) -> None:
    assert parse_wire(text) == Balanced(factor)


@pytest.mark.parametrize("text", [*NOT_RATES, "balanced"])
def test_parse_rate_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"100kbit, 500mbit or 2\.5gbit") as error:
        parse_rate(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", NOT_RATES + NOT_BALANCED)
def test_parse_wire_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--wire '.*'; allowed: a rate such as 100kbit, .*balanced\*FACTOR") as error:
        parse_wire(text)
    assert repr(text) in str(error.value)
    assert "\n" not in str(error.value)
