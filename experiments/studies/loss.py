"""How long does training over a slow link take to a held-out loss?"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

import jaxcomm
from experiments.errors import ExperimentError
from experiments.lab.inputs import TRANSFORMER
from experiments.lab.methods import CODES, LABELS, find
from experiments.lab.network import UNSHAPED, Link, bits_per_second, isolate
from experiments.lab.peers import (
    AS_SHIPPED,
    KEPT,
    PEERS,
    START,
    installed,
    require_torch,
    trained_as,
)
from experiments.lab.processes import Lab, describe_measurements
from experiments.methods import expand
from experiments.studies._loss_claims import ADVISED, CLAIMS, LIMIT, TIME
from experiments.study import run as readme
from experiments.study import targets
from experiments.study.claims import Results
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
    tuned,
)
from experiments.study.tuning import Grid, Values

METHODS = (
    *("mean", "mean_bfloat16", "global_qsgd:8", "two_stage:4", "delayed"),
    *(f"power_sgd_rank_{rank}_start_2" for rank in (4, 8, 16, 32)),
    *(f"power_sgd_rank_{rank}_16_bits_start_2" for rank in (8, 16, 32)),
    *("ef_top_1_percent", "deep_gradient_compression", "demo", "dion"),
    *(f"local_sgd_{period}" for period in (2, 4, 8, 16)),
    *(f"local_sgd_{bits}_bits_{period}" for bits in (8, 4) for period in (4, 8, 16)),
    *(f"diloco_4_bits_{period}" for period in (4, 8, 16)),
    "streaming_diloco_4_bits_8",
    *AS_SHIPPED,
    *(f"{name}{KEPT}" for name in AS_SHIPPED),
)
OF_ADVICE = {
    code: f"{label}_start_{START}" if f"{label}_start_{START}" in LABELS else label
    for label, code in CODES.items()
}
"""The methods that `jaxcomm.advise` may name, by their code; begun as its line to paste is."""

TRAINING_SECONDS = 3600  # The time limit of a training.
TIMED_STEPS = 8  # At most, of a measurement.
# What `jaxcomm.advise` takes two cores with four processes for.
MEMORY_BITS = 4e9
CORE = jaxcomm.perf.Device(4e9, "half a core", "an assumption")


@dataclasses.dataclass(frozen=True)
class LossConfig(Options):
    """How long does training over a slow link take to a held-out loss?

    Question: four processes of one machine train a transformer of 3.3 million parameters on text
    with Adam. Each is in a network namespace whose link `tc` limits. How long does each method of
    jaxcomm take to a held-out loss, among them the one that `jaxcomm.advise` names before the run?
    How long does PyTorch's DistributedDataParallel (DDP) take, with each of its hooks? All methods
    are tuned with one budget, by the steps that they take to a loss on validation data.

    Command: `python -m experiments loss`, as root or where unprivileged user namespaces are
    permitted, on Linux with iproute2. `--resume RECORD` with more `--methods` or more `--bandwidth`
    adds to a record. Expected time on two idle cores: four minutes a method and seed, and ten
    seconds a method, link and seed.

    Number: seconds to the target of the advised method, divided by those of the fastest hook.
    """

    methods: tuple[str, ...] = ()
    """methods instead of the default ones; mean is among them"""
    bandwidth: tuple[str, ...] = ("1gbit", "500mbit", "200mbit", "100mbit", "50mbit", "20mbit")
    """bandwidths of each worker's link"""
    latency: float | None = None
    """milliseconds that a message takes to another worker, on every link"""
    confirm: tuple[str, ...] = ("local_sgd_4_bits_8", "ddp_power_sgd_8")
    """methods that also train over the slowest link, up to the target"""
    workers: int = 4
    """number of workers, each a process"""
    seeds: int = 5
    """seeds, each with a round of step times"""
    steps: int = 160
    """training steps of a run, at most"""
    every: int = 8
    """steps between evaluations"""
    target: float = 2.5
    """held-out loss at which a run ends"""
    validation_target: float = 2.25
    """loss on validation data at which a trial ends"""
    learning_rates: tuple[float, ...] = (0.00035, 0.0005, 0.0007, 0.001)
    """the first grid"""
    momenta: tuple[float, ...] = (0.9,)
    """the first grid of the decay of Adam's first moment"""
    trials: int = 5
    """points of the grid that each method tries"""
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
        elif find(name).clusters:
            raise ExperimentError(f"--methods has {name}, which needs clusters.")
    for name in {*config.confirm} - PEERS.keys():
        find(name)  # A method that does not train is ignored, an unknown one is an error.
    if "mean" not in names:
        raise ExperimentError("--methods needs mean, whose steps define the limit.")
    links = {link: bits_per_second(link) for link in (UNSHAPED, *config.bandwidth)}
    return [{"link": link, "method": name} for link in links for name in names]


def trains(config: LossConfig, setting: Setting) -> bool:
    """Whether a setting is a training; otherwise it only has step times."""
    name = setting["method"]
    return setting["link"] == UNSHAPED and name == trained_as(name, methods(config))


def grid(config: LossConfig, setting: Setting) -> Grid | None:
    """What is tuned of a training; None for step times."""
    if not trains(config, setting):
        return None
    return {
        "learning_rate": Values(config.learning_rates),
        "momentum": Values(config.momenta, 0.5, 0.98),
    }


@functools.cache
def lab_of(config: LossConfig) -> Lab:
    """The workers, which stay for all trainings and measurements."""
    return Lab(config, "transformer", "adam", config.latency or 0.0)


def facts(config: LossConfig, known: Sequence[Row]) -> Iterator[Mapping[str, Any]]:
    """What `jaxcomm.advise` names for each link before its first run, by the measured control."""
    milliseconds = known[0]["control"] if known else lab_of(config).control()
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in TRANSFORMER.items()}
    for rate in dict.fromkeys((UNSHAPED, *config.bandwidth)):
        if any(row["link"] == rate for row in known):
            continue
        bits = min(bits_per_second(rate), MEMORY_BITS)
        latency = config.latency / 1e3 if config.latency else jaxcomm.perf.Link(1.0).latency
        advice = jaxcomm.advise(
            params,
            config.workers,
            link=jaxcomm.perf.Link(bits / 8, latency),
            step_seconds=milliseconds / 1e3,
            device=CORE,
        )
        label = OF_ADVICE[advice.recommended.code]
        yield {"link": rate, "advised": label, "control": milliseconds}


def steps_to(curve: Mapping[str, Any], target: float) -> float:
    """The steps to a loss, interpolated; if it is not reached, more than all, by what is left."""
    steps, losses = curve["steps"], curve["evaluated"]
    if not math.isfinite(losses[-1]):
        return math.nan
    if losses[-1] > target:
        return steps[-1] * losses[-1] / target
    share = (target - losses[-1]) / max(losses[-2] - losses[-1], 1e-9) if len(steps) > 1 else 0
    return steps[-1] - share * (steps[-1] - steps[-2])


def train(config: LossConfig, setting: Setting) -> Trainer:
    """The trainer of one method on one link."""
    name, link, lab = setting["method"], Link(setting["link"]), lab_of(config)

    def trainer(setting, seed, parameters, *, validation):
        def curve(steps, every, split="held_out", until=-math.inf):
            lab.network.shape(link)
            return lab.group(name).ask(
                "train",
                seconds=TRAINING_SECONDS,
                method=name,
                learning_rate=parameters["learning_rate"],
                momentum=parameters["momentum"],
                steps=steps,
                seed=seed,
                evaluate_every=every,
                split=split,
                until=until,
            )[0]

        if validation:
            until = config.validation_target
            tried = curve(config.steps, config.every, "validation", until)
            yield {"steps_to_target": steps_to(tried, until)}
            return
        found = {}
        if trains(config, setting):
            done = curve(config.steps, config.every, until=config.target)
            for step, loss in zip(done["steps"], done["evaluated"], strict=True):
                yield {"step": step, "held_out": loss}
            found = {"held_out": loss, "trained_seconds": done["seconds"][-1]}
        found |= lab.time_steps(name, link, TIMED_STEPS)
        if steps := parameters.get("confirmed_steps"):
            done = curve(steps, steps)
            found["confirmed_seconds"] = done["seconds"][-1]
            found["confirmed_loss"] = done["evaluated"][-1]
        yield {**found, "target": config.target}

    return trainer


def exact_steps(name: str) -> int:
    """The first steps of a method, which send what the exact mean does."""
    if name in PEERS:
        return START if PEERS[name].hook.endswith("powerSGD") else 0
    return find(name).exact_steps


def _seconds(milliseconds: float, exact: int, dense: float, steps: float) -> float:
    """The seconds of steps, of which the first `exact` take `dense` milliseconds each."""
    first = min(steps, exact)
    return ((steps - first) * milliseconds + first * dense) / 1e3


def derive(rows: Sequence[Row]) -> list[Row]:
    """Adds the steps and the seconds to the target, what was advised, and the limit.

    Seconds are steps times the time of a step on the link. Exact steps take those of `mean`, or of
    `ddp` in PyTorch. The limit is the steps of `mean` times the time of a step that does not
    communicate.
    """
    runs, of_facts = of_kind(rows, "run"), of_kind(rows, "fact")
    advised = {row["link"]: row["advised"] for row in of_facts if "advised" in row}
    trained = {(run["method"], run["seed"]): run for run in runs if "trained_seconds" in run}
    took = {(run["link"], run["method"], run["seed"]): run["milliseconds"] for run in runs}
    methods = {method for method, _ in trained}
    curves = grouped(of_kind(rows, "point"), ("method", "seed"))
    derived = []
    for run in runs:
        link, name, seed = run["link"], run["method"], run["seed"]
        own = trained_as(name, methods), seed
        if own not in trained:
            continue
        last, exact = trained[own], exact_steps(name)
        dense = took.get((link, "ddp" if name in PEERS else "mean", seed), run["milliseconds"])
        keys = {"link": link, "method": name}
        seconds = functools.partial(_seconds, run["milliseconds"], exact, dense)
        curve = {
            "steps": [point["step"] for point in curves[own]],
            "evaluated": [point["held_out"] for point in curves[own]],
        }
        is_reached = last["held_out"] <= run["target"]
        steps = steps_to(curve, run["target"]) if is_reached else math.nan
        derived += [
            {**point, **keys, "seconds": seconds(point["step"])}
            for point in curves[own]
            if point["step"] > 0
        ]
        found = {**last, **run, "step_to_target": steps, TIME: seconds(steps), "exact_steps": exact}
        derived.append(found)
        if name == advised.get(link):
            derived.append({**found, "method": ADVISED, "named": name})
        if name == "mean":
            limit = {"milliseconds": run["control"], TIME: steps * run["control"] / 1e3}
            derived.append({**found, **limit, "method": LIMIT})
    return [*derived, *of_kind(rows, "trial"), *of_facts]


def inputs(config: LossConfig, rows: Sequence[Row], setting: Setting, seed: int) -> dict[str, Any]:
    """The rate, the momentum and the number of steps of a training over the slowest link.

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
    tuned = {name: run[name] for name in ("learning_rate", "momentum")}
    return {**tuned, "confirmed_steps": confirmed}


def seconds_to_target(group: Group) -> Estimate | None:
    """The mean and its interval over seeds; infinite if the target is not reached with a seed."""
    if any(map(is_missing, group.values(TIME))):
        return Estimate(math.inf, math.nan, math.nan)
    return interval(TIME)(group)


def confirmed(group: Group) -> float | None:
    """The measured seconds of a training over the link, divided by those that are predicted."""
    for run in group.runs:
        if "confirmed_seconds" in run:
            steps, exact = run["confirmed_steps"], run["exact_steps"]
            reference = group.other(method="ddp" if run["method"] in PEERS else "mean") or group
            dense, own = (mean(each.values("milliseconds")) for each in (reference, group))
            return 1e3 * run["confirmed_seconds"] / ((steps - exact) * own + exact * dense)
    return None


TABLE = Table(
    by=("link", "method"),
    columns=(
        key("link"),
        key("method"),
        SEEDS,
        Column("rate", tuned("learning_rate"), name="learning_rate"),
        Column("momentum", tuned("momentum"), name="momentum"),
        Column("steps to target", targets.needed("step"), ".0f", "steps_to_target"),
        Column("reached", targets.reached("step")),
        Column(
            "of mean's steps", difference("step_to_target", log=True), targets.show_ratio, "steps"
        ),
        Column("ms/step [range]", extent("milliseconds"), ".0f", "milliseconds"),
        Column(
            "seconds to target [95 %]",
            seconds_to_target,
            functools.partial(targets.show_ratio, digits=1),
            TIME,
        ),
        Column("of the limit", difference(TIME, log=True), targets.show_ratio, "over_limit"),
        Column("measured / predicted", confirmed, ".3f", "confirmed"),
    ),
    reference={"method": LIMIT},
)


def prose(results: Results) -> list[str]:
    config, runs = results.config, of_kind(results.rows, "run")
    measured = [run for run in runs if run["method"] not in (LIMIT, ADVISED)]
    of_facts = of_kind(results.rows, "fact")
    advised = {row["link"]: row["advised"] for row in of_facts if "advised" in row}
    confirmations = [
        f"`{run['method']}` took {run['confirmed_seconds']:.1f} s for {run['confirmed_steps']} "
        f"steps on {run['link']}, to a held-out loss of {run['confirmed_loss']:.3f}"
        for run in measured
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
        "A run trains on unshaped links, since links do not change its arithmetic, with each of "
        f"{config.seeds} seeds. It ends at a loss of {config.target:g} on 128 held-out windows, or "
        f"after {config.steps} steps; the loss is evaluated every {config.every} steps, and steps "
        "between are interpolated. Of local steps, it is the loss of the mean of the workers' "
        "parameters. Rates and momenta are chosen by the steps to a loss of "
        f"{config.validation_target:g} on 128 windows of a validation split. Batches contain "
        "neither split. The first learning rates are "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)}, the first momenta "
        f"{', '.join(f'{momentum:g}' for momentum in config.momenta)}. Every method tries "
        f"{config.trials} points, and more if the best is an end of several values. All other "
        "options have their defaults.",
        readme.TUNING,
        "PyTorch's DistributedDataParallel (DDP) runs on Gloo with its default buckets. Its hooks "
        "of low rank have one bucket, since they abort on Gloo with more, and compress from step "
        f"{START} on (`start_powerSGD_iter={START}`; by default 1,000, which is longer than a "
        "run). Otherwise they have their defaults, among them error feedback and a warm start. "
        "Its hooks that quantize need a GPU. "
        f"Methods of jaxcomm whose names end in `_start_{START}` also have {START} exact steps "
        f"first, `warmup([mean(), ...], every={START})`. "
        "jaxcomm's processes keep freed memory, as `jaxcomm.launch` sets it. PyTorch's launcher "
        "does not, except in rows that end in `_kept_memory`, which have the training of the row "
        "without that ending.",
        "Seconds are steps times the step time on the link, paired: each seed has a round in which "
        "all methods are measured in turn. Exact first steps take the time of `mean`, or of `ddp`. "
        f"`{LIMIT}` has the steps of `mean` and the time of the control. `{ADVISED}` is the method "
        "that `jaxcomm.advise` named before the first run on a link, by the time of the control: "
        f"{'; '.join(f'{link}: `{name}`' for link, name in advised.items()) or 'none'}. "
        + describe_measurements(config, TIMED_STEPS, measured),
        f"A message takes {config.latency:g} ms to another worker, on every link."
        if config.latency
        else "Links have no latency but that of the machine.",
        "Trainings over a shaped link, with wall-clock time: "
        f"{'; '.join(confirmations) or 'none'}.",
        readme.CLAIMS,
        readme.TABLE,
        "± is the standard deviation over seeds. Ratios of seconds are geometric means over seeds, "
        "with 95 % intervals. The column `measured / predicted` has the wall-clock time of one "
        "training over the link, divided by that of its steps by the table. Times exclude "
        "evaluations.",
        "A run has no points after it has reached the loss, so the last points of a line are the "
        "mean of the other seeds.",
        "The text is small and runs are short, so methods may rank differently in longer runs. The "
        f"{config.workers} processes share the cores of one machine, so compression takes a larger "
        "part of a step than on separate machines.",
        readme.FIGURES,
    ]  # fmt: skip


STYLE = marked_style(LIMIT, [*PEERS])
LOSS = Study(
    "loss", LossConfig, settings, train, TABLE, prose,
    (
        Lines(file="loss_against_seconds.png", caption="Held-out loss against seconds",
              by="method", across=("link",), x=(Axis("seconds", "seconds"),),
              y=Axis("held_out", "held-out loss, nats per byte", log=False), size=(4.5, 4.5),
              style=STYLE, banded=lambda name: False, finish=targets.mark),
    ),
    CLAIMS, grid=grid, interleaved=True, derive=derive, inputs=inputs, facts=facts,
    budget=lambda config: config.trials, tuned_by="steps_to_target",
)  # fmt: skip
