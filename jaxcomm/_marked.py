"""Properties of a codec's functions that let aggregators and feedback read large arrays less often.

Each property belongs to the function and not to the codec. A wrapper with another function
therefore cannot keep a stale property.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Context, PyTree

FEW_COLUMNS = 6
"""Up to this number of columns, XLA for CPUs multiplies factors fastest without a dot."""


@dataclasses.dataclass(frozen=True)
class Marked:
    """A `measure` or `encode` with known properties.

    Attributes:
      function: The function itself.
      linear: Whether the result is linear in `x`, for a fixed context. Feedback then applies the
        function to the update and to the residual separately. Their sum would be one more array.
      exposes_nonfinite: Whether a NaN or an infinity in `x` makes the result non-finite, if the
        result is not empty. The finite check then reads the result instead of `x`.
      code: The name of a variable-length code in which an `encode` sends, for error messages.
    """

    function: Callable[[Context, jax.Array], PyTree]
    linear: bool = False
    exposes_nonfinite: bool = False
    code: str = ""

    def __call__(self, context: Context, x: jax.Array) -> PyTree:
        """The result of the function."""
        return self.function(context, x)


_Mark = TypeVar("_Mark")


def mark_of(function: Callable[..., Any], kind: type[_Mark]) -> _Mark | None:
    """The outermost mark of a kind around the function; `None` if there is none."""
    inner: Any = function
    while inner is not None and not isinstance(inner, kind):
        inner = getattr(inner, "function", None)
    return inner


def is_linear(function: Callable[..., Any]) -> bool:
    """Whether the function is marked as linear in `x`."""
    return isinstance(function, Marked) and function.linear


def exposes_nonfinite(function: Callable[..., Any]) -> bool:
    """Whether the function is marked as non-finite for a non-finite `x`."""
    return isinstance(function, Marked) and function.exposes_nonfinite


def code_of(encode: Callable[..., Any]) -> str:
    """The name of the variable-length code in which the function sends; empty for none."""
    return encode.code if isinstance(encode, Marked) else ""


def combine_of(codec: Codec) -> str:
    """How payloads combine, for the error message of a function that cannot combine them so."""
    code = code_of(codec.encode)
    reason = f": words of the variable-length code `{code}` cannot be added" if code else ""
    return f"`combine`={codec.combine!r}{reason}"


@dataclasses.dataclass(frozen=True)
class FactoredDecode:
    r"""The `decode` of a codec whose payload decodes to a product of thin factors.

    .. math:: \mathrm{decode}(\text{context}, \text{payload}) = L R^T

    XLA fuses a product of few columns into the operations that read it, so that the product is
    never written to memory.

    Attributes:
      factors: `(context, payload) -> (left, right)`, float32[rows, k] and float32[columns, k]; or
        `None` if the payload decodes without factors.
      exact: `(context, payload) -> x`, used if there are no factors.
    """

    factors: Callable[[Context, PyTree], tuple[jax.Array, jax.Array] | None]
    exact: Callable[[Context, PyTree], jax.Array]

    def __call__(self, context: Context, payload: PyTree) -> jax.Array:
        """The dense array."""
        factors = self.factors(context, payload)
        if factors is None:
            return self.exact(context, payload)
        return product_of(*factors).reshape(context.shape)


@dataclasses.dataclass(frozen=True)
class MappedDecode:
    r"""The `decode` of a codec that maps what another codec decodes to, linearly.

    .. math:: \mathrm{decode}(\text{context}, \text{payload}) = M\, \mathrm{inner}(\text{context}',
              \text{payload})

    The mean of several payloads then takes one product with :math:`M`, and not one each.

    Attributes:
      inner: The `decode` of the other codec.
      within: The context of the other codec, from that of this one.
      back: `(array, shape) -> float32[shape]`, the map, equal on all workers.
    """

    inner: Callable[[Context, PyTree], jax.Array]
    within: Callable[[Context], Context]
    back: Callable[[jax.Array, tuple[int, ...]], jax.Array]

    def __call__(self, context: Context, payload: PyTree) -> jax.Array:
        """The mapped array."""
        return self.back(self.inner(self.within(context), payload), context.shape)


@dataclasses.dataclass(frozen=True)
class ResidualDecode:
    r"""The `decode` of a codec that can encode and compute the residual in one pass.

    .. math:: e' = x + e - \mathrm{decode}(\mathrm{encode}(x + e))

    It is valid for one pair of functions. A wrapper that replaces `decode` replaces this object; if
    it replaces `encode`, that is another one than `encode` here, and `with_residual_of` sees it.

    Attributes:
      decode: `(context, payload) -> x`, the function itself.
      encode: The function whose payloads it decodes.
      with_residual: `(context, x, e, divisor) -> (payload, memory, e')`, where receivers divide
        what they decode by the float `divisor`, and :math:`e'` has the dtype of `e`.
      add: `(context, payload, total, divisor) -> total + decode(context, payload) / divisor`, all
        in one pass; `None` if it has no such function.
    """

    decode: Callable[[Context, PyTree], jax.Array]
    encode: Callable[..., Any]
    with_residual: Callable[[Context, jax.Array, jax.Array, float], tuple[PyTree, Any, jax.Array]]
    add: Callable[[Context, PyTree, jax.Array, float], jax.Array] | None = None

    def __call__(self, context: Context, payload: PyTree) -> jax.Array:
        """The dense array."""
        return self.decode(context, payload)


def with_residual_of(codec: Codec) -> Callable[..., Any] | None:
    """The codec's `with_residual`; `None` if it has none for its `encode`."""
    decode = codec.decode
    if isinstance(decode, ResidualDecode) and decode.encode is codec.encode:
        return decode.with_residual
    return None


def add_of(
    decode: Callable[[Context, PyTree], jax.Array],
) -> Callable[[Context, PyTree, jax.Array, float], jax.Array] | None:
    """The `add` of a codec's `decode`; `None` if it has none."""
    return decode.add if isinstance(decode, ResidualDecode) else None


def product_of(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right.T` in full float32, `[rows, columns]`."""
    if left.shape[1] > FEW_COLUMNS:
        return jnp.matmul(left, right.T, precision="highest")
    # Without the barrier, XLA would compute the factors again for each coordinate.
    left, right = jax.lax.optimization_barrier((left, right))
    columns = range(left.shape[1])
    terms = [left[:, column, None] * right[None, :, column] for column in columns]
    return sum(terms[1:], terms[0])


def bound_of(left: jax.Array, right: jax.Array) -> jax.Array:
    """A bound on the magnitudes of `left @ right.T`, float32[], without computing it."""
    left, right = (jnp.max(jnp.abs(factor), axis=0) for factor in (left, right))
    return jnp.sum(left * right)


def factors_of(
    codec: Codec, context: Context, payload: PyTree
) -> tuple[jax.Array, jax.Array] | None:
    """The factors whose product the payload decodes to; `None` if it has none."""
    decode = codec.decode
    return decode.factors(context, payload) if isinstance(decode, FactoredDecode) else None
