"""Powers of two against exact probabilities, and the growth of their second moment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxcomm
from pallas_kernels import exponential
from tests.slow import slow
from tests.workers import draws

DRAWS = 40_000


def round_to_powers(y: jax.Array, key: jax.Array) -> np.ndarray:
    """`y` of at most 1/2, the largest that has a code."""
    codes = exponential.encode(2 * y, jnp.float32(1), jax.random.key_data(key), headroom=1)
    return np.asarray(codes)


def test_the_papers_example() -> None:
    # 0.3 lies between 0.25 and 0.5 and goes up with probability 20 %.
    codes = round_to_powers(jnp.full(DRAWS, 0.3), jax.random.key(0))
    assert set(np.unique(codes)) == {1, 2}
    assert scipy.stats.binomtest(int(np.sum(codes == 1)), DRAWS, 0.2).pvalue > 1e-6


@pytest.mark.parametrize("workers", [5, slow(1), slow(3), slow(64)])
def test_exponents_never_leave_their_field(workers: int) -> None:
    # All workers at the extreme: the sum must not carry out of the exponents, which would read 0.
    tx = jaxcomm.global_qsgd(dithering="exponential")
    given = jnp.asarray(np.tile([1.0, -1.0, 0.9, 0.6], (workers, 1)), jnp.float32)
    result = draws(tx, given, 50)
    assert np.all(np.abs(result) >= 0.25) and np.all(np.sign(result) == [1, -1, 1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 16])
def test_the_second_moment_grows_by_nine_eighths_a_hop(workers: int) -> None:
    # Workers hold one vector of magnitude 4/3 of a power of two, where one rounding is worst.
    given = jnp.full((workers, 2000), 4 / 3).at[:, 0].set(2.0)
    growth = {}
    for reduce in ("tree", "two_stage"):
        tx = jaxcomm.global_qsgd(dithering="exponential", reduce=reduce)
        sample = draws(tx, given, 10)[:, 1:]
        growth[reduce] = np.mean(sample**2) / (4 / 3) ** 2
        np.testing.assert_allclose(sample.mean(), 4 / 3, rtol=0.02)
    bound = (9 / 8) ** (1 + np.log2(workers))
    assert 1.05 < growth["tree"] <= bound * 1.01
    assert growth["two_stage"] <= (1 + 1 / (8 * workers)) * 9 / 8 * 1.01
    # One rounding after the sum, where the tree has log2(n).
    assert growth["two_stage"] <= growth["tree"] * 1.02
