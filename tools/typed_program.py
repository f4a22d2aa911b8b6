"""A user's program with types. tools/test_wheel checks it with mypy --strict, and runs it.

Each `type: ignore` is a mistake that mypy must report: an ignore that nothing needs is an error.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

import jaxcomm
from jaxcomm import perf, wire
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k

Batch = tuple[jax.Array, jax.Array]


def loss_fn(params: dict[str, jax.Array], batch: Batch) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


def train(steps: int) -> float:
    params = {"w": jnp.zeros((32, 4))}
    x = jax.random.normal(jax.random.key(0), (64, 32))
    batch = (x, x[:, :4])
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    tx = optax.chain(jaxcomm.global_qsgd(bits=8), optax.sgd(0.1))
    state = jaxcomm.init(tx, params, mesh)
    step = jaxcomm.make_step(loss_fn, tx, mesh)
    for _ in range(steps):
        params, state, metrics = step(params, state, batch)
    assert jnp.isfinite(metrics["loss"])
    account = wire.account(step, params, state, batch)
    assert_type(account.bytes_per_worker, float)
    return seconds(tx, params)


def codec() -> jaxcomm.Codec:
    found = error_feedback(top_k(ratio=0.01))
    assert_type(found, jaxcomm.Codec)
    return found


def seconds(tx: optax.GradientTransformation, params: Any) -> float:
    seen = perf.predict(tx, params, link="1Gbit", compute_seconds=0.1, workers=8)
    assert_type(seen.seconds, float)
    return seen.seconds


def mistakes() -> None:
    jaxcomm.global_qsgd(bits="8")  # type: ignore[arg-type]
    jaxcomm.power_sgd("data")  # type: ignore[call-arg]
    jaxcomm.global_qsgd(norm="l1")  # type: ignore[arg-type]
    perf.Link("1Gbit")  # type: ignore[arg-type]
    assert_type(codec().scope, int)  # type: ignore[assert-type]


if __name__ == "__main__":
    print(train(3), codec().scope)
