"""Training steps in public styles, which must keep a tight budget: no false alarm.

A budget is counted by hand from the design of a step, before its report: bytes to a hundredth, what
kinds of messages and how many, which dtypes, over which axes, and whether in loops.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm import wire
from jaxcomm.wire._account import Account
from tests.training.places import mesh_of
from tests.wire.rings import (
    SCALAR,
    N,
    all_gather,
    all_reduce,
    all_to_all,
    array,
    reduce_scatter,
    size_of,
)

pytestmark = pytest.mark.usefixtures("loose")

MESH = mesh_of(AxisType.Auto, N)
EXPLICIT = mesh_of(AxisType.Explicit, N)
ROWS, WHOLE = P("data"), P()
REPLICATED, SHARDED = NamedSharding(MESH, WHOLE), NamedSharding(MESH, ROWS)
LOSS = all_reduce(SCALAR)


def keeps(design: float, program: Any, *args: Any, axes: Any = "data", **budget: Any) -> Account:
    """The report of a step that sends what its design says, to a hundredth, and keeps a budget."""
    limits: dict[str, Any] = {"bytes": 1.01 * design, "only_axes": axes, "dtypes": "float32"}
    report = wire.require(program, *args, **limits | budget)
    assert report.bytes_per_worker >= 0.99 * design
    return report


def squared(w: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ w["in"]) @ w["out"]) ** 2)


def layers(mesh: Any, spec: P = WHOLE) -> dict[str, jax.ShapeDtypeStruct]:
    return {"in": array(mesh, spec, 16, 32), "out": array(mesh, spec, 32, 16)}


def stepped(w: Any, g: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, g)


def mapped(fn: Callable[..., Any], *specs: P, out: Any, axis: str = "data") -> Callable[..., Any]:
    """A function of each device's part."""
    mesh = mesh_of(AxisType.Auto, N, names=(axis,))
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out)


# A transformer with two layers in a loop, weights sharded over both axes, the batch over "fsdp".
BATCH, LENGTH, WIDTH, HEADS, HIDDEN, DEPTH, VOCABULARY = 8, 8, 16, 2, 64, 2, 32
TWO_AXES = mesh_of(AxisType.Auto, 4, 2, names=("fsdp", "tensor"))
WEIGHTS = {
    "qkv": array(TWO_AXES, P(None, "fsdp", None, "tensor"), DEPTH, WIDTH, 3, HEADS, 8),
    "merge": array(TWO_AXES, P(None, "tensor", None, "fsdp"), DEPTH, HEADS, 8, WIDTH),
    "up": array(TWO_AXES, P(None, "fsdp", "tensor"), DEPTH, WIDTH, HIDDEN),
    "down": array(TWO_AXES, P(None, "tensor", "fsdp"), DEPTH, HIDDEN, WIDTH),
}
HEAD = array(TWO_AXES, P("fsdp", "tensor"), WIDTH, VOCABULARY)


def at(x: jax.Array, *spec: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(TWO_AXES, P(*spec)))


def block(x: jax.Array, w: Any) -> Any:
    """A layer, of which the products gather their weights over "fsdp"."""
    normal = lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)  # noqa: E731
    w = {
        "qkv": at(w["qkv"], None, None, "tensor"),
        "merge": at(w["merge"], "tensor"),
        "up": at(w["up"], None, "tensor"),
        "down": at(w["down"], "tensor"),
    }
    q, k, v = jnp.unstack(jnp.einsum("btd,dchk->cbthk", normal(x), w["qkv"]))
    shares = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k), axis=-1)
    mixed = jnp.einsum("bhts,bshk->bthk", shares, v)
    x = at(x + jnp.einsum("bthk,hkd->btd", mixed, w["merge"]), "fsdp")
    return at(x + jax.nn.relu(normal(x) @ w["up"]) @ w["down"], "fsdp"), None


def cross_entropy(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    x = lax.scan(jax.checkpoint(block, prevent_cse=False), x, params["layers"])[0]
    logits = at(x @ at(params["head"], None, "tensor"), "fsdp", None, "tensor")
    right = jnp.sum(logits * jax.nn.one_hot(y, VOCABULARY), -1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def test_a_transformer_with_fsdp_and_tensor_axes() -> None:
    """As XLA partitions it: layers gather weights, forward and backward, and sum activations."""

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(cross_entropy)(params, x, y)
        return stepped(params, gradient), loss

    params = {"layers": WEIGHTS, "head": HEAD}
    x = array(TWO_AXES, P("fsdp"), BATCH, LENGTH, WIDTH)
    y = array(TWO_AXES, P("fsdp"), BATCH, LENGTH, dtype=jnp.int32)
    half, head = size_of(WEIGHTS) / 2, size_of(HEAD) / 2  # Of the two parts along "tensor".
    # Of the sum of gradients each device keeps a part: XLA for CPUs has no reduce-scatter. Layers
    # are computed again in the backward pass; otherwise gathered weights are kept for it.
    fsdp = 2 * all_gather(half / 4, 4) + all_reduce(half, 4)
    fsdp += all_gather(head / 4, 4) + all_reduce(head, 4)
    # Two sums forward and two backward, where the first forward is computed again; one of the head.
    tensor = (DEPTH * 5 + 1) * all_reduce(size_of(x) / 4, 2)
    softmax = 3 * all_reduce(BATCH / 4 * LENGTH * 4, 2)  # Maximum, sum, and the right logit.
    compiled = jax.jit(step).lower(params, x, y).compile()
    report = keeps(fsdp + tensor + softmax, compiled, axes={"fsdp", "tensor"})
    wire.require(report, bytes={"fsdp": 1.01 * fsdp, "tensor": 1.01 * (tensor + softmax)})
    wire.require(compiled.as_text(), mesh=TWO_AXES, same_as=report)


def test_accumulation_with_one_sum_and_a_sharded_optimizer() -> None:
    """As MaxText: gradients stay parts of a sum, and each device updates a part of the weights."""
    tx = optax.trace(0.9)
    to = lambda tree, spec: jax.tree.map(lambda x: jax.sharding.reshard(x, spec), tree)  # noqa: E731

    def step(w: Any, state: Any, micro: jax.Array) -> Any:
        shared = to(w, P(reduced={"data"}))
        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(squared)(shared, x)), None)  # noqa: E731
        zeros = to(jax.tree.map(jnp.zeros_like, w), P(unreduced={"data"}))
        parts = to(lax.scan(add, zeros, micro)[0], ROWS)
        updates, state = tx.update(parts, state)
        return to(stepped(to(w, ROWS), updates), WHOLE), state

    w, micro = layers(EXPLICIT), array(EXPLICIT, P(None, "data"), 4, 16, 16)
    # A reduce-scatter in place of the all-reduce on other devices; XLA for CPUs makes none.
    design = all_reduce(size_of(w)) + all_gather(size_of(w) / N)
    with jax.set_mesh(EXPLICIT):
        keeps(design, step, w, optax.TraceState(layers(EXPLICIT, ROWS)), micro, outside_loops=True)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


@pytest.mark.parametrize("style", ["called", "lowered"])
def test_flax_nnx_with_replicated_weights(style: str) -> None:
    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        loss = lambda model: jnp.mean((model(x) - y) ** 2)  # noqa: E731
        found, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return found

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for tree in (model, optimizer):
        nnx.update(tree, jax.device_put(nnx.state(tree), REPLICATED))
    args = (model, optimizer, array(MESH, ROWS, 64, 16), array(MESH, ROWS, 64, 4))
    design = all_reduce((16 * 32 + 32 + 32 * 4 + 4) * 4) + LOSS
    given = (step, *args) if style == "called" else (step.lower(*args),)
    keeps(design, *given, collectives={"all_reduce": 1}, outside_loops=True)


@pytest.mark.parametrize("style", ["called", "lowered"])
def test_equinox_with_replicated_weights(style: str) -> None:
    tx = optax.adam(1e-3)

    @eqx.filter_jit
    def step(model: Any, state: Any, x: jax.Array) -> Any:
        model, x = eqx.filter_shard((model, x), (REPLICATED, SHARDED))
        loss = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)  # noqa: E731
        found, gradient = eqx.filter_value_and_grad(loss)(model)
        updates, state = tx.update(gradient, state)
        model = eqx.apply_updates(model, updates)
        return *eqx.filter_shard((model, state), REPLICATED), found

    model = eqx.nn.MLP(16, 4, 32, 1, key=jax.random.key(0))
    state = tx.init(eqx.filter(model, eqx.is_array))
    model, state = eqx.filter_shard((model, state), REPLICATED)
    design = all_reduce((16 * 32 + 32 + 32 * 4 + 4) * 4) + LOSS
    args = (model, state, jax.device_put(jnp.ones((64, 16)), SHARDED))
    given = (step, *args) if style == "called" else (step.lower(*args),)
    keeps(design, *given, collectives={"all_reduce": 1}, outside_loops=True)


def test_a_diffusion_step_with_sharded_weights_and_their_average() -> None:
    """Random times and noise, and the exponential average of the weights, are computed in place."""
    tx = optax.adam(1e-3)

    def loss(w: Any, key: jax.Array, x: jax.Array) -> jax.Array:
        for_time, for_noise = jax.random.split(key)
        time = jax.random.uniform(for_time, (len(x), 1))
        noise = jax.random.normal(for_noise, x.shape)
        angles = time * jnp.arange(8, dtype=jnp.float32)[None]
        hidden = (x * jnp.sqrt(1 - time) + noise * jnp.sqrt(time)) @ w["in"]
        hidden = jnp.tanh(hidden + jnp.sin(angles) @ w["time"])
        return jnp.mean((hidden @ w["out"] - noise) ** 2)

    def step(w: Any, average: Any, state: Any, key: jax.Array, x: jax.Array) -> Any:
        found, gradient = jax.value_and_grad(loss)(w, key, x)
        updates, state = tx.update(gradient, state)
        w = optax.apply_updates(w, updates)
        average = jax.tree.map(lambda a, w: 0.99 * a + 0.01 * w, average, w)
        return w, average, state, found

    w = layers(MESH, ROWS) | {"time": array(MESH, ROWS, 8, 32)}
    count = array(MESH, WHOLE, dtype=jnp.int32)
    state = (optax.ScaleByAdamState(count, w, w), optax.EmptyState())
    key = array(MESH, WHOLE, dtype=jax.random.key(0).dtype)
    # Weights are gathered once, and as above gradients are summed.
    design = all_gather(size_of(w) / N) + all_reduce(size_of(w)) + LOSS
    kept = jax.tree.map(lambda x: x.sharding, (w, w, state))
    jitted = jax.jit(step, out_shardings=(*kept, REPLICATED))
    keeps(design, jitted, w, w, state, key, array(MESH, ROWS, 64, 16), outside_loops=True)


def test_pmap_with_replicated_weights() -> None:
    def step(w: Any, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(squared)(w, x)
        norm = optax.tree.norm(gradient)
        gradient, loss, norm = lax.pmean((gradient, loss, norm), "batch")
        return stepped(w, gradient), {"loss": loss, "norm": norm}

    w = {"in": jnp.ones((N, 16, 32)), "out": jnp.ones((N, 32, 16))}
    design = all_reduce(size_of(w) / N) + 2 * LOSS
    args = (w, jnp.ones((N, 8, 16)))
    pmapped = jax.pmap(step, axis_name="batch")
    for given in ((pmapped, *args), (pmapped.lower(*args),)):
        keeps(design, *given, axes="batch", collectives=1, outside_loops=True)


def test_shard_map_with_clipping() -> None:
    """The sum of gradients is that of autodiff; the norm is of the sum, so it sends nothing."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(w: Any, state: Any, x: jax.Array) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: lax.pmean(squared(w, x), "data"))(w)
        updates, state = tx.update(gradient, state, w)
        return optax.apply_updates(w, updates), state, loss

    w = layers(MESH)
    run = mapped(step, WHOLE, WHOLE, ROWS, out=(WHOLE, WHOLE, WHOLE))
    args = (w, jax.eval_shape(tx.init, w), array(MESH, ROWS, 64, 16))
    design = all_reduce(size_of(w)) + LOSS
    keeps(design, run, *args, collectives={"all_reduce": 1}, outside_loops=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_sharded_weights_in_half_precision(compiled: bool) -> None:
    """Weights are gathered in bfloat16; their gradients are summed in it, each device a part."""

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            gather = lambda w: lax.all_gather(w.astype(jnp.bfloat16), "data", tiled=True)  # noqa: E731
            found = squared(jax.tree.map(gather, w), x)
            return lax.pmean(found.astype(jnp.float32), "data")

        found, gradient = jax.value_and_grad(loss)(w)
        return stepped(w, gradient), found

    w, x = layers(MESH, ROWS), array(MESH, ROWS, 64, 16, dtype=jnp.bfloat16)
    run = mapped(step, ROWS, ROWS, out=(ROWS, WHOLE))
    design = all_gather(size_of(w) / 2 / N) + reduce_scatter(size_of(w) / 2) + LOSS
    given: Any = (jax.jit(run).lower(w, x),) if compiled else (run, w, x)
    kinds = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 1}
    keeps(design, *given, dtypes="bfloat16", above=LOSS, collectives=kinds)


def test_a_pipeline_that_shifts_activations_in_a_loop() -> None:
    """As GPipe: each tick, every stage passes 2 x 16 numbers on; the gradient passes them back."""
    micro, ticks = 4, 4 + N - 1
    ring = [(stage, (stage + 1) % N) for stage in range(N)]

    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        stage = lax.axis_index("stage")

        def tick(carried: jax.Array, time: jax.Array) -> Any:
            x = jnp.where(stage == 0, xs[jnp.minimum(time, micro - 1)], carried)
            y = jnp.tanh(x @ w[0])
            return lax.ppermute(y, "stage", ring), y

        begin = lax.pcast(jnp.zeros((2, 16)), "stage", to="varying")
        ys = lax.scan(tick, begin, jnp.arange(ticks))[1]
        last = jnp.mean(ys[N - 1 :] ** 2)
        return lax.psum(jnp.where(stage == N - 1, last, 0), "stage")

    def step(w: jax.Array, xs: jax.Array) -> Any:
        found, gradient = jax.value_and_grad(loss)(w, xs)
        return w - 0.1 * gradient, found

    run = mapped(step, P("stage"), WHOLE, out=(P("stage"), WHOLE), axis="stage")
    design = 2 * ticks * 2 * 16 * 4 + LOSS
    kinds = {"ppermute": 2 * ticks, "all_reduce": 1}
    args = (jnp.ones((N, 16, 16)), jnp.ones((micro, 2, 16)))
    keeps(design, run, *args, axes="stage", collectives=kinds)


def test_a_mixture_of_experts() -> None:
    """An expert on each device; 4 tokens of each device for each expert, there and back again."""
    width, capacity = 8, 4

    def loss(w: Any, x: jax.Array) -> jax.Array:
        x = jnp.tanh(x @ w["in"])
        shares = jax.nn.softmax(x @ w["router"], axis=-1)
        chosen = jax.nn.one_hot(jnp.argmax(shares, -1), N, dtype=jnp.int32)
        place = jnp.cumsum(chosen, 0) * chosen - 1
        sent = chosen[..., None] * jax.nn.one_hot(place, capacity)
        slots = jnp.einsum("tec,td->ecd", sent, x)
        at_experts = lax.all_to_all(slots, "expert", 0, 0)
        computed = jnp.tanh(at_experts @ w["experts"][0])
        back = lax.all_to_all(computed, "expert", 0, 0)
        y = jnp.einsum("tec,ecd,te->td", sent, back, shares)
        return lax.pmean(jnp.mean(y**2), "expert")

    def step(w: Any, x: jax.Array) -> Any:
        found, gradient = jax.value_and_grad(loss)(w, x)
        return stepped(w, gradient), found

    shared = {"in": jnp.ones((width, width)), "router": jnp.ones((width, N))}
    w = shared | {"experts": jnp.ones((N, width, width))}
    specs = {"in": WHOLE, "router": WHOLE, "experts": P("expert")}
    run = mapped(step, specs, P("expert"), out=(specs, WHOLE), axis="expert")  # type: ignore[arg-type]
    design = 4 * all_to_all(N * capacity * width * 4) + all_reduce(size_of(shared)) + LOSS
    kinds = {"all_to_all": 4, "all_reduce": 1}
    keeps(design, run, w, jnp.ones((N * 16, width)), axes="expert", collectives=kinds)


def test_ring_attention() -> None:
    """Keys and values of 4 positions pass all devices in 7 turns; their gradients pass back."""
    positions, width = 4, 8
    ring = [(device, (device + 1) % N) for device in range(N)]

    def loss(w: Any, x: jax.Array) -> jax.Array:
        q, *both = jnp.unstack(jnp.einsum("td,cdk->ctk", x, w))
        pair = jnp.stack(both)

        def attend(state: Any, pair: jax.Array) -> Any:
            total, weight = state
            scores = jnp.exp(q @ pair[0].T / width)
            return total + scores @ pair[1], weight + jnp.sum(scores, 1, keepdims=True)

        def turn(carry: Any, _: None) -> Any:
            state, pair = carry
            pair = lax.ppermute(pair, "sequence", ring)
            return (attend(state, pair), pair), None

        zeros = jnp.zeros_like(q), jnp.zeros_like(q[:, :1])
        (total, weight), _ = lax.scan(turn, (attend(zeros, pair), pair), None, length=N - 1)[0]
        return lax.pmean(jnp.mean((total / weight) ** 2), "sequence")

    def step(w: jax.Array, x: jax.Array) -> Any:
        found, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, found

    run = mapped(step, WHOLE, P("sequence"), out=(WHOLE, WHOLE), axis="sequence")
    w = jnp.ones((3, width, width))
    design = 2 * (N - 1) * 2 * positions * width * 4 + all_reduce(size_of(w)) + LOSS
    kinds = {"ppermute": 2 * (N - 1), "all_reduce": 1}
    keeps(design, run, w, jnp.ones((N * positions, width)), axes="sequence", collectives=kinds)


def test_local_steps_and_an_outer_step() -> None:
    """As DiLoCo: four steps on each device's own data, and then one mean of the displacements."""
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)

    def rounds(w: Any, state: Any, batches: jax.Array) -> Any:
        own = lax.pcast(w, "data", to="varying")
        inner = lambda w, x: (stepped(w, jax.grad(squared)(w, x)), None)  # noqa: E731
        moved = lax.scan(inner, own, batches)[0]
        displacement = lax.pmean(jax.tree.map(jnp.subtract, own, moved), "data")
        updates, state = outer.update(displacement, state, w)
        return optax.apply_updates(w, updates), state

    w = layers(MESH)
    run = mapped(rounds, WHOLE, WHOLE, P(None, "data"), out=(WHOLE, WHOLE))
    args = (w, jax.eval_shape(outer.init, w), array(MESH, P(None, "data"), 4, 16, 16))
    keeps(all_reduce(size_of(w)), run, *args, collectives={"all_reduce": 1}, outside_loops=True)


def test_steps_of_which_every_fourth_sends() -> None:
    """As optax.MultiSteps: the mean is in the optimizer that it wraps, so a branch sends."""
    mean = optax.stateless(lambda updates, _: lax.pmean(updates, "data"))
    tx = optax.MultiSteps(optax.chain(mean, optax.sgd(0.1)), every_k_schedule=4)

    def step(w: Any, state: Any, x: jax.Array) -> Any:
        updates, state = tx.update(jax.grad(squared)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    w = layers(MESH)
    specs: Any = {"in_specs": (WHOLE, WHOLE, ROWS), "out_specs": (WHOLE, WHOLE)}
    run = jax.shard_map(step, mesh=MESH, check_vma=False, **specs)
    args = (w, jax.eval_shape(tx.init, w), array(MESH, ROWS, 64, 16))
    design = all_reduce(size_of(w))
    report = keeps(design, run, *args, collectives={"all_reduce": 1}, outside_loops=True)
    assert report.amortized_bytes_per_worker(1 / 4) == design / 4


def test_an_evaluation_with_metrics() -> None:
    """Sums of the loss, of right answers and of answers that count: a message for each dtype."""

    def evaluate(w: jax.Array, x: jax.Array, y: jax.Array, counts: jax.Array) -> Any:
        logits = x @ w
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        right = (jnp.argmax(logits, -1) == y) & counts
        return {
            "loss": jnp.sum(jnp.where(counts, losses, 0)),
            "right": jnp.sum(right),
            "answers": jnp.sum(counts),
        }

    args = (array(MESH, WHOLE, 16, 10), array(MESH, ROWS, 64, 16))
    labels = (array(MESH, ROWS, 64, dtype=jnp.int32), array(MESH, ROWS, 64, dtype=jnp.bool_))
    report = wire.require(
        evaluate, *args, *labels, bytes=3 * LOSS, dtypes={"float32", "int32"}, collectives=2
    )
    assert report.bytes_per_worker == 3 * LOSS
