"""The error of an estimate against its formula, and the methods that `all` selects."""

import functools

import numpy as np
import pytest

from experiments.methods import ALL_LABELS, ESTIMATORS, expand
from experiments.studies.digits import Digits
from experiments.training.mean_estimation import make_estimator, measure, predict
from experiments.training.train import make_mesh

WORKERS, SIZE = 8, 2000
X = np.random.default_rng(0).standard_normal((WORKERS, SIZE)).astype(np.float32)


@functools.cache
def measured(method: str) -> dict[str, float]:
    return measure(make_estimator(method, make_mesh(WORKERS)), X, 10, 0)


@pytest.mark.parametrize(("bits", "levels"), [(8, 15), (10, 63)])
def test_the_error_is_the_variance_of_rounding(bits: int, levels: int) -> None:
    x = X.astype(np.float64)
    step = np.abs(x).max() / levels
    above = x / step - np.floor(x / step)
    variance = (above * (1 - above)).sum() * (step / WORKERS) ** 2
    expected = variance / np.square(x.mean(axis=0)).sum()
    assert measured(f"global_qsgd:{bits}")["error"] == pytest.approx(expected, rel=0.05)
    assert predict(f"global_qsgd:{bits}", X) == {"predicted_error": pytest.approx(expected)}
    assert predict("qsgd:8", X) == predict("global_qsgd_exponential", X) == {}


def test_all_selects_every_method_once_and_estimators_have_no_memory_or_vote() -> None:
    assert set(Digits().methods) < set(ALL_LABELS)
    assert expand(["mean", "mean"]) == ("mean",)
    assert expand(["qsgd:16", "all", "mean"]) == ("qsgd:16", *ALL_LABELS)
    assert {"mean", "terngrad", "random_10_percent"} < {*ESTIMATORS} < {*ALL_LABELS}
    assert not {"sign_sgd", "ef_top_1_percent", "diana"} & {*ESTIMATORS}
