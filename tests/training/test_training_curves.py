"""Training of an LSTM of flax, and of a transformer with JAX's own flash attention."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.synchronization import diloco
from tests.training.losses import Loss, flash_attention, third_party
from tests.training.test_any_loss import WHERE, build

STEPS, ROWS, TIME, WIDTH, TOKENS, HEADS = 40, 16, 128, 16, 6, 2


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        place = self.param("place", nn.initializers.normal(0.1), (1, TIME, WIDTH))
        x = nn.Embed(TOKENS, WIDTH)(tokens) + place
        parts = nn.DenseGeneral((3, HEADS, WIDTH // HEADS))(nn.LayerNorm()(x))
        parts = jnp.moveaxis(parts, (2, 3), (0, 2))  # [3, rows, heads, time, width]
        mixed = jnp.swapaxes(flash_attention(*parts), 1, 2)
        x = x + nn.DenseGeneral(WIDTH, (-2, -1))(mixed)
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(TOKENS)(x)


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Dense(TOKENS)(nn.RNN(nn.LSTMCell(WIDTH))(nn.Embed(TOKENS, WIDTH)(tokens)))


MODELS: dict[str, Callable[[], nn.Module]] = {"lstm": Recurrent, "transformer": Transformer}


def batches() -> np.ndarray:
    """Sequences whose next token is the last and 1, except for a tenth of them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TOKENS, size=(STEPS, ROWS, TIME + 1))
    kept = rng.random(tokens.shape) < 0.9
    for time in range(1, TIME + 1):
        follows = (tokens[..., time - 1] + 1) % TOKENS
        tokens[..., time] = np.where(kept[..., time], follows, tokens[..., time])
    return tokens.astype(np.int32)


@functools.cache
def model_of(name: str) -> tuple[Any, Callable[..., jax.Array]]:
    model = MODELS[name]()

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    return third_party(model.init)(jax.random.key(0), batches()[0, :, :-1]), third_party(loss)


def optimizer() -> Any:
    return optax.rmsprop(0.01, momentum=0.5)


@functools.cache
def on_one_device(name: str) -> np.ndarray:
    params, loss = model_of(name)
    tx, losses = optimizer(), []
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    for tokens in batches():
        params, state, value = step(params, state, tokens)
        losses.append(float(value))
    return np.array(losses)


def after_aggregator(aggregator: Any) -> Any:
    return optax.chain(aggregator, optimizer())


METHODS: dict[str, Callable[[], Any]] = {
    "mean": lambda: after_aggregator(jaxcomm.mean()),
    "global_qsgd": lambda: after_aggregator(jaxcomm.global_qsgd(bits=8)),
    "power_sgd": lambda: after_aggregator(jaxcomm.power_sgd(rank=2)),
    "diloco": lambda: diloco(optimizer(), optax.sgd(0.7, momentum=0.5, nesterov=True), 5),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_training(name: str, method: str) -> None:
    (params, loss), tx, mesh = model_of(name), METHODS[method](), WHERE["auto"]()
    if method == "diloco":
        params = jaxcomm.replicate(params, mesh)
    step = build(Loss(loss, params, None), tx, mesh)
    state, losses = jaxcomm.init(tx, params, mesh), []
    for tokens in batches():
        params, state, metrics = step(params, state, tokens)
        losses.append(float(metrics["loss"]))
    alone = on_one_device(name)
    print(f"\n{name}, every fifth loss: one device {alone[::5].round(4)}")
    print(f"{method} {np.round(losses[::5], 4)}")
    if method == "mean":
        np.testing.assert_allclose(losses, alone, rtol=1e-4)  # Rounding grows with each step.
    assert np.mean(losses[-10:]) < 1.05 * np.mean(alone[-10:]) < 0.3 * alone[0]
