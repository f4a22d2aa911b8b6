"""A bfloat16 transformer, tensor parallel over "model"; top-k with memory over "data"; checkpoints.

Run it on 8 fake devices, or without XLA_FLAGS on GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/examples/tensor_parallel.py

Two devices share the hidden units, with their moments and residuals, and each sends the largest
coordinates of its shards. Halfway, training goes on from a checkpoint. The program prints the first
and last loss and the bytes sent, for top-k and for the exact mean in float32.
13 lines differ from the ordinary program: those that end in `# jaxcomm`.
"""

import tempfile

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm  # jaxcomm
from jaxcomm.checkpoint import Checkpoints  # jaxcomm

STEPS, ROWS, LENGTH, WIDTH, WORDS = 100, 32, 16, 64, 64


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, words):
        embed = nn.Embed(WORDS, WIDTH, dtype=jnp.bfloat16)
        x = embed(words) + nn.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16)(jnp.arange(LENGTH))
        for _ in range(2):
            y, mask = nn.LayerNorm(dtype=jnp.bfloat16)(x), nn.make_causal_mask(words)
            x += nn.MultiHeadDotProductAttention(4, dtype=jnp.bfloat16)(y, mask=mask)
            y = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(nn.LayerNorm()(x)))
            x += nn.Dense(WIDTH, dtype=jnp.bfloat16)(y)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def loss_fn(params, text):
    logits = Transformer().apply(params, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@jax.jit
def make_batch(number):
    """Each word w is followed by 5 w + 3, modulo the number of words."""
    words = [jax.random.randint(jax.random.key(number), ROWS, 0, WORDS)]
    for _ in range(LENGTH):
        words.append((5 * words[-1] + 3) % WORDS)
    return jnp.stack(words, axis=1)


def train(name, aggregator, folder):  # jaxcomm
    params = Transformer().init(jax.random.key(0), make_batch(0)[:, :-1])
    axes = {(WIDTH, 4 * WIDTH): P(None, "model"), (4 * WIDTH, WIDTH): P("model")}  # Hidden units.
    specs = jax.tree.map(lambda x: axes.get(x.shape, P()), params)
    params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    tx = optax.chain(jaxcomm.shard_local(aggregator, specs), optax.adam(5e-3))  # jaxcomm
    state = [params, jaxcomm.init(tx, params, mesh, shard_axes="model")]  # jaxcomm
    step = jaxcomm.make_step(loss_fn, tx, mesh, shard_axes="model")  # jaxcomm
    losses = []
    for number in range(STEPS):
        if number == STEPS // 2:
            with Checkpoints(f"{folder}/{name}") as checkpoints:  # jaxcomm
                checkpoints.save(number, state)  # jaxcomm
                state = checkpoints.restore(state).state  # jaxcomm
        *state, metrics = step(*state, make_batch(number))
        losses.append(float(metrics["loss"]))
    sent = jaxcomm.wire.account(step, *state, make_batch(0))  # jaxcomm
    print(f"{name}: {sent.bytes_per_worker:,.0f} bytes per worker and step, ", end="")  # jaxcomm
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")


mesh = jax.make_mesh((-(-jax.device_count() // 2), min(jax.device_count(), 2)), ("data", "model"))
with tempfile.TemporaryDirectory() as folder:
    train("top_k", jaxcomm.top_k_sgd(ratio=0.05), folder)  # jaxcomm
    train("mean", jaxcomm.mean(), folder)  # jaxcomm
