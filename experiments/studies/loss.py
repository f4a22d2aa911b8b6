"""How long does training over a slow link take to a held-out loss?"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from experiments.errors import ExperimentError
from experiments.lab.methods import LABELS, find
from experiments.lab.network import UNSHAPED, Link, bits_per_second, isolate
from experiments.lab.peers import AS_SHIPPED, KEPT, PEERS, installed, require_torch, trained_as
from experiments.lab.processes import Lab, describe_measurements
from experiments.methods import expand
from experiments.study import run as readme
from experiments.study import targets
from experiments.study.claims import Claim, Finding, Judge, Results, is_no_worse, is_within
from experiments.study.plot import Axis, Lines, marked_style
from experiments.study.record import Row, grouped, is_missing, of_kind
from experiments.study.run import Options, Setting, Study, Trainer
from experiments.study.statistics import mean
from experiments.study.table import (
    SEEDS,
    Column,
    Estimate,
    Group,
    Table,
    difference,
    extent,
    interval,
    key,
    spread,
    tuned,
)
from experiments.study.tuning import Grid

METHODS = (
    *("mean", "mean_bfloat16", "global_qsgd:8", "power_sgd_rank_4"),
    *(f"power_sgd_rank_{rank}_start_2" for rank in (1, 2, 4)),
    *AS_SHIPPED,
    *("ddp_power_sgd_1_kept_memory", "ddp_power_sgd_4_kept_memory"),
)
TARGET_PART = 0.6  # So a method with slower progress may take 1.67 times the steps.
TRAINING_SECONDS = 3600  # The time limit of a training.
TIME = "seconds_to_target"
THEIRS = tuple(AS_SHIPPED)
TRIAL_STEPS = 40  # Training steps of a trial.
TIMED_STEPS = 8  # At most, of a measurement.


@dataclasses.dataclass(frozen=True)
class LossConfig(Options):
    """How long does training over a slow link take to a held-out loss?

    Question: four processes of one machine train a transformer of 3.3 million parameters on text
    with Adam. Each is in a network namespace whose link `tc` limits. How long does each method take
    to the loss that PyTorch's DistributedDataParallel (DDP) has at 60 % of its steps? How long do
    the hooks of DDP take? All methods are tuned with one budget.

    Command: `python -m experiments loss`, as root or where unprivileged user namespaces are
    permitted, on Linux with iproute2. Expected time: 45 minutes on two idle cores.

    Number: seconds to the target of the fastest method, divided by those of the fastest hook.
    """

    methods: tuple[str, ...] = ()
    """methods instead of the default ones; ddp or mean is among them"""
    bandwidth: tuple[str, ...] = ("1gbit", "500mbit", "200mbit")
    """bandwidths of each worker's link"""
    confirm: tuple[str, ...] = ("power_sgd_rank_4_start_2", "ddp_fp16")
    """methods that also train over the slowest link, up to the target"""
    workers: int = 4
    """number of workers, each a process"""
    seeds: int = 3
    """seeds, each with a round of step times"""
    steps: int = 120
    """training steps of a run"""
    points: int = 10
    """evaluations of a run"""
    learning_rates: tuple[float, ...] = (0.00025, 0.0005, 0.001, 0.002)
    """the first grid"""
    trials: int = 4
    """learning rates that each method tries"""
    seconds: float = 4.0
    """time limit of a measurement of steps"""
    attempts: int = 2
    """attempts at a measurement; the last one counts"""

    def before_jax(self) -> None:
        """Moves this process to a private network."""
        isolate()


def methods(config: LossConfig) -> tuple[str, ...]:
    """The methods of a config; by default without those of PyTorch if it is not installed."""
    return expand(config.methods or installed(METHODS), (*LABELS, *PEERS))


def settings(config: LossConfig) -> list[Setting]:
    """Every method on every link; first the unshaped one, where methods train.

    Raises:
      ExperimentError: If an option is invalid, or PyTorch is required and not installed.
    """
    if config.workers < 2:
        raise ExperimentError("--workers must be at least 2.")
    names = methods(config)
    for name in names:
        if name in PEERS:
            require_torch()
        elif find(name).own_parameters or find(name).clusters:
            raise ExperimentError(
                f"--methods has {name}, whose workers have no common parameters or need clusters; "
                "the study of time to a loss evaluates one set of parameters."
            )
    for name in {*config.confirm} - PEERS.keys():
        find(name)  # A method that does not train is ignored, an unknown one is an error.
    if not {"ddp", "mean"} & {*names}:
        raise ExperimentError("--methods needs ddp or mean, whose loss defines the target.")
    links = {link: bits_per_second(link) for link in (UNSHAPED, *config.bandwidth)}
    return [{"link": link, "method": name} for link in links for name in names]


def trains(config: LossConfig, setting: Setting) -> bool:
    """Whether a setting is a training; otherwise it only has step times."""
    name = setting["method"]
    return setting["link"] == UNSHAPED and name == trained_as(name, methods(config))


def grid(config: LossConfig, setting: Setting) -> Grid | None:
    """The learning rates of a training; None for step times."""
    return {"learning_rate": (config.learning_rates,)} if trains(config, setting) else None


@functools.cache
def lab_of(config: LossConfig) -> Lab:
    """The workers, which stay for all trainings and measurements."""
    return Lab(config, "transformer", "adam")


def train(config: LossConfig, setting: Setting) -> Trainer:
    """The trainer of one method on one link."""
    name, link, lab = setting["method"], Link(setting["link"]), lab_of(config)

    def trainer(setting, seed, parameters, *, validation):
        def curve(steps, every, split="held_out"):
            lab.network.shape(link)
            return lab.group(name).ask(
                "train",
                seconds=TRAINING_SECONDS,
                method=name,
                learning_rate=parameters["learning_rate"],
                steps=steps,
                seed=seed,
                evaluate_every=every,
                split=split,
            )[0]

        if validation:
            tried = curve(TRIAL_STEPS, TRIAL_STEPS, "validation")
            yield {"validation_loss": tried["evaluated"][-1]}
            return
        found = {}
        if trains(config, setting):
            done = curve(config.steps, max(1, config.steps // config.points))
            for step, loss in zip(done["steps"], done["evaluated"], strict=True):
                yield {"step": step, "held_out": loss}
            found = {"held_out": loss, "trained_seconds": done["seconds"][-1]}
        found |= lab.time_steps(name, link, TIMED_STEPS)
        if link.rate != UNSHAPED:
            found["megabits"] = bits_per_second(link.rate) / 1e6
        if steps := parameters.get("confirmed_steps"):
            done = curve(steps, steps)
            found["confirmed_seconds"] = done["seconds"][-1]
            found["confirmed_loss"] = done["evaluated"][-1]
        yield found

    return trainer


def reference_of(runs: Sequence[Row]) -> str:
    """The method whose loss defines the target."""
    return "ddp" if any(run["method"] == "ddp" for run in runs) else "mean"


def derive(rows: Sequence[Row]) -> list[Row]:
    """Adds the curves on every link, and the steps and the seconds to the target."""
    runs = of_kind(rows, "run")
    trained = {(run["method"], run["seed"]): run for run in runs if "trained_seconds" in run}
    methods = {method for method, _ in trained}
    points = grouped(of_kind(rows, "point"), ("method", "seed"))
    derived, of_links = [], []
    for run in runs:
        own = trained_as(run["method"], methods), run["seed"]
        if own not in trained:
            continue
        keys = {"link": run["link"], "method": run["method"]}
        derived += [
            {**point, **keys, "seconds": point["step"] * run["milliseconds"] / 1e3}
            for point in points[own]
            if point["step"] > 0
        ]
        derived.append({**trained[own], **run})
        if "megabits" in run:
            of_links.append({**run, "kind": "point"})
    found = targets.add_targets(
        derived,
        ("link",),
        {"method": reference_of(of_kind(derived, "run"))},
        "held_out",
        ("step", "seconds"),
        interpolated=True,
        part=TARGET_PART,
    )
    return [*found, *of_links, *of_kind(rows, "trial")]


def inputs(config: LossConfig, rows: Sequence[Row], setting: Setting, seed: int) -> dict[str, Any]:
    """The learning rate and the number of steps of a training over the slowest link.

    They are those that the method needed on unshaped links with the last seed.
    """
    link, method = setting["link"], setting["method"]
    is_slowest = UNSHAPED != link == min(config.bandwidth, key=bits_per_second)
    if not is_slowest or method not in config.confirm or seed != config.seeds - 1:
        return {}
    runs = {(row["link"], row["method"], row["seed"]): row for row in of_kind(derive(rows), "run")}
    run = runs[UNSHAPED, method, seed]
    steps = run["step_to_target"]
    confirmed = config.steps if is_missing(steps) else math.ceil(steps)
    return {"learning_rate": run["learning_rate"], "confirmed_steps": confirmed}


def seconds_to_target(group: Group) -> Estimate | None:
    """The mean and its interval over seeds; infinite if the target is not reached with a seed."""
    if math.isnan(group.runs[0]["target"]):
        return None
    if any(map(is_missing, group.values(TIME))):
        return Estimate(math.inf, math.nan, math.nan)
    return interval(TIME)(group)


def confirmed(group: Group) -> float | None:
    """The measured seconds of a training over the link, divided by steps times step time."""
    for run in group.runs:
        if "confirmed_seconds" in run:
            predicted = run["confirmed_steps"] * mean(group.values("milliseconds")) / 1e3
            return run["confirmed_seconds"] / predicted
    return None


TABLE = Table(
    by=("link", "method"),
    columns=(
        key("link"),
        key("method"),
        SEEDS,
        Column("learning rate", tuned("learning_rate"), name="learning_rate"),
        Column("held-out loss", spread("held_out"), ".3f", "held_out"),
        Column("steps to target", targets.needed("step"), ".0f", "steps_to_target"),
        Column("reached", targets.reached("step")),
        Column("ms/step [range]", extent("milliseconds"), ".0f", "milliseconds"),
        Column(
            "seconds to target [95 %]",
            seconds_to_target,
            functools.partial(targets.show_ratio, digits=1),
            TIME,
        ),
        Column("of DDP's", difference(TIME, log=True), targets.show_ratio, "over_ddp"),
        Column("measured / predicted", confirmed, ".3f", "confirmed"),
    ),
    reference={"method": "ddp"},
)


def fastest_takes(limit: float, theirs: Sequence[str]) -> Judge:
    """The claim that our fastest method takes at most `limit` of the time of their fastest one."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for link in dict.fromkeys(line["link"] for line in results.lines):
            if link == UNSHAPED:
                continue
            here = {line["method"]: line.group for line in results.lines if line["link"] == link}
            ours = targets.fastest([here[name] for name in here if name not in PEERS], "seconds")
            beside = targets.fastest([here[name] for name in here if name in theirs], "seconds")
            if not (ours and beside):
                why = "no method of one side reaches the target"
                found.append(Finding(link, "not tested", why))
                continue
            judge = is_no_worse(TIME, limit, methods=ours.keys, reference=beside.keys, log=True)
            where = f"{link}, {ours.keys['method']} against {beside.keys['method']}"
            found += [each._replace(where=where) for each in judge(results)]
        return found

    return findings


CLAIMS = (
    Claim(
        "On shaped links, the fastest method of jaxcomm reaches the target in under 0.7 of the "
        "time of the fastest of PyTorch's, with and without hooks, as shipped.",
        fastest_takes(0.7, THEIRS),
    ),
    Claim(
        "The same, if PyTorch's processes keep freed memory as those of jaxcomm.",
        fastest_takes(0.7, [f"{name}{KEPT}" for name in THEIRS]),
    ),
    *(
        Claim(
            f"After equal steps, the held-out loss of `power_sgd_rank_{rank}_start_2` is at most "
            f"1.01 times that of `ddp_power_sgd_{rank}`.",
            is_no_worse(
                "held_out", 1.01,
                methods={"link": UNSHAPED, "method": f"power_sgd_rank_{rank}_start_2"},
                reference={"method": f"ddp_power_sgd_{rank}"}, log=True,
            ),
        )
        for rank in (1, 2, 4)
    ),
    Claim(
        "A training over the slowest link takes its steps times the measured step time, within "
        "10 %.",
        is_within("confirmed", 0.9, 1.1),
    ),
)  # fmt: skip


def prose(results: Results) -> list[str]:
    config, runs = results.config, of_kind(results.rows, "run")
    confirmations = [
        f"`{run['method']}` took {run['confirmed_seconds']:.1f} s for {run['confirmed_steps']} "
        f"steps on {run['link']}, to a held-out loss of {run['confirmed_loss']:.3f}"
        for run in runs
        if "confirmed_seconds" in run
    ]
    return [
        f"{config.workers} processes of one machine train a decoder-only transformer of bytes with "
        "3.3 million parameters. Each has 1 compute thread and a network namespace, whose link a "
        "token bucket "
        "(`tc tbf`) limits in both directions. All methods train with Adam (β 0.9 and 0.999, ε "
        "1e-8, a constant learning rate), from the same weights and with the same batches per "
        "seed: 4 windows of 64 bytes per worker and step. Losses are in nats per byte.",
        readme.PROVENANCE,
        "A run trains on unshaped links, since links do not change its arithmetic: "
        f"{config.steps} steps with each of {config.seeds} seeds, with {config.points} evaluations "
        "on 128 held-out windows. `mean` and `ddp` compute the same mean, and differ by rounding. "
        "Learning rates are chosen by the loss on 128 windows of a validation split after "
        f"{TRIAL_STEPS} steps. Batches contain neither split. The first learning rates are "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)}. Every method tries "
        f"{config.trials} rates, and more if the best is an end. All other "
        "options have their defaults.",
        readme.TUNING,
        (
            "PyTorch's DistributedDataParallel (DDP) runs on Gloo with its default buckets. Its "
            "hook PowerSGD has one bucket, since it aborts on Gloo with more, and compresses from "
            "step 2 on (`start_powerSGD_iter=2`; by default 1,000, which is longer than a run). "
            "Otherwise it has its defaults, among them error feedback and a warm start. Methods of "
            "jaxcomm whose names end in `_start_2` also have two exact steps first, "
            "`warmup([mean(), ...], every=2)`. "
            "jaxcomm's processes keep freed memory, as `jaxcomm.launch` sets it. PyTorch's "
            "launcher does not, except in rows that end in `_kept_memory`, which have the "
            "training of the row without that ending."
            if reference_of(runs) == "ddp"
            else "PyTorch is not installed, so this record has none of its methods."
        ),
        f"The target is the mean held-out loss of `{reference_of(runs)}` at the last evaluation "
        f"within {100 * TARGET_PART:.0f} % of its steps, {runs[0]['target']:.4f}. Steps to the "
        "target are interpolated between evaluations. Seconds are these steps times the step time "
        "on the link, paired: each seed has a round in which all methods are measured in turn. "
        + describe_measurements(config, TIMED_STEPS, runs),
        "Trainings over a shaped link, with wall-clock time: "
        f"{'; '.join(confirmations) or 'none'}.",
        readme.CLAIMS,
        readme.TABLE,
        "± is the standard deviation over seeds. Ratios of seconds are geometric means over seeds, "
        "with 95 % intervals. The column `measured / predicted` has the wall-clock time of one "
        "training over the link, divided by its steps times the step time of the table. Times "
        "exclude evaluations.",
        "The text is small and runs are short, so methods may rank differently in longer runs. The "
        f"{config.workers} processes share the cores of one machine, so compression takes a larger "
        "part of a step than on separate machines.",
        readme.FIGURES,
    ]  # fmt: skip


STYLE = marked_style("mean", [*PEERS])
LOSS = Study(
    "loss", LossConfig, settings, train, TABLE, prose,
    (
        Lines(file="loss_against_seconds.png", caption="Held-out loss against seconds",
              by="method", across=("link",), x=(Axis("seconds", "seconds"),),
              y=Axis("held_out", "held-out loss, nats per byte", log=False), size=(4.5, 4.5),
              style=STYLE, banded=lambda name: False, finish=targets.mark),
        Lines(file="step_time_against_bandwidth.png", caption="Step time against bandwidth",
              by="method", at="megabits", x=(Axis("megabits", "Mbit/s of a worker's link"),),
              y=Axis("milliseconds", "milliseconds per step"), size=(6.0, 5.0),
              style=STYLE, banded=lambda name: False),
    ),
    CLAIMS, grid=grid, interleaved=True, derive=derive, inputs=inputs,
    budget=lambda config: config.trials,
)  # fmt: skip
