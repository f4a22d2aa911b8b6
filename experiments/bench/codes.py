"""Bytes and seconds of variable-length codes, for a million coordinates on one device.

`python -m experiments.bench.codes` prints one line per update, quantizer and code. Updates are
normal numbers, and the gradient of a network on the digits after 200 steps. All sizes are in bits
per integer, and times in milliseconds.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

HIDDEN, STEPS, BATCH, REPEATS = 900, 200, 256, 7


class Measured(NamedTuple):
    """What a code takes.

    Attributes:
      entropy: Of the integers, each by itself; NaN for indices.
      fixed: What the codec itself sends.
      code: The words of this update, with headers and tables.
      sent: What is sent: the default room, headers and tables.
      fits: Whether the words fit.
      encode: Milliseconds, the least of some.
      decode: The same, of one payload.
    """

    entropy: float
    fixed: float
    code: float
    sent: float
    fits: bool
    encode: float
    decode: float


def updates() -> Mapping[str, Any]:
    """Updates of about a million coordinates, by name."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    sizes = (64, HIDDEN, HIDDEN + 90, 10)
    params = [
        jnp.asarray(random.normal(size=pair) / np.sqrt(pair[0]), jnp.float32)
        for pair in itertools.pairwise(sizes)
    ]

    def loss(params: Any, inputs: Any, labels: Any) -> Any:
        for kernel in params[:-1]:
            inputs = jax.nn.relu(inputs @ kernel)
        logits = inputs @ params[-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    gradient = jax.jit(jax.grad(loss))
    found = {}
    for step in range(STEPS + 1):
        chosen = random.integers(0, len(images), BATCH)
        batch = (images[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int32)
        gradients = gradient(params, *batch)
        if step == STEPS:
            found["gradient of digits"] = jnp.concatenate([g.ravel() for g in gradients])
        params = jax.tree.map(lambda p, g: p - jnp.float32(0.1) * g, params, gradients)
    size = found["gradient of digits"].size
    normal = jnp.asarray(random.normal(size=size), jnp.float32)
    return {"normal": normal, **found}


def codecs() -> Mapping[str, tuple[Any, Mapping[str, Any]]]:
    """The quantizers and sparsifiers, each with its codes."""
    from jaxcomm.compression import blockwise
    from jaxcomm.compression.codes import elias, golomb_rice, rans
    from jaxcomm.compression.quantizers import dither
    from jaxcomm.compression.sparsifiers import top_k

    sparse = blockwise(dither(levels=1, norm="l2"), 512)
    return {
        "7 levels of the largest": (dither(levels=7), {"elias": elias, "rans": rans}),
        "7 levels, blocks of 512": (blockwise(dither(levels=7), 512), {"rans": rans}),
        "1 level, l2, blocks of 512": (sparse, {"golomb_rice": golomb_rice, "rans": rans}),
        "top 1 %": (top_k(ratio=0.01), {"golomb_rice": golomb_rice}),
    }


def _milliseconds(run: Callable[[], Any]) -> float:
    import jax

    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def measure(x: Any, inner: Any, wrap: Any) -> Measured:
    """The code of one codec's integers, for one update."""
    import jax
    import numpy as np

    from jaxcomm import Context
    from jaxcomm.compression.codes import measured_room

    codec = wrap(inner)
    context = Context.of(x, memory=codec.init(x))
    context = context.replace(statistics=codec.measure(context, x))
    encode = jax.jit(lambda context, x: codec.encode(context, x)[0])
    decode = jax.jit(lambda context, payload: codec.decode(context.received(), payload))
    payload = encode(context, x)
    of_inner = jax.jit(lambda context, x: inner.encode(context, x)[0])(context, x)
    integers = inner.fast.integers
    assert integers is not None
    values, rest = integers.split(context, of_inner)
    counts = np.unique(np.asarray(values), return_counts=True)[1] / values.size
    is_gaps = integers.kind == "indices"

    def bits(tree: Any) -> float:
        return 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / float(values.size)

    beside = bits((payload.headers, payload.table))
    decoded = decode(context, payload)
    return Measured(
        entropy=float("nan") if is_gaps else float(-counts @ np.log2(counts)),
        fixed=bits(of_inner) - bits(rest),
        code=measured_room(codec, x[None]) + beside,
        sent=bits(payload.words) + beside,
        fits=not bool(np.isnan(np.asarray(decoded)).any()),
        encode=_milliseconds(lambda: encode(context, x)),
        decode=_milliseconds(lambda: decode(context, payload)),
    )


def main() -> None:
    """Prints the table."""
    columns = "update", "integers", "entropy", "fixed", "code", "length", "sent", "encode", "decode"
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for of_update, x in updates().items():
        for of_codec, (inner, wraps) in codecs().items():
            for name, wrap in wraps.items():
                found = measure(x, inner, wrap)
                sent = f"{found.sent:.2f}" + ("" if found.fits else ", too little")
                entropy = "" if found.entropy != found.entropy else f"{found.entropy:.2f}"
                print(
                    f"| {of_update} | {of_codec} | {entropy} | {found.fixed:.2f} | `{name}` | "
                    f"{found.code:.2f} | {sent} | {found.encode:.0f} | {found.decode:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
