"""Which local steps lose what, at the same period: states, shares, neighbors and few bits."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.errors import ExperimentError, select
from experiments.study import run as readme
from experiments.study.claims import Claim, Results, is_no_worse
from experiments.study.plot import Axis, Lines, marked_style
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
from experiments.tasks.partitions import orders, split
from experiments.tasks.task import Task
from jaxcomm import gossip, synchronization
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import coarse_top_k
from jaxcomm.synchronization._des_loc import averaged_moments

WORKERS = 8


@dataclasses.dataclass(frozen=True)
class LocalSteps(Options):
    """What do methods of local steps lose to a synchronous optimizer, with one budget of tuning?

    Question: a small convolutional network on scikit-learn's digits, 8 simulated workers with equal
    shares of the examples, and exchanges in every eighth step. Which test loss does each method
    reach, and for how many bytes per step? Each is compared with its inner optimizer on the exact
    mean gradient in every step; rates are tuned with one budget.

    Command: `python -m experiments local_steps`. Expected time: half an hour on two CPU cores.
    Number: the paired ratio of the test losses, and its 95 % interval.
    """

    seeds: int = 5
    """number of seeds"""
    steps: int = 240
    """training steps per run; a trial has half of them"""
    batch: int = 256
    """examples per step, over all workers"""
    period: int = 8
    """steps between exchanges"""
    log_every: int = 24
    """steps between two logged losses"""
    methods: tuple[str, ...] = ("all",)
    """methods to compare, or all"""


OUTER = optax.sgd(0.8, momentum=0.8, nesterov=True)  # As MuLoCo's; DiLoCo has 0.7 and 0.9.


class Method(NamedTuple):
    """A method; `build` is `(inner optimizer, period) -> transformation`."""

    build: Callable[[Any, int], Any]
    replicas: bool = True  # whether parameters differ by worker
    sends: Callable[[int], list[tuple[Any, int]]] | None = None
    """`period -> parts`: what sends, and in every how many steps, if it is not all in `period`."""
    inner: Callable[[Any], Any] | None = None  # in place of that of the group


class Group(NamedTuple):
    """Methods that are compared with each other."""

    inner: Callable[[Any], Any]  # the optimizer of a worker, from its rate
    rates: tuple[float, ...]
    methods: Mapping[str, Method]


def _mean(aggregator: Any, **options: Any) -> Method:
    return Method(lambda inner, period: optax.chain(aggregator, inner), replicas=False, **options)


def _diloco(codec: Any = None) -> Method:
    aggregator = None if codec is None else jaxcomm.all_gather_mean(codec)
    return Method(
        lambda inner, period: synchronization.diloco(inner, OUTER, period, aggregator=aggregator)
    )


def _after(*methods: Callable[[int], Any], every: tuple[int, ...] = ()) -> Method:
    """Each method exchanges in every `period` steps, or in those that `every` says if not 0."""

    def build(inner: Any, period: int) -> Any:
        return optax.chain(jaxcomm.per_worker(inner), *(method(period) for method in methods))

    def sends(period: int) -> list[tuple[Any, int]]:
        steps = every or (0,) * len(methods)
        return [(m(period), each or period) for m, each in zip(methods, steps, strict=True)]

    return Method(build, sends=sends)


def _des_loc(of_nu: int) -> Method:
    """The first moment is averaged in every third exchange of parameters."""

    def sends(period: int) -> list[tuple[Any, int]]:
        fields = {"mu": 3 * period, "nu": of_nu * period}
        moments = [
            (averaged_moments(optax.adam(0.1), {k: v}, "data"), v) for k, v in fields.items()
        ]
        return [(synchronization.local_sgd(period), period), *moments]

    return Method(
        lambda inner, period: synchronization.des_loc(
            inner, period, {"mu": 3 * period, "nu": of_nu * period}
        ),
        sends=sends,
    )


PAIRS, RING = gossip.random_pairs(WORKERS), gossip.ring(WORKERS)
FOUR_BITS = error_feedback(blockwise(dither(bits=4), 32), decay=0.9)
TWO_BITS = error_feedback(coarse_top_k(ratio=1.0, block_size=256), decay=0.9)
GROUPS = {
    "sgd": Group(
        lambda rate: optax.sgd(rate, momentum=0.9),
        (0.01, 0.03, 0.1, 0.3),
        {
            "synchronous": _mean(jaxcomm.mean()),
            "local_sgd": _after(synchronization.local_sgd),
            "sparta": _after(lambda period: synchronization.sparta(1 / period), every=(1,)),
            "noloco": _after(lambda period: gossip.noloco(PAIRS, period)),
            "gasloc_pairs": _after(lambda period: gossip.gasloc(PAIRS, period)),
            "gasloc_ring": _after(lambda period: gossip.gasloc(RING, period)),
        },
    ),
    "adam": Group(
        optax.adam,
        (0.0005, 0.0015, 0.005, 0.015),
        {
            "synchronous": _mean(jaxcomm.mean()),
            "local_adam": Method(synchronization.pr_sgd),
            "des_loc": _des_loc(6),
            "des_loc_nu_as_often": _des_loc(3),
            "diloco": _diloco(),
            "sparta_diloco": _after(
                lambda period: synchronization.sparta(1 / (4 * period)),
                lambda period: synchronization.average_every(period, OUTER),
                every=(1, 0),
            ),
        },
    ),
    "muon": Group(
        lambda rate: optax.contrib.muon(rate, beta=0.9, nesterov=False),
        (0.003, 0.01, 0.03, 0.1),
        {
            "synchronous": _mean(jaxcomm.mean()),
            "power_sgd": _mean(jaxcomm.power_sgd(rank=4)),
            "dion": _mean(jaxcomm.dion(rank=4), inner=optax.sgd),
            "dion_without_feedback": _mean(jaxcomm.dion(rank=4, feedback=False), inner=optax.sgd),
            "muloco": _diloco(),
            "muloco_4_bits": _diloco(FOUR_BITS),
            "muloco_2_bits": _diloco(TWO_BITS),
        },
    ),
}


@functools.cache
def digits() -> Task:
    """The task of all settings."""
    return Task("digits")


def settings(config: LocalSteps) -> list[Setting]:
    """The settings in the order of the runs."""
    if config.batch % WORKERS or config.steps % (2 * config.log_every):
        raise ExperimentError(
            f"--batch must be divisible by {WORKERS}, and --steps by twice --log-every."
        )
    every = dict.fromkeys(name for group in GROUPS.values() for name in group.methods)
    names = select(config.methods, [*every], "--methods")
    return [
        {"inner": inner, "method": name}
        for inner, group in GROUPS.items()
        for name in group.methods
        if name in names
    ]


def train(config: LocalSteps, setting: Setting) -> Trainer:
    """What trains a method with any rate and seed."""
    group = GROUPS[setting["inner"]]
    method = group.methods[setting["method"]]
    make_inner = method.inner or group.inner

    def transformation(rate: Any) -> Any:
        return method.build(make_inner(rate), config.period)

    def step(rate: Any) -> Any:
        return jaxcomm.simulate(digits().loss, transformation(rate), WORKERS)

    def first(task: Task, seed: int) -> tuple[Any, Any]:
        params = task.first_weights(seed)
        params = jaxcomm.replicate(params, WORKERS) if method.replicas else params
        return params, jaxcomm.init(transformation(0.1), params, WORKERS)

    @functools.partial(jax.jit, donate_argnums=1)
    def advance(rate: Any, carried: Any, batches: Any) -> Any:
        def body(carry: Any, batch: Any) -> Any:
            return step(rate)(*carry, batch)[:2], None

        return jax.lax.scan(body, carried, batches)[0]

    def bytes_of(tx: Any) -> float:
        """Of a step that exchanges."""
        data, params = digits().dataset, first(digits(), 0)[0]
        batch = data.train_inputs[: config.batch], data.train_labels[: config.batch]
        alone = jaxcomm.simulate(digits().loss, tx, WORKERS, metrics="own")
        account = jaxcomm.wire.account(alone, params, jaxcomm.init(tx, params, WORKERS), batch)
        return account.amortized_bytes_per_worker(1)

    every = config.period if method.replicas else 1
    parts = method.sends(config.period) if method.sends else [(transformation(0.1), every)]
    per_step = sum(bytes_of(tx) / steps for tx, steps in parts)

    def run(setting: Setting, seed: int, parameters: Any, *, validation: bool) -> Any:
        """Trains once; losses are of the mean of the parameters of all workers."""
        task = digits().hold_out() if validation else digits()
        data = task.dataset
        parts = split(data.train_labels, WORKERS, "iid", seed)
        batches = orders(parts, config.batch // WORKERS, seed)
        carried = first(task, seed)
        model = jaxcomm.consensus if method.replicas else lambda params: params
        steps = config.steps // 2 if validation else config.steps
        for done in range(config.log_every, steps + 1, config.log_every):
            examples = np.stack([*itertools.islice(batches, config.log_every)])
            batch = data.train_inputs[examples], data.train_labels[examples]
            carried = advance(jnp.float32(parameters["learning_rate"]), carried, batch)
            train_loss, _ = task.train_score(model(carried[0]))
            yield {"step": done, "train_loss": train_loss, "bytes_sent": per_step * done}
        test_loss, test_accuracy = task.test_score(model(carried[0]))
        yield {"validation_loss": test_loss} if validation else {
            "train_loss": train_loss, "test_loss": test_loss, "test_accuracy": test_accuracy,
            "bytes_per_step": per_step,
        }  # fmt: skip

    return run


CLAIMED = (
    *(("sgd", "gasloc_ring"), ("sgd", "sparta"), ("adam", "des_loc"), ("adam", "diloco")),
    *(("muon", "dion"), ("muon", "muloco_4_bits"), ("muon", "muloco_2_bits")),
)
CLAIMS = [
    Claim(
        f"The test loss of `{name}` is at most 1.1 times that of synchronous {inner}.",
        is_no_worse("test_loss", 1.1, methods={"inner": inner, "method": name}, log=True),
    )
    for inner, name in CLAIMED
]
TABLE = Table(
    by=("inner", "method"),
    columns=(
        *map(key, ("inner", "method")),
        SEEDS,
        Column("rate", tuned("learning_rate")),
        Column("training loss", spread("train_loss"), ".4f", "train_loss"),
        Column("test loss", spread("test_loss"), ".4f", "test_loss"),
        Column("of synchronous [95 %]", difference("test_loss", log=True), ",.2f", "test_ratio"),
        Column("test accuracy %", spread("test_accuracy"), ".1f", "test_accuracy", scale=100),
        Column("bytes/worker/step", mean_of("bytes_per_step"), ",.0f", "bytes_per_step"),
        Column("bytes ratio", relative("bytes_per_step"), ".3f", "bytes_ratio"),
    ),
    reference={"method": "synchronous"},
    adjacent=("inner",),
)  # fmt: skip
FIGURE = Lines(
    file="loss_against_bytes.png",
    caption="Training loss against bytes sent per worker",
    by="method", across=("inner",), size=(3.6, 3.0),
    x=(Axis("bytes_sent", "bytes sent per worker (MB)", 1e-6),),
    y=Axis("train_loss", "training loss"), style=marked_style("synchronous", dashed=()),
)  # fmt: skip


def prose(results: Results) -> list[str]:
    """The paragraphs of the README."""
    config = results.config
    return [
        f"digits, {config.steps} steps of {config.batch} examples over {WORKERS} workers, an "
        f"exchange in every step of number {config.period}. Reference: the inner optimizer on the "
        "exact mean gradient. `sparta` averages an eighth of the parameters in every step, and "
        "`sparta_diloco` a thirty-second. DES-LOC averages Adam's moments in 3 and 6 times the "
        "period, and `des_loc_nu_as_often` both in 3 times. `des_loc` diverges at its first "
        "average of the first moments without the second ones: where all gradients of a worker "
        "were 0, so are its second moments, and it steps by the mean over epsilon, 1e-8.",
        readme.PROVENANCE, readme.TUNING,
        "The inner rate is the only tuned parameter. The outer optimizer has rate and momentum "
        "0.8; GASLoC and NoLoCo have their defaults.",
        readme.CLAIMS, readme.TABLE,
        "Losses are of the mean of the parameters of all workers. ± is the standard deviation over "
        "seeds, a ratio the geometric mean over paired seeds. One device simulates all workers.",
        readme.FIGURES,
    ]  # fmt: skip


LOCAL_STEPS = Study(
    "local_steps", LocalSteps, settings, train, TABLE, prose, (FIGURE,), CLAIMS,
    shares=("inner", "method"),
    grid=lambda config, setting: {"learning_rate": (GROUPS[setting["inner"]].rates,)},
    budget=lambda config: 4,
)  # fmt: skip
