"""The claims of the study of digits fail if the method fails or a control passes."""

from typing import Any

import pytest

from experiments.methods import ALL_LABELS, ESTIMATORS, METHODS, expand
from experiments.studies.digits import CONTROLS, STUDY, Digits
from experiments.study import command
from experiments.study.claims import Results
from tests.records import committed

RECORD = committed("*_digits")[-1]
ENVIRONMENT = "command: python -m experiments digits\ndevices: 8 x cpu\n"


def run(method: str, loss: float, sent: float, optimizer: str = "sgd") -> dict[str, Any]:
    """A run; those of mean have the loss 1 and send 1 byte."""
    others = dict.fromkeys(("test_accuracy", "compression_error", "step_milliseconds"), 0.0)
    names = {"kind": "run", "optimizer": optimizer, "method": method, "seed": 0}
    return {**names, **others, "train_loss": loss, "bytes_per_step": sent}


def analyzed(config: Digits, **ratios: tuple[float, float]) -> Results:
    """Methods with the ratios of loss and bytes."""
    names = {"passing": "global_qsgd:8", "first": CONTROLS[0], "second": CONTROLS[1]}
    rows = [run("mean", 1, 1)] + [run(names[name], *each) for name, each in ratios.items()]
    return command.analyze(STUDY, config, rows, ENVIRONMENT)


NOT_A_NUMBER = float("nan")


@pytest.mark.parametrize(
    ("passing", "control", "is_met"),
    [
        ((1.2, 0.25), (2.0, 0.25), True),
        ((1.2, 0.25), (1.2, 0.27), True),
        ((1.6, 0.25), (2.0, 0.25), False),
        ((1.2, 0.27), (2.0, 0.25), False),
        ((1.2, 0.25), (1.4, 0.25), False),
        ((NOT_A_NUMBER, 0.25), (2.0, 0.25), False),
        ((1.2, 0.25), (NOT_A_NUMBER, 0.25), False),
    ],
)
def test_both_limits_apply_to_the_method_and_to_controls(
    passing: tuple[float, float], control: tuple[float, float], is_met: bool
) -> None:
    results = analyzed(Digits(), passing=passing, first=control, second=(9.0, 0.1))
    assert results.all_hold == is_met and STUDY.exit_code(results) == int(not is_met)


def test_without_a_control_or_the_method_the_claims_do_not_hold() -> None:
    for ratios in ({"passing": (1.0, 0.25)}, {"first": (2.0, 0.25), "second": (2.0, 0.25)}):
        results = analyzed(Digits(), **ratios)
        assert STUDY.exit_code(results) == 1
        assert any("not tested" in judgement.markdown for judgement in results.judgements)


def test_all_selects_every_method_once_and_estimators_have_no_memory_or_vote() -> None:
    assert set(Digits().methods) < set(ALL_LABELS)
    assert expand(["mean", "mean"]) == ("mean",)
    assert expand(["qsgd:16", "all", "mean"]) == ("qsgd:16", *ALL_LABELS)
    assert {"mean", "terngrad", "random_10_percent"} < {*ESTIMATORS} < {*ALL_LABELS}
    assert not {"sign_sgd", "ef_top_1_percent", "diana"} & {*ESTIMATORS}


def test_the_claims_hold_in_the_committed_record() -> None:
    assert set(CONTROLS) == {name for name, method in METHODS.items() if method.is_control}
    results = command.read_results(STUDY, RECORD)
    assert results.workers == 8 and len(results.lines) >= 12
    assert [len(each.findings) for each in results.judgements] == [2, 2, 4]
    assert results.all_hold and STUDY.exit_code(results) == 0
