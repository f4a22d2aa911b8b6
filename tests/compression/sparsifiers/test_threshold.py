"""A fixed threshold: what passes, what exceeds the capacity, and what feedback keeps."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Claims
from jaxcomm.compression import scaled
from jaxcomm.compression._scaled import require_contraction
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import random_k, threshold, top_k
from tests.codecs import payload_of, run, send
from tests.slow import slow


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("level", "k"), [(0.5, 40), slow(2.5, 8), slow(9.0, 3)])
def test_what_passes_is_sent(level: float, k: int) -> None:
    x, codec = normal(5, 8), threshold(level, k=k)
    found, memory = send(codec, codec.init(x), x)
    np.testing.assert_array_equal(found, np.where(np.abs(x) > level, x, 0))
    assert memory.report.overflow == 0 and memory.report.overflow.dtype == jnp.int32


def test_unused_entries_have_one_more_index_than_there_are_coordinates() -> None:
    # Of 128 indices, five take a word; of 129, two.
    assert payload_of(threshold(1.0, k=5), (127,)).indices.size == 1


def test_above_the_capacity_the_largest_are_sent() -> None:
    x, codec = normal(40), threshold(0.5, k=5, overflow="drop")
    found, memory = send(codec, codec.init(x), x)
    fifth = np.sort(np.abs(x))[-5]
    np.testing.assert_array_equal(found, np.where(np.abs(x) >= fifth, x, 0))
    assert memory.report.overflow == np.sum(np.abs(x) > 0.5) - 5 > 0


def test_the_residual_stays_below_the_threshold() -> None:
    level, given = 0.7, normal(200, 30) * 0.2
    found, kept, _ = run(error_feedback(threshold(level, k=30)), given)
    assert np.abs(kept).max() <= level + 1e-6
    # It would not if nothing were sent: what accumulates passes the threshold in the end.
    assert np.abs(np.cumsum(given, axis=0)).max() > 3 * level
    assert np.all(np.abs(found[found != 0]) > level)


def test_only_feedback_with_bounded_residuals_accepts_thresholds() -> None:
    codec = threshold(0.5, k=2)
    assert codec.claims == Claims(bounded=True)
    for accepted in (codec, top_k(k=1)):
        require_contraction(accepted, 10, 1, "error_feedback")
    # What feedback makes of it is no contraction of the update, nor is a scaled one `bounded`.
    assert not scaled(random_k(k=1)).claims.bounded
    with pytest.raises(ValueError, match="no bound is known"):
        require_contraction(error_feedback(codec), 10, 1, "error_feedback")
    with pytest.raises(ValueError, match="`variance`"):
        scaled(codec)
    for level in (0, float("nan")):
        with pytest.raises(ValueError, match="`threshold`"):
            threshold(level, k=1)
