"""A bfloat16 transformer: remat, accumulation, clipping, a schedule, decay of the kernels only.

Run it on 8 fake devices, or without XLA_FLAGS on GPUs:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python docs/examples/transformer_bf16.py

It prints the first and last loss and the bytes sent, for `global_qsgd` and for the exact mean in
float32. An update averages the gradients of two steps, and workers communicate in the second only.
12 lines differ from the ordinary program: those that end in `# jaxcomm`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxcomm  # jaxcomm

STEPS, EVERY, ROWS, LENGTH = 120, 2, 32, 16
LAYERS, WIDTH, HEADS, WORDS = 2, 64, 4, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        causal = nn.make_causal_mask(x[..., 0])
        x += nn.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16)(y, mask=causal)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.bfloat16)(y))
        return x + nn.Dense(WIDTH, dtype=jnp.bfloat16)(y)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, words):
        embed = nn.Embed(WORDS, WIDTH, dtype=jnp.bfloat16)
        x = embed(words) + nn.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16)(jnp.arange(LENGTH))
        x = nn.remat_scan(Block, lengths=(LAYERS,))()(x)  # jax.checkpoint in a jax.lax.scan
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def loss_fn(params, text):
    logits = Transformer().apply(params, text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@jax.jit
def make_batch(key):
    """Each word w is followed by 5 w + 3, modulo the number of words."""
    words = [jax.random.randint(key, ROWS, 0, WORDS)]
    for _ in range(LENGTH):
        words.append((5 * words[-1] + 3) % WORDS)
    return jnp.stack(words, axis=1)


def train(name, aggregator):  # jaxcomm
    params = Transformer().init(jax.random.key(0), make_batch(jax.random.key(0))[:, :-1])
    kernels = jax.tree.map_with_path(lambda path, _: path[-1].key == "kernel", params)
    schedule = optax.warmup_cosine_decay_schedule(0, 3e-3, 10, STEPS // EVERY)
    optimizer = optax.adamw(schedule, weight_decay=0.1, mask=kernels)
    tx = optax.chain(aggregator, optax.clip_by_global_norm(1.0), optimizer)  # jaxcomm
    tx = jaxcomm.accumulate(tx, EVERY)  # jaxcomm
    opt_state = jaxcomm.init(tx, params, mesh)  # jaxcomm
    step = jaxcomm.make_step(loss_fn, tx, mesh)  # jaxcomm
    losses = []
    for key in jax.random.split(jax.random.key(1), STEPS):
        batch = make_batch(key)
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
    account = jaxcomm.wire.account(step, params, opt_state, batch)  # jaxcomm
    sent = account.amortized_bytes_per_worker(1 / EVERY)  # jaxcomm
    print(f"{name}: {sent:,.0f} bytes per worker and step, ", end="")  # jaxcomm
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert losses[-1] < 0.1 * losses[0]


mesh = jax.make_mesh((jax.device_count(),), ("data",))  # jaxcomm
train("global_qsgd", jaxcomm.global_qsgd(bits=8))  # jaxcomm
train("mean", jaxcomm.mean())  # jaxcomm
