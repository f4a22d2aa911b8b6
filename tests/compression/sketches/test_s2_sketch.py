"""S2 Reducer's codecs: moments, the union, peeling, and codes modulo 256."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Coins, s2_reducer
from jaxcomm.compression import scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sketches import s2_codes, s2_sketch
from pallas_kernels import count_sketch
from tests.codecs import coins_of, context_of, jitted, run, send
from tests.slow import slow
from tests.workers import aggregator, initial

SIZE, NON_ZERO, DRAWS = 4000, 200, 300


def sparse(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = np.zeros(SIZE, np.float32)
    x[rng.choice(SIZE, NON_ZERO, replace=False)] = rng.normal(size=NON_ZERO)
    return x


def errors(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Of every draw, [draws, size], over the norm of x."""

    def once(key: jax.Array) -> jax.Array:
        given = jnp.asarray(x)
        context = context_of(codec, given, Coins(key, key))
        payload, _ = codec.encode(context, given)
        return codec.decode(context.received(), payload)

    keys = jax.random.split(jax.random.key(1), DRAWS)
    decoded = jax.jit(lambda keys: jax.lax.map(once, keys, batch_size=50))(keys)
    return (np.asarray(decoded, np.float64) - x) / np.linalg.norm(x)


build = functools.partial(s2_sketch, density=NON_ZERO / SIZE, granularity="element")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "ratio", "decode", "omega"),
    [
        (1, 0.25, "mean", 3.98),
        slow(1, 1, "mean", 0.995),
        slow(1, 2, "mean", 0.4975),
        slow(3, 1, "mean", 0.995),
        (3, 1, "median", 1.17),
        slow(5, 1, "median", 1.28),
    ],
)
def test_the_error_is_that_of_theory(rows: int, ratio: float, decode: Any, omega: float) -> None:
    """(K - 1)/c of the mean; of the median, what was simulated with ideal hashes."""
    codec = build(sketch_ratio=ratio, rows=rows, decode=decode)
    error = errors(codec, sparse())
    assert np.sum(error**2, axis=1).mean() == pytest.approx(omega, rel=0.1)
    # Unbiased: of 4000 means, none is off by 5 standard errors.
    deviation = error.std(axis=0, ddof=1) / math.sqrt(DRAWS)
    assert (np.abs(error.mean(axis=0)) <= 5 * deviation + 1e-9).all()
    if decode == "mean":
        assert codec.claims.variance(SIZE, 1) == pytest.approx(omega, rel=0.01)
    else:
        assert codec.claims.variance is None


def test_the_claim_is_that_of_the_docstring() -> None:
    columns = math.ceil(2 * NON_ZERO / 3)
    claim: Any = build(sketch_ratio=2, rows=3).claims.variance
    assert claim(SIZE, 8) == pytest.approx((NON_ZERO - 1) / (3 * columns), rel=1e-12)


def test_the_table_is_that_of_the_formula() -> None:
    x, codec = sparse(), jitted(build(sketch_ratio=1, rows=2))
    context = context_of(codec, jnp.asarray(x))
    payload, _ = codec.encode(context, jnp.asarray(x))
    columns, signs = count_sketch.locations(
        jnp.arange(SIZE), jax.random.key_data(context.coins.public), rows=2, columns=100
    )
    expected = np.zeros((2, 100))
    for row in range(2):
        np.add.at(expected[row], columns[row], np.asarray(signs[row]) * x)
    np.testing.assert_allclose(payload.table, expected, atol=1e-5)


@pytest.mark.slow
def test_an_even_number_of_rows_is_not_decoded_by_the_lower_of_the_middle_two() -> None:
    ones = np.ones(600, np.float32)
    error = errors(
        s2_sketch(density=1, sketch_ratio=0.5, rows=2, granularity="element", decode="median"), ones
    )
    deviation = error.mean(axis=1).std(ddof=1) / math.sqrt(DRAWS)
    assert abs(error.mean()) < 5 * deviation
    assert error.std() > 20 * deviation  # Two rows' lower one is off by 0.8 of it.


@pytest.mark.parametrize(
    "options", [{"sketch_ratio": 1.0}, slow({"sketch_ratio": 1.5, "rows": 3, "decode": "peel"})]
)
def test_of_more_than_was_foreseen_as_many_are_sent(options: dict[str, Any]) -> None:
    x = np.random.default_rng(3).normal(size=SIZE).astype(np.float32)
    codec = build(**options, overflow="drop")
    error = errors(codec, x)
    dropped = 1 - NON_ZERO / SIZE
    assert (np.isclose(error, -x / np.linalg.norm(x), atol=0).mean(axis=1) >= dropped).all()
    omega = 0 if "decode" in options else codec.claims.variance(SIZE, 1)
    expected = dropped + (1 - dropped) * omega
    assert np.sum(error**2, axis=1).mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["row", slow("element"), slow(16)])
def test_peeling_is_exact_and_rows_are_whole(granularity: Any) -> None:
    x = np.zeros((300, 8), np.float32)
    x[::17] = np.random.default_rng(0).standard_t(2, (18, 8))
    codec = s2_sketch(
        density=0.125, sketch_ratio=1.7, rows=3, granularity=granularity, decode="peel"
    )
    decoded, _ = send(codec, (), jnp.asarray(x))
    np.testing.assert_allclose(decoded, x, atol=2.0**-21 * np.abs(x).max())
    union = np.repeat((x.reshape(-1, 16) != 0).any(axis=1), 16).reshape(x.shape)
    assert (decoded[~union] == 0).all()


@pytest.mark.slow
def test_what_does_not_peel_is_estimated_without_bias() -> None:
    codec = build(sketch_ratio=1.1, rows=3, decode="peel")
    error = errors(codec, sparse())
    square = np.sum(error**2, axis=1)
    assert 0.01 < square.mean() <= codec.claims.variance(SIZE, 1)
    deviation = error.std(axis=0, ddof=1) / math.sqrt(DRAWS)
    assert (np.abs(error.mean(axis=0)) <= 5 * deviation + 1e-6).all()


def workers_with_rows_of_their_own(workers: int) -> np.ndarray:
    x = np.zeros((workers, 120, 4), np.float32)
    rng = np.random.default_rng(5)
    for worker in range(workers):
        x[worker, rng.choice(120, 6, replace=False)] = rng.normal(size=(6, 4))
    return x


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["checked", slow("vmap")])
def test_the_mean_of_workers_with_other_rows(mode: Any) -> None:
    x = workers_with_rows_of_their_own(4)
    tx = s2_reducer(density=0.2, sketch_ratio=1.8, rows=3, decode="peel", diagnostics=True)
    results, state = aggregator(tx, 4, mode)(
        jnp.asarray(x), initial(tx, jnp.asarray(x), mode), jnp.ones(4)
    )
    mean = x.mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(results, np.broadcast_to(mean, x.shape), atol=1e-5)
    assert (np.asarray(results)[:, (mean == 0)] == 0).all()
    union = (mean != 0).any(axis=1).mean()
    assert float(state.diagnostics["union_density"]) == pytest.approx(union)
    assert float(state.diagnostics["unpeeled"]) == float(state.diagnostics["overflow"]) == 0


@pytest.mark.slow
def test_info_tells_the_density_and_the_error_to_be_expected() -> None:
    x = workers_with_rows_of_their_own(4)
    tx = s2_reducer(density=0.05, sketch_ratio=1, overflow="drop", diagnostics=True)
    run_, state = aggregator(tx, 4, "vmap"), initial(tx, jnp.asarray(x), "vmap")
    assert {"union_density", "expected_error"} < set(state.diagnostics)
    measured, expected = [], []
    for _ in range(30):
        _, state = run_(jnp.asarray(x), state, jnp.ones(4))
        measured.append(float(state.diagnostics["compression_error"]))
        expected.append(float(state.diagnostics["expected_error"]))
    rows = (x != 0).any(axis=(0, 2)).sum()
    sent = 6 / rows  # There is room for six, in as many times four cells.
    assert float(state.diagnostics["overflow"]) == pytest.approx(1 - sent)
    assert expected == pytest.approx([1 - sent + sent * (4 * 6 - 1) / 24] * 30)
    assert np.mean(measured) == pytest.approx(expected[0], rel=0.2)


@pytest.mark.slow
def test_own_parts_decode_to_the_decoded_sum() -> None:
    x = workers_with_rows_of_their_own(3)
    codec = jitted(s2_sketch(density=0.1, sketch_ratio=0.5, rows=3))
    contexts = [context_of(codec, jnp.asarray(each), 2, workers=3) for each in x]
    own = [context.statistics for context in contexts]
    statistics = own[0]._replace(support=functools.reduce(jnp.bitwise_or, [o.support for o in own]))
    context = contexts[0].replace(statistics=statistics)
    payloads = [codec.encode(context, jnp.asarray(each))[0] for each in x]
    total = jax.tree.map(lambda *tables: sum(tables), *payloads)
    alone = [codec.decode(context.received(), payload) for payload in payloads]
    together = codec.decode(context.received(3), total)
    np.testing.assert_allclose(together, sum(alone) / 3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, slow(1)])
def test_codes_have_the_error_of_the_quantizer_alone_however_cells_wrap(seed: int) -> None:
    x = np.repeat(workers_with_rows_of_their_own(8).sum(axis=0, keepdims=True), 8, axis=0)
    x[:, :, 0] = np.where(x[:, :, 0] != 0, 9.0, 0)  # 120 of all workers, where two will wrap.
    codec = jitted(s2_codes(density=0.35, sketch_ratio=1.6))
    coins = [coins_of(seed)._replace(private=jax.random.key(i)) for i in range(8)]
    contexts = [
        context_of(codec, jnp.asarray(each), c, workers=8) for c, each in zip(coins, x, strict=True)
    ]
    own = [context.statistics for context in contexts]
    statistics = own[0]._replace(
        support=functools.reduce(jnp.bitwise_or, [o.support for o in own]),
        norm=jax.tree.map(lambda *norms: jnp.max(jnp.stack(norms)), *[o.norm for o in own]),
    )
    contexts = [context.replace(statistics=statistics) for context in contexts]
    tables = [
        np.asarray(codec.encode(context, jnp.asarray(each))[0].table)
        for context, each in zip(contexts, x, strict=True)
    ]
    total = np.sum(tables, axis=0, dtype=np.int64)
    wrapped = total.astype(np.int8)
    assert tables[0].dtype == np.int8
    payload = codec.encode(contexts[0], jnp.asarray(x[0]))[0]
    decoded = codec.decode(contexts[0].received(8), payload._replace(table=jnp.asarray(wrapped)))
    mean = x.mean(axis=0, dtype=np.float64)
    step = np.abs(x).max() / 15
    assert (wrapped != total).any()
    assert np.abs(np.asarray(decoded) - mean).max() <= step
    assert (np.asarray(decoded)[mean == 0] == 0).all() and (np.asarray(decoded) != 0).any()


@pytest.mark.slow
def test_codes_that_do_not_peel_are_nan_or_zero() -> None:
    x = np.random.default_rng(3).normal(size=(200, 4)).astype(np.float32)
    x = jnp.asarray(x)
    assert np.isnan(send(s2_codes(density=0.5, sketch_ratio=1.0), (), x)[0]).all()
    decoded, _ = send(s2_codes(density=0.5, sketch_ratio=1.0, overflow="drop"), (), x)
    found = decoded != 0
    step = np.abs(x).max() / 127
    assert 0.02 < found.mean() < 0.9
    assert (np.abs(decoded - x)[found] <= step).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [
        slow(s2_sketch(density=1, sketch_ratio=1.5, rows=3, decode="peel")),
        slow(scaled(s2_sketch(density=1, sketch_ratio=0.5))),
        s2_codes(density=0.3, sketch_ratio=1.5),
    ],
    ids=["peel", "scaled mean", "codes"],
)
def test_under_feedback_nothing_is_lost(codec: Codec) -> None:
    rng = np.random.default_rng(0)
    given = jnp.asarray(rng.normal(size=(12, 50, 3)) * (rng.random((12, 50, 1)) < 0.2), jnp.float32)
    sent, kept, _ = run(error_feedback(codec), given)
    total = np.asarray(given, np.float64).sum(axis=0)
    np.testing.assert_allclose(sent.sum(axis=0) + kept[-1], total, atol=1e-5)
    assert np.linalg.norm(kept[-1]) < 6 * np.linalg.norm(given[-1])


def test_feedback_refuses_what_may_diverge() -> None:
    x = jnp.ones((10, 2))
    for codec, words in (
        (s2_sketch(density=0.5, sketch_ratio=0.5), "scaled"),
        (s2_sketch(density=0.5, sketch_ratio=2, rows=3, decode="median"), "no bound is known"),
    ):
        with pytest.raises(ValueError, match=words):
            send(error_feedback(codec), error_feedback(codec).init(x), x)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sketch_ratio": jnp.float32(1)}, "static_args"),
        ({"rows": 0}, "`rows` must be"),
        ({"granularity": "column"}, "`granularity` must be"),
        ({"bits": 8}, "needs `decode`='peel'"),
        ({"scope": "tree", "granularity": "element"}, "statistic of a single array"),
        ({"scope": "bucket"}, "two axes or more"),
    ],
)
def test_wrong_options(change: dict[str, Any], words: str) -> None:
    options = {"density": 0.5, "sketch_ratio": 1.0} | change
    with pytest.raises(ValueError, match=words):
        tx = s2_reducer(**options)
        jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")(jnp.ones((2, 4, 3)))
