"""Published counterexamples: a method that must fail, and one that must not, on the same losses."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.study.record import Row
from experiments.study.run import Setting
from experiments.tasks import objectives
from jaxcomm import gossip
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import scaled_signs
from jaxcomm.compression.sparsifiers import top_k


class Outcome(NamedTuple):
    """What a counterexample shows."""

    curves: list[np.ndarray]  # The errors after each step of the failing method and its control.
    measured: float  # A number that theory gives in closed form,
    expected: float  # and that number.


def _curves(methods, loss, params, batches, error, project=lambda x: x) -> list[np.ndarray]:
    """The errors of methods after each step. Batches have the axes steps and workers."""
    workers = jax.tree.leaves(batches)[0].shape[1]

    def run(tx):
        step = jaxcomm.simulate(loss, tx, workers)

        def body(carry, batch):
            params, state, _ = step(*carry, batch)
            params = project(params)
            return (params, state), error(params)

        first = params, jaxcomm.init(tx, params, workers)
        return np.float64(jax.jit(lambda *given: jax.lax.scan(body, *given)[1])(first, batches))

    return [*map(run, methods)]


RATE = 0.01


def biased_compression(seed: int, steps: int) -> Outcome:
    r"""Top-1 without feedback diverges from all points on the diagonal, for every rate.

    Beznosikov et al. 2020 (arXiv 2002.12410): :math:`f_i(x) = \langle a_i, x \rangle^2 +
    \frac14 \|x\|^2` with :math:`a_1 = (-3, 2, 2)` and its rotations. At :math:`t (1, 1, 1)` the
    largest coordinate of worker i's gradient is the i-th, :math:`-\frac{11}{2} t`, so
    :math:`t \gets (1 + \frac{11}{6} \eta) t`.
    """
    vectors = np.float32([[-3, 2, 2], [2, -3, 2], [2, 2, -3]])
    curves = _curves(
        [
            optax.chain(jaxcomm.all_gather_mean(codec), optax.sgd(RATE))
            for codec in (top_k(k=1), error_feedback(top_k(k=1)))
        ],
        lambda x, a: jnp.mean(jnp.square(a @ x)) + jnp.float32(0.25) * jnp.sum(jnp.square(x)),
        jnp.full(3, 1.0 + seed, jnp.float32),
        np.broadcast_to(vectors, (steps, 3, 3)),
        lambda x: jnp.sqrt(jnp.sum(jnp.square(x))),
    )
    grown = (curves[0][-1] / curves[0][0]) ** (1 / (steps - 1))
    return Outcome(curves, grown, 1 + 11 / 6 * RATE)


def dissimilar_workers(seed: int, steps: int) -> Outcome:
    r"""D-PSGD with a constant rate does not reach the minimum if workers' minima differ; D2 does.

    Tang et al. 2018 (arXiv 1803.07068). Without noise, D-PSGD converges to the solution of
    :math:`(I - W + \eta h) x = \eta h b` in each coordinate. The root mean square of the workers'
    distances from the minimum there is the expected number.
    """
    workers, rate = 64, 0.25 / objectives.LARGEST
    objective = objectives.quadratic(workers, noise=0.0, growth=0.0)
    mixing = gossip.lazy_mixing(gossip.hypercube(workers))
    batch = objectives.draw(jax.tree.map(jnp.asarray, objective), jax.random.key(0))
    away = np.float32(0.1 * (1 + seed) / objectives.DIMENSION**0.5)

    def error(params):
        offsets = params.per_worker["data"] - objective.solution[None]
        return jnp.sqrt(jnp.mean(jnp.sum(jnp.square(offsets), axis=1)))

    curves = _curves(
        [optax.chain(optax.sgd(rate), tx) for tx in (gossip.dpsgd(mixing), gossip.d2(mixing))],
        objectives.loss,
        jaxcomm.replicate(objective.solution + away, workers),
        jax.tree.map(lambda x: jnp.broadcast_to(x, (steps, *x.shape)), batch),
        error,
    )
    h, b = np.float64(objective.curvature.T), np.float64(objective.center.T)  # [d, n]
    matrices = np.eye(workers) * (1 + rate * h[..., None]) - np.asarray(mixing.matrices[0])
    fixed = np.linalg.solve(matrices, rate * (h * b)[..., None])[..., 0]
    squares = (fixed - np.float64(objective.solution)[:, None]) ** 2
    return Outcome(curves, curves[0][-1], np.sqrt(squares.sum() / workers))


DRIFT = 50  # Steps before the projection.


def signs_of_skewed_noise(seed: int, steps: int) -> Outcome:
    r"""Sign SGD moves away from the minimum, since the sign of the gradient is mostly wrong.

    Karimireddy et al. 2019 (arXiv 1901.09847), counterexample 1: :math:`f(x) = x / 4` on
    :math:`[-1, 1]`. The gradient is 4 with probability 1/4 and -1 otherwise, so its mean is 1/4 and
    the mean of its sign is -1/2. The expected number is the drift per step and rate, 1/2.
    """
    drawn = jax.random.bernoulli(jax.random.key(seed), 0.25, (steps, 1))
    with_feedback = jaxcomm.all_gather_mean(error_feedback(scaled_signs()))
    curves = _curves(
        [optax.chain(tx, optax.sgd(RATE)) for tx in (jaxcomm.majority_vote(), with_feedback)],
        lambda x, slope: jnp.mean(slope) * x[0],
        jnp.zeros(1, jnp.float32),
        jnp.where(drawn, jnp.float32(4), jnp.float32(-1)),
        lambda x: (x[0] + 1) / 4,
        lambda x: jnp.clip(x, -1, 1),
    )
    return Outcome(curves, 4 * (curves[0][DRIFT - 1] - 0.25) / (DRIFT * RATE), 0.5)


DELAY = 4


def stable_rate(delay: int) -> float:
    r"""The largest :math:`\eta L` for which delayed gradient descent on a quadratic is stable.

    .. math:: x^{t+1} = x^t - \eta L x^{t - \tau} \quad\text{is stable if and only if}\quad
              \eta L < 2 \sin \frac{\pi}{2 (2 \tau + 1)}
    """
    return float(2 * np.sin(np.pi / (2 * (2 * delay + 1))))


def growth_of_delayed(rate: float, delay: int) -> float:
    r"""The growth per step: the largest root of :math:`z^{\tau + 1} - z^\tau + \eta L`."""
    return np.abs(np.roots([1, -1, *[0] * (delay - 1), rate])).max()


def stale_gradients(seed: int, steps: int) -> Outcome:
    """Delayed gradient descent diverges 5 % above the stable rate, and converges 5 % below.

    The bound is of Levin and May (1976).
    """
    above, below = (part * stable_rate(DELAY) for part in (1.05, 0.95))
    curves = _curves(
        [
            optax.chain(jaxcomm.delayed(jaxcomm.mean(), DELAY), optax.sgd(rate))
            for rate in (above, below)
        ],
        lambda x, zero: jnp.mean(jnp.float32(0.5) * jnp.square(x[0] - zero)),
        jnp.full(1, 1.0 + seed, jnp.float32),
        jnp.zeros((steps, 4), jnp.float32),
        lambda x: jnp.abs(x[0]),
    )
    _, second, _, last = (part.max() for part in np.split(curves[0], 4))
    return Outcome(curves, (last / second) ** (2 / steps), growth_of_delayed(above, DELAY))


class Example(NamedTuple):
    """A counterexample."""

    run: Callable[[int, int], Outcome]  # `(seed, steps) -> outcome`
    workers: int
    steps: int
    measured: str  # What theory gives.


EXAMPLES = {
    "top-1, three workers": Example(biased_compression, 3, 800, "growth per step"),
    "D-PSGD, dissimilar workers": Example(dissimilar_workers, 64, 800, "distance at the end"),
    "sign SGD, skewed noise": Example(signs_of_skewed_noise, 1, 1600, "drift per step and rate"),
    "stale gradients": Example(stale_gradients, 4, 720, "growth per step"),
}
POINTS, OSCILLATION = 24, 18  # The largest error of the last steps: those of a delay oscillate.


def train(setting: Setting, seed: int, parameters: Setting, *, validation: bool) -> Iterator[Row]:
    """Yields points of both methods, and at last what the example shows."""
    example = EXAMPLES[setting["cell"]]
    curves, measured, expected = example.run(seed, example.steps)
    for role, curve in zip(("must fail", "control"), curves, strict=True):
        for step in np.linspace(0, len(curve) - 1, POINTS).astype(int):
            near = curve[max(0, step - OSCILLATION) : step + 1]
            yield {"step": int(step) + 1, "role": role, "distance": near.max()}
    failing, control = (curve[-(len(curve) // 10) :].mean() for curve in curves)
    yield {
        "what": example.measured,
        "measured": measured,
        "expected": expected,
        "end_failing": failing,
        "end_control": control,
    }
