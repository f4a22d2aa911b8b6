"""Published counterexamples: a method that must fail, and one that must not, on the same losses."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.tasks import objectives
from jaxcomm import gossip
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import scaled_signs
from jaxcomm.compression.sparsifiers import top_k

FAILS, CONTROL = "must fail", "control"
ENDS = "failing", "control"
POINTS, OSCILLATION = 24, 18  # The largest error of the last steps: those of a delay oscillate.


class Outcome(NamedTuple):
    """What a counterexample shows.

    Attributes:
      curves: The error of both methods after each step.
      measured: A number that theory gives in closed form.
      expected: That number.
    """

    curves: Mapping[str, np.ndarray]
    measured: float
    expected: float


def _scan(
    loss: Callable[..., jax.Array],
    tx: optax.GradientTransformation,
    workers: int,
    params: Any,
    batches: Any,
    error: Callable[[Any], jax.Array],
    project: Callable[[Any], Any] = lambda x: x,
) -> np.ndarray:
    """The errors after each step of a simulation, over the leading axis of the batches."""
    step = jaxcomm.simulate(loss, tx, workers)

    @jax.jit
    def run(params: Any, batches: Any) -> jax.Array:
        def body(carry: Any, batch: Any) -> Any:
            params, state, _ = step(*carry, batch)
            params = project(params)
            return (params, state), error(params)

        return jax.lax.scan(body, (params, jaxcomm.init(tx, params, workers)), batches)[1]

    return np.asarray(run(params, batches), np.float64)


RATE = 0.01


def biased_compression(seed: int, workers: int, steps: int) -> Outcome:
    r"""Top-1 without feedback diverges from all points on the diagonal, for every rate.

    Beznosikov et al. 2020 (arXiv 2002.12410): :math:`f_i(x) = \langle a_i, x \rangle^2 +
    \frac14 \|x\|^2` with :math:`a_1 = (-3, 2, 2)` and its rotations. At :math:`t (1, 1, 1)` the
    largest coordinate of worker i's gradient is the i-th, :math:`-\frac{11}{2} t`, so
    :math:`t \gets (1 + \frac{11}{6} \eta) t`.
    """
    vectors = np.float32([[-3, 2, 2], [2, -3, 2], [2, 2, -3]])
    batches = np.broadcast_to(vectors, (steps, *vectors.shape))
    first = jnp.full(3, 1.0 + seed, jnp.float32)

    def loss(x: jax.Array, a: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(a @ x)) + jnp.float32(0.25) * jnp.sum(jnp.square(x))

    curves = {
        name: _scan(
            loss,
            optax.chain(jaxcomm.all_gather_mean(codec), optax.sgd(RATE)),
            workers, first, batches, lambda x: jnp.sqrt(jnp.sum(jnp.square(x))),
        )
        for name, codec in ((FAILS, top_k(k=1)), (CONTROL, error_feedback(top_k(k=1))))
    }  # fmt: skip
    failed = curves[FAILS]
    grown = (failed[-1] / failed[0]) ** (1 / (steps - 1))
    return Outcome(curves, float(grown), 1 + 11 / 6 * RATE)


def dissimilar_workers(seed: int, workers: int, steps: int) -> Outcome:
    r"""D-PSGD with a constant rate does not reach the minimum if workers' minima differ; D2 does.

    Tang et al. 2018 (arXiv 1803.07068). Without noise, D-PSGD converges to the solution of
    :math:`(I - W + \eta h) x = \eta h b` in each coordinate. The root mean square of the workers'
    distances from the minimum there is the expected number.
    """
    objective = objectives.quadratic(workers, noise=0.0, growth=0.0)
    mixing = gossip.lazy_mixing(gossip.hypercube(workers))
    rate = 0.25 / objectives.LARGEST
    batch = objectives.draw(objective, jax.random.key(0))
    batches = jax.tree.map(lambda x: jnp.broadcast_to(x, (steps, *x.shape)), batch)
    first = jaxcomm.replicate(
        objective.solution + np.float32(0.1 * (1 + seed) / objectives.DIMENSION**0.5), workers
    )

    def error(params: jaxcomm.PerWorker) -> jax.Array:
        offsets = params.per_worker["data"] - objective.solution[None]
        return jnp.sqrt(jnp.mean(jnp.sum(jnp.square(offsets), axis=1)))

    methods = {FAILS: gossip.dpsgd(mixing), CONTROL: gossip.d2(mixing)}
    curves = {
        name: _scan(
            objectives.loss, optax.chain(optax.sgd(rate), tx), workers, first, batches, error
        )
        for name, tx in methods.items()
    }
    h, b = np.float64(objective.curvature), np.float64(objective.center)
    away = np.eye(workers) - np.asarray(mixing.matrices[0])
    fixed = np.stack(
        [
            np.linalg.solve(away + rate * np.diag(h[:, j]), rate * h[:, j] * b[:, j])
            for j in range(h.shape[1])
        ],
        axis=1,
    )
    floor = np.sqrt(np.mean(np.sum((fixed - np.float64(objective.solution)) ** 2, axis=1)))
    return Outcome(curves, float(curves[FAILS][-1]), float(floor))


DRIFT = 50


def signs_of_skewed_noise(seed: int, workers: int, steps: int) -> Outcome:
    r"""Sign SGD moves away from the minimum, since the sign of the gradient is mostly wrong.

    Karimireddy et al. 2019 (arXiv 1901.09847), counterexample 1: :math:`f(x) = x / 4` on
    :math:`[-1, 1]`. The gradient is 4 with probability 1/4 and -1 otherwise, so its mean is 1/4 and
    the mean of its sign is -1/2. The expected number is the drift per step and rate, 1/2.
    """
    drawn = jax.random.bernoulli(jax.random.key(seed), 0.25, (steps, workers))
    batches = jnp.where(drawn, jnp.float32(4), jnp.float32(-1))
    methods = {
        FAILS: jaxcomm.majority_vote(),
        CONTROL: jaxcomm.all_gather_mean(error_feedback(scaled_signs())),
    }
    curves = {
        name: _scan(
            lambda x, slope: jnp.mean(slope) * x[0],
            optax.chain(method, optax.sgd(RATE)),
            workers, jnp.zeros(1, jnp.float32), batches,
            lambda x: (x[0] + 1) / 4, lambda x: jnp.clip(x, -1, 1),
        )
        for name, method in methods.items()
    }  # fmt: skip
    moved = 4 * (curves[FAILS][DRIFT - 1] - 0.25)
    return Outcome(curves, float(moved / (DRIFT * RATE)), 0.5)


def stable_rate(delay: int) -> float:
    r"""The largest :math:`\eta L` for which delayed gradient descent on a quadratic is stable.

    .. math:: x^{t+1} = x^t - \eta L x^{t - \tau} \quad\text{is stable if and only if}\quad
              \eta L < 2 \sin \frac{\pi}{2 (2 \tau + 1)}

    Example:
      >>> stable_rate(0), round(stable_rate(1), 6)
      (2.0, 1.0)
    """
    return float(2 * np.sin(np.pi / (2 * (2 * delay + 1))))


DELAY = 4


def stale_gradients(seed: int, workers: int, steps: int) -> Outcome:
    r"""Delayed gradient descent diverges 5 % above the stable rate, and converges 5 % below.

    The expected number is the largest root of :math:`z^{\tau + 1} - z^\tau + \eta L`, by which the
    error grows per step. The bound is of Levin and May (1976).
    """
    batches = jnp.zeros((steps, workers), jnp.float32)

    def run(part: float) -> np.ndarray:
        tx = optax.chain(
            jaxcomm.delayed(jaxcomm.mean(), DELAY), optax.sgd(part * stable_rate(DELAY))
        )
        first = jnp.full(1, 1.0 + seed, jnp.float32)
        return _scan(
            lambda x, zero: jnp.mean(jnp.float32(0.5) * jnp.square(x[0] - zero)),
            tx, workers, first, batches, lambda x: jnp.abs(x[0]),
        )  # fmt: skip

    curves = {FAILS: run(1.05), CONTROL: run(0.95)}
    quarter = steps // 4
    second, last = (curves[FAILS][part : part + quarter].max() for part in (quarter, 3 * quarter))
    polynomial = np.zeros(DELAY + 2)
    polynomial[[0, 1, -1]] = 1, -1, 1.05 * stable_rate(DELAY)
    expected = np.abs(np.roots(polynomial)).max()
    return Outcome(curves, float((last / second) ** (1 / (2 * quarter))), float(expected))


EXAMPLES: Mapping[str, tuple[Callable[[int, int, int], Outcome], int, int]] = {
    "top-1, three workers": (biased_compression, 3, 800),
    "D-PSGD, dissimilar workers": (dissimilar_workers, 64, 800),
    "sign SGD, skewed noise": (signs_of_skewed_noise, 1, 1600),
    "stale gradients": (stale_gradients, 4, 720),
}
"""The examples, with the number of workers and of steps."""

WHAT: Mapping[str, str] = {
    "top-1, three workers": "growth per step",
    "D-PSGD, dissimilar workers": "distance at the end",
    "sign SGD, skewed noise": "drift per step and rate",
    "stale gradients": "growth per step",
}
"""The number of each example that theory gives."""


@functools.cache
def outcome(name: str, seed: int) -> Outcome:
    """The outcome of an example."""
    example, workers, steps = EXAMPLES[name]
    return example(seed, workers, steps)


def train(
    setting: Mapping[str, Any], seed: int, parameters: Any, *, validation: bool
) -> Iterator[dict[str, Any]]:
    """Yields points of both methods, and at last what the example shows."""
    name = setting["cell"]
    found = outcome(name, seed)
    tail, curves = max(1, setting["steps"] // 10), [*found.curves.values()]
    for part, curve in enumerate(curves):
        for step in np.unique(np.linspace(0, len(curve) - 1, POINTS).astype(int)):
            near = curve[max(0, step - OSCILLATION) : step + 1]
            yield {"step": int(step) + 1, "role": (FAILS, CONTROL)[part], "distance": near.max()}
    yield {
        "what": WHAT[name],
        "measured": found.measured,
        "expected": found.expected,
        **{f"start_{name}": curve[0] for name, curve in zip(ENDS, curves, strict=True)},
        **{f"end_{name}": curve[-tail:].mean() for name, curve in zip(ENDS, curves, strict=True)},
    }
