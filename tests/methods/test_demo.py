"""DeMo against its equations in NumPy, and the transform of its chunks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

import jaxcomm
from jaxcomm.compression import cosine
from jaxcomm.compression._transforms import cosine_matrix, cut
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import cast, dither
from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import sent
from tests.slow import slow
from tests.steps import steps

WORKERS, STEPS = 3, 5
SHAPES = {"matrix": (8, 12), "uneven": (5, 6), "vector": (10,), "kernel": (2, 2, 3, 4)}


def test_the_matrix_is_the_orthonormal_dct() -> None:
    for size in (1, 2, 5, 64):
        by_scipy = scipy.fft.dct(np.eye(size), norm="ortho", axis=0)
        np.testing.assert_allclose(cosine_matrix(size), by_scipy, atol=1e-6)


def test_chunks_have_nearly_equal_sizes() -> None:
    expected = {128: (2, 64), 64: (1, 64), 10: (1, 10), 67: (2, 34), 100: (2, 50), 0: (1, 1)}
    assert {length: cut(length, 64) for length in expected} == expected


def chunks_of(x: np.ndarray, chunk: int) -> list[tuple[tuple[slice, slice], np.ndarray]]:
    """The places of chunks of a matrix, and their values, padded with zeros."""
    height, width = (cut(length, chunk)[1] for length in x.shape)
    found = []
    for row in range(0, x.shape[0], height):
        for column in range(0, x.shape[1], width):
            place = slice(row, row + height), slice(column, column + width)
            values = np.zeros((height, width))
            values[: x[place].shape[0], : x[place].shape[1]] = x[place]
            found.append((place, values))
    return found


def fast_components(x: np.ndarray, k: int, chunk: int) -> np.ndarray:
    """What DeMo extracts, with SciPy's transform, chunk by chunk."""
    matrix = x.reshape(-1, x.shape[-1])
    result = np.zeros_like(matrix)
    for place, values in chunks_of(matrix, chunk):
        axes = [axis for axis in (0, 1) if values.shape[axis] > 1]
        frequencies = scipy.fft.dctn(values, norm="ortho", axes=axes)
        least = np.sort(np.abs(frequencies), axis=None)[-min(k, values.size)]
        kept = np.where(np.abs(frequencies) >= least, frequencies, 0)
        back = scipy.fft.idctn(kept, norm="ortho", axes=axes)
        result[place] = back[: result[place].shape[0], : result[place].shape[1]]
    return result.reshape(x.shape)


def demo_by_hand(given: np.ndarray, k: int, chunk: int, momentum: float) -> np.ndarray:
    """[steps, workers, *shape] -> [steps, *shape], in float64."""
    momenta, updates = np.zeros(given.shape[1:]), []
    for gradients in given:
        momenta = momentum * momenta + gradients
        sent = np.stack([fast_components(m, k, chunk) for m in momenta])
        momenta = momenta - sent
        updates.append(sent.mean(axis=0))
    return np.stack(updates)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("signs", [False, slow(True)])
def test_the_updates_are_those_of_the_equations(signs: bool) -> None:
    given = {name: drawn(STEPS, WORKERS, *shape) for name, shape in SHAPES.items()}
    results, _ = steps(jaxcomm.demo(k=3, block_size=4, momentum=0.9, signs=signs), given)
    for name, each in given.items():
        found = results[name][:, 0]
        expected = demo_by_hand(each.astype(np.float64), 3, 4, 0.9)
        if signs:
            expected = np.where(np.abs(expected) > 1e-4, np.sign(expected), found)
        np.testing.assert_allclose(found, expected, atol=2e-5)


def is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def products(jaxpr: Any, looped: bool = False) -> list[bool]:
    """For each product of matrices, whether it is in a loop."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(looped)
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                in_loop = looped or equation.primitive.name in ("scan", "while")
                found += products(getattr(inner, "jaxpr", inner), in_loop)
    return found


def test_a_mean_takes_one_inverse_transform() -> None:
    tx = jaxcomm.all_gather_mean(cosine(top_k(k=3)))
    one = lambda x: tx.update(x, tx.init(x))[0]  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.vmap(one, axis_name="data"))(jnp.zeros((5, 128, 128)))
    found = products(jaxpr.jaxpr)
    assert found and not any(found)  # None is in the loop over workers.


def test_with_other_codecs() -> None:
    x = drawn(6, 9)
    for everything in (cast("float32"), top_k(k=99)):
        np.testing.assert_allclose(sent(cosine(everything, 4), x), x, atol=2e-6)
    codec = cosine(dither(bits=8), 4)
    assert codec.claims.variance(10**6, 1) == dither(bits=8).claims.variance(16, 1)
    assert codec.claims.variance(9, 1) == dither(bits=8).claims.variance(9, 1)
    assert cosine(top_k(ratio=0.25), 4).claims.contraction(100, 1) == 1 / 5  # Of a chunk of 5.


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="`scope` must be 'leaf', got 'bucket'"):
        jaxcomm.demo(scope="bucket")
    with pytest.raises(ValueError, match=r"error_feedback\(cosine"):
        cosine(error_feedback(top_k(k=1))).init(jnp.zeros((3, 3)))
