"""What the owner decodes, with its half of the memory, is what the codec gives on one side."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm import Codec, Context, Keys
from jaxcomm.compression import low_rank, quantizers, sketches, sparsifiers
from jaxcomm.compression.feedback import diana, ef21, error_feedback
from jaxcomm.synchronization import events, shifted_exponential
from jaxcomm.synchronization.events._messages import bytes_of, messages
from tests.synchronization.events import problem

CODECS: dict[str, Callable[[], Codec]] = {
    "eight_bits": lambda: quantizers.dither(bits=8),
    "four_bits": lambda: quantizers.dither(bits=4),
    "top_k": lambda: error_feedback(sparsifiers.top_k(k=2)),
    "ef21": lambda: ef21(sparsifiers.top_k(k=2)),
    "diana": lambda: diana(quantizers.dither(bits=4)),
    "power_iteration": lambda: error_feedback(low_rank.power_iteration(1)),
    "projection": lambda: error_feedback(low_rank.projection(1, "right")),
    "blocks": lambda: error_feedback(sparsifiers.block_coordinate(2)),
    "sketch": lambda: sketches.count_sketch(sketch_ratio=0.5),
}


@pytest.mark.parametrize("name", CODECS)
def test_both_sides_agree(name: str) -> None:
    codec = CODECS[name]()
    sides = messages(codec)
    tree = {"a": jnp.zeros((4, 3)), "b": jnp.zeros(6, jnp.bfloat16)}

    @jax.jit
    def two_sided(memory, shared, key, tree):  # type: ignore[no-untyped-def]
        message, memory = sides.encode(memory, key, tree)
        received, shared = sides.decode(shared, key, message, tree)
        return received, memory, shared, message

    @jax.jit
    def one_sided(memory, key, x, number):  # type: ignore[no-untyped-def]
        keys = Keys(*jax.random.split(jax.random.fold_in(key, number)))
        context = Context(keys, memory, shape=x.shape)
        context = context.replace(statistics=codec.measure(context, x))
        payload, after = codec.encode(context, x)
        mean = codec.decode(context.received(), payload)
        update, after = codec.finalize(context.replace(memory=after), payload, mean)
        return update, after.kept

    memory, alone = sides.init(tree), [codec.init(x.astype("float32")) for x in tree.values()]
    shared = sides.kept(memory)
    for step in range(3):
        draw = np.random.default_rng(step)
        tree = {name: jnp.asarray(draw.normal(size=x.shape), x.dtype) for name, x in tree.items()}
        key = jax.random.key(step)
        received, memory, shared, message = two_sided(memory, shared, key, tree)
        for number, (leaf, found) in enumerate(zip(tree.values(), received.values(), strict=True)):
            x = leaf.astype("float32")
            update, alone[number] = one_sided(alone[number], key, x, jnp.uint32(number))
            np.testing.assert_allclose(
                found.astype("float32"), update.astype(leaf.dtype).astype("float32"), rtol=1e-5
            )
        assert bytes_of(message) == sides.bytes(tree)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), memory, alone)
    jax.tree.map(np.testing.assert_array_equal, shared, sides.kept(memory))


@pytest.mark.parametrize("name", ["eight_bits", "top_k", "ef21"])
def test_decoupled_diloco_with_a_codec_comes_close_to_the_exact_one(name: str) -> None:
    outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
    models = []
    for codec in (None, CODECS[name]()):
        policy = events.decoupled_diloco(optax.sgd(0.05), outer, 4, quorum=3, codec=codec)
        loop = events.event_loop(policy, problem.whole, shifted_exponential(0.3), workers=4)
        progress, records = jax.jit(loop.run, static_argnums=1)(
            loop.start(problem.tree(problem.START)), 1200
        )
        models.append(problem.vector(loop.model(progress)))
    assert np.abs(models[0] - models[1]).max() < 0.1
    assert abs(int(records.sent.uploads.sum()) - 300) < 4
