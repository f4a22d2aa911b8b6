"""How the study of convergence trains: scans, compiled once for all problems of a cell."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.studies._convergence_cells import Choice, Strategy
from experiments.tasks import objectives
from experiments.tasks.objectives import Objective
from jaxcomm.synchronization import events, shifted_exponential

CHUNK = 16
"""Steps of one call of a compiled program, which returns means over them."""
REPEATS = 4
"""Runs of a seed, with draws of their own, whose mean error counts: exponents then vary less."""


class Problem(NamedTuple):
    """What is minimized, and the learning rate that bounds assume."""

    title: str
    objective: Callable[[int], Objective]
    distance: float
    """From the minimum at the start."""
    exponent: float = -1.0
    """That bounds predict, in the steps and in the workers."""
    has_constant_rate: bool = False


PROBLEMS = {
    "quadratic": Problem("Quadratics, decreasing rate", objectives.quadratic, 0.01),
    "logistic": Problem("Logistic regression, decreasing rate", objectives.logistic, 0.01),
    "constant rate": Problem(
        "Quadratics, a constant rate of the order of √(n/T), squared gradients",
        objectives.quadratic, 0.15, -0.5, has_constant_rate=True,
    ),
}  # fmt: skip


class Schedule(NamedTuple):
    """The learning rate `scale / (offset + slope * steps)`, and the first parameters."""

    scale: jax.Array  # float32[]
    offset: jax.Array  # float32[]
    slope: jax.Array  # float32[]
    start: jax.Array  # float32[d]

    def rate(self, count: jax.Array) -> jax.Array:
        """The rate after that many steps."""
        return self.scale / (self.offset + self.slope * jnp.asarray(count, jnp.float32))


FIRST_RATE = 0.7  # Times L and the root of the stretch, of the shortest run at a constant rate.


def make_schedule(problem: Problem, objective: Objective, stretch: float, share: float) -> Schedule:
    r"""The schedule that bounds assume, from the constants of the objective.

    Decreasing: :math:`\eta_t = \frac{2}{\mu (t + \gamma)}` with :math:`\gamma = 2 s L / \mu`, so
    the first rate is :math:`1 / (s L)` for the stretch s of the cell. Constant: :math:`c \sqrt{n /
    T}`, with one c for all n and T, by which the largest rate of the study is
    :math:`0.7 / (\sqrt{s} L)`: from :math:`1 / (s L)`, short runs would not come close to the
    minimum. `share` is n / T, divided by its largest value in the study.
    """
    convexity, smoothness = objectives.convexity_and_smoothness(objective)
    largest = 1 / (stretch * smoothness)
    scale, offset, slope = 2 / convexity, 2 / convexity / largest, 1
    if problem.has_constant_rate:
        scale, offset, slope = FIRST_RATE * largest * math.sqrt(stretch * share), 1, 0
    start = objective.solution + problem.distance / objectives.DIMENSION**0.5
    return Schedule(*map(np.float32, (scale, offset, slope, start)))


def stepwise(strategy: Strategy, choice: Choice, workers: int) -> tuple[Callable, Callable]:
    """`begin` and `step` of a method whose workers step together.

    These are `(objective, schedule, seed) -> carried` and `(objective, schedule, seed, carried) ->
    (carried, mean of the workers)`.
    """

    def transformation(rate, seed):
        method = strategy.build(choice.codec, choice.parameter, seed, workers)
        stages = [method, optax.sgd(rate)]
        return optax.chain(*(reversed(stages) if strategy.per_worker else stages))

    def begin(objective, schedule, seed):
        params = schedule.start
        if strategy.per_worker:
            params = jaxcomm.replicate(params, workers)
        return params, jaxcomm.init(transformation(0.1, seed), params, workers), jnp.int32(0)

    def step(objective, schedule, seed, carried):
        params, state, count = carried
        tx = transformation(schedule.rate(count), 0)  # The state has the key of the draws.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), count)
        batch = objectives.draw(objective, key)
        params, state, _ = jaxcomm.simulate(objectives.loss, tx, workers)(params, state, batch)
        model = jaxcomm.consensus(params) if strategy.per_worker else params
        return (params, state, count + 1), model

    return begin, step


def eventwise(strategy: Strategy, choice: Choice, workers: int) -> tuple[Callable, Callable]:
    """The same of a method on the event engine; a step is as many events as workers."""

    def loop_of(objective, schedule, seed):
        def work(params, event):
            batch = objectives.draw_of(objective, event.worker, event.key)
            return jax.value_and_grad(objectives.loss)(params, batch)

        policy = strategy.build(choice.codec, choice.parameter, schedule.rate, workers)
        return events.event_loop(policy, work, shifted_exponential(1.0), workers=workers, seed=seed)

    def begin(objective, schedule, seed):
        return loop_of(objective, schedule, seed).start(schedule.start)

    def step(objective, schedule, seed, carried):
        loop = loop_of(objective, schedule, seed)
        carried, _ = loop.run(carried, workers)
        return carried, loop.model(carried)

    return begin, step


def compiled(begin: Callable, step: Callable) -> Callable[..., np.ndarray]:
    """`(objective, schedule, seed, steps) -> errors`, float64[2, chunks].

    These are the squared distance to the minimum and the squared gradient of the mean quadratic.
    """

    def advance(objective, schedule, seed, carried):
        def body(carry, _):
            carry, model = step(objective, schedule, seed, carry)
            offset = model - objective.solution
            gradient = jnp.mean(objective.curvature, axis=0) * offset
            return carry, (jnp.sum(jnp.square(offset)), jnp.sum(jnp.square(gradient)))

        carried, found = jax.lax.scan(body, carried, length=CHUNK)
        return carried, jax.tree.map(jnp.mean, found)

    begin_all = jax.jit(jax.vmap(begin, (None, None, 0)))
    advance_all = jax.jit(jax.vmap(advance, (None, None, 0, 0)), donate_argnums=3)

    def run(objective, schedule, seed, steps):
        runs = REPEATS * seed + np.arange(REPEATS, dtype=np.uint32)
        given = jax.device_put((objective, schedule, runs))
        carried, found = begin_all(*given), []
        for _ in range(steps // CHUNK):
            carried, means = advance_all(*given, carried)
            found.append(means)
        return np.array(found, np.float64).mean(axis=2).T

    return run
