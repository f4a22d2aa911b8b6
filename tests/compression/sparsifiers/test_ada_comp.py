"""AdaComp against NumPy, and the facts of the paper."""

import numpy as np
import pytest

from jaxcomm.compression.sparsifiers import ada_comp
from tests.codecs import payload_of, run, sent
from tests.slow import slow


def oracle(given: np.ndarray, block_size: int, capacity: int) -> tuple[np.ndarray, int]:
    """What is sent in each step, by the formulas, and what exceeded the capacity in the last."""
    residue, sent = np.zeros(given.shape[1]), []
    for x in given:
        g = residue + x
        h = g + x
        starts = range(0, len(x), block_size)
        peaks = [np.abs(g[s : s + block_size]).max() for s in starts]
        c, lost = np.zeros(len(x)), 0
        for s, peak in zip(starts, peaks, strict=True):
            block = range(s, min(s + block_size, len(x)))
            passing = [j for j in block if abs(h[j]) >= peak * (1 - 1e-6) and g[j]]
            best = sorted(passing, key=lambda j: -abs(h[j]))[:capacity]
            c[best] = np.sign(g[best]) * np.mean(peaks)
            lost += len(passing) - len(best)
        residue = g - c
        sent.append(c)
    return np.array(sent), lost


@pytest.mark.parametrize(("block_size", "capacity"), [(7, 2), slow(20, 4), slow(100, 3)])
def test_against_numpy(block_size: int, capacity: int) -> None:
    given = np.random.default_rng(1).normal(size=(6, 20)).astype(np.float32)
    found, _, memory = run(ada_comp(block_size=block_size, capacity=capacity), given)
    expected, lost = oracle(given.astype(np.float64), block_size, capacity)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert memory.report.overflow == lost


def test_bins_of_one_send_all() -> None:
    x, codec = np.random.default_rng(2).normal(size=24).astype(np.float32), ada_comp(block_size=1)
    np.testing.assert_allclose(sent(codec, x), np.sign(x) * np.abs(x).mean(), rtol=1e-5)
    np.testing.assert_allclose(sent(codec, np.full(24, 3e37)), 3e37, rtol=1e-5)


def test_a_symbol_takes_as_few_bits_as_there_are_symbols() -> None:
    # 500 indices of two signs, and none: 1001 symbols in 10 bits, five of each of 20 bins.
    assert payload_of(ada_comp(), (10000,)).symbols.shape == (-(-20 * 5 * 10 // 32),)
    found, _, memory = run(ada_comp(), np.ones((1, 10000)))
    assert np.count_nonzero(found) == 100 and memory.report.overflow == 9900
