"""Aggregators of one program draw independently without seeds, and the same after a rebuild."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import jaxcomm
from jaxcomm import _noise
from tests.cases import CASES, Case
from tests.laws.test_draws import RANDOM, halfway
from tests.workers import aggregate

ALPHA = 1e-6
DRAWS = 4000
GROUPS = (2, 3)
STAGED = [c for c in CASES if c.unbiased and c.staged and c.random]


def check_stages(inner: Case, outer: Case, seed: int = 0) -> None:
    """The mean of the method applied to its results, over two axes and with no seed set."""
    given = np.random.default_rng(5).normal(size=(*GROUPS, 7)).astype(np.float32)
    tx = jaxcomm.hierarchical(inner.make("ici"), outer.make("dcn", seed))

    def steps(x: jax.Array) -> jax.Array:
        def body(state: optax.OptState, _: None) -> tuple[optax.OptState, jax.Array]:
            update, state = tx.update(x, state)
            return state, update

        return jax.lax.scan(body, tx.init(x), None, length=DRAWS)[1]

    over_ici = jax.vmap(steps, axis_name="ici")
    sample = np.asarray(jax.jit(jax.vmap(over_ici, axis_name="dcn"))(given), np.float64)[0, 0]
    truth = given.astype(np.float64).mean(axis=(0, 1))
    # Along the mean itself too: a bias that is small in a coordinate is large in the sum.
    sample = np.concatenate([sample, (sample @ truth)[:, None]], axis=1)
    truth = np.append(truth, truth @ truth)
    deviation = sample.std(axis=0, ddof=1) / DRAWS**0.5
    threshold = scipy.stats.norm.isf(ALPHA / 2 / len(truth))
    # Bernstein's second term: values too rare to be seen in so many draws have no deviation yet.
    far = (1 + inner.resolution(GROUPS[1], 7)) * (1 + outer.resolution(GROUPS[0], 7))
    unseen = 2 * far * np.abs(given).max() * np.log(2 * len(truth) / ALPHA) / (3 * DRAWS)
    unseen = unseen * np.append(np.ones(len(truth) - 1), np.abs(truth[:-1]).sum())
    assert np.all(np.abs(sample.mean(axis=0) - truth) <= threshold * deviation + unseen + 1e-5)


@pytest.mark.parametrize("case", STAGED, ids=repr)
def test_the_same_method_at_both_stages_is_unbiased(case: Case) -> None:
    check_stages(case, case)


def check_branches(case: Case, seed: int = 0) -> None:
    equal = {"a": halfway(case), "b": halfway(case)}
    labels = {"a": "first", "b": "second"}
    tx = optax.partition({"first": case.make(), "second": case.make(seed=seed)}, labels)
    result = aggregate(tx, equal)
    assert np.any(result["a"] != result["b"])


@pytest.mark.parametrize("case", RANDOM, ids=repr)
def test_branches_draw_independently(case: Case) -> None:
    check_branches(case)


@pytest.mark.parametrize("case", RANDOM, ids=repr)
def test_a_rebuilt_optimizer_draws_the_same(case: Case) -> None:
    given = halfway(case)
    case.make.__wrapped__(seed=3)  # Another one made in between changes nothing.
    again = aggregate(case.make.__wrapped__(), given)
    np.testing.assert_array_equal(aggregate(case.make(), given), again)


class _Leaves(NamedTuple):
    a: jax.Array
    b: jax.Array


@pytest.mark.slow
def test_draws_depend_on_paths_but_not_on_the_kind_of_tree() -> None:
    x = jnp.tile(jnp.linspace(0, 1, 100), (4, 1))
    results = [
        aggregate(jaxcomm.global_qsgd(levels=1), tree)
        for tree in ({"a": x, "b": x}, _Leaves(x, x), {"a": x, "c": x})
    ]
    as_dict, as_tuple, elsewhere = (np.asarray(jax.tree.leaves(tree)) for tree in results)
    np.testing.assert_array_equal(as_dict, as_tuple)
    assert np.any(as_dict != elsewhere)


def test_draws_are_equal_in_every_process() -> None:
    """Frozen: Python's hash differs from one process to the next."""
    key = _noise.placed_key(jax.random.key(0), "data", {"a": 0, "b": [1, 2]})
    assert jax.random.key_data(key).tolist() == [1258740059, 3063671342]
