"""Compiled scans of methods on objectives with known constants, for all seeds at once."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.methods.convergence import Cell
from experiments.tasks import objectives
from experiments.tasks.objectives import DIMENSION, Objective
from jaxcomm.synchronization import events, shifted_exponential
from jaxcomm.synchronization.events._engine import EventLoop

CHUNK = 16
"""Steps of one call of a compiled program, which returns means over them."""

REPEATS = 4
"""Runs of a seed, with draws of their own, whose mean error counts: exponents then vary less."""

DISTANCES = {"quadratic": 0.01, "logistic": 0.01, "constant rate": 0.15}
"""How far from the minimum runs of a problem begin."""

FIRST_RATE = 0.7  # Times L and the root of the stretch, of the shortest run at a constant rate.


class Schedule(NamedTuple):
    """The learning rate `scale / (offset + slope * steps)`, and the distance at the start."""

    scale: jax.Array  # float32[]
    offset: jax.Array  # float32[]
    slope: jax.Array  # float32[]
    distance: jax.Array  # float32[]


def make_objective(problem: str, workers: int) -> Objective:
    """The objective of a problem."""
    return (objectives.logistic if problem == "logistic" else objectives.quadratic)(workers)


def make_schedule(
    problem: str, cell: Cell, strength: int, workers: int, share: float = 1.0
) -> Schedule:
    r"""The schedule that bounds assume, from the constants of the objective.

    Decreasing: :math:`\eta_t = \frac{2}{\mu (t + \gamma)}` with :math:`\gamma = 2 s L / \mu`, so
    the first rate is :math:`1 / (s L)` for the stretch s of the cell. Constant: :math:`c \sqrt{n /
    T}`, with one c for all n and T, by which the largest rate of the study is
    :math:`0.7 / (\sqrt{s} L)`: from :math:`1 / (s L)`, short runs would not come close to the
    minimum.

    Args:
      problem: The problem.
      cell: The cell.
      strength: The number of the value of its constant.
      workers: n.
      share: n / T, divided by its largest value in the study; for a constant rate.
    """
    known = objectives.constants(make_objective(problem, workers))
    stretch = cell.stretch(strength)
    largest = 1 / (stretch * known.smoothness)
    distance = DISTANCES[problem]
    if problem == "constant rate":
        rate = FIRST_RATE * largest * math.sqrt(stretch * share)
        return Schedule(*map(np.float32, (rate, 1, 0, distance)))
    scale = 2 / known.convexity
    return Schedule(*map(np.float32, (scale, scale / largest, 1, distance)))


def start(objective: Objective, schedule: Schedule) -> jax.Array:
    """The first parameters: the minimum, moved equally in all coordinates."""
    return objective.solution + schedule.distance / jnp.float32(DIMENSION**0.5)


def measure(objective: Objective, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The squared distance to the minimum, and the squared gradient of the mean quadratic."""
    offset = x - objective.solution
    gradient = jnp.mean(jnp.asarray(objective.curvature), axis=0) * offset
    return jnp.sum(jnp.square(offset)), jnp.sum(jnp.square(gradient))


class Program(NamedTuple):
    """Two compiled functions, mapped over seeds.

    Attributes:
      begin: `(objective, schedule, seeds) -> carried`.
      advance: `(objective, schedule, seeds, carried) -> (carried, means)`, over `CHUNK` steps.
    """

    begin: Callable[..., Any]
    advance: Callable[..., Any]


def _over_seeds(begin: Callable[..., Any], advance: Callable[..., Any]) -> Program:
    return Program(
        jax.jit(jax.vmap(begin, (None, None, 0))),
        jax.jit(jax.vmap(advance, (None, None, 0, 0)), donate_argnums=3),
    )


def _rate(schedule: Schedule, count: jax.Array) -> jax.Array:
    return schedule.scale / (schedule.offset + schedule.slope * jnp.asarray(count, jnp.float32))


def stepwise(cell: Cell, strength: int, workers: int) -> Program:
    """The program of a method whose workers step together: `jaxcomm.simulate` in a scan."""
    strategy, (codec, parameter) = cell.of_strategy, cell.parts(strength)

    def transformation(rate: Any, seed: Any) -> optax.GradientTransformation:
        method = strategy.build(codec, parameter, seed, workers)
        stages = [method, optax.sgd(rate)]
        return optax.chain(*(reversed(stages) if strategy.per_worker else stages))

    def begin(objective: Objective, schedule: Schedule, seed: jax.Array) -> Any:
        params: Any = start(objective, schedule)
        if strategy.per_worker:
            params = jaxcomm.replicate(params, workers)
        state = jaxcomm.init(transformation(0.1, seed), params, workers)
        return params, state, jnp.int32(0)

    def advance(
        objective: Objective, schedule: Schedule, seed: jax.Array, carried: Any
    ) -> tuple[Any, Any]:
        key = jax.random.fold_in(jax.random.key(seed), 1)

        def body(carry: Any, _: None) -> Any:
            params, state, count = carry
            tx = transformation(_rate(schedule, count), 0)  # The state has the key of the draws.
            step = jaxcomm.simulate(objectives.loss, tx, workers)
            batch = objectives.draw(objective, jax.random.fold_in(key, count))
            params, state, _ = step(params, state, batch)
            model = jaxcomm.consensus(params) if strategy.per_worker else params
            return (params, state, count + 1), measure(objective, model)

        carried, found = jax.lax.scan(body, carried, length=CHUNK)
        return carried, jax.tree.map(jnp.mean, found)

    return _over_seeds(begin, advance)


def eventwise(cell: Cell, strength: int, workers: int) -> Program:
    """The program of a method on the event engine; a step is as many events as workers."""
    strategy, (codec, parameter) = cell.of_strategy, cell.parts(strength)

    def loop_of(objective: Objective, schedule: Schedule, seed: jax.Array) -> EventLoop:
        def work(params: jax.Array, event: events.Event) -> tuple[jax.Array, jax.Array]:
            batch = objectives.draw_of(objective, event.worker, event.key)
            return jax.value_and_grad(objectives.loss)(params, batch)

        policy = strategy.build(codec, parameter, functools.partial(_rate, schedule), workers)
        return events.event_loop(policy, work, shifted_exponential(1.0), workers=workers, seed=seed)

    def begin(objective: Objective, schedule: Schedule, seed: jax.Array) -> Any:
        return loop_of(objective, schedule, seed).start(start(objective, schedule))

    def advance(
        objective: Objective, schedule: Schedule, seed: jax.Array, carried: Any
    ) -> tuple[Any, Any]:
        loop = loop_of(objective, schedule, seed)

        def body(progress: Any, _: None) -> Any:
            progress, _ = loop.run(progress, workers)
            return progress, measure(objective, loop.model(progress))

        carried, found = jax.lax.scan(body, carried, length=CHUNK)
        return carried, jax.tree.map(jnp.mean, found)

    return _over_seeds(begin, advance)


def run(
    program: Program, objective: Objective, schedule: Schedule, seeds: Sequence[int], steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """The mean squared distance and gradient of each chunk of steps, float64[seeds, chunks]."""
    runs = [seed * REPEATS + repeat for seed in seeds for repeat in range(REPEATS)]
    given = jax.device_put((objective, schedule, np.asarray(runs, np.uint32)))
    carried, found = program.begin(*given), []
    for _ in range(steps // CHUNK):
        carried, means = program.advance(*given, carried)
        found.append(means)
    distances, gradients = (
        np.array(each, np.float64).T.reshape(len(seeds), REPEATS, -1).mean(axis=1)
        for each in zip(*found, strict=True)
    )
    return distances, gradients
