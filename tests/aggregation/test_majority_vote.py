"""The majority of signs: ties, zeros, words that are not full, and what travels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm import _units
from jaxcomm.compression.feedback import error_feedback, momentum
from jaxcomm.compression.quantizers import dither, scaled_signs, signs
from tests.laws.test_wire import compiled, compiled_collectives
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, aggregate, aggregator, flat, initial

VOTES = jaxcomm.majority_vote()


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
    """By hand: the sign of those who have one, and 0 where coins for zeros and ties decide."""
    balance, zeros = np.sign(given).sum(axis=0), (given == 0).sum(axis=0)
    return np.where(np.abs(balance) > zeros, np.sign(balance), 0.0)


def assert_elected(results: np.ndarray, given: np.ndarray) -> None:
    """All workers have the same +1 or -1, by the majority where there is one."""
    expected = elected(given)
    np.testing.assert_array_equal(results, np.tile(results[:1], (len(results), 1)))
    np.testing.assert_array_equal(np.abs(results), 1)
    np.testing.assert_array_equal(results[0][expected != 0], expected[expected != 0])


def check_election(workers: int, mode: Mode) -> None:
    given = ballots(workers)
    run = aggregator(VOTES, workers, mode)
    results, state = run(given, initial(VOTES, given, mode), jnp.ones(workers))
    assert_elected(flat(results), flat(given))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), results) == jax.tree.map(
        lambda x: (x.shape, x.dtype), given
    )
    assert not jax.tree.leaves((state.own, state.shared, state.diagnostics))


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [1, 5, slow(2), slow(3), slow(8)])
def test_against_numpy_on_a_mesh(workers: int) -> None:
    check_election(workers, "checked")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("workers", "mode"), [(3, "unchecked"), (5, "vmap"), (16, "vmap")])
def test_against_numpy_elsewhere(workers: int, mode: Mode) -> None:
    check_election(workers, mode)


def test_every_count_of_an_even_and_an_odd_electorate() -> None:
    for workers in (4, 5):
        # Coordinate k has k votes for +1.
        given = np.where(np.arange(workers + 1) > np.arange(workers)[:, None], 1.0, -1.0)
        result = aggregate(VOTES, jnp.asarray(given, jnp.float32))[0]
        votes_for = np.arange(workers + 1)
        decided = 2 * votes_for != workers  # Two of four are a tie.
        np.testing.assert_array_equal(
            result[decided], np.where(2 * votes_for > workers, 1.0, -1.0)[decided]
        )


LIMIT = 4.9  # Standard deviations, of a probability of 1e-6 on both sides together.


@pytest.mark.parametrize("workers", [2, 8, slow(4), slow(7)])
def test_noise_of_mean_zero_does_not_drift(workers: int) -> None:
    noise = np.random.default_rng(workers).normal(size=(workers, 20_000))
    result = aggregate(VOTES, jnp.asarray(noise, jnp.float32))[0]
    assert abs(result.sum()) < LIMIT * 20_000**0.5
    # So it is where only some of the workers know of a coordinate, as of words they have not met.
    noise[1:, ::2] = 0
    result = aggregate(VOTES, jnp.asarray(noise, jnp.float32))[0]
    assert abs(result.sum()) < LIMIT * 20_000**0.5
    # And those that know have their say.
    assert (result * np.sign(noise[0]))[::2].mean() > 0.2


@pytest.mark.parametrize("workers", [4, slow(1), slow(7)])
def test_what_is_zero_everywhere_walks_at_random(workers: int) -> None:
    coordinates, steps = 500, 64
    given = jnp.zeros((workers, coordinates))
    run, state = aggregator(VOTES, workers, "vmap"), initial(VOTES, given, "vmap")
    moved = np.zeros((steps, coordinates))
    for step in range(steps):
        results, state = run(given, state, jnp.ones(workers))
        moved[step] = np.asarray(results)[0]
    assert set(np.unique(moved)) == {-1.0, 1.0}
    # Of the mean of all moves, and of the squares of how far each coordinate has come.
    assert abs(moved.sum()) < LIMIT * moved.size**0.5
    far = moved.sum(axis=0) ** 2
    assert abs(far.mean() - steps) < LIMIT * steps * (2 / coordinates) ** 0.5


def test_another_seed_has_other_coins() -> None:
    given = jnp.zeros((2, 64))
    one, other = aggregate(VOTES, given), aggregate(jaxcomm.majority_vote(seed=1), given)
    assert (one != other).any()


def test_the_size_of_a_vote_does_not_count() -> None:
    given = jnp.array([[1e30, 3e38], [-1e-30, -1.0], [-1e-30, -1.0]])
    np.testing.assert_array_equal(aggregate(VOTES, given), np.full((3, 2), -1.0))


@pytest.mark.parametrize("mode", MODE_ROWS)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_seen_everywhere(value: float, mode: Mode) -> None:
    given = ballots(3)
    given["float32"] = given["float32"].at[1, 20, 2].set(value)
    assert np.isnan(flat(aggregate(VOTES, given, mode))).all()


@pytest.mark.parametrize(
    ("workers", "coordinates", "words"),
    # Words in the row of a worker: 100 coordinates of 3 workers fill 96 bits of 192.
    [(1, 100, 4), (2, 64, 1), (2, 65, 2), (3, 100, 2), (8, 1, 1), (8, 4096, 16)],
)
def test_bytes(workers: int, coordinates: int, words: int) -> None:
    given = jnp.ones((workers, coordinates))
    arguments = given, initial(VOTES, given, "checked"), jnp.ones(workers)
    sent = jaxcomm.wire.account(aggregator(VOTES, workers, "checked"), *arguments)
    flag = 2 * (workers - 1) / workers * 4
    assert sent.bytes_per_worker == pytest.approx(2 * (workers - 1) * words * 4 + flag)


def test_only_words_travel_in_the_compiled_program() -> None:
    given = jnp.ones((8, 4096))
    arguments = given, initial(VOTES, given, "checked"), jnp.ones(8)
    elements = compiled_collectives(compiled(aggregator(VOTES, 8, "checked"), arguments))
    assert elements == {"u32": 128 + 128, "f32": 1}


def test_empty_trees_and_empty_leaves() -> None:
    assert aggregate(VOTES, {"a": jnp.zeros((2, 0))}, "checked")["a"].shape == (2, 0)
    nothing = jax.vmap(lambda x: VOTES.update({}, VOTES.init({}))[0], axis_name="data")
    assert nothing(jnp.ones(2)) == {}


def test_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_units, "BUCKET_BYTES", 4 * 40)
    given, tx = ballots(3), jaxcomm.majority_vote()
    assert_elected(flat(aggregate(tx, given)), flat(given))
    arguments = given, initial(tx, given, "checked"), jnp.ones(3)
    sent = jaxcomm.wire.account(aggregator(tx, 3, "checked"), *arguments)
    # 10 + 1 coordinates, 111 of a leaf that stands alone, 1: rows of 1, 2 and 1 words.
    assert sent.bytes_per_worker == pytest.approx(2 * 2 * (1 + 2 + 1) * 4 + 2 * 2 / 3 * 4)


def test_votes_have_no_weights() -> None:
    with pytest.raises(ValueError, match="takes no `weight`"):
        aggregate(VOTES, jnp.ones((2, 3)), weights=[1.0, 2.0])


def test_integers_are_an_error() -> None:
    with pytest.raises(ValueError, match="int32: only floating-point leaves"):
        aggregate(VOTES, jnp.ones((2, 3), jnp.int32))


def test_between_stages_of_a_hierarchy() -> None:
    axes = ("dcn", "ici")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(3)
    given = {"a": jnp.asarray(rng.normal(size=(8, 21)), jnp.float32), "empty": jnp.zeros((8, 0))}
    means = np.asarray(given["a"]).reshape(2, 4, 21).mean(axis=1)
    signs = elected(np.asarray(given["a"]).reshape(2, 4, 21).swapaxes(0, 1))
    expected = {"ring first": elected(means), "votes first": signs.mean(axis=0)}
    for name, stages in {
        "ring first": (jaxcomm.ring_mean("ici"), jaxcomm.majority_vote("dcn")),
        "votes first": (jaxcomm.majority_vote("ici"), jaxcomm.ring_mean("dcn")),
    }.items():
        tx = jaxcomm.hierarchical(*stages)

        def average(updates: Any, tx: Any = tx) -> Any:
            own = jax.tree.map(lambda x: x[0], updates)
            return tx.update(own, tx.init(own))[0]

        run = jax.shard_map(
            average, mesh=mesh, in_specs=PartitionSpec(axes), out_specs=PartitionSpec()
        )
        result, wanted = np.asarray(jax.jit(run)(given)["a"]), expected[name]
        decided = wanted != 0 if name == "ring first" else (signs != 0).all(axis=0)
        assert 5 < decided.sum() < 21
        np.testing.assert_allclose(result[decided], wanted[decided], atol=1e-6)
        alone = {"empty": given["empty"]}
        assert jax.jit(run)(alone)["empty"].shape == (0,)


STEPS, DECAY = 5, 0.75


def momenta(given: np.ndarray) -> np.ndarray:
    """By hand, as a sum over steps: [steps, workers, coordinates]."""
    past = np.arange(STEPS)[:, None] - np.arange(STEPS)
    shares = np.where(past >= 0, (1 - DECAY) * DECAY ** np.maximum(past, 0), 0)
    return np.einsum("ts,s...->t...", shares, given)


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_workers_vote_by_their_momentum(mode: Mode) -> None:
    tx = jaxcomm.signum(momentum=DECAY)
    given = np.random.default_rng(4).normal(size=(STEPS, 3, 70)).astype(np.float32)
    run, state = aggregator(tx, 3, mode), initial(tx, jnp.asarray(given[0]), mode)
    kept = momenta(given.astype(np.float64))
    for updates, expected in zip(given, kept, strict=True):
        results, state = run(jnp.asarray(updates), state, jnp.ones(3))
        np.testing.assert_array_equal(results, np.tile(elected(expected), (3, 1)))
        (own,) = state.own.per_worker["data"]
        np.testing.assert_allclose(own.kept, expected, atol=1e-6)
    # Votes by the last gradient alone would not be the same.
    assert np.any(elected(given[-1]) != elected(kept[-1]))


def test_a_nan_enters_no_momentum() -> None:
    tx, given = jaxcomm.signum(), jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 1.0]])
    run = aggregator(tx, 3, "vmap")
    _, before = run(given, initial(tx, given, "vmap"), jnp.ones(3))
    results, after = run(given.at[1, 0].set(jnp.nan), before, jnp.ones(3))
    assert np.isnan(results).all()
    np.testing.assert_array_equal(
        after.own.per_worker["data"][0].kept, before.own.per_worker["data"][0].kept
    )
    results, _ = run(given, after, jnp.ones(3))
    np.testing.assert_array_equal(results, np.tile(elected(np.asarray(given)), (3, 1)))


def test_no_decay_is_a_plain_vote() -> None:
    given = ballots(5)
    tx = jaxcomm.majority_vote(codec=momentum(signs(), momentum=0.0))
    run, state = aggregator(tx, 5, "vmap"), initial(tx, given, "vmap")
    for shift in range(2):
        updates = jax.tree.map(lambda x, shift=shift: jnp.roll(x, shift, axis=0), given)
        results, state = run(updates, state, jnp.ones(5))
        assert_elected(flat(results), flat(updates))


@pytest.mark.parametrize("codec", [scaled_signs(), error_feedback(scaled_signs()), dither()])
def test_magnitudes_are_not_voted_on(codec: jaxcomm.Codec) -> None:
    with pytest.raises(ValueError, match="`codec` must send only signs"):
        jaxcomm.majority_vote(codec=codec)
