"""The codecs of docs/extending.md are one short file each, and the last one is PowerSGD."""

import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Claims, Context
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.testing import check_codec
from tests.low_rank import of_matrices, power_sgd
from tests.programs import program

ROOT = pathlib.Path(__file__).parent.parent.parent
WORKERS, STEPS = 3, 6
PUBLIC = {"jax", "jax.numpy", "jaxcomm", "typing", "math"}


@functools.cache
def files() -> list[str]:
    """The three blocks of the page that are a codec's whole file."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    codes = [block.code for block in program("run_readme").python_blocks(page)]
    return [code for code in codes if "Codec(" in code and "import Claims" in code]


@functools.cache
def low_rank() -> Any:
    defined: dict[str, Any] = {"__name__": "low_rank"}
    exec(files()[2], defined)
    return defined["low_rank"]


def test_each_codec_is_a_file_of_60_lines_without_private_imports() -> None:
    assert len(files()) == 3
    for code in files():
        assert len(code.splitlines()) <= 60
        imports = [
            line.split() for line in code.splitlines() if line.startswith(("import", "from"))
        ]
        assert {words[1] for words in imports} <= PUBLIC
        assert not re.search(r"[. ]_(?!replace)", code)


@functools.cache
def updates(shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    common = rng.normal(size=(1, 1, *shape))
    return np.asarray(common + rng.normal(size=(STEPS, WORKERS, *shape)), np.float32)


def means_of(codec: Any, given: np.ndarray) -> np.ndarray:
    """The aggregator's means of every step on every worker, [workers, steps, ...]."""
    tx = jaxcomm.all_reduce_mean(codec)

    def worker(xs: jax.Array) -> jax.Array:
        _, means = jax.lax.scan(lambda s, x: tx.update(x, s)[::-1], tx.init(xs[0]), xs)
        return means

    return np.asarray(jax.jit(jax.vmap(worker, in_axes=1, axis_name="data"))(jnp.asarray(given)))


@pytest.mark.parametrize("feedback", [False, True])
def test_is_power_sgd(feedback: bool) -> None:
    given = updates((12, 7))
    plain = low_rank()(2, drawn=0)
    start = np.asarray(plain.init(jnp.zeros((12, 7))).shared, np.float64)
    expected = power_sgd(given.astype(np.float64), start, feedback=feedback)
    # The page says why PowerSGD itself claims no bound, so feedback would refuse it.
    codec = error_feedback(plain.replace(claims=Claims(bounded=True))) if feedback else plain
    for means in means_of(codec, given):
        np.testing.assert_allclose(means, expected, atol=1e-4)


def test_feedback_refuses_power_sgd_as_published() -> None:
    with pytest.raises(ValueError, match="no bound is known"):
        means_of(error_feedback(low_rank()(2, drawn=0)), updates((12, 7)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(), (5,), (1, 4)])
def test_a_single_row_is_sent_whole(shape: tuple[int, ...]) -> None:
    given = updates(shape)
    for means in means_of(error_feedback(low_rank()(2)), given):
        np.testing.assert_allclose(means, given.mean(axis=1), rtol=1e-5, atol=1e-6)


def test_each_worker_keeps_the_part_that_is_claimed_though_updates_cancel() -> None:
    codec, x = low_rank()(1), jnp.asarray(updates((6, 4))[0, 0])
    claimed = codec.claims.contraction(x.size, 2)
    # What two workers have adds up to 0: they agree on nothing but the column that is drawn.
    statistics = jax.tree.map(jnp.zeros_like, codec.measure(Context.of(x, memory=codec.init(x)), x))

    def compression_error(key: jax.Array) -> jax.Array:
        context = Context.of(x, memory=codec.init(x)).replace(statistics=statistics, workers=2)
        context = context.replace(coins=context.coins._replace(public=key))
        payload, _ = codec.encode(context, x)
        return jnp.sum((codec.decode(context.received(), payload) - x) ** 2) / jnp.sum(x**2)

    parts = np.asarray(
        jax.jit(jax.vmap(compression_error))(jax.random.split(jax.random.key(1), 2000))
    )
    assert parts.mean() + 5 * parts.std() / 2000**0.5 <= 1 - claimed


@pytest.mark.slow
def test_keeps_the_laws_of_codecs() -> None:
    check_codec(of_matrices(low_rank()(2), columns=6))
