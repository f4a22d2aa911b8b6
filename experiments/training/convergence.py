"""Runs of the cells of the table of convergence: one compiled scan for all seeds of a setting."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.methods.convergence import CELLS, Cell
from experiments.tasks import objectives
from experiments.tasks.objectives import DIMENSION, Objective
from experiments.training import counterexamples
from experiments.training.moments import exact_distances_of_mean
from experiments.training.power_laws import binned, fit_exponent
from jaxcomm.synchronization import events, exponential

EXACT, EXAMPLE = "exact mean", "counterexample"
CHUNK = 16
"""Steps of one call of a compiled program, which returns means over them."""

DISTANCES = {"quadratic": 0.01, "logistic": 0.01, "constant rate": 0.15}
"""How far from the minimum runs of a problem begin."""

REPEATS = 4
"""Runs of a seed, with draws of their own, whose mean error counts: exponents then vary less."""

BINS, TAIL = 10, 16  # The fit is over the last 15/16 of the steps, in so many intervals.
HORIZONS = (16, 4, 1)  # Divisors of the steps of runs with a constant rate.
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

    def loop_of(objective: Objective, schedule: Schedule, seed: jax.Array) -> events.EventLoop:
        def work(params: jax.Array, event: events.Event) -> tuple[jax.Array, jax.Array]:
            batch = objectives.draw_of(objective, event.worker, event.key)
            return jax.value_and_grad(objectives.loss)(params, batch)

        policy = strategy.build(codec, parameter, functools.partial(_rate, schedule), workers)
        return events.event_loop(policy, work, exponential(1.0), workers=workers, seed=seed)

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


def exact_error(objective: Objective, schedule: Schedule, steps: int) -> float:
    """The exact expectation of `error` of a run of synchronous SGD."""
    rates = np.float64(schedule.scale) / (schedule.offset + schedule.slope * np.arange(steps))
    first = np.asarray(start(objective, schedule), np.float64)
    return float(exact_distances_of_mean(objective, rates, first)[steps // 2 :].mean())


def settings(config: Any) -> list[dict[str, Any]]:
    """All settings; those that share a program follow each other.

    The exponents in the steps are fitted with the most workers, and those in the constant too.

    Raises:
      ExperimentError: If an option is invalid.
    """
    cells = select(config.cells, [*CELLS], "--cells")
    problems = select(config.problems, [*DISTANCES], "--problems")
    if any(workers < 4 or workers & (workers - 1) for workers in config.workers):
        raise ExperimentError("--workers must be powers of 2, of at least 4: a hypercube has them.")
    for name in ("steps", "event_steps"):
        if getattr(config, name) % (least := CHUNK * max(HORIZONS)):
            raise ExperimentError(
                f"--{name.replace('_', '-')} {getattr(config, name)} is not divisible by {least}."
            )
    if config.seeds < 2:
        raise ExperimentError(f"--seeds must be at least 2 for an interval, got {config.seeds}.")
    counts, most = sorted({*config.workers}, reverse=True), max(config.workers)
    found: list[dict[str, Any]] = []
    for name in cells:
        cell = CELLS[name]
        steps = config.event_steps if cell.of_strategy.is_simulated else config.steps
        for workers, strength in [(n, 0) for n in counts] + [
            (most, strength) for strength in range(1, cell.strengths)
        ]:
            horizons = [steps // part for part in HORIZONS]
            for problem in problems if strength == 0 else problems[:1]:
                lengths = [steps]
                if problem == "constant rate":
                    lengths = horizons if workers == most else horizons[1:2]
                found += [
                    {"problem": problem, "cell": name, "workers": workers, "strength": strength,
                     "steps": length}
                    for length in lengths
                ]  # fmt: skip
    examples = [
        {"problem": EXAMPLE, "cell": name, "workers": workers, "strength": 0, "steps": steps}
        for name, (_, workers, steps) in counterexamples.EXAMPLES.items()
    ]  # fmt: skip
    return [*examples, *found]


def train(config: Any, setting: Mapping[str, Any]) -> Any:
    """What runs a setting."""
    if setting["problem"] == EXAMPLE:
        return counterexamples.train
    return Trainer(config, setting)


class Trainer:
    """Runs all seeds of a setting at once, when the first is requested."""

    def __init__(self, config: Any, setting: Mapping[str, Any]):
        """Makes the program; it is compiled by its first call.

        Args:
          config: The config of the study.
          setting: Has the cell, the number of workers and the number of the strength.
        """
        self._seeds, self._cell = range(config.seeds), CELLS[setting["cell"]]
        self._most = max(config.workers)
        is_simulated = self._cell.of_strategy.is_simulated
        self._steps = config.event_steps if is_simulated else config.steps
        make = eventwise if is_simulated else stepwise
        self._program = make(self._cell, setting["strength"], setting["workers"])
        self._found: dict[tuple, Any] = {}

    def __call__(
        self, setting: Mapping[str, Any], seed: int, parameters: Any, *, validation: bool
    ) -> Iterator[dict[str, Any]]:
        """Yields the points of one seed, and at last what is fitted to them."""
        problem, workers, strength = (setting[n] for n in ("problem", "workers", "strength"))
        steps, cell = setting["steps"], self._cell
        objective = make_objective(problem, workers)
        share = workers / self._most * (self._steps // HORIZONS[0]) / steps
        schedule = make_schedule(problem, cell, strength, workers, share)
        key = tuple(setting.values())
        if key not in self._found:
            self._found = {key: run(self._program, objective, schedule, self._seeds, steps)}
        distances, gradients = (each[[*self._seeds].index(seed)] for each in self._found[key])
        strategy = cell.of_strategy
        values = {
            "architecture": strategy.architecture,
            "synchronization": strategy.synchronization,
            "compression": cell.compression or "exact",
            "symbol": cell.symbol,
            "constant": cell.value(strength, workers),
            "predicted_constant": cell.constant if cell.symbol else math.nan,
        }
        if problem == "constant rate":
            yield {**values, "error": gradients.mean()}
            return
        offset = float(schedule.offset)
        times = offset + CHUNK * (np.arange(len(distances)) + 0.5)
        first = len(times) // TAIL
        across, up = binned(times[first:], distances[first:], BINS)
        if (strength, workers) == (0, self._most):
            for x, y in zip(across, up, strict=True):
                yield {"step": x - offset, "error": y}
        exact = (
            exact_error(objective, schedule, steps)
            if problem == "quadratic" and setting["cell"] == EXACT
            else math.nan
        )
        yield {
            **values,
            "error": distances[len(distances) // 2 :].mean(),
            "exact_error": exact,
            "exponent": fit_exponent(across, up),
        }
