"""Payloads that may be added, or merged, decode to the mean of what each decodes to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Coins
from jaxcomm.compression import blockwise, rotated
from tests.cases import CASES, Case
from tests.codecs import context_of
from tests.slow import slow
from tests.workers import draws, flat, gradients

SUMMABLE = [c for c in CASES if c.integer_sum and c.codec and c.codec.combine == "sum"]


def check_sums(case: Case, workers: int) -> None:
    codec = case.codec
    rng = np.random.default_rng(4)
    xs = rng.normal(size=(workers, 7)).astype(np.float32)
    xs[:, 0] = np.abs(xs).max()  # All workers at the extreme.
    xs = jnp.asarray(xs)
    public = jax.random.key(0)
    contexts = [
        context_of(codec, x, Coins(public, jax.random.key(i + 1)), workers=workers)
        for i, x in enumerate(xs)
    ]
    measured = [context.agreed for context in contexts]
    combine = {"sum": sum, "max": max}
    agreed = jax.tree.map(lambda kind, *own: combine[kind](own), codec.agree, *measured)
    payloads = [
        codec.encode(context.replace(agreed=agreed), x)[0]
        for context, x in zip(contexts, xs, strict=True)
    ]
    # NumPy adds and wraps in the payload's own dtype, as the wire does.
    total = jax.tree.map(
        lambda *p: jnp.asarray(np.sum([np.asarray(a) for a in p], axis=0, dtype=p[0].dtype)),
        *payloads,
    )
    known = contexts[0].replace(agreed=agreed)
    own = [codec.decode(known.received(), payload) for payload in payloads]
    together = codec.decode(known.received(workers), total)
    np.testing.assert_allclose(together, np.mean(own, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [slow(1), slow(2), 5, 8])
@pytest.mark.parametrize("case", SUMMABLE, ids=repr)
def test_sums(case: Case, workers: int) -> None:
    check_sums(case, workers)


MERGED = [c for c in CASES if c.codec and callable(c.codec.combine)]
WRAPPERS = {
    "blocks": lambda codec: blockwise(codec, 4),
    "rotated": rotated,
    "rotated blocks": lambda codec: blockwise(rotated(codec), 4),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", MERGED, ids=repr)
def test_what_merges_merges_when_wrapped(case: Case, wrapper: str) -> None:
    updates, times = gradients(5), 1000
    sample = draws(jaxcomm.merged_mean("data", WRAPPERS[wrapper](case.codec)), updates, times)
    off = np.abs(sample.mean(axis=0) - flat(updates).mean(axis=0))
    assert np.all(off <= 6 * sample.std(axis=0, ddof=1) / times**0.5 + 1e-6)
