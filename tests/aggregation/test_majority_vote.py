"""The majority of signs: ties, zeros, words that are not full, and what travels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import _units, majority_vote
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, scaled_signs
from tests.aggregation.runs import averaged, over, refuse, sent, steps
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, aggregate, flat

VOTES = majority_vote()


def ballots(workers: int) -> Any:
    """Leaves of all shapes and dtypes, a third of them zeros, which n divides into nothing even."""
    rng = np.random.default_rng(workers)

    def draw(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        drawn = rng.choice([-1.5, -1e-3, -0.0, 0.0, 2.0, 7.0], size=(workers, *shape))
        return jnp.asarray(drawn, dtype)

    return {
        "bfloat16": draw((5, 2), jnp.bfloat16),
        "empty": draw((0, 3)),
        "float16": draw((), jnp.float16),
        "float32": draw((37, 3)),
        "scalar": draw(()),
    }


def elected(given: np.ndarray) -> np.ndarray:
    """By hand: the sign of those who have one, and 0 where random bits decide."""
    balance, zeros = np.sign(given).sum(axis=0), (given == 0).sum(axis=0)
    return np.where(np.abs(balance) > zeros, np.sign(balance), 0.0)


def assert_elected(results: np.ndarray, given: np.ndarray) -> None:
    """All workers have the same +1 or -1, by the majority where there is one."""
    expected = elected(given)
    np.testing.assert_array_equal(results, np.tile(results[:1], (len(results), 1)))
    np.testing.assert_array_equal(np.abs(results), 1)
    np.testing.assert_array_equal(results[0][expected != 0], expected[expected != 0])


@pytest.mark.parametrize(
    ("workers", "mode"),
    [
        (5, "checked"),
        (16, "vmap"),
        *(slow(n, "checked") for n in (1, 2, 3, 8)),
        slow(3, "unchecked"),
    ],
)
def test_against_numpy(workers: int, mode: Mode) -> None:
    given = ballots(workers)
    assert_elected(flat(aggregate(VOTES, given, mode)), flat(given))


@pytest.mark.parametrize("workers", [4, 5])
def test_every_vote_count_of_even_and_odd_numbers_of_workers(workers: int) -> None:
    votes_for = np.arange(workers + 1)  # Of each coordinate.
    given = np.where(votes_for > np.arange(workers)[:, None], 1.0, -1.0)
    result = aggregate(VOTES, jnp.asarray(given, jnp.float32))[0]
    decided = 2 * votes_for != workers  # Two of four are a tie.
    expected = np.where(2 * votes_for > workers, 1.0, -1.0)
    np.testing.assert_array_equal(result[decided], expected[decided])


LIMIT = 4.9  # Standard deviations, of a probability of 1e-6 on both sides together.


@pytest.mark.parametrize("workers", [2, *map(slow, (8, 4, 7))])
def test_noise_of_mean_zero_does_not_drift(workers: int) -> None:
    noise = np.random.default_rng(workers).normal(size=(workers, 20_000)).astype(np.float32)
    assert abs(aggregate(VOTES, jnp.asarray(noise))[0].sum()) < LIMIT * 20_000**0.5
    # So it is where only some of the workers know of a coordinate, as of words they have not met.
    noise[1:, ::2] = 0
    result = aggregate(VOTES, jnp.asarray(noise))[0]
    assert abs(result.sum()) < LIMIT * 20_000**0.5
    # And those that know have their say.
    assert (result * np.sign(noise[0]))[::2].mean() > 0.2


@pytest.mark.parametrize("workers", [4, slow(1), slow(7)])
def test_zero_coordinates_do_not_drift(workers: int) -> None:
    coordinates, number = 500, 64
    given = jnp.zeros((workers, coordinates))
    moved = np.array([np.asarray(x[0]) for x, _ in steps(VOTES, [given] * number)])
    assert set(np.unique(moved)) == {-1.0, 1.0}
    # Of the mean of all moves, and of the squares of how far each coordinate has come.
    assert abs(moved.sum()) < LIMIT * moved.size**0.5
    far = moved.sum(axis=0) ** 2
    assert abs(far.mean() - number) < LIMIT * number * (2 / coordinates) ** 0.5
    other = aggregate(majority_vote(seed=1), given)
    assert (other[0] != moved[0]).any()


def test_magnitudes_of_votes_are_ignored() -> None:
    given = jnp.array([[1e30, 3e38], [-1e-30, -1.0], [-1e-30, -1.0]])
    np.testing.assert_array_equal(aggregate(VOTES, given), np.full((3, 2), -1.0))


def test_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_units, "BUCKET_BYTES", 4 * 40)
    given, tx = ballots(3), majority_vote()
    assert_elected(flat(aggregate(tx, given)), flat(given))
    # 10 + 1 coordinates, 111 of a leaf that stands alone, 1: rows of 1, 2 and 1 words.
    expected = pytest.approx(2 * 2 * (1 + 2 + 1) * 4 + 2 * 2 / 3 * 4)
    assert sent(tx, given).bytes_per_worker == expected


def test_as_a_stage_of_a_hierarchy() -> None:
    axes = ("dcn", "ici")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    given = np.random.default_rng(3).normal(size=(8, 21)).astype(np.float32)
    groups = given.reshape(2, 4, 21)

    tx = jaxcomm.hierarchical(majority_vote("ici"), jaxcomm.ring_mean("dcn"))
    result = np.asarray(over(mesh, axes, averaged(tx))(given))
    first = elected(groups.swapaxes(0, 1))
    decided = (first != 0).all(axis=0)
    np.testing.assert_allclose(result[decided], first.mean(axis=0)[decided], atol=1e-6)
    assert 5 < decided.sum() < 21


STEPS, DECAY = 5, 0.75


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_workers_vote_by_their_momentum(mode: Mode) -> None:
    given = np.random.default_rng(4).normal(size=(STEPS, 3, 70)).astype(np.float32)
    kept = np.zeros((3, 70))
    for number, (results, state) in enumerate(steps(jaxcomm.signum(momentum=DECAY), given, mode)):
        kept = DECAY * kept + (1 - DECAY) * given[number]
        np.testing.assert_array_equal(results, np.tile(elected(kept), (3, 1)))
        (own,) = state.own.per_worker["data"]
        np.testing.assert_allclose(own.kept, kept, atol=1e-6)
    # Votes by the last gradient alone would not be the same.
    assert np.any(elected(given[-1]) != elected(kept))


@pytest.mark.parametrize("codec", [error_feedback(scaled_signs()), dither()])
def test_codecs_with_magnitudes_are_refused(codec: jaxcomm.Codec) -> None:
    refuse("`codec` must send only signs", lambda: majority_vote(codec=codec))
