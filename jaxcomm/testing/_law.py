"""What a law is, how its failure reads, and the inputs and moments that laws share."""

import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
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


def inputs(size: int, workers: int = 1) -> dict[str, np.ndarray]:
    """Returns arrays [workers, size] by name: float32 values, stored as float64."""
    rng, shape = np.random.default_rng(size), (workers, size)
    found = {
        "normal": rng.normal(size=shape),
        "heavy_tailed": rng.standard_t(2, size=shape),
        "sparse": rng.normal(size=shape) * (rng.random(shape) < 0.1),
        "one_hot": np.stack([np.eye(size)[(size // 2 + i) % size] for i in range(workers)]),
        "constant": np.full(shape, -0.7),
        "zero": np.zeros(shape),
        "tiny": rng.normal(size=shape) * 1e-15,
        "huge": rng.normal(size=shape) * 1e15,
    }
    if workers > 1:
        found["of_unlike_scales"] = found["normal"] * np.logspace(0, -6, workers)[:, None]
        found["of_one_worker"] = found["normal"] * (np.arange(workers) == 0)[:, None]
    return {name: x.astype(np.float32).astype(np.float64) for name, x in found.items()}


def with_extremes(size: int, workers: int, seed: int = 4) -> dict[str, np.ndarray]:
    """Returns updates with the extreme value in a coordinate of all workers; a sum may wrap."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(workers, size)).astype(np.float32)
    normal[:, 0] = np.abs(normal).max()
    sparse = np.zeros_like(normal)
    sparse[:, 0] = -1
    signs = np.tile(np.where(np.arange(size) % 2, -1, 1).astype(np.float32), (workers, 1))
    return {"normal": normal, "sparse": sparse, "extreme": signs}


def edges(size: int, workers: int) -> dict[str, np.ndarray]:
    """Returns updates at the edges of float32, [workers, size]."""
    shape = (workers, size)
    return {
        "one worker alone": np.concatenate([np.ones((1, size)), np.zeros((workers - 1, size))]),
        "the smallest normal numbers": np.full(shape, 3e-38),
        "denormal": np.full(shape, 1e-40),
        "the largest numbers": np.linspace(-1, 1, workers * size).reshape(shape)
        * (9e37 / max(workers, 3)),
        "a wide range": np.tile(np.resize(10.0 ** np.arange(-30, 31, 15), size), (workers, 1)),
    }


def weights_of(workers: int) -> dict[str, np.ndarray]:
    """Returns weights of several kinds, [workers]."""
    kinds = {
        "uneven": [1.0, 2.0, 5.0, 0.5],
        "some zero": [0.0, 3.0, 0.0, 1.0],
        "one left": [0.0, 0.0, 2.0, 0.0],
        "equal": [7.0, 7.0, 7.0, 7.0],
        "small": [2.0**-100, 2.0**-98, 0.0, 2.0**-100],
        "large": [2.0**98, 2.0**100, 0.0, 2.0**98],
    }
    found = {name: np.resize(np.array(row), workers) for name, row in kinds.items()}
    return {name: row for name, row in found.items() if row.any()}


# A vector, a matrix and a scalar.
LEAVES = {
    "bias": jax.ShapeDtypeStruct((3,), "float32"),
    "kernel": jax.ShapeDtypeStruct((5, 2), "float32"),
    "scale": jax.ShapeDtypeStruct((), "float32"),
}
# Of several dtypes, and without a leaf.
MIXED = {
    "float32": jax.ShapeDtypeStruct((5, 2), "float32"),
    "bfloat16": jax.ShapeDtypeStruct((3,), "bfloat16"),
    "float16": (jax.ShapeDtypeStruct((), "float16"), jax.ShapeDtypeStruct((5, 2), "float16")),
    "none": None,
}


def size_of(leaves: PyTree) -> int:
    """Returns the number of coordinates of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves))


def tree_of(leaves: PyTree, rows: np.ndarray) -> PyTree:
    """Converts `[workers, coordinates]` to a tree like `leaves`, with leaves [workers, ...]."""
    found: list[Any] = jax.tree.leaves(leaves)
    treedef: Any = jax.tree.structure(leaves)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in found])
    parts = np.split(rows, ends[:-1], axis=1)
    with np.errstate(over="ignore"):
        return treedef.unflatten(
            jnp.asarray(part.reshape(len(rows), *leaf.shape).astype(leaf.dtype))
            for part, leaf in zip(parts, found, strict=True)
        )


def rows_of(tree: PyTree) -> np.ndarray:
    """Returns each worker's tree as one row: [workers, coordinates], float64."""
    leaves = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def spacing_of(leaves: PyTree) -> np.ndarray:
    """Returns the relative rounding error of each coordinate's dtype, [coordinates].

    It is zero for float32 and wider dtypes.
    """

    def spacing(leaf: Any) -> float:
        return 0.0 if leaf.dtype.itemsize >= 4 else float(jnp.finfo(leaf.dtype).eps)

    return np.concatenate(
        [np.full(math.prod(leaf.shape), spacing(leaf)) for leaf in jax.tree.leaves(leaves)]
    )


def finite_updates(leaves: PyTree, workers: int) -> dict[str, PyTree]:
    """Returns updates by name, without those that overflow the dtypes of the leaves."""
    found = {name: tree_of(leaves, x) for name, x in inputs(size_of(leaves), workers).items()}
    return {name: tree for name, tree in found.items() if np.isfinite(rows_of(tree)).all()}


ALPHA = 1e-6  # The probability that a correct method fails the test of bias.
MOMENT_ALPHA = 1e-7  # The probability that a correct method fails the test of the moment.


def require_unbiased(
    law: str,
    sample: np.ndarray,
    truth: np.ndarray,
    what: str,
    *,
    spread: float | None = None,
    rounding: float | np.ndarray = 0.0,
) -> None:
    """Tests with z-tests whether the average of draws is the truth.

    There is one test per coordinate, and one of the inner product with the truth.

    Args:
      law: The name of the law, for the message.
      sample: Float64, [draws, coordinates].
      truth: Float64, [coordinates].
      what: The input, for the message.
      spread: The largest possible error of a draw in a coordinate. Default: the largest error in
        the sample.
      rounding: The allowance for floating-point rounding, for all coordinates or for each.
    """
    draws, size = sample.shape
    largest = np.abs(sample - truth).max(initial=0) if spread is None else spread
    # A shrinkage is small in each coordinate and large in the inner product with the truth.
    sample = np.concatenate([sample, (sample @ truth)[:, None]], axis=1)
    ones = np.ones(size)
    along = rounding * np.abs(truth).max(initial=0)
    if isinstance(rounding, np.ndarray):
        along = np.abs(truth) @ rounding
    rounding = np.append(rounding * ones, along)
    # Bernstein's second term: values too rare to occur in the draws add nothing to the deviation.
    unseen = 2 * largest * np.log(2 * (size + 1) / ALPHA) / (3 * draws)
    unseen = unseen * np.append(ones, np.abs(truth).sum())
    truth = np.append(truth, truth @ truth)
    deviation = sample.std(axis=0, ddof=1) / draws**0.5
    allowed = quantile(ALPHA / 2 / len(truth)) * deviation + unseen + rounding
    off = np.abs(sample.mean(axis=0) - truth)
    worst = int(np.argmax(off - allowed))
    where = f"in coordinate {worst}" if worst < size else "along the truth"
    require_law(
        np.all(off <= allowed),
        law,
        f"for {what}, {draws} draws average {sample.mean(axis=0)[worst]:.6g} {where} instead of "
        f"{truth[worst]:.6g}: off by {off[worst]:.3g}, more than {allowed[worst]:.3g}.",
    )


def require_moment(
    law: str, errors: np.ndarray, bound: float, what: str, *, alpha: float = MOMENT_ALPHA
) -> None:
    """Checks that the mean of the squared errors [draws] is not significantly above the bound."""
    slack = quantile(alpha) * errors.std() / len(errors) ** 0.5
    require_law(
        errors.mean() - slack <= bound,
        law,
        f"for {what}, the squared error over {len(errors)} draws is {errors.mean():.6g} +- "
        f"{slack:.2g} on average, above the bound of {bound:.6g}.",
    )
