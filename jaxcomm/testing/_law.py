"""Errors of violated laws, which name the law, the input and the numbers."""

import math
import statistics
from typing import Any

import jax
import numpy as np

from jaxcomm._contract import PyTree


def require_law(holds: Any, law: str, message: str) -> None:
    """Raises an AssertionError that names the law, unless it holds."""
    if not holds:
        raise AssertionError(f"law {law!r}: {message}")


def quantile(alpha: float) -> float:
    """Returns the value that a standard normal variable exceeds with probability `alpha`."""
    return -statistics.NormalDist().inv_cdf(alpha)


def _type(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def require_types(law: str, found: PyTree, expected: PyTree, what: str) -> None:
    """Checks that structures, shapes and dtypes are equal."""
    structure: Any = jax.tree.structure(found)
    wanted: Any = jax.tree.structure(expected)
    require_law(
        structure == wanted, law, f"{what} has the structure {structure} and must have {wanted}."
    )
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, leaf), other in pairs:
        require_law(
            leaf.shape == other.shape and leaf.dtype == other.dtype,
            law,
            f"{what}{jax.tree_util.keystr(path)} is {_type(leaf)} and must be {_type(other)}.",
        )


def on_host(leaf: Any) -> np.ndarray:
    """Returns a NumPy array that can be compared; for a key, its words."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def require_equal(
    law: str, found: PyTree, expected: PyTree, what: str, *, tolerance: float = 0.0
) -> None:
    """Checks that values are equal; NaNs match, and floats may differ by `tolerance`.

    The tolerance is relative to the largest magnitude.
    """
    require_types(law, found, expected, what)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, leaf), other in pairs:
        one, two = on_host(leaf), on_host(other)
        if jax.numpy.issubdtype(one.dtype, np.floating):
            one, two = one.astype(np.float64), two.astype(np.float64)
            finite = np.isfinite(one) & np.isfinite(two)
            slack = tolerance * np.abs(two[finite]).max(initial=0)
            with np.errstate(invalid="ignore"):
                differs = ~(np.isclose(one, two, rtol=0, atol=slack, equal_nan=True))
        else:
            differs = one != two
        if differs.any():
            first = tuple(int(i) for i in np.argwhere(differs)[0])
            raise AssertionError(
                f"law {law!r}: {what}{jax.tree_util.keystr(path)} differs in "
                f"{int(differs.sum())} of {math.prod(differs.shape)} numbers, first at "
                f"{list(first)}: {one[first]!s} instead of {two[first]!s}."
            )
