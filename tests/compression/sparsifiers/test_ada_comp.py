"""AdaComp against NumPy, and the facts of the paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import ada_comp
from tests.codecs import context_of, run, send
from tests.slow import slow
from tests.workers import aggregator, initial


def oracle(given: np.ndarray, block_size: int, capacity: int) -> tuple[np.ndarray, int]:
    """What is sent in each step, by the formulas, and what had no room in the last."""
    residue, sent = np.zeros(given.shape[1]), []
    for x in given:
        g = residue + x
        h = g + x
        starts = range(0, len(x), block_size)
        peaks = [np.abs(g[s : s + block_size]).max() for s in starts]
        c, lost = np.zeros(len(x)), 0
        for s, peak in zip(starts, peaks, strict=True):
            passing = [
                j
                for j in range(s, min(s + block_size, len(x)))
                if abs(h[j]) >= peak * (1 - 1e-6) and g[j]
            ]
            best = sorted(passing, key=lambda j: -abs(h[j]))[:capacity]
            c[best] = np.sign(g[best]) * np.mean(peaks)
            lost += len(passing) - len(best)
        residue = g - c
        sent.append(c)
    return np.array(sent), lost


@pytest.mark.parametrize("block_size, capacity", [(7, 2), (20, 4), slow(5, 5), slow(100, 3)])
def test_against_numpy(block_size: int, capacity: int) -> None:
    given = np.random.default_rng(1).normal(size=(6, 20)).astype(np.float32)
    sent, kept, memory = run(ada_comp(block_size=block_size, capacity=capacity), jnp.asarray(given))
    expected, lost = oracle(given.astype(np.float64), block_size, capacity)
    np.testing.assert_allclose(sent, expected, rtol=1e-5, atol=1e-6)
    assert memory.report.overflow == lost
    np.testing.assert_allclose(
        np.cumsum(sent, axis=0) + kept, np.cumsum(given, axis=0), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("aligned", [0.0, 0.3])
def test_at_least_one_of_each_bin(aligned: float) -> None:
    residue = np.random.default_rng(2).normal(size=24).astype(np.float32)
    codec = ada_comp(block_size=6, capacity=1)
    memory = codec.init(jnp.asarray(residue))
    memory = memory._replace(own=memory.own._replace(kept=jnp.asarray(residue)))
    sent, _ = send(codec, memory, jnp.asarray(aligned * residue))
    np.testing.assert_array_equal(np.count_nonzero(sent.reshape(4, 6), axis=1), 1)


def test_bins_of_one_send_all() -> None:
    x = np.random.default_rng(2).normal(size=24).astype(np.float32)
    codec = ada_comp(block_size=1)
    sent, _ = send(codec, codec.init(jnp.asarray(x)), jnp.asarray(x))
    np.testing.assert_allclose(sent, np.sign(x) * np.abs(x).mean(), rtol=1e-5)


def test_zeros_send_nothing() -> None:
    codec = ada_comp(block_size=4)
    for shape in ((10,), (2, 0)):
        sent, memory = send(codec, codec.init(jnp.zeros(shape)), jnp.zeros(shape))
        assert sent.shape == shape and not sent.any()
        assert not np.any(memory.own.kept) and memory.report.overflow == 0


def test_huge_numbers_do_not_overflow() -> None:
    x = jnp.full(24, 3e37)
    codec = ada_comp(block_size=1)
    sent, _ = send(codec, codec.init(x), x)
    np.testing.assert_allclose(sent, 3e37, rtol=1e-5)


def test_a_symbol_takes_as_few_bits_as_there_are_symbols() -> None:
    # 500 indices of two signs, and none: 1001 symbols in 10 bits, five of each of 20 bins.
    codec, x = ada_comp(), jnp.ones(10000)
    payload = jax.eval_shape(lambda x: codec.encode(context_of(codec, x), x)[0], x)
    assert payload.symbols.shape == (-(-20 * 5 * 10 // 32),)
    sent, memory = send(codec, codec.init(x), x)
    assert np.count_nonzero(sent) == 100 and memory.report.overflow == 9900


def test_overflow_is_told_and_feedback_refused() -> None:
    tx = jaxcomm.all_gather_mean(ada_comp(block_size=4, capacity=1), diagnostics=True)
    given = jnp.ones((2, 4))
    _, state = aggregator(tx, 2, "vmap")(given, initial(tx, given, "vmap"), jnp.ones(2))
    assert state.diagnostics["overflow"] == 3
    assert state.diagnostics["compression_error"] == pytest.approx(3 / 4)
    codec = error_feedback(ada_comp())
    with pytest.raises(ValueError, match="no bound is known"):
        send(codec, codec.init(jnp.ones(3)), jnp.ones(3))


@pytest.mark.parametrize("name", ["block_size", "capacity"])
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_options_out_of_range(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        ada_comp(**{name: value})
