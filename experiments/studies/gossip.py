"""Does MATCHA at half the budget train as well as D-PSGD, step for step?"""

import dataclasses

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study import readme
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Table, key, only_in_csv
from experiments.study.figure import Lines
from experiments.study.groups import difference, first, mean_of, over_reference, spread, tuned
from experiments.study.judges import is_equivalent, is_no_worse
from experiments.study.late import late
from experiments.study.panels import COLORS, Axis
from experiments.study.search import Budget
from experiments.study.signs import describe_signs
from experiments.study.study import Study

CLAIMED = {"matcha": "MATCHA", "periodic": "The periodic baseline"}
MAIN, SPLITS = ("dpsgd", *CLAIMED), ("iid", "skewed")


@dataclasses.dataclass(frozen=True)
class Gossip:
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

    seeds: int = options.seeds_option()
    steps: int = option(200, "training steps per run; a trial has half of them", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    learning_rates: tuple[float, ...] = option(
        (0.1, 0.2, 0.4, 0.8), "the grid of rates of plain SGD", positive_number, many=True
    )
    tuning_seeds: int = option(1, "number of additional seeds per rate", positive_integer)
    log_every: int = option(20, "steps between two logged losses", positive_integer)
    graphs: tuple[str, ...] = option(("all",), "graphs such as ring_8, or all", many=True)
    splits: tuple[str, ...] = option(SPLITS, "how examples are split", choices=SPLITS, many=True)
    methods: tuple[str, ...] = option(("all",), "methods to compare, or all", many=True)
    record: str = options.record_option("gossip")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


CLAIM = "{} at the budget 0.5 has {} D-PSGD's training loss over the last half of the steps."
TESTS = {"at most 1.1 times": is_no_worse, "between 1 / 1.1 and 1.1 times": is_equivalent}

TABLE = Table(
    by=("graph", "split", "method"),
    columns=(
        *map(key, ("graph", "split", "method")),
        *(only_in_csv(name, first(name)) for name in ("workers", "least_examples")),
        SEEDS,
        Column("rate", tuned("learning_rate")),
        Column("training loss, last half", spread("late_loss"), ",.4f", "late_loss"),
        Column("of D-PSGD's [95 %]", difference("late_loss", log=True), ",.2f", "late_ratio"),
        Column("final training loss", spread("train_loss"), ",.4f", "train_loss", hidden=True),
        Column("test loss", spread("test_loss"), ",.4f", "test_loss"),
        Column("of D-PSGD's [95 %]", difference("test_loss", log=True), ",.2f", "test_ratio"),
        Column("test accuracy %", spread("test_accuracy"), ",.1f", "test_accuracy", scale=100),
        Column("distance", mean_of("distance"), ".3g", hidden=True),
        Column("rounds/step", mean_of("rounds_per_step"), ".2f", "rounds_per_step"),
        Column("expected rounds", first("expected_rounds"), ".2f", "expected_rounds", hidden=True),
        Column("bytes/worker/step", mean_of("bytes_per_step"), ",.0f", "bytes_per_step"),
        Column("expected bytes", first("expected_bytes"), ",.0f", "expected_bytes", hidden=True),
        Column("bytes ratio", over_reference(mean_of("bytes_per_step")), ".3f", "bytes_ratio"),
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
    from experiments.training.gossip import METHODS, SHARES

    config, lines = results.config, results.lines
    counts = sorted({(line["workers"], line["least_examples"]) for line in lines})
    parts = "; ".join(
        f"{workers} workers have at least {examples} each, {config.batch // workers} in a step"
        for workers, examples in counts
    )
    legend = "\n".join(
        f"- `{name}`: {METHODS[name].sends}"
        for name in dict.fromkeys(line.group.keys["method"] for line in lines)
    )
    signs = [
        f"{title}, {loss} relative to D-PSGD, by the 95 % interval: "
        f"{describe_signs(of_method, column, ['graph', 'split'])}."
        for method, title in CLAIMED.items()
        if (of_method := [line for line in lines if line.group.keys["method"] == method])
        for column, loss in (("late_ratio", "training loss"), ("test_ratio", "test loss"))
    ]
    return [
        f"digits, {config.steps} steps of {config.batch} examples over all workers, plain SGD. All "
        "methods have the same weights, splits and batches per seed. MATCHA and the periodic "
        "baseline have the budget 0.5. " + SHARES + f" {parts}.",
        readme.PROVENANCE, readme.TUNING, MEASURE, readme.CLAIMS, *signs,
        f"Each worker sends in a step:\n\n{legend}", readme.TABLE, NOTES, readme.FIGURES,
    ]  # fmt: skip


MEASURE = (
    "The rate is the only tuned parameter; others, such as CHOCO-SGD's step size, are fixed. A "
    "trial takes half the steps; a fifth of the training set is its validation data.\n\n"
    "The measure of the claims was chosen before the run: `late_loss`, the training loss of the "
    "mean model, averaged over the logged steps of the last half. The paper claims the same "
    "convergence step for step, and one final loss varies more. The first claim of each method has "
    "a one-sided test, since the paper claims no loss. The second also fails if the method is "
    "better by more than the margin."
)
NOTES = (
    "Losses are of the mean of the parameters of all workers, over the whole training or test set. "
    "± is the standard deviation over seeds. A ratio is the geometric mean over paired seeds. The "
    "distance is the sum of the squared distances of the workers from the mean at the end. In a "
    "round, each participating worker sends one message and receives one. Bytes are those of a "
    "worker that participates in every round. The expected values follow from the graph and the "
    "budget, which for MATCHA is a share of its matchings. D-PSGD may need one round less than "
    "there are matchings. One device simulates all workers, so no time is measured."
)

STUDY = Study(
    "gossip", Gossip, late("gossip.settings"), late("gossip.Trainer"), TABLE, prose, (FIGURE,),
    [Claim(CLAIM.format(title, words), test("late_loss", 1.1, methods={"method": name}, log=True))
     for name, title in CLAIMED.items() for words, test in TESTS.items()],
    shares=("graph", "method"), headline=("late_loss", "late_ratio"),
    grid=lambda config, setting: {"learning_rate": (config.learning_rates,)},
    budget=lambda config: Budget(len(config.learning_rates), config.tuning_seeds),
)  # fmt: skip
