"""The labels of methods, and the controls against NumPy."""

import jax
import numpy as np
import pytest

from experiments.errors import ExperimentError
from experiments.methods import ALL_LABELS, KINDS, METHODS, SELECTED, expand, parse_method

X = np.random.default_rng(0).standard_normal((8, 1000)).astype(np.float32)


def test_every_label_is_a_method() -> None:
    parsed = [parse_method(label) for label in ALL_LABELS]
    assert [method.label for method in parsed] == [*ALL_LABELS] == [*dict.fromkeys(ALL_LABELS)]
    assert {label.partition(":")[0] for label in ALL_LABELS} <= {*METHODS}
    controls = {method.label for method in parsed if method.is_control}
    assert controls == {"truncating", "top_1_percent"}
    assert len(SELECTED) <= 16 and {parse_method(label).kind for label in SELECTED} == {*KINDS}
    assert expand(["qsgd:16", "all", "mean"]) == ("qsgd:16", *ALL_LABELS)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("mean:8", "the method 'mean' takes no bits"),
        ("qsgd:many", "'qsgd:many' is not METHOD or METHOD:BITS"),
        ("qsgd:1", "'qsgd:1' is not METHOD or METHOD:BITS: "),
        ("globel_qsgd", "no method 'globel_qsgd'; did you mean 'global_qsgd'[?]"),
        ("zzzz", "no method 'zzzz'; there are "),
    ],
)
def test_wrong_labels_are_errors(label: str, message: str) -> None:
    with pytest.raises(ExperimentError, match=message):
        parse_method(label)


def test_controls_are_biased_and_deterministic() -> None:
    """Truncated codes, and the largest 1 % of each worker."""
    norm, kept = np.abs(X).max(), np.argsort(-np.abs(X), axis=1)[:, :10]
    largest = np.zeros_like(X)
    np.put_along_axis(largest, kept, np.take_along_axis(X, kept, axis=1), axis=1)
    truncated = np.trunc(X * (np.float32(15) / norm)) * norm / 15
    for label, sent in (("truncating", truncated), ("top_1_percent", largest)):
        for seed in (0, 1):
            tx = parse_method(label).build(seed=seed)
            update = jax.vmap(lambda x, tx=tx: tx.update(x, tx.init(x))[0], axis_name="data")
            for found in np.asarray(jax.jit(update)(X)):
                np.testing.assert_allclose(found, sent.mean(axis=0), rtol=1e-5, atol=1e-7)
    assert np.vdot(truncated.mean(axis=0), X.mean(axis=0)) < 0.9 * np.square(X.mean(axis=0)).sum()
