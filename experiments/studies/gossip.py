"""Does MATCHA at half the budget train as well as D-PSGD, step for step?"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax

import jaxcomm
from experiments.errors import ExperimentError, select
from experiments.study import run as readme
from experiments.study.claims import Claim, Results, is_equivalent, is_no_worse
from experiments.study.plot import COLORS, Axis, Lines
from experiments.study.run import Options, Setting, Study, Trainer
from experiments.study.table import (
    SEEDS,
    Column,
    Table,
    difference,
    key,
    mean_of,
    relative,
    spread,
    tuned,
)
from experiments.tasks.partitions import SKEW, orders, split
from experiments.tasks.task import Task
from jaxcomm import compression, gossip


@dataclasses.dataclass(frozen=True)
class Gossip(Options):
    """Does MATCHA at half the budget train as well as D-PSGD, step for step?

    Question: a small convolutional network on scikit-learn's digits, 8 to 64 simulated workers on
    the graphs of MATCHA's paper, a ring, a torus and an exponential graph. The training set is
    split uniformly or with skewed labels; the rate is tuned by method, graph and split. Is the
    training loss of the consensus model, averaged over the last half of the steps, at most 1.1
    times that of D-PSGD, with half the message rounds? Which loss, on training and test data, do
    compressed, directed and asynchronous gossip reach, and for how many bytes?

    Command: `python -m experiments gossip`. Expected time: half an hour on one CPU core.
    Number: the paired ratio of the two losses per graph and split, and its 95 % interval.
    """

    seeds: int = 5
    """number of seeds"""
    steps: int = 200
    """training steps per run; a trial has half of them"""
    batch: int = 256
    """examples per step, over all workers"""
    learning_rates: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    """the grid of rates of plain SGD"""
    log_every: int = 20
    """steps between two logged losses"""
    graphs: tuple[str, ...] = ("all",)
    """graphs such as ring_8, or all"""
    splits: tuple[Literal["iid", "skewed"], ...] = ("iid", "skewed")
    """how examples are split"""
    methods: tuple[str, ...] = ("all",)
    """methods to compare, or all"""


# The graphs. The first and the last of matchings are from figures 1a and 3b of MATCHA's paper.

MATCHINGS = {
    "erdos_renyi_8": [
        [(1, 5), (6, 7), (0, 4), (2, 3)],
        [(1, 7), (3, 6)],
        [(1, 0), (3, 7), (5, 6)],
        [(1, 2), (7, 0)],
        [(3, 1)],
    ],
    "ring_8": [
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        [(0, 7), (2, 1), (4, 3), (6, 5)],
    ],
    "erdos_renyi_16": [
        [(2, 7), (3, 15), (13, 14), (8, 9), (1, 5), (0, 10), (6, 12), (4, 11)],
        [(12, 11), (5, 6), (14, 1), (9, 10), (15, 2), (8, 13)],
        [(12, 5), (11, 6), (1, 8), (9, 3), (2, 10)],
        [(12, 14), (11, 9), (5, 15), (0, 6), (1, 7)],
        [(12, 8), (5, 2), (11, 14), (1, 6)],
        [(12, 15), (13, 11), (10, 5), (3, 14)],
        [(12, 9)],
        [(0, 12)],
    ],
}
GRAPHS = {
    **{name: nx.Graph(itertools.chain(*matchings)) for name, matchings in MATCHINGS.items()},
    "torus_64": gossip.torus(8, 8),
    "exponential_64": gossip.exponential(64, directed=False),
}
BUDGET = 0.5


@functools.cache
def plan(graph: str) -> Any:
    """MATCHA's plan for a graph, whose matchings the library finds if it has none here."""
    return gossip.matcha_plan(MATCHINGS.get(graph, GRAPHS[graph]), BUDGET)


class Method(NamedTuple):
    """A method of gossip."""

    build: Callable
    """`(graph, **options) -> transformation`, from the name of a graph and common options."""
    sends: str
    graphs: Collection[str] = ("erdos_renyi_8",)


TOP_10_PERCENT = compression.sparsifiers.top_k(ratio=0.1)
FOUR_BITS = compression.blockwise(compression.quantizers.dither(levels=7), block_size=32)


adapt_then_combine = functools.partial(gossip.dpsgd, order="adapt_then_combine")
"""D-PSGD, in the order of MATCHA."""


def one_peer(graph: str) -> Any:
    """One neighbor in turn, of the exponential graph with as many workers."""
    return gossip.one_peer_exponential(len(GRAPHS[graph]))


METHODS = {
    "dpsgd": Method(
        lambda graph, **options: adapt_then_combine(GRAPHS[graph], **options),
        "parameters over every link in every step, with Metropolis weights, which are positive",
        GRAPHS,
    ),
    "dpsgd_best_constant": Method(
        lambda graph, **options: adapt_then_combine(
            gossip.to_mixing(GRAPHS[graph], "best_constant"), **options
        ),
        "the same, with one weight for all links, the best for consensus, as MATCHA and `periodic` "
        "have; a worker with many neighbors then has a negative weight of itself",
        ("erdos_renyi_8", "erdos_renyi_16"),
    ),
    "dpsgd_bfloat16": Method(  # With a lossless codec and this step size, it is D-PSGD.
        lambda graph, **options: gossip.choco_sgd(
            GRAPHS[graph], compression.quantizers.cast(jnp.bfloat16), step_size=1.0, **options
        ),
        "bfloat16 differences to the copies of the parameters at neighbors, over every link: "
        "D-PSGD with messages of 16 bits",
        GRAPHS,
    ),
    "matcha": Method(
        lambda graph, **options: gossip.matcha(plan(graph), **options),
        "parameters over a random half of the matchings per step",
        GRAPHS,
    ),
    "periodic": Method(
        lambda graph, **options: adapt_then_combine(
            gossip.random_periodic(GRAPHS[graph], BUDGET), **options
        ),
        "parameters over every link in a random half of the steps",
        GRAPHS,
    ),
    "choco_sgd": Method(
        lambda graph, **options: gossip.choco_sgd(
            GRAPHS[graph], TOP_10_PERCENT, step_size=0.3, **options
        ),
        "the largest 10 % of the differences to the copies of the parameters at neighbors",
    ),
    "choco_sgd_over_matcha": Method(
        lambda graph, **options: gossip.choco_sgd(
            plan(graph), TOP_10_PERCENT, step_size=0.3, **options
        ),
        "the same over half the matchings, with copies per neighbor",
    ),
    "deep_squeeze": Method(
        lambda graph, **options: gossip.deep_squeeze(
            GRAPHS[graph], FOUR_BITS, step_size=0.5, **options
        ),
        "parameters in 4 bits, in blocks of 32, with feedback",
    ),
    "d2": Method(
        lambda graph, seed, **options: gossip.d2(gossip.lazy_mixing(GRAPHS[graph]), **options),
        "parameters over every link, corrected by the last step",
        ("erdos_renyi_8", "torus_64"),
    ),
    "sgp": Method(
        lambda graph, **options: gossip.sgp(one_peer(graph), **options),
        "half of the parameters and of the mass to one worker in turn, on the exponential graph",
        ("erdos_renyi_8", "torus_64"),
    ),
    "overlap_sgp": Method(
        lambda graph, **options: gossip.sgp(one_peer(graph), overlap=1, **options),
        "the same, received one step later",
    ),
    "ad_psgd": Method(
        lambda graph, **options: gossip.ad_psgd(MATCHINGS[graph], staleness=1, **options),
        "parameters to one random neighbor, with gradients that are one step late",
    ),
}


# How one run trains.


@functools.cache
def digits() -> Task:
    """The task of all settings."""
    return Task("digits")


def settings(config: Gossip) -> list[Setting]:
    """The settings in the order of the runs; both splits share a compiled program."""
    methods = select(config.methods, [*METHODS], "--methods")
    graphs = select(config.graphs, [*GRAPHS], "--graphs")
    for graph in graphs:
        if config.batch % len(GRAPHS[graph]):
            raise ExperimentError(
                f"--batch {config.batch} is not divisible by {len(GRAPHS[graph])} workers."
            )
    if config.steps % (2 * config.log_every):
        raise ExperimentError(
            f"--steps {config.steps} is not divisible by twice --log-every {config.log_every}: a "
            "trial has half the steps."
        )
    return [
        {"graph": graph, "split": kind, "method": method}
        for graph in graphs
        for method in methods
        if graph in METHODS[method].graphs
        for kind in dict.fromkeys(config.splits)
    ]


def train(config: Gossip, setting: Setting) -> Trainer:
    """What trains a method on a graph, with any rate, split and seed."""
    graph, method = setting["graph"], METHODS[setting["method"]]
    workers = len(GRAPHS[graph])

    def transformation(rate, seed):
        return optax.chain(optax.sgd(rate), method.build(graph, seed=seed, diagnostics=True))

    def step(rate):
        # The state has the key of the random draws, so the seed here has no effect.
        return jaxcomm.simulate(digits().loss, transformation(rate, 0), workers)

    @jax.jit
    def init(seed, params):
        return jaxcomm.init(transformation(0.1, seed), params, workers)

    @functools.partial(jax.jit, donate_argnums=1)
    def advance(rate, carried, batches):
        """Takes one step per batch; returns also the number of rounds of messages."""

        def body(carry, batch):
            *carry, metrics = step(rate)(*carry, batch)
            return tuple(carry), metrics["diagnostics/rounds"]

        carried, rounds = jax.lax.scan(body, carried, batches)
        return carried, jnp.sum(rounds)

    data = digits().dataset
    params = jaxcomm.replicate(digits().first_weights(0), workers)
    batch = data.train_inputs[: config.batch], data.train_labels[: config.batch]
    account = jaxcomm.wire.account(step(0.1), params, init(0, params), batch)
    sent = [each.bytes_per_worker for each in account.collectives if each.kind == "ppermute"]
    # All rounds send the same number of bytes; push-sum also sends the mass.
    bytes_per_round = sum(sent) / sent.count(max(sent))

    def run(setting, seed, parameters, *, validation):
        """Trains once; losses are of the mean of the parameters of all workers."""
        task = digits().hold_out() if validation else digits()
        data = task.dataset
        parts = split(data.train_labels, workers, setting["split"], seed)
        batches = orders(parts, config.batch // workers, seed)
        params = jaxcomm.replicate(task.first_weights(seed), workers)
        carried, rounds, losses = (params, init(seed, params)), 0.0, []
        steps = config.steps // 2 if validation else config.steps
        for done in range(config.log_every, steps + 1, config.log_every):
            examples = np.stack([*itertools.islice(batches, config.log_every)])
            batch = data.train_inputs[examples], data.train_labels[examples]
            carried, more = advance(jnp.float32(parameters["learning_rate"]), carried, batch)
            rounds += float(more)
            loss, _ = task.train_score(jaxcomm.consensus(carried[0]))
            losses.append(loss)
            yield {"step": done, "train_loss": loss, "rounds": rounds}
        test_loss, test_accuracy = task.test_score(jaxcomm.consensus(carried[0]))
        if validation:
            yield {"validation_loss": test_loss}
            return
        yield {
            "late_loss": statistics.mean(losses[len(losses) // 2 :]),
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "rounds_per_step": rounds / steps,
            "bytes_per_step": rounds * bytes_per_round / steps,
        }

    return run


# What is claimed, and what the record shows.

CLAIMED = {"matcha": "MATCHA", "periodic": "The periodic baseline"}
MAIN = ("dpsgd", *CLAIMED)
CLAIM = "{} at the budget 0.5 has {} D-PSGD's training loss over the last half of the steps."
TESTS = {"at most 1.1 times": is_no_worse, "between 1 / 1.1 and 1.1 times": is_equivalent}
CLAIMS = [
    Claim(CLAIM.format(title, words), test("late_loss", 1.1, methods={"method": name}, log=True))
    for name, title in CLAIMED.items()
    for words, test in TESTS.items()
]

TABLE = Table(
    by=("graph", "split", "method"),
    columns=(
        *map(key, ("graph", "split", "method")),
        SEEDS,
        Column("rate", tuned("learning_rate")),
        Column("training loss, last half", spread("late_loss"), ",.4f", "late_loss"),
        Column("of D-PSGD's [95 %]", difference("late_loss", log=True), ",.2f", "late_ratio"),
        Column("test loss", spread("test_loss"), ",.4f", "test_loss"),
        Column("of D-PSGD's [95 %]", difference("test_loss", log=True), ",.2f", "test_ratio"),
        Column("test accuracy %", spread("test_accuracy"), ",.1f", "test_accuracy", scale=100),
        Column("rounds/step", mean_of("rounds_per_step"), ".2f", "rounds_per_step"),
        Column("bytes/worker/step", mean_of("bytes_per_step"), ",.0f", "bytes_per_step"),
        Column("bytes ratio", relative("bytes_per_step"), ".3f", "bytes_ratio"),
    ),
    reference={"method": "dpsgd"},
    adjacent=("graph", "split"),
)

FIGURE = Lines(
    file="loss_against_steps_and_rounds.png",
    caption="Training loss, up to 3, against steps and rounds of messages",
    by="method", across=("graph",), down=("split",), size=(3.0, 2.4),
    x=(Axis("step", "steps", log=False), Axis("rounds", "rounds of messages", log=False)),
    y=Axis("train_loss", "training loss"), banded=lambda name: name in MAIN,
    finish=lambda axes, results, keys: axes.set_ylim(top=3),  # Chance is at 2.3.
    style=lambda number, name: {
        "color": COLORS[number % len(COLORS)], "linewidth": 2 if name in MAIN else 1,
        "linestyle": "-" if name in MAIN else "--" if number < len(COLORS) else ":"},
)  # fmt: skip


def prose(results: Results) -> list[str]:
    """The paragraphs of the README."""
    config = results.config
    names = dict.fromkeys(line.group.keys["method"] for line in results.lines)
    legend = "\n".join(f"- `{name}`: {METHODS[name].sends}" for name in names)
    return [
        f"digits, {config.steps} steps of {config.batch} examples over all workers, plain SGD. All "
        "methods have the same weights, splits and batches per seed. MATCHA and the periodic "
        "baseline have the budget 0.5. The parts of the workers differ by at most one example. "
        "With skewed labels, each worker draws the shares of its labels from "
        f"Dirichlet({SKEW:g}).",
        readme.PROVENANCE, readme.TUNING,
        "The rate is the only tuned parameter; others, such as CHOCO-SGD's step size, are fixed. A "
        "trial takes half the steps; a fifth of the training set is its validation data.",
        "The measure of the claims was chosen before the run: `late_loss`, the training loss of "
        "the mean model, averaged over the logged steps of the last half. The paper claims the "
        "same convergence step for step, and one final loss varies more. The first claim of each "
        "method has a one-sided test, since the paper claims no loss. The second also fails if the "
        "method is better by more than the margin.",
        readme.CLAIMS, f"Each worker sends in a step:\n\n{legend}", readme.TABLE,
        "Losses are of the mean of the parameters of all workers, over the whole training or test "
        "set. ± is the standard deviation over seeds. A ratio is the geometric mean over paired "
        "seeds. In a round, each participating worker sends one message and receives one. Bytes "
        "are those of a worker that participates in every round. One device simulates all workers, "
        "so no time is measured.",
        readme.FIGURES,
    ]  # fmt: skip


GOSSIP = Study(
    "gossip", Gossip, settings, train, TABLE, prose, (FIGURE,), CLAIMS,
    shares=("graph", "method"),
    grid=lambda config, setting: {"learning_rate": (config.learning_rates,)},
    budget=lambda config: len(config.learning_rates),
)  # fmt: skip
