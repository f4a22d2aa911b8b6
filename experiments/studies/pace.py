"""One slow worker: does real time agree with the simulated clock, and do smaller budgets help?"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

import jaxcomm
from experiments import cluster
from experiments.errors import ExperimentError, select
from experiments.methods import Method
from experiments.study import run as readme
from experiments.study import targets
from experiments.study.claims import Claim, Results, is_better, is_equivalent, is_no_worse
from experiments.study.plot import Axis, Lines
from experiments.study.record import Row, of_kind
from experiments.study.run import Options, Setting, Study, Trainer
from experiments.study.statistics import mean
from experiments.study.table import (
    SEEDS,
    Column,
    Table,
    difference,
    first,
    interval,
    key,
    mean_of,
    spread,
    tuned,
)
from experiments.tasks.partitions import orders
from experiments.tasks.task import Task
from experiments.trainer import make_mesh, make_program, over_programs
from jaxcomm import synchronization
from jaxcomm.compression import blockwise
from jaxcomm.compression.quantizers import dither
from jaxcomm.wire._account import Account

# One process of several is slow, in real time.
MINIBATCHES, MINIBATCH = 4, 16  # Of a worker and window, and the examples of one.
RATE = 0.4
SLOWDOWN = 3.0
LOSS = 0.4  # The training loss at which the time is measured.
LOGGED = 24  # The logged losses of a synchronous run.
LONGER = 2  # Windows of a non-blocking run over those of a synchronous run.
WARM_UP_WINDOWS, WARM_UP_SEED = 4, 1000
TOLERANCE = 0.2


@dataclasses.dataclass(frozen=True)
class Pace(Options):
    """Does Non-blocking SGD save the wall-clock time that the simulated clock predicts?

    Question: several processes of one machine train on scikit-learn's digits. Extra work in each
    mini-batch slows down the last process. How long do synchronous SGD and Non-blocking SGD with a
    deadline take to reach the same training loss? Does the simulated clock, with the measured times
    of mini-batches, predict the same ratio?

    Command: `python -m experiments launch --processes 4 -- pace`.

    Expected time: ten minutes on two idle CPU cores.

    Number: the ratio of the two times, measured and simulated.
    """

    seeds: int = 9
    """seeds, each with a run per strategy and clock"""
    windows: int = 72
    """windows of a synchronous run"""
    minibatch_seconds: float = 0.02
    """seconds of sleep per mini-batch, which emulate an accelerator"""
    deadline_slack: float = 1.1
    """deadline over the time in which a fast worker ends all mini-batches"""
    distributed: bool = False
    """join the processes that `launch` has started"""
    start_timeout: float = 300.0
    """seconds within which all processes must start"""


def strategies(config: Pace) -> list[Setting]:
    """Both strategies in real time, and then on the simulated clock.

    Raises:
      ExperimentError: If this process is not one of several with one device each.
    """
    if not config.distributed or jax.local_device_count() != 1 or jax.process_count() < 2:
        raise ExperimentError(
            "pace requires at least two processes with one device each: "
            "python -m experiments launch --processes 4 -- pace."
        )
    return [
        {"clock": clock, "strategy": strategy}
        for clock in ("wall", "simulated")
        for strategy in ("synchronous", "non_blocking")
    ]


def measured(config: Pace, rows: Sequence[Row], setting: Setting, seed: int) -> Row:
    """The measured times that a run depends on.

    The deadline follows from the mini-batches of the first synchronous run. The simulated clock has
    the times of both runs of the seed on the wall clock.
    """
    runs = [row for row in of_kind(rows, "run") if row["clock"] == "wall"]
    found = {}
    if runs and setting["strategy"] == "non_blocking":
        fastest = min(runs[0]["minibatch_seconds"])
        found["deadline"] = config.deadline_slack * MINIBATCHES * fastest
    if setting["clock"] == "simulated":
        for name in ("minibatch_seconds", "exchange_seconds"):
            of_seed = [row[name] for row in runs if row["seed"] == seed]
            found[name] = np.mean(of_seed, axis=0).tolist()
    return found


def minibatches_of(task: Task, worker: int, workers: int, seed: int) -> Iterator[Any]:
    """Infinite mini-batches of a worker, from its shard of the training set."""
    inputs, labels = task.dataset.train_inputs, task.dataset.train_labels
    local = np.random.default_rng(seed).permutation(len(inputs))[worker::workers]
    for rows in orders([local], MINIBATCH, [seed, worker]):
        yield inputs[rows], labels[rows]


Run = tuple[list[tuple[float, Any]], Row]  # Logged seconds and parameters, and the end.


def simulated_run(
    task: Task, tx: Any, seed: int, count: int, every: int, deadline: float,
    minibatch_seconds: Sequence[float], exchange_seconds: float,
) -> Run:  # fmt: skip
    """Trains on the same batches on a simulated clock."""
    workers, params, logged = len(minibatch_seconds), task.first_weights(seed), []
    state = jaxcomm.init(tx, params, workers)
    step = jaxcomm.simulate(task.loss, tx, workers, gradients=synchronization.window_gradients)
    clock, close = synchronization.windows(
        synchronization.deterministic(minibatch_seconds),
        synchronization.all_workers() if math.isinf(deadline)
        else synchronization.deadline(deadline),
        workers=workers, minibatches=MINIBATCHES, communication_seconds=exchange_seconds,
        in_flight="abort",
    )  # fmt: skip
    queues = [minibatches_of(task, worker, workers, seed) for worker in range(workers)]
    unused = next(minibatches_of(task, 0, workers, seed))
    for number in range(1, count + 1):
        window, clock = close(clock)
        given = [
            next(queue) if place < finished else unused
            for queue, finished in zip(queues, window.finished.tolist(), strict=True)
            for place in range(MINIBATCHES)
        ]
        batch = jax.tree.map(lambda *each: np.stack(each), *given)
        params, state, _ = step(params, state, (batch, window.finished))
        if number % every == 0:
            logged.append((float(clock.seconds), jax.device_get(params)))
    return logged, {"minibatches": int(clock.minibatches)}


def make_real_run(
    task: Task, tx: Any, mesh: Mesh, config: Pace, deadline: float
) -> Callable[[int, int, int], Run]:
    """What trains in real time in windows of one length."""
    me, workers = jax.process_index(), mesh.size
    step = jaxcomm.make_step(task.loss, tx, mesh, gradients=synchronization.precomputed_gradients)
    close = synchronization.RealTimeWindow(
        task.loss, step, mesh, seconds=deadline, minibatches=MINIBATCHES
    )
    gradient = jax.jit(jax.grad(task.loss))
    extra = (SLOWDOWN - 1) * config.minibatch_seconds if me == workers - 1 else 0.0

    def slowly(weights, seed):
        for batch in minibatches_of(task, me, workers, seed):
            end = time.perf_counter() + extra
            while time.perf_counter() < end:
                jax.block_until_ready(gradient(weights, batch))
            time.sleep(config.minibatch_seconds)
            yield batch

    def run(seed, count, every):
        params = jax.device_get(task.first_weights(seed))
        queue, state = slowly(params, seed), jaxcomm.init(tx, params, mesh)
        logged, seconds, exchanges, minibatches = [], [], [], 0
        multihost_utils.sync_global_devices("start")
        close.restart()
        began = time.perf_counter()
        for number in range(1, count + 1):
            params, state, metrics, _ = close(params, state, [queue])
            seconds.append(close.minibatch_seconds)
            exchanges.append(metrics["exchange_seconds"])
            minibatches += int(metrics["weight"])
            if number % every == 0:
                own = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
                logged.append((time.perf_counter() - began, own))
        times = np.asarray([np.median(seconds), *exchanges], np.float32)
        each = np.asarray(multihost_utils.process_allgather(times), np.float64)
        # The last worker to arrive at an exchange does not wait in it.
        exchange = float(np.median(each[:, 1:].min(axis=0)))
        return logged, {"minibatches": minibatches, "minibatch_seconds": each[:, 0].tolist(),
                        "exchange_seconds": exchange}  # fmt: skip

    run(WARM_UP_SEED, WARM_UP_WINDOWS, WARM_UP_WINDOWS)  # Compiles.
    return run


def logged_every(config: Pace) -> int:
    return max(1, config.windows // LOGGED)


def train_in_time(config: Pace, _: Setting) -> Trainer:
    """The trainer of both strategies on one clock. Only the first process has the values."""
    task, is_main = Task("digits"), cluster.is_main_process()
    tx = optax.chain(jaxcomm.mean(), optax.sgd(RATE))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    real_run = functools.cache(functools.partial(make_real_run, task, tx, mesh, config))

    def trainer(setting, seed, parameters, *, validation):
        times = {"deadline": math.inf, **parameters}
        count = config.windows * (LONGER if "deadline" in parameters else 1)
        given = seed, count, logged_every(config)
        if setting["clock"] == "wall":
            logged, found = real_run(times["deadline"])(*given)
        elif is_main:
            logged, found = simulated_run(task, tx, *given, **times)
        if not is_main:
            yield {}
            return
        points = [{"seconds": seconds, "train_loss": task.train_score(params)[0]}
                  for seconds, params in logged]  # fmt: skip
        yield from points
        reached = [point["seconds"] for point in points if point["train_loss"] <= LOSS]
        yield {**points[-1], "seconds_to_loss": min(reached, default=math.nan), **found}

    return trainer


def add_speedups(rows: Sequence[Row]) -> list[Row]:
    """Adds the time to the loss of the synchronous run of the same clock and seed over its own."""
    waited = {(row["clock"], row["seed"]): row["seconds_to_loss"]
              for row in of_kind(rows, "run") if row["strategy"] == "synchronous"}  # fmt: skip

    return [
        row if row["kind"] == "point"
        else {**row, "speedup": waited[row["clock"], row["seed"]] / row["seconds_to_loss"]}
        for row in rows
    ]  # fmt: skip


PACES = Table(
    by=("clock", "strategy"),
    columns=(
        key("clock"),
        key("strategy"),
        Column("seconds to the loss", interval("seconds_to_loss"), ".2f", "seconds_to_loss"),
        Column("times as fast", interval("speedup"), ".2f", "speedup"),
        Column("mini-batches", mean_of("minibatches"), ",.0f", "minibatches"),
    ),
    reference={"strategy": "synchronous"},
)  # fmt: skip


def describe_pace(results: Results) -> list[str]:
    extra = 1e3 * results.config.minibatch_seconds
    (deadline,) = {row["deadline"] for row in results.rows if "deadline" in row}
    return [
        "digits, several processes of one machine, windows of 4 mini-batches of 16 examples, plain "
        "SGD with the rate 0.4 for both strategies. Each "
        f"mini-batch sleeps {extra:g} ms, which emulates an accelerator. Each mini-batch of the "
        f"last process also computes unused gradients for {2 * extra:g} ms. So the "
        "processes do not compete for the cores. The strategies alternate, and the simulated clock "
        "trains on the same batches, with the mean times of each pair of runs. The deadline is "
        f"{1e3 * deadline:.1f} ms.",
        readme.CLAIMS, readme.TABLE,
        "Seconds to the loss 0.4 over the whole training set, evaluated every "
        f"{logged_every(results.config)} windows; brackets are 95 % intervals over seeds. Speedups "
        "are paired by seed.",
    ]  # fmt: skip


PACE = Study(
    "pace", Pace, strategies, train_in_time, PACES, describe_pace, 
    claims=(
        Claim("Non-blocking SGD reaches the loss sooner than synchronous SGD.",
              is_better("seconds_to_loss", methods={"strategy": "non_blocking"}, log=True)),
        Claim("The simulated clock predicts the ratio of the two times within a factor of 1.2.",
              is_equivalent("speedup", 1 + TOLERANCE, log=True,
                            methods={"clock": "simulated", "strategy": "non_blocking"},
                            reference={"clock": "wall"})),
    ),
    figures=[Lines(
        file="loss_against_seconds.png", caption="Training loss against seconds", by="strategy",
        across=("clock",), x=(Axis("seconds", "seconds"),), y=Axis("train_loss", "training loss"),
        at=None)],
    inputs=measured, interleaved=True, shares=("clock",), derive=add_speedups,
)  # fmt: skip


# One worker has a slow link, on a simulated clock.
WORKERS, BATCH, BLOCK = 8, 256, 64
SLOWDOWNS = (1.0, 4.0, 16.0)
RATES = (0.03, 0.1, 0.3)
BANDWIDTH, STEP_SECONDS = 1e6, 0.005  # Bytes per second and direction; computation of a step.
LOG_EVERY = 10
TIME, REFERENCE = "seconds_to_target", {"method": "equal_8_4"}


@dataclasses.dataclass(frozen=True)
class Budgets(Options):
    """How much time do smaller budgets of a worker on a slow link save?

    Question: 8 simulated workers train scikit-learn's digits; the link of one is as fast as the
    others', or 4 or 16 times slower. All wait for it. How much sooner do they reach a training
    loss if only this worker sends 2 bits in place of 8, and does the loss per step suffer?

    Command: `python -m experiments budgets`. Expected time: three minutes on two CPU cores.
    Number: seconds to the same loss over those of equal budgets with the same code of the mean.
    """

    seeds: int = 5
    """number of seeds"""
    steps: int = 200
    """training steps per run; a trial has half of them"""
    methods: tuple[str, ...] = ("all",)
    """methods to compare, or all"""


def code(bits: int) -> jaxcomm.Codec:
    return blockwise(dither(levels=2 ** (bits - 1) - 1), BLOCK)


def equal(bits: int, of_mean: int, seed: Any) -> optax.GradientTransformation:
    return jaxcomm.two_stage_mean(code(bits), mean_codec=code(of_mean), seed=seed)


def budgeted(slow: int, of_mean: int, seed: Any) -> optax.GradientTransformation:
    return jaxcomm.budgeted_mean(code, 8, slow={0: slow}, mean_codec=code(of_mean), seed=seed)


MEANS = {  # A description, what builds the method, and the bits.
    "mean": ("all workers send float32", lambda seed: jaxcomm.mean()),
    "equal_8": ("all workers send 8 bits, and the mean has 8 bits", equal, 8, 8),
    "equal_8_4": ("all workers send 8 bits, and the mean has 4 bits", equal, 8, 4),
    "equal_2_4": ("all workers send 2 bits, and the mean has 4 bits", equal, 2, 4),
    "slow_2_8": ("the slow worker sends 2 bits, others 8, and the mean has 8", budgeted, 2, 8),
    "slow_2_4": ("the slow worker sends 2 bits, others 8, and the mean has 4", budgeted, 2, 4),
}


def slow_links(config: Budgets) -> list[Setting]:
    """All methods with all slow links.

    Raises:
      ExperimentError: If a method does not exist, or no logged loss is after half of the steps.
    """
    if config.steps % (2 * LOG_EVERY):
        raise ExperimentError(f"--steps {config.steps} is not divisible by {2 * LOG_EVERY}.")
    methods = select(config.methods, [*MEANS], "--methods")
    return [{"slowdown": slowdown, "method": each} for each in methods for slowdown in SLOWDOWNS]


def seconds_of(account: Account, slowdown: float) -> float:
    """The seconds of a step's messages, one stage after the other.

    A stage is all collectives of one kind. It ends when the slowest link has moved the bytes that
    its worker sends and receives at the same time. The link of worker 0 is slower.
    """
    total = 0.0
    for kind in {each.kind for each in account.collectives}:
        stage = [each for each in account.collectives if each.kind == kind]
        total += max(
            max(sum(each.bytes_sent(worker) for each in stage),
                sum(each.bytes_received(worker) for each in stage))
            * (slowdown if worker == 0 else 1) / BANDWIDTH
            for worker in range(WORKERS)
        )  # fmt: skip
    return total


def train_on_links(config: Budgets, setting: Setting) -> Trainer:
    """The trainer of a method; only the clock depends on the slow link."""
    task, (_, build, *bits) = Task("digits"), MEANS[setting["method"]]
    method = Method(lambda seed: build(*bits, seed), "unbiased")
    program = make_program(
        task, method, "sgd", RATES[0], BATCH, make_mesh(WORKERS),
        simulated=True, with_errors=False,
    )  # fmt: skip
    run = over_programs(
        lambda: program, task.hold_out(BATCH), config.steps, LOG_EVERY, config.steps // 2
    )

    @functools.cache
    def trained(seed, rate, validation):
        return [*run(setting, seed, {"learning_rate": rate}, validation=validation)]

    def trainer(setting, seed, parameters, *, validation):
        *points, end = trained(seed, parameters["learning_rate"], validation)
        if validation:
            yield end
            return
        seconds = STEP_SECONDS + seconds_of(program.account, setting["slowdown"])
        for point in points:
            yield {**point, "seconds": point["step"] * seconds}
        late = mean([each["train_loss"] for each in points[len(points) // 2 :]])
        yield {**end, "late_loss": late, "step_milliseconds": 1e3 * seconds}

    return trainer


LINKS = Table(
    by=("slowdown", "method"),
    columns=(
        key("slowdown"),
        key("method"),
        SEEDS,
        Column("rate", tuned("learning_rate")),
        Column("ms/step", first("step_milliseconds"), ",.1f", "step_milliseconds"),
        Column("training loss, last half", spread("late_loss"), ",.4f", "late_loss"),
        Column("seconds to target", targets.needed("seconds"), ".2f"),
        Column("reached", targets.reached("seconds")),
        Column("of equal_8_4", difference(TIME, log=True), targets.show_ratio, name="of equal"),
    ),
    reference=REFERENCE,
    adjacent=("slowdown",),
)


def describe_links(results: Results) -> list[str]:
    legend = "\n".join(f"- `{name}`: {what}" for name, (what, *_) in MEANS.items())
    return [
        f"digits, 8 simulated workers, {results.config.steps} steps of 256 examples, SGD with "
        "momentum 0.9. All methods have the same weights and batches per seed; the rate is tuned "
        "by method. Blocks of 64 coordinates have a norm.",
        readme.PROVENANCE, readme.TUNING, readme.CLAIMS, legend, readme.TABLE,
        "The seconds are simulated. A step takes 5 ms of computation and then its stages one after "
        "the other. A stage ends when the slowest link has moved what its worker sends and "
        "receives, at 1e+06 bytes per second in each direction, divided by the slowdown for "
        "worker 0. Bytes are those of the traced program for each worker. Latencies are left out: "
        "`budgeted_mean` sends up to two permutations per worker where an all-to-all is one "
        "collective, which counts on links of high latency. The training does not depend on the "
        "clock, so the rows of a method differ in seconds only. The target is the training loss of "
        "`equal_8_4` after half of its steps.",
        readme.FIGURES,
    ]  # fmt: skip


BUDGETS = Study(
    "budgets", Budgets, slow_links, train_on_links, LINKS, describe_links,
    figures=[Lines(
        file="loss_against_seconds.png", caption="Training loss against simulated seconds",
        by="method", across=("slowdown",), x=(Axis("seconds", "simulated seconds"),),
        y=Axis("train_loss", "training loss"), finish=targets.mark,
    )],
    claims=[
        Claim("Where a link is slower, `slow_2_4` takes less time to the target than `equal_8_4`.",
              is_better(TIME, methods={"method": "slow_2_4", "slowdown": (4.0, 16.0)}, log=True)),
        Claim("`slow_2_4` has at most 1.1 times its training loss over the last half of the steps.",
              is_no_worse("late_loss", 1.1, methods={"method": "slow_2_4"}, log=True)),
        Claim("`equal_2_4`, with 2 bits for all, has at most 1.1 times this loss as well.",
              is_no_worse("late_loss", 1.1, methods={"method": "equal_2_4"}, log=True)),
    ],
    derive=lambda rows: targets.add_targets(
        rows, ("slowdown",), REFERENCE, "train_loss", ("seconds",), interpolated=True
    ),
    shares=("method",),
    grid=lambda config, setting: {"learning_rate": (RATES,)},
    budget=lambda config: len(RATES),
)  # fmt: skip
