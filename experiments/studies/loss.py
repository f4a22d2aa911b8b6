"""How long does training over a slow link take to a held-out loss?"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.lab.network import UNSHAPED, bits_per_second
from experiments.lab.peers import AS_SHIPPED, KEPT, trained_as
from experiments.lab.peers import METHODS as PEERS
from experiments.studies.lab import parse_bandwidth
from experiments.study import readme, targets
from experiments.study.claims import Claim, Finding, Judge, Results
from experiments.study.columns import SEEDS, Column, Table, key, only_in_csv
from experiments.study.figure import Lines
from experiments.study.groups import Estimate, Group, difference, extent, mean_of, spread, tuned
from experiments.study.judges import is_no_worse, is_within
from experiments.study.late import late
from experiments.study.panels import Axis, marked_style
from experiments.study.search import Budget
from experiments.study.statistics import confidence_interval, mean
from experiments.study.study import Setting, Study
from experiments.study.tidy import Row, grouped, is_missing, of_kind

TARGET_PART = 0.6  # So a method with slower progress may take 1.67 times the steps.
EXTENSIONS = 1
TIME = "seconds_to_target"
THEIRS = tuple(name for name, peer in AS_SHIPPED.items() if peer.communicates)
RANKS = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Loss:
    """How long does training over a slow link take to a held-out loss?

    Question: four processes of one machine train a transformer of 3.3 million parameters on text
    with Adam. Each is in a network namespace whose link `tc` limits. How long does each method take
    to the loss that PyTorch's DistributedDataParallel (DDP) has at 60 % of its steps? How long do
    the hooks of DDP take? All methods are tuned with one budget.

    Command: `python -m experiments loss`, as root or where unprivileged user namespaces are
    permitted, on Linux with iproute2. Expected time: 45 minutes on two idle cores.

    Number: seconds to the target of the fastest method, divided by those of the fastest hook.
    """

    methods: tuple[str, ...] = option(
        (), "methods instead of the default ones; ddp or mean is among them", many=True
    )
    bandwidth: tuple[str, ...] = option(
        ("1gbit", "500mbit", "200mbit"),
        "bandwidths of each worker's link",
        parse_bandwidth,
        many=True,
    )
    confirm: tuple[str, ...] = option(
        ("power_sgd_rank_4_start_2", "ddp_fp16"),
        "methods that also train over the slowest link, up to the target",
        many=True,
    )
    delay: str | None = option(None, "delay per direction of shaped links, such as 5ms")
    workers: int = option(4, "number of workers, each a process", positive_integer)
    threads: int = option(1, "threads that compute, per process", positive_integer)
    seeds: int = option(3, "seeds, each with a round of step times", positive_integer)
    steps: int = option(120, "training steps of a run", positive_integer)
    points: int = option(10, "evaluations of a run", positive_integer)
    learning_rates: tuple[float, ...] = option(
        (0.00025, 0.0005, 0.001, 0.002), "the first grid", positive_number, many=True
    )
    trials: int = option(4, "learning rates that each method tries", positive_integer)
    trial_steps: int = option(40, "training steps of a trial", positive_integer)
    timed_steps: int = option(8, "timed steps of a measurement, at most", positive_integer)
    seconds: float = option(4.0, "time limit of a measurement of steps", positive_number)
    drift: float = option(
        0.05, "largest change of the control around a measurement that counts", positive_number
    )
    attempts: int = option(2, "attempts at a measurement; the last one counts", positive_integer)
    record: str = options.record_option("loss")
    records: str = options.records_option()
    resume: str | None = options.resume_option()

    def before_jax(self) -> None:
        """Moves this process to a private network, which requires a single thread."""
        from experiments.lab.isolation import isolate

        isolate()


def slowest(config: Loss) -> str:
    """The name of the slowest link."""
    return min(config.bandwidth, key=bits_per_second)


def _trained(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    """The runs that trained on unshaped links, by method and seed."""
    return {
        (run["method"], run["seed"]): run
        for run in of_kind(rows, "run")
        if "trained_seconds" in run
    }


def _training_of(trained: Mapping[tuple[str, int], Row], method: str, seed: int) -> Row | None:
    return trained.get((trained_as(method, {name for name, _ in trained}), seed))


def reference_of(runs: Sequence[Row]) -> str:
    """The method whose loss defines the target."""
    return "ddp" if any(run["method"] == "ddp" for run in runs) else "mean"


def derive(rows: Sequence[Row]) -> list[Row]:
    """Adds the curves on every link, and the steps and the seconds to the target."""
    trained, runs, curves = _trained(rows), [], []
    points = grouped(of_kind(rows, "point"), ("method", "seed"))
    for run in of_kind(rows, "run"):
        training = _training_of(trained, run["method"], run["seed"])
        if training is None:
            continue
        held_out, rate = training["held_out"], training["learning_rate"]
        runs.append({**run, "held_out": held_out, "learning_rate": rate})
        curves += [
            {**point, "link": run["link"], "method": run["method"],
             "seconds": point["step"] * run["milliseconds"] / 1e3}
            for point in points[training["method"], run["seed"]]
            if point["step"] > 0
        ]  # fmt: skip
    reference = {"method": reference_of(runs)}
    needs = ("step", "seconds")
    found = targets.add_targets(
        [*curves, *runs], ("link",), reference, "held_out", needs,
        interpolated=True, part=TARGET_PART,
    )  # fmt: skip
    of_links = [
        {**{name: run[name] for name in ("schema", "link", "method", "seed")}, "kind": "point",
         "megabits": run["megabits"], "milliseconds": run["milliseconds"]}
        for run in runs
        if "megabits" in run
    ]  # fmt: skip
    return [*found, *of_links, *of_kind(rows, "trial")]


def inputs(config: Loss, rows: Sequence[Row], setting: Setting, seed: int) -> Mapping[str, Any]:
    """The learning rate and the number of steps of a training over the slowest link.

    They are those that the method needed on unshaped links with the last seed.
    """
    method = setting["method"]
    is_slowest = UNSHAPED != setting["link"] == slowest(config)
    if not is_slowest or method not in config.confirm or seed != config.seeds - 1:
        return {}
    (run,) = (
        row
        for row in of_kind(derive(rows), "run")
        if (row["link"], row["method"], row["seed"]) == (UNSHAPED, method, seed)
    )
    steps = run["step_to_target"]
    confirmed = config.steps if is_missing(steps) else math.ceil(steps)
    return {"learning_rate": run["learning_rate"], "confirmed_steps": confirmed}


def seconds_to_target(group: Group) -> Estimate | None:
    """The mean and its interval over seeds; infinite if the target is not reached with a seed."""
    if math.isnan(group.runs[0]["target"]):
        return None
    values = group.values(TIME)
    if any(map(is_missing, values)):
        return Estimate(math.inf, math.nan, math.nan)
    return Estimate(mean(values), *confidence_interval(values))


def show_seconds(seconds: Estimate) -> str:
    """Seconds and their interval.

    Example:
      >>> show_seconds(Estimate(20.0, 18.0, 22.0)), show_seconds(Estimate(*[math.inf] * 3))
      ('20.0 [18.0, 22.0]', 'not reached')
    """
    if math.isinf(seconds.mean):
        return "not reached"
    interval = "" if math.isnan(seconds.low) else f" [{seconds.low:.1f}, {seconds.high:.1f}]"
    return f"{seconds.mean:.1f}{interval}"


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
        Column("seconds to target [95 %]", seconds_to_target, show_seconds, TIME),
        Column("of DDP's", difference(TIME, log=True), targets.show_ratio, "over_ddp"),
        Column(
            "of the fastest of PyTorch's",
            targets.over_fastest("seconds", [{"method": name} for name in THEIRS]),
            targets.show_ratio,
            "over_fastest",
        ),
        Column("measured / predicted", confirmed, ".3f", "confirmed"),
        Column("control, ms", mean_of("control"), ".0f", "control", hidden=True),
        Column("rejected", lambda group: sum(group.values("rejected")), ".0f", hidden=True),
        only_in_csv("sent", mean_of("sent")),
    ),
    reference={"method": "ddp"},
)


def fastest_takes(limit: float, theirs: Sequence[str]) -> Judge:
    """The claim that our fastest method takes at most `limit` of the time of their fastest one."""

    def findings(results: Results) -> list[Finding]:
        found = []
        shaped = [line.group for line in results.lines if line.group.keys["link"] != UNSHAPED]
        for link in dict.fromkeys(group.keys["link"] for group in shaped):
            here = {g.keys["method"]: g for g in shaped if g.keys["link"] == link}
            ours = targets.fastest([here[n] for n in here if n not in PEERS], "seconds")
            beside = targets.fastest([here[n] for n in here if n in theirs], "seconds")
            if ours is None or beside is None:
                found.append(
                    Finding(link, "not tested", "no method of one side reaches the target")
                )
                continue
            names = ours.keys["method"], beside.keys["method"]
            judge = is_no_worse(
                TIME, limit, methods={"link": link, "method": names[0]},
                reference={"method": names[1]}, log=True,
            )  # fmt: skip
            (finding,) = judge(results)
            found.append(finding._replace(where=f"{link}, {names[0]} against {names[1]}"))
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
        for rank in RANKS
    ),
    Claim(
        "A training over the slowest link takes its steps times the measured step time, within "
        "10 %.",
        is_within("confirmed", 0.9, 1.1),
    ),
)  # fmt: skip


def prose(results: Results) -> list[str]:
    config, runs = results.config, of_kind(results.rows, "run")
    unsteady = sum(not row["is_steady"] for row in runs)
    target = next((run["target"] for run in runs), math.nan)
    peers = any(run["method"] in PEERS for run in runs)
    confirmations = [
        f"`{run['method']}` took {run['confirmed_seconds']:.1f} s for {run['confirmed_steps']} "
        f"steps on {run['link']}, to a held-out loss of {run['confirmed_loss']:.3f}"
        for run in runs
        if "confirmed_seconds" in run
    ]
    return [
        f"{config.workers} processes of one machine train a decoder-only transformer of bytes with "
        f"3.3 million parameters. Each has {config.threads} compute "
        f"thread{'s' * (config.threads > 1)} and a network namespace, whose link a token bucket "
        "(`tc tbf`) limits in both directions. All methods train with Adam (β 0.9 and 0.999, ε "
        "1e-8, a constant learning rate), from the same weights and with the same batches per "
        "seed: 4 windows of 64 bytes per worker and step. Losses are in nats per byte.",
        readme.PROVENANCE,
        "A run trains on unshaped links, since links do not change its arithmetic: "
        f"{config.steps} steps with each of {config.seeds} seeds, with {config.points} evaluations "
        "on 128 held-out windows. `mean` and `ddp` compute the same mean, and differ by rounding. "
        "Learning rates are chosen by the loss on 128 windows of a validation split after "
        f"{config.trial_steps} steps. Batches contain neither split. The first learning rates are "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)}. Every method tries "
        f"{config.trials} rates, and at most {EXTENSIONS} more if the best is an end. All other "
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
            if peers
            else "PyTorch is not installed, so this record has none of its methods."
        ),
        f"The target is the mean held-out loss of `{reference_of(runs)}` at the last evaluation "
        f"within {100 * TARGET_PART:.0f} % of its steps, {target:.4f}. Steps to the target are "
        "interpolated between evaluations. Seconds are these steps times the step time on the "
        "link, paired: each seed has a round in which all methods are measured in turn. A "
        f"measurement is the median of at most {config.timed_steps} steps. It follows a "
        "measurement of a control that does not communicate, and precedes another one. If the "
        f"two controls differ by more than {100 * config.drift:.0f} %, the measurement is "
        f"repeated. After {config.attempts} rejection{'s' * (config.attempts > 1)} the last one "
        f"counts: {unsteady} of {len(runs)} measurements.",
        *(["Trainings over a shaped link, with wall-clock time: " + "; ".join(confirmations) + "."]
          if confirmations else []),
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
STUDY = Study(
    "loss", Loss, late("loss.settings"), late("loss.train"), TABLE, prose,
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
    CLAIMS, grid=late("loss.grid"), interleaved=True, derive=derive, inputs=inputs,
    budget=lambda config: Budget(config.trials, extensions=EXTENSIONS),
    headline=("held_out", "milliseconds"),
)  # fmt: skip
