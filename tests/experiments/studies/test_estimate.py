"""The error of an estimate against its formula, its table, and the methods that `all` selects."""

import functools

import numpy as np
import pytest

from experiments.methods import ALL_LABELS, ESTIMATORS, expand
from experiments.studies.digits import Digits
from experiments.studies.estimate import ERRORS, EXACT, STUDY, Estimate
from experiments.study.claims import Results
from experiments.training.mean_estimation import bytes_of, make_estimator, measure, predict
from experiments.training.train import make_mesh

WORKERS, SIZE = 8, 2000
X = np.random.default_rng(0).standard_normal((WORKERS, SIZE)).astype(np.float32)


@functools.cache
def measured(method: str) -> dict[str, float]:
    return measure(make_estimator(method, make_mesh(WORKERS)), X, 10, 0)


def test_an_exact_mean_has_no_error() -> None:
    assert measured("mean")["error"] < EXACT and measured("ring_mean")["error"] < EXACT
    assert 0 < measured("global_qsgd:16")["error"] < 1e-3 * measured("global_qsgd:8")["error"]


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


def test_bias_is_separated_from_variance() -> None:
    biased, unbiased = measured("truncating"), measured("global_qsgd:8")
    assert biased["squared_bias"] == pytest.approx(biased["error"])
    assert abs(unbiased["squared_bias"]) < 0.02 * unbiased["error"]


@pytest.mark.slow
def test_the_sparse_form_does_not_overflow_and_sends_few_bytes() -> None:
    assert np.isfinite(measured("sparse_global_qsgd")["error"])
    assert 8 * bytes_of("sparse_global_qsgd", make_mesh(WORKERS), SIZE) / SIZE < 5


def results(*rows: dict[str, object]) -> Results:
    common = {"kind": "run", "squared_bias": 0.01, "bytes_per_worker": 1.0, "bytes_ratio": 1.0}
    return Results(Estimate(), rows, ERRORS.lines([{"schema": 1, **common, **row} for row in rows]))


def test_a_line_is_the_mean_over_steps() -> None:
    (line,) = results(
        *({"method": "qsgd", "seed": step, "error": step / 10, "bits_per_coordinate": 4.0}
          for step in (1, 3))
    ).lines  # fmt: skip
    assert line["error"] == pytest.approx((0.2, 0.1, 0.3))
    assert (line["bias_share"], line["error_times_bits"]) == pytest.approx((0.05, 0.8))


def test_the_readme_names_the_methods_that_no_other_beats() -> None:
    points = {"z": (1, 40.0), "a": (4, 0.5), "b": (8, 0.5), "c": (8, 0.1), "d": (56, 2e-15),
              "e": (57, 1e-15)}  # fmt: skip
    data = results(
        *({"method": method, "seed": 1, "error": error, "bits_per_coordinate": bits}
          for method, (bits, error) in points.items())
    )  # fmt: skip
    assert "from fewest bits to most: `a`, `c`, `d`." in " ".join(STUDY.prose(data))


def test_all_selects_every_method_once_and_estimators_have_no_memory_or_vote() -> None:
    assert set(Digits().methods) < set(ALL_LABELS)
    assert expand(["mean", "mean"]) == ("mean",)
    assert expand(["qsgd:16", "all", "mean"]) == ("qsgd:16", *ALL_LABELS)
    assert {"mean", "terngrad", "random_10_percent"} < {*ESTIMATORS} < {*ALL_LABELS}
    assert not {"sign_sgd", "ef_top_1_percent", "diana"} & {*ESTIMATORS}
