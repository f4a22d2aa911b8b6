"""The sentences on methods that lose to the mean, from made-up runs."""

import math

from experiments.study import losers
from experiments.study.columns import Column, Line, Table, key, only_in_csv
from experiments.study.groups import p_value, relative, spread
from experiments.study.tidy import Row

KINDS = {"mean": "exact", "qsgd": "unbiased", "sign_sgd": "signs only", "top_1_percent": "biased"}
REASONS = {"signs only": "they send only signs", "biased": "they have no memory"}
P_VALUE = p_value("test_loss", log=True, is_worse=True)
TABLE = Table(
    ("optimizer", "method"),
    (
        key("method"),
        Column("kind", lambda group: KINDS.get(group.keys["method"], "unbiased")),
        Column("test loss", spread("test_loss")),
        Column("loss_ratio", relative("test_loss")),
        Column("p", P_VALUE),
        Column("bytes_ratio", relative("bytes")),
        Column("steps_to_target", lambda group: 30.0),
        Column("target_bytes_ratio", relative("bytes_to_target")),
        only_in_csv("loses", losers.loses(P_VALUE, 0.01)),
        only_in_csv("saves", lambda group: relative("bytes")(group) < 0.99),
    ),
    {"method": "mean"},
)


def runs_of(method: str, factor: float, sent: float, optimizer: str = "sgd") -> list[Row]:
    """Five seeds whose losses are `factor` times those of the mean, with a small spread."""
    return [
        {
            "kind": "run",
            "optimizer": optimizer,
            "method": method,
            "seed": seed,
            "test_loss": (0.2 + 0.03 * seed) * factor * (1 + 0.01 * (-1) ** seed * (factor != 1)),
            "bytes": sent,
            "bytes_to_target": sent if factor < 2 else math.nan,
        }
        for seed in range(5)
    ]


def lines(*runs: list[Row]) -> list[Line]:
    return TABLE.lines([row for each in runs for row in each])


FIVE = (
    runs_of("mean", 1, 100), runs_of("global_qsgd:8", 1.001, 25), runs_of("qsgd", 1.001, 100),
    runs_of("sign_sgd", 2, 3), runs_of("top_1_percent", 4, 8),
)  # fmt: skip


def test_the_sentences_name_losers_their_reasons_and_what_saves_nothing() -> None:
    found = lines(*FIVE)
    assert [line["method"] for line in found if line["loses"]] == ["sign_sgd", "top_1_percent"]
    assert [line["method"] for line in found if not line["saves"]] == ["mean", "qsgd"]
    (described,) = losers.describe_settings(found, REASONS)
    first, rest = described.split(" save nothing")
    assert first.startswith("sgd: 2 of 4 methods lose to `mean` in loss.")
    assert "`sign_sgd` (2.00 times): they send only signs." in first
    assert "`top_1_percent` (4.01 times): they have no memory." in first
    assert "for these parts of its bytes: `global_qsgd:8` (0.250; 1.00 times)." in rest
    assert "2 of 4 methods reach the loss that `mean` has after half its steps" in rest


def test_no_method_is_judged_without_the_mean_and_a_diverged_one_loses() -> None:
    (line,) = lines(runs_of("sign_sgd", 2, 3))
    assert not line["loses"] and "None is judged" in losers.describe([line], REASONS)
    diverged = [row | {"test_loss": math.nan} for row in runs_of("sign_sgd", 1, 1)]
    found = lines(runs_of("mean", 1, 1), diverged)
    assert found[1]["loses"] and math.isnan(found[1]["test loss"].sd)
    assert "`sign_sgd` (diverged): they send only signs." in losers.describe(found, REASONS)


def test_settings_are_judged_separately() -> None:
    found = lines(
        runs_of("mean", 1, 1), runs_of("sign_sgd", 2, 1),
        runs_of("mean", 1, 1, "adam"), runs_of("sign_sgd", 0.5, 1, "adam"),
    )  # fmt: skip
    assert [line["loses"] for line in found] == [False, True, False, False]
    sgd, adam = losers.describe_settings(found, REASONS)
    assert sgd.startswith("sgd: 1 of 1 methods") and "adam: None of 1 methods loses" in adam
