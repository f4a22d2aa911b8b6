"""The settings in which a method is above or below its reference."""

import math

import pytest

from experiments.study.columns import Line
from experiments.study.groups import Estimate, Group
from experiments.study.signs import describe_signs

CASES = {
    "ring": Estimate(1.2, 1.1, 1.3),
    "torus": Estimate(1.1, 0.9, 1.3),
    "path": Estimate(0.8, 0.7, 0.9),
    "star": Estimate(math.inf, math.inf, math.inf),
    "one_seed": Estimate(1.5, math.nan, math.nan),
    "reference": None,
}


def described(*names: str, equal: float = 1.0) -> str:
    lines = [Line(Group({"graph": name}, [], {}, {}), {"ratio": CASES[name]}) for name in names]
    return describe_signs(lines, "ratio", ["graph"], equal=equal)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([*CASES], "higher in 2 of 5 settings: ring (1.20), star (diverged); lower in 1: path "
                   "(0.80); not told apart in 2: torus (1.10), one_seed (1.50)"),
        (["path", "reference"], "lower in 1 of 1 setting: path (0.80)"),
        (["reference"], "not compared"),
        ([], "not compared"),
    ],
)  # fmt: skip
def test_settings_are_listed_by_their_sign(names: list[str], text: str) -> None:
    assert described(*names) == text


def test_differences_are_compared_with_zero() -> None:
    assert described("path", equal=0.0) == "higher in 1 of 1 setting: path (0.80)"
