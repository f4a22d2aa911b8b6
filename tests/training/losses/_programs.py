"""Losses of what JAX itself has: loops, derivatives, draws, callbacks, linear algebra."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import sparse
from jax.experimental.ode import odeint

from tests.training.losses._table import (
    CLASSES,
    ROWS,
    TIME,
    WIDTH,
    Loss,
    draw,
    labels,
    listed,
    sequences,
    third_party,
)


@listed()
def differential_equation() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        field = lambda y, t, w: jnp.tanh(y @ w) - 0.1 * t  # noqa: E731
        end = lambda x: odeint(field, x, jnp.linspace(0.0, 1.0, 2), params, rtol=1e-6)[-1]  # noqa: E731
        return jnp.mean(jax.vmap(end)(x) ** 2)

    return Loss(third_party(loss), draw(WIDTH, WIDTH), draw(ROWS, WIDTH))


@listed()
def custom_vjp() -> Loss:
    @jax.custom_vjp
    def clipped(x: jax.Array) -> jax.Array:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, slope: (jnp.clip(slope, -0.01, 0.01),))
    loss = lambda w, x: jnp.mean(jnp.tanh(clipped(w) @ x.T))  # noqa: E731
    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed()
def checkpointed_layers() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return Loss(loss, draw(3, WIDTH, WIDTH), draw(ROWS, WIDTH))


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


@listed()
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


@listed()
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


@listed()
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


@listed()
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
def hessian_penalty() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        inner = lambda w: jnp.mean(jnp.tanh(x @ w))  # noqa: E731
        return inner(params) + jnp.trace(jax.hessian(inner)(params)) ** 2

    return Loss(loss, draw(WIDTH), draw(ROWS, WIDTH))


@listed(key=True, model_state=True)
def dropout_in_a_scan() -> Loss:
    def loss(params: Any, statistics: Any, x: jax.Array, key: jax.Array, *, shared: Any) -> Any:
        def body(carry: Any, w: jax.Array) -> Any:
            x, key = carry
            key, own = jax.random.split(key)
            x = jnp.where(jax.random.bernoulli(own, 0.5, x.shape), jnp.tanh(x @ w), 0)
            return (x, key), jnp.mean(x)

        (x, _), means = lax.scan(body, (x, key), params)
        return jnp.mean(x**2), shared * statistics + (1 - shared) * means

    params, batch = draw(2, WIDTH, WIDTH), draw(ROWS, WIDTH)
    return Loss(loss, params, batch, model_state=jnp.zeros(2), shared=0.9)


@listed()
def linear_algebra() -> Loss:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        matrix = params @ params.T + x.T @ x / len(x) + jnp.eye(WIDTH)
        solved = jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, x[0], maxiter=5)[0]
        return jnp.linalg.slogdet(matrix)[1] + jnp.sum(solved**2)

    return Loss(third_party(loss), draw(WIDTH, WIDTH), draw(ROWS, WIDTH))


@listed()
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


@listed()
def distillation() -> Loss:
    """What all workers share: weights of classes, a teacher, and a coefficient."""

    def loss(params: Any, batch: Any, *, shared: Any) -> jax.Array:
        x, y = batch
        logits, taught = x @ params, x @ shared["teacher"]
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        distance = jnp.mean((logits - taught) ** 2)
        return jnp.mean(shared["weights"][y] * errors) + shared["coefficient"] * distance

    shared = {
        "teacher": draw(WIDTH, CLASSES, seed=3),
        "weights": np.linspace(0.1, 5, CLASSES, dtype=np.float32),
        "coefficient": 0.5,
    }
    return Loss(loss, draw(WIDTH, CLASSES), (draw(ROWS, WIDTH), labels(ROWS)), shared=shared)
