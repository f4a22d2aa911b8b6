"""Which methods lose to the exact mean, why, and how many bytes do they save?"""

import dataclasses
import functools
import itertools
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib.lines import Line2D

from experiments.methods import (
    ALL_LABELS,
    DEFAULT_RATES,
    KINDS,
    SELECTED,
    WHY_THEY_LOSE,
    expand,
    parse_method,
)
from experiments.study import plot
from experiments.study.claims import (
    SIGNIFICANCE,
    Claim,
    Finding,
    Outcome,
    Results,
    is_about,
    is_at_most,
    is_no_worse,
    number,
)
from experiments.study.record import Row, is_missing
from experiments.study.run import CLAIMS, FIGURES, PROVENANCE, TUNING, Options, Setting, Study
from experiments.study.run import TABLE as SHOWN
from experiments.study.statistics import holm
from experiments.study.table import (
    SEEDS,
    Column,
    Group,
    Line,
    Table,
    difference,
    key,
    mean_of,
    only_in_csv,
    relative,
    spread,
    tuned,
    tuned_beside,
)
from experiments.study.targets import add_targets, reached
from experiments.study.tuning import Grid
from experiments.trainer import OPTIMIZER_TITLES, load_task, make_trainer

CLAIMED = ("mean_bfloat16", "two_stage:4", "ef_top_1_percent")
CONTROLS = ("truncating", "top_1_percent")
SHORT = "digits"
SCORED_EXAMPLES = 2000  # Training examples of longer tasks; the score of all takes too long.


@dataclasses.dataclass(frozen=True)
class Survey(Options):
    """Which methods lose to the exact mean, why, and how many bytes do they save?

    Question: a small network per task, 8 simulated workers, five seeds. Every method is tuned with
    the same number of trials by the loss on a held-out fifth of the training set, and then trained
    on all of it. Which test loss does it reach, and is that higher than that of the exact mean from
    the same weights and batches? Which steps and bytes does it need to the loss of half a run?

    Command: `python -m experiments survey --tasks digits text glyphs`; `make survey` is for digits.
    Expected time on two CPU cores: half an hour for digits, one for text, and three for glyphs.

    Number: the ratio of each method's test loss to that of `mean`, and the ratio of its bytes.
    """

    tasks: tuple[str, ...] = ("digits",)
    """digits, and longer tasks: text, glyphs, or others as DATASET:PATH"""
    methods: tuple[str, ...] = ("all",)
    """methods to compare, each METHOD or METHOD:BITS, or all"""
    optimizers: tuple[Literal["sgd", "adam"], ...] = ("sgd",)
    """sgd (momentum 0.9), adam, or both"""
    seeds: int = 5
    """number of seeds"""
    steps: int = 150
    """steps of a run and of a trial on digits"""
    long_steps: int = 2000
    """steps on other tasks; a trial has a quarter"""
    batch: int = 128
    """examples per step, over all workers"""
    learning_rates: tuple[float, ...] = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    """the first grid; every second rate if a method has more to tune"""
    trials: int | None = 14
    """points of its grid that each method tries; with None, rates are those of the optimizer"""
    points: int = 20
    """logged losses per run"""
    simulated: bool = True
    """whether one device simulates all workers, which is faster and measures no step time"""
    devices: int | None = None
    """number of workers (default: the number in XLA_FLAGS, or 8)"""


@dataclasses.dataclass(frozen=True)
class Digits(Survey):
    """Does 8-bit Global-QSGD train as well as the exact mean for about a quarter of its bytes?

    Question: a small convolutional network on scikit-learn's digits, 8 workers, five seeds; every
    method starts from the same weights and sees the same batches. Is the mean final loss over the
    whole training set within 1.5 times that of the float32 mean, at no more than 0.26 of its bytes?
    The comparison must also discriminate: two controls, truncation instead of random rounding and
    the largest 1 % without error feedback, must each exceed one of the two limits.

    Command: `python -m experiments digits`, or `make demo`. With the default options, the exit code
    is 1 if a claim does not hold. Expected time: about three minutes on two CPU cores.

    Number: the ratio of the final loss of `global_qsgd:8` to that of `mean`, about 1.0 with SGD and
    momentum and about 1.2 with Adam, at 0.25 of the bytes.
    """

    methods: tuple[str, ...] = (
        *("mean", "mean_bfloat16", "global_qsgd:8", "global_qsgd:16", "qsgd"),
        *CONTROLS,
    )
    optimizers: tuple[Literal["sgd", "adam"], ...] = ("sgd", "adam")
    batch: int = 256
    trials: int | None = None
    points: int = 6
    simulated: bool = False


@dataclasses.dataclass(frozen=True)
class Sharded(Survey):
    """What does a sharded server lose with 8 bits both ways, and with LoCo?

    The survey, with these methods. Expected time: three minutes on two CPU cores.
    """

    methods: tuple[str, ...] = ("mean", "sharded_server_8_bits", "sharded_server_loco")


@dataclasses.dataclass(frozen=True)
class Codes(Survey):
    """What do entropy codes, blocks, zeroth order, CocktailSGD and DeMo lose to the mean?

    The survey, with the methods that joined the catalogue after its record. Expected time: ten
    minutes on two CPU cores.
    """

    methods: tuple[str, ...] = (
        *("mean", "mean_bfloat16", "elias", "golomb_rice", "rans", "ef_blocks"),
        *("ef_blocks_southwell", "zeroth_order", "ef_cocktail", "reserved_4_bits", "demo"),
    )


def train(config: Survey, setting: Setting) -> Any:
    (name,) = (name for name in config.tasks if name.partition(":")[0] == setting["task"])
    steps, trial, scored = config.long_steps, config.long_steps // 4, SCORED_EXAMPLES
    if name == SHORT:
        steps, trial, scored = config.steps, config.steps, None
    return make_trainer(
        config,
        setting["method"],
        setting["optimizer"],
        load_task(name, scored),
        steps=steps,
        log_every=max(1, steps // config.points),
        trial_steps=max(1, trial) if config.trials else None,
        simulated=config.simulated,
    )


@functools.cache
def settings(config: Survey) -> Sequence[Setting]:
    """All methods on digits, and the selected ones on other tasks; or the methods of the config."""
    # The warning is about few levels, which are intended here.
    warnings.filterwarnings("ignore", "`bits`=", UserWarning)
    found = [
        {"task": task, "optimizer": optimizer, "method": method}
        for task in dict.fromkeys(name.partition(":")[0] for name in config.tasks)
        for optimizer in dict.fromkeys(config.optimizers)
        for method in expand(config.methods, ALL_LABELS if task == SHORT else SELECTED)
    ]
    for setting in found:  # An invalid option is an error before the first run.
        train(config, setting)
    return found


def grid(config: Survey, setting: Setting) -> Grid | None:
    """The learning rates, and the options of the method; then every second rate."""
    if not config.trials:
        return None
    options, rates = parse_method(setting["method"]).grid, sorted(set(config.learning_rates))
    return {"learning_rate": (rates[1::2] if options and rates[1:] else rates,), **options}


def derive(rows: Sequence[Row]) -> Sequence[Row]:
    with_task = [{"task": SHORT, **row} for row in rows]  # Which older records lack.
    within, needs = ("task", "optimizer"), ("step", "bytes_sent")
    return add_targets(with_task, within, {"method": "mean"}, "train_loss", needs)


def p_worse(group: Group) -> float | None:
    """The p-value of the one-sided test that test losses are above the reference.

    It is corrected by Holm's method for the number of groups of the table that are compared.
    """
    found = {keys: each.difference("test_loss", log=True) for keys, each in group.groups.items()}
    p_values = {keys: each.p_above() for keys, each in found.items() if each}
    corrected = dict(zip(p_values, holm([*p_values.values()]), strict=True))
    return corrected.get(tuple(group.keys.values()))


TABLE = Table(
    by=("task", "optimizer", "method"),
    columns=(
        *map(key, ("task", "optimizer", "method")),
        Column("kind", lambda group: KINDS[parse_method(group.keys["method"]).kind], text=True,
               hidden=True),
        SEEDS,
        Column("learning rate", tuned("learning_rate"), name="learning_rate"),
        Column("also tuned", tuned_beside("learning_rate"), name="also_tuned", hidden=True),
        Column("training loss", spread("train_loss"), ".4f", "train_loss"),
        Column("of mean's", relative("train_loss"), ".2f", "train_loss_ratio"),
        Column("paired [95 %]", difference("train_loss", log=True), ",.2f", "train_paired",
               hidden=True),
        Column("test loss", spread("test_loss"), ".3f", "test_loss"),
        Column("of mean's", relative("test_loss"), ".2f", "loss_ratio"),
        Column("paired [95 %]", difference("test_loss", log=True), ".2f", "paired", hidden=True),
        Column("p", p_worse, ".3f", hidden=True),
        Column("test accuracy %", spread("test_accuracy"), ".1f", "test_accuracy", 100),
        Column("bytes/worker/step", mean_of("bytes_per_step"), ",.0f", "bytes_per_step",
               hidden=True),
        Column("of mean's", relative("bytes_per_step"), ".3f", "bytes_ratio"),
        Column("steps to target", mean_of("step_to_target"), ",.0f", "steps_to_target",
               hidden=True),
        Column("bytes to target, of mean's", relative("bytes_sent_to_target"), ".3f",
               "target_bytes_ratio", hidden=True),
        Column("reached", reached("step"), hidden=True),
        Column("compression error", mean_of("compression_error"), ".3g", "compression_error",
               hidden=True),
        Column("ms/step", lambda group: statistics.median(group.values("step_milliseconds")), ".1f",
               "step_milliseconds", hidden=True),
        only_in_csv("loses", lambda group: (p_worse(group) or 1) < SIGNIFICANCE),
        only_in_csv("saves", lambda group: relative("bytes_per_step")(group) < 0.99),
    ),
    reference={"method": "mean"},
)  # fmt: skip


def exceeds_a_limit(limits: Mapping[str, float], methods: Mapping[str, Any]) -> Any:
    """The claim that a column of the table exceeds its limit, as one of a control must."""

    def findings(results: Results) -> list[Finding]:
        found = []
        for line in results.lines:
            if is_about(line.group.keys, methods):
                values = [line[column] for column in limits]
                exceeds = any(v > limit for v, limit in zip(values, limits.values(), strict=True))
                outcome: Outcome = "holds" if exceeds else "does not hold"
                if not exceeds and any(map(math.isnan, values)):
                    outcome = "not tested"
                numbers = (f"{c} {number(line[c])}, limit {limits[c]:g}" for c in limits)
                found.append(Finding(line.where, outcome, "; ".join(numbers)))
        return found

    return findings


CLAIM = Claim(
    f"The test loss of `{'`, `'.join(CLAIMED)}` is at most 1.1 times that of `mean`.",
    is_no_worse("test_loss", 1.1, log=True, methods={"method": CLAIMED}),
)
LIMITS = {"train_loss_ratio": 1.5, "bytes_ratio": 0.26}
CLAIMS_OF_DIGITS = (
    Claim(
        "`global_qsgd:8` has at most 1.5 times the mean final training loss of `mean`.",
        is_at_most("train_loss_ratio", 1.5, methods={"method": "global_qsgd:8"}),
    ),
    Claim(
        "`global_qsgd:8` sends at most 0.26 of the bytes of `mean`.",
        is_at_most("bytes_ratio", 0.26, methods={"method": "global_qsgd:8"}),
    ),
    Claim(
        "Each of the controls `truncating` and `top_1_percent` exceeds one of these limits.",
        exceeds_a_limit(LIMITS, {"method": CONTROLS}),
    ),
)

NUMBERS: dict[str, int] = {}  # Of the colors of the kinds.


def mark(line: Line) -> Setting:
    """A color per kind; a cross if the method loses, and otherwise a circle."""
    number = NUMBERS.setdefault(line["kind"], len(NUMBERS))
    return {"marker": "X" if line["loses"] else "o", "color": plot.COLORS[number]}


def color_legend(axes: Any, results: Results, _: Setting) -> None:
    """Adds a legend of the colors."""
    colors = {line["kind"]: mark(line)["color"] for line in results.lines}
    squares = [Line2D([], [], color=c, marker="s", linestyle="") for c in colors.values()]
    axes.legend(squares, [*colors], fontsize=7)


FIGURE = plot.Points(
    file="test_loss_against_bytes.png", caption="Test loss against bytes; crosses lose",
    by="method", across=("task", "optimizer"), numbered=True, mark=mark,
    finish=color_legend, size=(7.0, 6.0),
    x=(plot.Axis("bytes_ratio", "bytes sent, relative to the float32 mean"),),
    y=plot.Axis("loss_ratio", "test loss, relative to the float32 mean"),
)  # fmt: skip
CURVES = plot.Lines(
    file="loss_against_bytes.png",
    caption="Training loss against bytes sent per worker",
    by="method", across=("optimizer",), size=(4.5, 4.2),
    band=lambda values: (min(values), max(values)),
    x=(plot.Axis("bytes_sent", "bytes sent per worker (MB)", 1e-6),),
    y=plot.Axis("train_loss", "loss over the whole training set"),
    style=plot.marked_style("mean", dashed=CONTROLS),
)  # fmt: skip


def _named(lines: Sequence[Line], form: str = "`{0[method]}` ({1})") -> str:
    def times(line: Line) -> str:
        ratio = line["loss_ratio"]
        return f"{ratio:.2f} times" if math.isfinite(ratio) else "diverged"

    return ", ".join(form.format(line, times(line)) for line in lines)


def describe(lines: Sequence[Line]) -> str:
    """Which methods lose to the mean and why, which save no bytes, and what the others save."""
    judged = [line for line in lines if not is_missing(line["p"])]
    if not judged:
        return "None is judged, which takes `mean` and two seeds."
    losers = [line for line in judged if line["loses"]]
    losers.sort(key=lambda e: -e["loss_ratio"] if math.isfinite(e["loss_ratio"]) else -math.inf)
    said = [f"{len(losers) or 'None'} of {len(judged)} methods lose to `mean` in test loss."]
    for kind, reason in WHY_THEY_LOSE.items():
        if group := [line for line in losers if line["kind"] == KINDS[kind]]:
            said.append(f"{_named(group)}: {reason}.")
    if paying := [line for line in judged if not line["saves"] and line["kind"] != "exact"]:
        said.append(
            f"In bytes {_named(paying, '`{0[method]}`')} save nothing: their payloads cannot be "
            "added, and each worker's goes to all the others."
        )
    saving = [line for line in judged if line["saves"] and not line["loses"]]
    if saving := sorted(saving, key=lambda line: line["bytes_ratio"]):
        named = _named(saving, "`{0[method]}` ({0[bytes_ratio]:.3f}; {1})")
        said.append(f"Inconclusive against `mean` in loss, for these parts of its bytes: {named}.")
    if reaching := [line for line in judged if not is_missing(line["target_bytes_ratio"])]:
        fewest = sorted(reaching, key=lambda line: line["target_bytes_ratio"])[:3]
        form = "`{0[method]}` ({0[target_bytes_ratio]:.3f}, {0[steps_to_target]:.0f} steps)"
        said.append(
            f"{len(reaching)} of {len(judged)} methods reach the loss that `mean` has after half "
            "its steps, with every seed. Those that send the fewest bytes until then, relative to "
            f"`mean`: {_named(fewest, form)}."
        )
    return " ".join(said)


def prose(results: Results) -> Sequence[str]:
    config = results.config
    of_task = {SHORT: f"{config.steps} steps"}
    long = f"{config.long_steps} steps, a quarter in trials"
    rates = (
        f"{rate:g} with {OPTIMIZER_TITLES[name]}"
        for name, rate in DEFAULT_RATES.items()
        if name in config.optimizers
    )
    tuning = f"Learning rates are {' and '.join(rates)}."
    if config.trials:
        tuning = (
            "Methods are tuned by the loss on a held-out fifth of the training set. The first "
            f"learning rates are {', '.join(f'{rate:g}' for rate in config.learning_rates)}. SGD "
            "has momentum 0.9, except for methods whose aggregator has momentum."
        )
    by_setting = itertools.groupby(
        results.lines, lambda line: ", ".join([*map(str, line.group.keys.values())][:2])
    )
    return (
        f"{'; '.join(f'{name}: {of_task.get(name, long)}' for name in config.tasks)}; "
        f"{results.workers} workers{', simulated on one device' if config.simulated else ''}, "
        f"{config.batch} examples per step, {config.seeds} seeds. All methods have the same "
        f"weights and batches per seed. {tuning}",
        PROVENANCE,
        TUNING,
        *(f"{where}: {describe([*lines])}" for where, lines in by_setting),
        SHOWN,
        "A method loses if its test loss is above that of `mean` by a one-sided paired t-test of "
        f"the logarithms over seeds, at p < {SIGNIFICANCE:g}; p is corrected for the number of "
        "lines of the table by Holm's method, and intervals are not. Where parameters were tuned, "
        "by the loss on held-out examples, the test loss is the fair one: a higher rate alone can "
        "reduce the training loss. ± is the standard deviation over seeds. Ratios are to `mean`; "
        "the paired one is the geometric mean over seeds. The target is the training loss of "
        "`mean` after half of its steps; steps and bytes to it are means over seeds, `-` if a seed "
        "does not reach it. Bytes are means over steps. The compression error is "
        "‖G - mean‖² / ‖mean‖² of an update G, averaged over logged steps and seeds; it exceeds 1 "
        "if G has momentum or an earlier residual, and means nothing for signs.",
        "Small networks, small datasets, the same number of steps for all methods. Methods that "
        "lose here may not lose in a longer run, where feedback has more time; methods that tie "
        "here may not tie on a larger model. Options that are not tuned are defaults, or were set "
        "once by hand. All workers share one machine and no link is slow: ms/step, a median, is "
        "the cost of computation, and does not show the time that fewer bytes would save.",
        CLAIMS,
        FIGURES,
    )


def reject(results: Results) -> int:
    """The exit code 1 if a claim does not hold with the default options on 8 workers."""
    return int(results.is_default and results.workers == 8 and not results.all_hold)


SURVEY = Study(
    "survey", Survey, settings, train, TABLE, prose, (FIGURE,), (CLAIM,), grid=grid, derive=derive,
    budget=lambda config: config.trials,
)  # fmt: skip
SHARDED = dataclasses.replace(SURVEY, name="sharded", config=Sharded)
CATALOGUE = dataclasses.replace(SURVEY, name="catalogue", config=Codes)
DIGITS = dataclasses.replace(
    SURVEY, name="digits", config=Digits, figures=(CURVES,), claims=CLAIMS_OF_DIGITS,
    exit_code=reject,
)  # fmt: skip
