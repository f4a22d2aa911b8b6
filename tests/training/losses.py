"""Losses that `jax.jit(jax.value_and_grad(loss))` takes: a step has to take them too."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import sparse
from jax.experimental.ode import odeint
from jax.experimental.pallas.ops.tpu import flash_attention as tpu_attention

ROWS, TIME, WIDTH, CLASSES = 16, 4, 3, 5


class Loss(NamedTuple):
    """A loss `(params, batch) -> value`, and what it is called with in addition.

    With `model_state` it is `(params, model_state, batch) -> (value, model_state)`. With `key`, it
    takes a key as its last argument. `is_mean` tells whether it is a mean over the rows of `batch`.
    """

    call: Callable[..., Any]
    params: Any
    batch: Any
    model_state: Any = None
    key: bool = False
    is_mean: bool = True


LOSSES: dict[str, Callable[[], Loss]] = {}
WITH_STATE: set[str] = set()
WITH_KEY: set[str] = set()


def listed(*, key: bool = False, model_state: bool = False, is_mean: bool = True) -> Any:
    """Adds a loss to the table: whoever reads the names builds no model."""

    def add(make: Callable[[], Loss]) -> Callable[[], Loss]:
        name = make.__name__
        WITH_KEY.update([name] if key else [])
        WITH_STATE.update([name] if model_state else [])
        LOSSES[name] = functools.cache(lambda: make()._replace(key=key, is_mean=is_mean))
        return LOSSES[name]

    return add


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def labels(*shape: int, classes: int = CLASSES) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, classes, size=shape), jnp.int32)


def sequences() -> tuple[jax.Array, jax.Array]:
    return draw(ROWS, TIME, WIDTH), draw(ROWS, seed=2)


def third_party(call: Callable[..., Any]) -> Callable[..., Any]:
    """Libraries promote dtypes and ranks where this project's tests do not allow it."""

    @functools.wraps(call)
    def lenient(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return call(*args)

    return lenient


def square_error(apply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The loss of outputs [rows, time, width] whose last step sums to the target."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((jnp.sum(apply(params, x)[:, -1], axis=-1) - y) ** 2)

    return third_party(loss)


def of_linen(module: nn.Module) -> Loss:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = module.init(jax.random.key(0), sequences()[0])
    return Loss(square_error(module.apply), params, sequences())


@listed()
def linen_lstm() -> Loss:
    return of_linen(nn.RNN(nn.LSTMCell(4)))


@listed()
def linen_gru() -> Loss:
    return of_linen(nn.RNN(nn.GRUCell(4)))


@listed()
def linen_bidirectional() -> Loss:
    return of_linen(nn.Bidirectional(nn.RNN(nn.SimpleCell(4)), nn.RNN(nn.SimpleCell(4))))


@listed()
def linen_attention() -> Loss:
    return of_linen(nn.MultiHeadAttention(num_heads=2, qkv_features=4))


@listed()
def linen_convolution() -> Loss:
    return of_linen(nn.Sequential([nn.Conv(4, (3,)), nn.gelu, nn.LayerNorm(), nn.Dense(2)]))


@listed(model_state=True, is_mean=False)
def linen_batch_norm() -> Loss:
    model = nn.Sequential(
        [nn.Dense(4), nn.BatchNorm(False, momentum=0.9, epsilon=0.1), nn.Dense(1)]
    )
    variables = model.init(jax.random.key(0), draw(2, WIDTH))

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        x, y = batch
        variables = {"params": params, "batch_stats": statistics}
        out, new = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean((out[:, 0] - y) ** 2), new["batch_stats"]

    batch = draw(ROWS, WIDTH), draw(ROWS, seed=2)
    return Loss(third_party(loss), variables["params"], batch, variables["batch_stats"])


@listed()
def nnx_rnn() -> Loss:
    model = nnx.RNN(nnx.GRUCell(WIDTH, 4, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, jax.tree.map(jnp.copy, rest))(x)

    return Loss(square_error(apply), params, sequences())


@listed(model_state=True, is_mean=False)
def nnx_batch_norm() -> Loss:
    norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=nnx.Rngs(0))
    graph, params, statistics = nnx.split(norm, nnx.Param, nnx.BatchStat)

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        # Variables belong to the trace in which they were made.
        norm = nnx.merge(graph, params, jax.tree.map(lambda x: x, statistics))
        value = jnp.mean(jnp.tanh(norm(batch)) ** 2)
        return value, nnx.state(norm, nnx.BatchStat)

    return Loss(third_party(loss), params, draw(ROWS, WIDTH), statistics)


@listed()
def haiku_lstm() -> Loss:
    def unrolled(x: jax.Array) -> jax.Array:
        core = hk.LSTM(4)
        return hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)[0]

    model = hk.without_apply_rng(hk.transform(unrolled))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), sequences()[0])
    return Loss(square_error(model.apply), params, sequences())


def of_equinox(module: Any, apply: Callable[[Any, jax.Array], jax.Array]) -> Loss:
    params, rest = eqx.partition(module, eqx.is_inexact_array)
    return Loss(
        square_error(lambda params, x: jax.vmap(lambda x: apply(eqx.combine(params, rest), x))(x)),
        params,
        sequences(),
    )


@listed()
def equinox_gru() -> Loss:
    def apply(cell: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, x: (cell(x, h),) * 2, jnp.zeros(4), x)[1]

    return of_equinox(eqx.nn.GRUCell(WIDTH, 4, key=jax.random.key(0)), apply)


@listed()
def equinox_lstm() -> Loss:
    def apply(cell: Any, x: jax.Array) -> jax.Array:
        def body(carry: Any, x: jax.Array) -> Any:
            new = cell(x, carry)
            return new, new[0]

        return lax.scan(body, (jnp.zeros(4), jnp.zeros(4)), x)[1]

    return of_equinox(eqx.nn.LSTMCell(WIDTH, 4, key=jax.random.key(0)), apply)


@listed()
def equinox_attention() -> Loss:
    attention = eqx.nn.MultiheadAttention(1, WIDTH, key=jax.random.key(0))
    return of_equinox(attention, lambda attention, x: attention(x, x, x))


@listed()
def equinox_convolution() -> Loss:
    layer = eqx.nn.Conv1d(WIDTH, 4, 3, padding=1, key=jax.random.key(0))
    return of_equinox(layer, lambda layer, x: jnp.tanh(layer(x.T).T))


@listed(model_state=True, is_mean=False)
def equinox_batch_norm() -> Loss:
    # It averages over an axis of `jax.vmap`.
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(WIDTH, "rows", mode="batch")
    params, rest = eqx.partition(norm, eqx.is_inexact_array)

    def loss(params: Any, state: Any, batch: jax.Array) -> Any:
        norm = jax.vmap(eqx.combine(params, rest), (0, None), (0, None), axis_name="rows")
        out, state = norm(batch, state)
        return jnp.mean(jnp.tanh(out) ** 2), state

    return Loss(third_party(loss), params, draw(ROWS, WIDTH), state)


@listed()
def ctc() -> Loss:
    targets = labels(ROWS, 2, classes=CLASSES - 1) + 1

    def loss(params: Any, batch: Any) -> jax.Array:
        x, targets = batch
        logits, none = x @ params, jnp.zeros(x.shape[:2])
        losses = optax.ctc_loss(logits, none, targets, jnp.zeros(targets.shape))
        return jnp.mean(losses)

    return Loss(third_party(loss), draw(WIDTH, CLASSES), (sequences()[0], targets))


@listed()
def integer_labels() -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        logits = batch["x"] @ params["w"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    batch = {"x": draw(ROWS, WIDTH), "y": labels(ROWS)}
    return Loss(loss, {"w": draw(WIDTH, CLASSES), "unused": jnp.ones(2)}, batch)


@listed()
def hinge() -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean(optax.hinge_loss(x @ params, y))

    return Loss(loss, draw(WIDTH), (draw(ROWS, WIDTH), jnp.sign(draw(ROWS, seed=2))))


def by_heads(params: Any, x: jax.Array, width: int = 4) -> tuple[jax.Array, ...]:
    """Queries, keys and values of 2 heads, [rows, time, heads, width]."""
    split = jnp.reshape(x @ params, (*x.shape[:2], 3, 2, width))
    return split[:, :, 0], split[:, :, 1], split[:, :, 2]


@listed()
def dot_product_attention() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.dot_product_attention(*by_heads(params, x), is_causal=True) ** 2)

    return Loss(third_party(loss), draw(WIDTH, 24), sequences()[0])


def of_attention(
    attention: Callable[..., jax.Array], time: int, width: int, heads_first: bool
) -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        parts = by_heads(params, x, width)
        if heads_first:
            parts = tuple(jnp.swapaxes(part, 1, 2) for part in parts)
        return jnp.mean(attention(*parts) ** 2)

    return Loss(third_party(loss), 0.1 * draw(WIDTH, 6 * width), draw(ROWS, time, WIDTH))


@listed()
def pallas_attention_of_gpu() -> Loss:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from jax.experimental.pallas.ops.gpu import attention as module  # It names its successor.

    attention = functools.partial(
        module.mha, segment_ids=None, causal=True, interpret=True, num_stages=1
    )
    return of_attention(attention, 16, 16, heads_first=False)


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


@listed()
def differential_equation() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        field = lambda y, t, w: jnp.tanh(y @ w) - 0.1 * t  # noqa: E731
        end = lambda x: odeint(field, x, jnp.linspace(0.0, 1.0, 2), params, rtol=1e-6)[-1]  # noqa: E731
        return jnp.mean(jax.vmap(end)(x) ** 2)

    return Loss(third_party(loss), draw(WIDTH, WIDTH), draw(ROWS, WIDTH))


@listed(is_mean=False)
def custom_vjp() -> Loss:
    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, slope: (jnp.clip(slope, -0.01, 0.01),))
    loss = lambda w, x: jnp.mean(jnp.tanh(clipped(w) @ x.T))  # noqa: E731
    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def custom_jvp() -> Loss:
    @jax.custom_jvp
    def softplus(x: jax.Array) -> jax.Array:
        return jnp.logaddexp(x, jnp.zeros_like(x))

    softplus.defjvps(lambda slope, out, x: slope * (1 - jnp.exp(-out)))
    return Loss(lambda w, x: jnp.mean(softplus(x @ w)), draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def checkpointed_layers() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return Loss(loss, draw(3, WIDTH, WIDTH), draw(ROWS, WIDTH))


@listed()
def map_of_rows() -> Loss:
    loss = lambda w, x: jnp.mean(lax.map(lambda row: jnp.tanh(row @ w) ** 2, x))  # noqa: E731
    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def associative_scan() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        decay = jnp.broadcast_to(jax.nn.sigmoid(params), x.shape)
        return jnp.mean(lax.associative_scan(combine, (decay, x), axis=1)[1] ** 2)

    return Loss(third_party(loss), draw(WIDTH), sequences()[0])


@listed()
def fori_loop() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        body = lambda i, total: total + jnp.sin(jnp.float32(i) * params) @ x.mean(axis=0)  # noqa: E731
        return lax.fori_loop(0, 3, body, 0.0)

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed(is_mean=False)
def loop_without_a_gradient() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        # The largest eigenvalue by iterations whose number depends on the data.
        def body(carry: Any) -> Any:
            v, _, i = carry
            new = matrix @ v
            return new / jnp.linalg.norm(new), jnp.linalg.norm(new - v), i + 1

        matrix = lax.stop_gradient(x.T @ x)
        going = lambda carry: (carry[1] > 1e-2) & (carry[2] < 50)  # noqa: E731
        v, _, _ = lax.while_loop(going, body, (jnp.ones(WIDTH), jnp.float32(jnp.inf), 0))
        return jnp.mean((x @ params - x @ lax.stop_gradient(v)) ** 2)

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def constant_carry() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        body = lambda total, row: (total + jnp.tanh(row @ params), None)  # noqa: E731
        return lax.scan(body, jnp.float32(0), x)[0] / len(x)

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed(is_mean=False)
def constant_branch() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        each = lambda row: jnp.sum(params * row)  # noqa: E731
        first = lax.cond(x[0, 0] > 0, each, lambda row: jnp.float32(0), x[0])
        return first + lax.switch(labels(1)[0] % 3, [lambda: 1.0, lambda: 2.0, lambda: each(x[1])])

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def fourier() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        filtered = jnp.fft.irfft(jnp.fft.rfft(x) * lax.complex(params, params**2), n=8)
        return jnp.mean(jnp.abs(jnp.fft.fft(filtered)) ** 2)

    return Loss(third_party(loss), draw(5), draw(ROWS, 8))


@listed(is_mean=False)
def sorting() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        score = x @ params
        ranked = jnp.sort(score)[len(x) // 2 :]
        return jnp.mean(ranked) + lax.top_k(score, 1)[0][0] + score[jnp.argsort(x[:, 0])[0]]

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def host_callback() -> Loss:
    @jax.custom_jvp
    def sine(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        of_host = lambda x: np.sin(np.asarray(x))  # noqa: E731
        return jax.pure_callback(of_host, shape, x, vmap_method="expand_dims")

    sine.defjvps(lambda slope, out, x: slope * jnp.cos(x))
    return Loss(lambda w, x: jnp.mean(sine(x @ w) ** 2), draw(WIDTH), draw(ROWS, WIDTH))


@listed(is_mean=False)
def segments() -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, group = batch
        return jnp.mean(jax.ops.segment_sum(x @ params, group, CLASSES) ** 2)

    return Loss(loss, draw(WIDTH), (draw(ROWS, WIDTH), labels(ROWS)))


@listed()
def embedding() -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        vectors = params["table"][batch].mean(axis=1)
        return jnp.mean(jnp.tanh(vectors @ params["table"].T) ** 2) + params["bias"] ** 2

    params = {"table": draw(CLASSES, WIDTH), "bias": jnp.float32(0.5)}
    return Loss(loss, params, labels(ROWS, TIME))


@listed()
def meta_learning() -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        task = lambda w, x, y: jnp.mean((jnp.tanh(x @ w) - y) ** 2)  # noqa: E731

        def of_row(x: jax.Array, y: jax.Array) -> jax.Array:
            adapted = lax.fori_loop(0, 2, lambda i, w: w - 0.1 * jax.grad(task)(w, x, y), params)
            return task(adapted, x[::-1], y)

        return jnp.mean(jax.vmap(of_row)(*batch))

    return Loss(loss, draw(WIDTH), (sequences()[0], draw(ROWS, TIME, seed=2)))


@listed()
def gradient_penalty() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        critic = lambda x: jnp.sum(jnp.tanh(x @ params))  # noqa: E731
        slopes = jax.vmap(jax.grad(critic))(x)
        return jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)

    return Loss(loss, draw(WIDTH, 4), draw(ROWS, WIDTH))


@listed(is_mean=False)
def hessian_penalty() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        inner = lambda w: jnp.mean(jnp.tanh(x @ w))  # noqa: E731
        return inner(params) + jnp.trace(jax.hessian(inner)(params)) ** 2

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed(key=True, is_mean=False)
def dropout() -> Loss:
    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        first, second = jax.random.split(key)
        kept = jax.random.bernoulli(first, 0.5, x.shape)
        out = jnp.where(kept, 2 * x, 0) @ params
        return jnp.mean(out**2 + jax.random.normal(second, out.shape))

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed(key=True, model_state=True, is_mean=False)
def dropout_in_a_scan() -> Loss:
    def loss(params: Any, statistics: Any, x: jax.Array, key: jax.Array) -> Any:
        def body(carry: Any, w: jax.Array) -> Any:
            x, key = carry
            key, own = jax.random.split(key)
            x = jnp.where(jax.random.bernoulli(own, 0.5, x.shape), jnp.tanh(x @ w), 0)
            return (x, key), jnp.mean(x)

        (x, _), means = lax.scan(body, (x, key), params)
        return jnp.mean(x**2), 0.9 * statistics + 0.1 * means

    params, batch = draw(2, WIDTH, WIDTH), draw(ROWS, WIDTH)
    return Loss(loss, params, batch, model_state=jnp.zeros(2))


@listed()
def chunked_cross_entropy() -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch

        def chunk(total: jax.Array, rows: Any) -> Any:
            logits = rows[0] @ params
            each = optax.softmax_cross_entropy_with_integer_labels(logits, rows[1])
            return total + jnp.sum(each), None

        chunks = jax.tree.map(lambda a: jnp.reshape(a, (-1, 2, *a.shape[1:])), (x, y))
        return lax.scan(jax.checkpoint(chunk), jnp.zeros(()), chunks)[0] / len(x)

    return Loss(loss, draw(WIDTH, CLASSES), (draw(ROWS, WIDTH), labels(ROWS)))


@listed(is_mean=False)
def linear_algebra() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        matrix = params @ params.T + x.T @ x / len(x) + jnp.eye(WIDTH)
        solved = jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0], maxiter=5)[0]
        return jnp.linalg.slogdet(matrix)[1] + jnp.sum(solved**2)

    return Loss(third_party(loss), draw(WIDTH, WIDTH), draw(ROWS, WIDTH))


@listed(is_mean=False)
def axis_of_its_own() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        # As equinox and haiku normalize over a batch: `jax.vmap` binds the axis.
        centered = lambda row: row - lax.pmean(row, "rows")  # noqa: E731
        return jnp.mean(jnp.tanh(jax.vmap(centered, axis_name="rows")(x) @ params) ** 2)

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def sparse_matrix() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        indices = jnp.array([[0, 0], [1, 2], [2, 1]])
        matrix = sparse.BCOO((params, indices), shape=(WIDTH, WIDTH))
        return jnp.mean((matrix @ x.T) ** 2)

    return Loss(third_party(loss), draw(3), draw(ROWS, WIDTH))


@listed()
def half_precision() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        out = x.astype(jnp.bfloat16) @ params["w"] + params["b"].astype(jnp.bfloat16)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    params = {"w": draw(WIDTH).astype(jnp.bfloat16), "b": jnp.float32(0.5)}
    return Loss(loss, params, draw(ROWS, WIDTH))


@listed()
def printing() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        value = jnp.mean((x @ params) ** 2)
        jax.debug.callback(lambda value: None, value)
        return value

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))
