"""Deltas of weights: bit for bit, sizes beside the entropy, and what goes wrong on the way."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxcomm.compression import WeightReceiver, WeightSender
from jaxcomm.compression._weight_delta import decode_delta, encode_delta

RNG = np.random.default_rng(0)


def same(found: Any, expected: Any) -> None:
    """Equal in every bit, also of NaN and -0, with the same dtypes."""

    def of_leaf(x: Any, y: Any) -> None:
        y = np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())

    jax.tree.map(of_leaf, found, expected)


def pair_of(params: Any) -> tuple[WeightSender, WeightReceiver]:
    sender, receiver = WeightSender(params), WeightReceiver(params)
    same(receiver.receive(sender.base()), params)
    return sender, receiver


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "int32", "float8_e4m3fn", "float64", "complex128"]
)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.8, 1.0])
def test_any_bits(dtype: str, share: float) -> None:
    """Random bits: NaN, infinities and zeros of both signs are among them."""
    kind: Any = np.dtype(getattr(ml_dtypes, dtype, dtype))
    draw = lambda size: RNG.integers(0, 256, size * kind.itemsize, np.uint8).view(kind)  # noqa: E731
    before = draw(5000)
    after, changed = before.copy(), RNG.random(5000) < share
    after[changed] = draw(5000)[changed]
    sender, receiver = pair_of({"w": before.reshape(50, 100), "none": before[:0], "s": before[3]})
    changed = {"w": after.reshape(50, 100), "none": after[:0], "s": after[4]}
    same(receiver.receive(sender.delta(changed)), changed)


def trained(steps: int, rate: float) -> Any:
    """Weights in bfloat16 after each step of AdamW, with a small model."""
    shapes = {"in": (64, 128), "out": (128, 10)}
    params = {k: jnp.asarray(RNG.normal(size=s) / 8, jnp.bfloat16) for k, s in shapes.items()}
    tx = optax.adamw(rate)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            wide = jax.tree.map(lambda w: w.astype(jnp.float32), p)
            return jnp.mean((jnp.tanh(x @ wide["in"]) @ wide["out"] - x[:, :10]) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    step = jax.numpy_dtype_promotion("standard")(step)  # Adam needs it.
    for _ in range(steps):
        yield params
        params, state = step(params, state, jnp.asarray(RNG.normal(size=(32, 64)), jnp.float32))


def test_a_thousand_steps_are_bit_identical() -> None:
    weights = trained(1001, 1e-4)
    sender, receiver = pair_of(next(weights))
    sizes = []
    for params in weights:
        message = sender.delta(params)
        sizes.append(len(message))
        same(receiver.receive(message), params)
    assert receiver.version == sender.version == 1000
    assert max(sizes) < 2 * (64 * 128 + 128 * 10)


@pytest.mark.parametrize(("share", "above"), [(0.01, 0.02), (0.05, 0.02), (0.6, 0.04)])
def test_the_size_is_near_the_entropy(share: float, above: float) -> None:
    """Of places, signs and magnitudes that are independent."""
    size = 400_000
    before = RNG.normal(size=size).astype(ml_dtypes.bfloat16).view(np.int16)
    places = np.flatnonzero(RNG.random(size) < share)
    magnitudes = RNG.geometric(0.8, places.size)
    after = before.copy()
    # One step of the bits is one step of the order, within a sign.
    after[places] += np.where(RNG.random(places.size) < 0.5, -1, 1) * magnitudes.astype(np.int16)
    message = encode_delta([before], [after])
    np.testing.assert_array_equal(decode_delta([before], message)[0], after)
    rate = places.size / size
    each = -np.log2(rate) - (1 - rate) / rate * np.log2(1 - rate)
    counts = np.unique(magnitudes, return_counts=True)[1] / places.size
    bound = places.size * (each + 1 - np.sum(counts * np.log2(counts)))
    assert bound <= 8 * len(message) * 1.001 and 8 * len(message) <= (1 + above) * bound + 1000


def test_a_receiver_that_missed_a_delta() -> None:
    weights = [jnp.full(40, x, jnp.bfloat16) for x in (1, 2, 3, 4)]
    sender, receiver = pair_of(weights[0])
    first, second, third = (sender.delta(w) for w in weights[1:])
    receiver.receive(first)
    with pytest.raises(ValueError, match="changes version 2, but the receiver has version 1"):
        receiver.receive(third)
    same(receiver.receive(second), weights[2])
    same(receiver.receive(third), weights[3])
    with pytest.raises(ValueError, match="but the receiver has no version"):
        WeightReceiver(weights[0]).receive(third)
    late = WeightReceiver(weights[0])
    same(late.receive(sender.base()), weights[3])
    # A trainer that began again has the same number of versions.
    again = WeightSender(weights[1])
    with pytest.raises(ValueError, match="changes version 0"):
        receiver.receive(again.delta(weights[2]))


def test_damage_is_found_and_changes_nothing() -> None:
    before = jnp.asarray(RNG.normal(size=2000), jnp.bfloat16)
    after = before.at[::7].multiply(1.1)
    sender, receiver = pair_of(before)
    message = sender.delta(after)
    for place in (70, len(message) // 2, len(message) - 1):
        damaged = bytearray(message)
        damaged[place] ^= 16
        with pytest.raises(ValueError, match="damaged"):
            receiver.receive(bytes(damaged))
    for short in (message[:-1], message[:30], b""):
        with pytest.raises(ValueError, match="damaged"):
            receiver.receive(short)
    same(receiver.receive(message), after)


def test_values_of_earlier_messages_stay() -> None:
    before, after = jnp.ones(9, jnp.bfloat16), jnp.zeros(9, jnp.bfloat16)
    sender, receiver = WeightSender(before), WeightReceiver(before)
    first = receiver.receive(sender.base())
    receiver.receive(sender.delta(after))
    same(first, before)


def test_weights_that_change_in_place() -> None:
    weights = np.ones(9, np.float32)
    sender, receiver = pair_of(weights)
    weights[4] = 2
    found = receiver.receive(sender.delta(weights))
    same(found, weights)
    assert not found.flags.writeable


def test_other_weights() -> None:
    sender, receiver = pair_of({"w": jnp.ones(4)})
    for other in ({"w": jnp.ones(5)}, {"w": jnp.ones(4, jnp.bfloat16)}, {"v": jnp.ones(4)}):
        with pytest.raises(ValueError, match="other shapes, dtypes or names"):
            sender.delta(other)
        with pytest.raises(ValueError, match="other shapes, dtypes or names"):
            receiver.receive(WeightSender(other).base())
