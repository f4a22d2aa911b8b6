"""Natural compression: what is exact, what scales, and where the exponents end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxcomm
from jaxcomm import Context
from jaxcomm.compression.quantizers import natural
from jaxcomm.compression.quantizers._natural import NaturalPayload
from tests.workers import aggregator, initial


def rounded(x: np.ndarray) -> np.ndarray:
    codec = natural()

    @jax.jit
    def both_ways(x: jax.Array) -> tuple[NaturalPayload, jax.Array]:
        payload, _ = codec.encode(Context.of(x), x)
        return payload, codec.decode(Context.of(x).received(), payload)

    payload, decoded = both_ways(jnp.asarray(x, jnp.float32))
    assert payload.exponents.dtype == jnp.uint8 and payload.exponents.shape == (x.size,)
    assert payload.signs.dtype == jnp.uint32 and payload.signs.shape == (-(-x.size // 32),)
    return np.asarray(decoded, np.float64)


def test_powers_of_two_and_zeros_are_exact() -> None:
    powers = 2.0 ** np.arange(-126, 128)
    x = np.concatenate([powers, -powers, [0.0, -0.0]]).reshape(2, -1)
    np.testing.assert_array_equal(rounded(x), x)


@pytest.mark.parametrize("shift", [-100, -1, 1, 100])
def test_powers_of_two_may_be_taken_out(shift: int) -> None:
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(rounded(x * 2.0**shift), 2.0**shift * rounded(x))


@pytest.mark.parametrize("x", [1.25, -4 / 3, 1.999, 5.5])
def test_up_with_the_right_probability(x: float) -> None:
    draws = rounded(np.full(40_000, x))
    below = 2.0 ** np.floor(np.log2(abs(x)))
    assert set(np.unique(np.abs(draws))) <= {below, 2 * below} and np.all(draws * x > 0)
    ups = int(np.sum(np.abs(draws) > below))
    assert scipy.stats.binomtest(ups, draws.size, abs(x) / below - 1).pvalue > 1e-6


def test_the_ends_of_the_exponents() -> None:
    largest = float(jnp.finfo(jnp.float32).max)
    np.testing.assert_array_equal(rounded(np.full(50, -largest)), -np.inf)
    assert {*rounded(np.full(200, 1.5 * 2.0**127))} == {2.0**127, np.inf}
    assert np.isinf(rounded(np.array([np.nan, np.inf]))).all()
    np.testing.assert_array_equal(rounded(np.full(50, 1e-40)), 0)
    assert rounded(np.zeros((0, 3))).shape == (0, 3) and rounded(np.array(-2.0)) == -2.0


def test_in_two_stages_bytes_do_not_grow_with_the_workers() -> None:
    tx = jaxcomm.two_stage_mean(natural())
    for workers in (2, 8):
        given = jnp.ones((workers, 4096))
        arguments = given, initial(tx, given, "checked"), jnp.ones(workers)
        sent = jaxcomm.wire.account(aggregator(tx, workers, "checked"), *arguments)
        share = 2 * (workers - 1) / workers
        assert sent.bytes_per_worker == pytest.approx(share * (4096 * 9 / 8 + 4))
