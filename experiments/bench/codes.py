"""Bits and milliseconds of variable-length codes, for a million coordinates on one device.

`python -m experiments.bench.codes` prints one line per update, quantizer and code. Updates are
normal numbers, and the gradient of a network on the digits after 200 steps. Sizes are in bits per
integer: the entropy of the integers (each by itself; none of indices), what the codec itself sends,
the length of the code, and what is sent with the default capacity.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.trainings import draw, first_weights, loss
from experiments.timing import medians
from jaxcomm import Context
from jaxcomm.compression import blockwise
from jaxcomm.compression.codes import elias, golomb_rice, measured_capacity, rans
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k

STEPS, BATCH, REPEATS = 200, 256, 7
COLUMNS = "update", "integers", "code", "entropy", "fixed", "length", "sent", "encode", "decode"
SPARSE = blockwise(dither(levels=1, norm="l2"), 512)
CODECS = (
    ("7 levels of the largest", dither(levels=7), elias),
    ("7 levels of the largest", dither(levels=7), rans),
    ("7 levels, blocks of 512", blockwise(dither(levels=7), 512), rans),
    ("1 level, l2, blocks of 512", SPARSE, golomb_rice),
    ("1 level, l2, blocks of 512", SPARSE, rans),
    ("top 1 %", top_k(ratio=0.01), golomb_rice),
)


def updates() -> dict[str, jax.Array]:
    """Updates of about a million coordinates, by name."""
    random, gradient = np.random.default_rng(0), jax.jit(jax.grad(loss))
    params = first_weights(random, 900, 990)
    for _ in range(STEPS):
        gradients = gradient(params, draw(random, BATCH))
        params = jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g, params, gradients)
    last = jnp.concatenate([each.ravel() for each in gradient(params, draw(random, BATCH))])
    normal = jnp.asarray(random.normal(size=last.size), jnp.float32)
    return {"normal": normal, "gradient of digits": last}


def measure(x: jax.Array, inner: Any, codec: Any) -> Sequence[str]:
    """The numbers of a code of one codec's integers, for one update."""
    context = Context.of(x, memory=codec.init(x))
    context = context.replace(statistics=codec.measure(context, x))
    encode = jax.jit(lambda context, x: codec.encode(context, x)[0])
    decode = jax.jit(lambda context, payload: codec.decode(context.received(), payload))
    payload = encode(context, x)
    plain = jax.jit(lambda context, x: inner.encode(context, x)[0])(context, x)
    integers = inner.fast.integers
    values, rest = integers.split(context, plain)
    shares = np.unique(np.asarray(values), return_counts=True)[1] / values.size

    def bits(tree):
        return 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / values.size

    beside = bits((payload.headers, payload.table))
    seconds = medians(
        {"encode": lambda: encode(context, x), "decode": lambda: decode(context, payload)}, REPEATS
    )
    return (
        "" if integers.kind == "indices" else f"{-shares @ np.log2(shares):.2f}",
        f"{bits(plain) - bits(rest):.2f}",
        f"{measured_capacity(codec, x[None]) + beside:.2f}",
        f"{bits(payload.words) + beside:.2f}",
        *(f"{1e3 * each:.0f}" for each in seconds.values()),
    )


if __name__ == "__main__":
    print(" | ".join(COLUMNS))
    for update, x in updates().items():
        for name, inner, code in CODECS:
            cells = (update, name, code.__name__, *measure(x, inner, code(inner)))
            print(" | ".join(cells), flush=True)
