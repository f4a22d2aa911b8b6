"""Attention of JAX, and kernels in a loss."""

import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_attention

from tests.training.losses._table import (
    ROWS,
    TIME,
    WIDTH,
    Loss,
    draw,
    listed,
    third_party,
)


def of_attention(
    attention: Callable[..., jax.Array], time: int, width: int, heads_first: bool = False
) -> Loss:
    """Attention of two heads; queries, keys and values are [rows, time, heads, width]."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        parts = jnp.reshape(x @ params, (*x.shape[:2], 3, 2, width))
        parts = jnp.moveaxis(parts, 2, 0)
        return jnp.mean(attention(*(jnp.swapaxes(parts, 2, 3) if heads_first else parts)) ** 2)

    return Loss(third_party(loss), 0.1 * draw(WIDTH, 6 * width), draw(ROWS, time, WIDTH))


@listed()
def dot_product_attention() -> Loss:
    return of_attention(functools.partial(jax.nn.dot_product_attention, is_causal=True), TIME, 4)


@listed()
def pallas_attention_of_gpu() -> Loss:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from jax.experimental.pallas.ops.gpu import attention as module  # It names its successor.

    options = {"segment_ids": None, "causal": True, "interpret": True, "num_stages": 1}
    return of_attention(functools.partial(module.mha, **options), 16, 16)


def interpreted() -> Any:
    """Kernels that have no such option run in the interpreter that `jax.vmap` takes too."""
    call = functools.partial(pl.pallas_call, interpret=True)
    return mock.patch.object(pl, "pallas_call", call)


@jax.custom_vjp
def flash_attention(*parts: jax.Array) -> jax.Array:
    """JAX's causal attention for TPUs, of 128 steps of time at least, with its own gradient."""
    return _forward(*parts)[0]


def _forward(*parts: jax.Array) -> Any:
    with interpreted():
        return jax.vjp(functools.partial(tpu_attention.flash_attention, causal=True), *parts)


def _backward(pullback: Any, slope: jax.Array) -> Any:
    with interpreted():
        return pullback(slope)


flash_attention.defvjp(_forward, _backward)


@listed()
def pallas_attention_of_tpu() -> Loss:
    return of_attention(flash_attention, 128, 8, heads_first=True)


@listed()
def pallas_kernel() -> Loss:
    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.tanh(x[...])

    @jax.custom_vjp
    def tanh(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    def forward(x: jax.Array) -> Any:
        out = tanh(x)
        return out, out

    tanh.defvjp(forward, lambda out, slope: (slope * (1 - out**2),))
    loss = lambda w, x: jnp.mean(jnp.sum(tanh(x @ w), axis=1))  # noqa: E731
    return Loss(loss, draw(WIDTH, 4), draw(ROWS, WIDTH))
