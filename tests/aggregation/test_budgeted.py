"""Slow workers really send less, their means stay unbiased, and the others' terms stay accurate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import budgeted_mean
from jaxcomm.aggregation._budgeted import plan_of
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import random_k, top_k
from tests.aggregation.runs import refuse
from tests.workers import aggregate, draws, gradients

WORKERS, SIZE = 4, 120


def bits(number: int) -> jaxcomm.Codec:
    return dither(levels=2 ** (number - 1) - 1)


def part(ratio: float) -> jaxcomm.Codec:
    return random_k(ratio=ratio)


def exactly(_: object) -> jaxcomm.Codec:
    """All coordinates in float32: there is no rounding, and no variance."""
    return cast("float32").replace(claims=jaxcomm.Claims(variance=lambda size, workers: 0.0))


def normal(workers: int = WORKERS, size: int = SIZE) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(workers, size)), jnp.float32)


@pytest.mark.parametrize("workers", [1, 3, 5, 8])
@pytest.mark.parametrize("slow", [{}, {0: 1}, "last", "all but one", "all"], ids=str)
def test_every_row_reaches_its_owner_once(workers: int, slow: object) -> None:
    named = {
        "last": [workers - 1],
        "all but one": [*range(workers - 1)],
        "all": [*range(workers)],
    }
    given = slow if isinstance(slow, dict) else dict.fromkeys(named[slow], 1)
    plan = plan_of(bits, 8, dict.fromkeys(given, 2), workers)
    messages = []
    for turn in range(workers):
        of_turn = [
            (kind, *pair) for kind in range(len(plan.codecs)) for pair in plan.pairs(turn, kind)
        ]
        for side in (1, 2):
            assert len({message[side] for message in of_turn}) == len(of_turn)
        for kind, sender, owner in of_turn:
            assert plan.kinds[sender] == kind
            assert plan.owners[(turn - sender) % workers] == owner
        messages += [message[1:] for message in of_turn]
    wanted = {(i, j) for i in range(workers) for j in plan.owners if i != j}
    assert {*messages} == wanted and len(messages) == len(wanted)
    assert not (set(plan.owners) & set(given)) or len(given) == workers


def test_without_rounding_it_equals_the_mean() -> None:
    tx, given = budgeted_mean(exactly, 8, slow={0: 2, 3: 4}), gradients(5)
    for mode in "checked", "vmap":
        means = aggregate(tx, given, mode)
        for found, each in zip(jax.tree.leaves(means), jax.tree.leaves(given), strict=True):
            expected = np.asarray(each, np.float64).mean(axis=0)
            np.testing.assert_allclose(found[0], expected, atol=1e-6)


def test_only_the_term_of_the_slow_worker_is_noisier() -> None:
    given = normal()
    x = np.asarray(given, np.float64)
    tx = budgeted_mean(part, 1.0, slow={2: 0.25}, mean_codec=exactly(0))
    found = draws(tx, given, 2000)
    # The means of the draws are the mean; a quarter of the coordinates has three times its square.
    error = found.mean(axis=0) - x.mean(axis=0)
    deviation = np.abs(x[2]) * 3**0.5 / WORKERS / 2000**0.5
    assert np.all(np.abs(error) <= 5 * deviation + 1e-6)
    squared = np.mean(np.sum((found - x.mean(axis=0)) ** 2, axis=1))
    assert squared == pytest.approx(3 * np.sum(x[2] ** 2) / WORKERS**2, rel=0.05)


FEEDBACK = error_feedback(dither(bits=4))
MISTAKES = {
    "`mean_codec` .* must be an unbiased codec": lambda: budgeted_mean(
        bits, 8, slow={}, mean_codec=top_k(k=1)
    ),
    r"`codec_for\(2\)` .* must be an unbiased codec": lambda: budgeted_mean(
        lambda k: top_k(k=k), 2, slow={}
    ),
    r"`codec_for\(4\)` .* codec without memory": lambda: budgeted_mean(
        lambda k: FEEDBACK, 4, slow={}
    ),
    r"workers \[-1, 7\], but there are only 4": lambda: aggregate(
        budgeted_mean(bits, 8, slow={7: 2, -1: 2}), normal()
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_named(message: str) -> None:
    refuse(message, MISTAKES[message])
