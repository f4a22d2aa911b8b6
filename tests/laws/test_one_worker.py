"""A single worker gets its decoded update."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Keys
from tests.cases import CASES, Case
from tests.codecs import context_of
from tests.workers import aggregate

# Their bases follow keys continuously: tests/compression/low_rank/test_alternating.py.
PROJECTED = {"power_sgd_alternate", "power_sgd_factor_codec"}
# The largest of the drawn coordinates is the scale, so a coordinate has more than two values.
SCALED_BY_DRAWN = {"chain", "chain_summed"}
CODED = [c for c in CASES if c.codec and c.name not in PROJECTED | SCALED_BY_DRAWN]


@pytest.mark.parametrize("case", CODED, ids=repr)
def test_one_worker(case: Case) -> None:
    codec = case.codec
    x = jnp.asarray(np.random.default_rng(6).normal(size=9), jnp.float32)

    def round_trip(key: jax.Array) -> jax.Array:
        context = context_of(codec, x, 0).replace(keys=Keys(key, key))
        payload, _ = codec.encode(context, x)
        return codec.decode(context.received(), payload)

    some = np.asarray(jax.jit(jax.vmap(round_trip))(jax.random.split(jax.random.key(1), 200)))
    lowest, highest = some.min(axis=0), some.max(axis=0)
    result = aggregate(case.make(), x[None])[0]
    tolerance = 1e-6
    # The keys differ, but each coordinate has the same two possible values.
    assert np.all((np.abs(result - lowest) < tolerance) | (np.abs(result - highest) < tolerance))
