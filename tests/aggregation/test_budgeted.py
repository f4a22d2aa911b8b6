"""Slow workers really send less, their means stay unbiased, and the others' terms stay accurate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import budgeted_mean, wire
from jaxcomm.aggregation._budgeted import plan_of
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import cast, dither, min_max_dither
from jaxcomm.compression.sparsifiers import random_k, top_k
from jaxcomm.wire._account import Account
from tests.workers import abstract, aggregate, aggregator, draws, gradients

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


def account(tx: object, updates: object) -> Account:
    workers = jax.tree.leaves(updates)[0].shape[0]
    arguments = updates, abstract(tx, updates, "checked"), jnp.ones(workers)
    return wire.account(aggregator(tx, workers, "checked"), *arguments)


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


def test_the_bytes_of_each_worker() -> None:
    tx = budgeted_mean(bits, 8, slow={1: 2}, mean_codec=bits(4))
    found = account(tx, normal())
    row = SIZE // 3
    fast, slow = row + 4, 4 * -(-row // 16) + 4  # Codes and a norm.
    gathered = 3 * (4 * -(-row // 8) + 4)
    flag = 2 * 3 / 4 * 4
    # Each of the three others owns a row, and sends the two that are not its own.
    assert [found.bytes_sent(worker) for worker in range(4)] == [
        2 * fast + gathered + flag,
        3 * slow + gathered + flag,
        2 * fast + gathered + flag,
        2 * fast + gathered + flag,
    ]
    owner = 2 * fast + slow + gathered + flag
    assert [found.bytes_received(worker) for worker in range(4)] == [
        owner,
        gathered + flag,
        owner,
        owner,
    ]
    equal = account(jaxcomm.two_stage_mean(bits(8), mean_codec=bits(4)), normal())
    assert equal.bytes_sent(1) == equal.bytes_received(1) == equal.bytes_per_worker
    assert found.bytes_sent(1) < equal.bytes_sent(1)
    assert found.bytes_received(1) < equal.bytes_received(1)


def test_a_masked_message_does_not_shrink() -> None:
    """Why the budgets are permutations: a collective sends zeros as well."""
    full, masked = normal(), normal().at[:, 10:].set(0)
    codec = jaxcomm.all_gather_mean(bits(8))
    assert account(codec, full).bytes_sent(0) == account(codec, masked).bytes_sent(0)


def test_without_rounding_it_is_the_mean() -> None:
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


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"slow": {0: 1}}, r"`levels` must be a Python int in \[1, .*, got 0"),
        ({"slow": {}, "mean_codec": top_k(k=1)}, "`mean_codec` .* must be an unbiased codec"),
        ({"slow": {}, "mean_codec": 3}, "`mean_codec` must be a codec, .* got 3"),
    ],
)
def test_options_out_of_range(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budgeted_mean(bits, 8, **arguments)


def test_codecs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"`codec_for\(2\)` .* must be an unbiased codec"):
        budgeted_mean(lambda k: top_k(k=k), 2, slow={})
    with pytest.raises(ValueError, match=r"`codec_for\(4\)` .* codec without memory"):
        budgeted_mean(lambda k: error_feedback(dither(bits=k)), 4, slow={})
    with pytest.raises(ValueError, match="must be a function"):
        budgeted_mean(dither(), 4, slow={})


def test_a_worker_that_does_not_exist() -> None:
    tx = budgeted_mean(bits, 8, slow={7: 2, -1: 2})
    with pytest.raises(ValueError, match=r"workers \[-1, 7\], but there are only 4"):
        aggregate(tx, normal())


@pytest.mark.slow
def test_blocks_and_other_quantizers() -> None:
    codec_for = lambda levels: min_max_dither(levels=levels)  # noqa: E731
    tx = budgeted_mean(codec_for, 256, slow={0: 2}, diagnostics=True)
    found = draws(tx, normal(), 200)
    assert np.abs(found.mean(axis=0) - np.asarray(normal()).mean(axis=0)).max() < 0.3
