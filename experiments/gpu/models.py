"""The gradients of ResNet-50, and a transformer of 125 million parameters in bfloat16."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Shapes = Mapping[str, tuple[int, ...]]
Params = Mapping[str, jax.Array]


class Sizes(NamedTuple):
    """Sizes of a transformer; the defaults are those of GPT-2 small, with a padded vocabulary."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50304
    length: int = 1024


SMALL = Sizes(layers=2, width=32, heads=2, words=64, length=16)
"""For a rehearsal."""


def resnet50() -> Shapes:
    """Kernels and the parameters of normalizations: 161 leaves, 25,557,032 coordinates."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, size: int, inputs: int, outputs: int) -> None:
        shapes[f"{name}_kernel"] = (size, size, inputs, outputs)
        shapes[f"{name}_scale"] = shapes[f"{name}_bias"] = (outputs,)

    convolution("stem", 7, 3, 64)
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            own = f"stage_{stage}_block_{block}"
            convolution(f"{own}_first", 1, inputs, width)
            convolution(f"{own}_second", 3, width, width)
            convolution(f"{own}_third", 1, width, 4 * width)
            if block == 0:
                convolution(f"{own}_shortcut", 1, inputs, 4 * width)
            inputs = 4 * width
    return {**shapes, "dense_kernel": (inputs, 1000), "dense_bias": (1000,)}


def transformer(sizes: Sizes) -> Shapes:
    """The parameters of a decoder that shares its embedding with its output."""
    width = sizes.width
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (sizes.words, width),
        "positions": (sizes.length, width),
        "final_scale": (width,),
        "final_shift": (width,),
    }
    for layer in range(sizes.layers):
        own = f"layer_{layer:02}"
        for name, (rows, columns) in {
            "qkv": (width, 3 * width),
            "mix": (width, width),
            "up": (width, 4 * width),
            "down": (4 * width, width),
        }.items():
            shapes[f"{own}_{name}"] = (rows, columns)
            shapes[f"{own}_{name}_bias"] = (columns,)
        for name in ("attention", "dense"):
            shapes[f"{own}_{name}_scale"] = shapes[f"{own}_{name}_shift"] = (width,)
    return shapes


def count(shapes: Shapes) -> int:
    """The number of coordinates."""
    return sum(map(math.prod, shapes.values()))


def drawn(shapes: Shapes, scale: float = 1e-3) -> dict[str, np.ndarray]:
    """Normal float32 arrays of these shapes."""
    random = np.random.default_rng(0)
    return {
        name: np.float32(scale) * random.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }


def weights(sizes: Sizes) -> dict[str, np.ndarray]:
    """The first weights of the transformer: matrices of deviation 0.02, scales of one."""
    found = drawn(transformer(sizes), 0.02)
    for name, value in found.items():
        if value.ndim == 1:
            value[...] = 1.0 if name.endswith("_scale") else 0.0
    return found


def tokens(sizes: Sizes, rows: int) -> np.ndarray:
    """int32[rows, length + 1], drawn uniformly."""
    shape = (rows, sizes.length + 1)
    return np.random.default_rng(1).integers(0, sizes.words, shape, np.int32)


def _norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.mean(centered**2, axis=-1, keepdims=True) + 1e-5)
    moved = scaled * params[f"{name}_scale"][None, None] + params[f"{name}_shift"][None, None]
    return moved.astype(x.dtype)


def loss_of(sizes: Sizes, attention: str) -> Callable[[Params, jax.Array], jax.Array]:
    """The mean cross-entropy of each next word. Weights are float32, products bfloat16.

    Args:
      sizes: Those of the transformer.
      attention: An implementation of `jax.nn.dot_product_attention`, "cudnn" or "xla".
    """

    def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
        kernel, bias = (params[key].astype(jnp.bfloat16) for key in (name, f"{name}_bias"))
        return x @ kernel + bias[None, None]

    def loss(params: Params, batch: jax.Array) -> jax.Array:
        inputs, labels = batch[:, :-1], batch[:, 1:]
        rows, length = inputs.shape
        embedding = params["embedding"].astype(jnp.bfloat16)
        x = embedding[inputs] + params["positions"].astype(jnp.bfloat16)[None]
        for layer in range(sizes.layers):
            own = f"layer_{layer:02}"
            qkv = dense(params, f"{own}_qkv", _norm(params, f"{own}_attention", x))
            qkv = qkv.reshape(rows, length, 3, sizes.heads, -1)
            mixed = jax.nn.dot_product_attention(
                *(qkv[:, :, i] for i in range(3)), is_causal=True, implementation=attention
            )
            x = x + dense(params, f"{own}_mix", mixed.reshape(rows, length, -1))
            hidden = dense(params, f"{own}_up", _norm(params, f"{own}_dense", x))
            x = x + dense(params, f"{own}_down", jax.nn.gelu(hidden, approximate=True))
        logits = (_norm(params, "final", x) @ embedding.T).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    return loss


def gradients(rehearse: bool) -> dict[str, Shapes]:
    """The gradients that codecs are timed on, the larger model first."""
    if rehearse:
        few = {"kernel": (3, 3, 8, 16), "dense": (16, 10), "bias": (10,)}
        return {"transformer": transformer(SMALL), "resnet50": few}
    return {"transformer": transformer(Sizes()), "resnet50": resnet50()}
