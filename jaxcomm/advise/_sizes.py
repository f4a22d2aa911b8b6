"""A model that is known by its number of parameters only."""

import math
import re

import jax
import jax.numpy as jnp

_COUNT = re.compile(r"([0-9.]{1,20}(?:e[0-9]{1,2})?)([kmbt]?)")
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
LAYERS = 12
MOST = 10**12
_MOST_OF_LEAF = 2**31 - 1  # What codecs support.


def parse_count(text: str) -> int:
    """A number of parameters, such as 125M or 1.3B.

    Raises:
      ValueError: If the text is no such number.
    """
    found = _COUNT.fullmatch(text.strip().lower())
    try:
        count = float(found[1]) * _FACTORS[found[2]] if found else math.nan
    except ValueError:
        count = math.nan
    if not 1 <= count <= MOST:
        raise ValueError(f"`params` must be a number such as 125M or 1.3B, got {text!r}.")
    return round(count)


def shapes_of_count(count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Square float32 matrices, and a vector of what is left."""
    layers = max(LAYERS, math.ceil(count / _MOST_OF_LEAF))
    side = math.isqrt(count // layers)
    shapes = {f"matrix_{i}": (side, side) for i in range(layers if side else 0)}
    left = count - len(shapes) * side**2
    found = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return {**found, "vector": jax.ShapeDtypeStruct((left,), jnp.float32)} if left else found
