"""What does a growing sparsity of the weights save on the wire?"""

import dataclasses
from collections.abc import Sequence

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study import groups, panels, readme
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Table, key, only_in_csv
from experiments.study.figure import Lines, Points
from experiments.study.judges import is_at_most, is_no_worse, is_within
from experiments.study.late import late
from experiments.study.study import Study

SPARSE = "0.004"  # The strength that the claims are about.


@dataclasses.dataclass(frozen=True)
class Proximal:
    """What does a growing sparsity of the weights save on the wire?

    Question: a small convolutional network on scikit-learn's digits, with the optimizer on the
    owners of slices (`sharded_server`). Each step of SGD is followed by the proximal operator of an
    l1 norm (`proximal`). The owners send updates, which are zero wherever a weight stays zero. How
    many bytes does a sparse pull (`nonzero`) save over a dense one, at which test error, and are
    the weights the same?

    Command: `python -m experiments proximal`. Expected time: three minutes on two CPU cores.

    Number: the bytes of a pull, relative to a dense one of float32 and of 16 bits, and the test
    error.
    """

    strengths: tuple[float, ...] = option(
        (0.001, 0.002, 0.004), "strengths of the l1 norm", positive_number, many=True
    )
    seeds: int = option(3, "runs per strength, each with its own seed", positive_integer)
    workers: int = option(8, "simulated workers", positive_integer)
    steps: int = option(
        1200, "steps of a run; the last quarter is pulled sparsely", positive_integer
    )
    batch: int = option(64, "examples per step, over all workers", positive_integer)
    learning_rate: float = option(0.2, "learning rate of plain SGD", positive_number)
    record: str = options.record_option("proximal")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def percent(heading: str, name: str) -> Column:
    return Column(heading, groups.spread(name), ".1f", name, 100)


TABLE = Table(
    by=("strength",),
    columns=(
        key("strength"),
        SEEDS,
        percent("test error %", "test_error"),
        percent("weights not 0, %", "weights"),
        percent("updates not 0, %", "updates"),
        Column("room %", groups.mean_of("room"), ".1f", "room", 100),
        Column("bytes/pull", groups.mean_of("pulled"), ",.0f", "pulled"),
        Column("of dense float32", groups.mean_of("pull_ratio"), ".3f", "pull_ratio"),
        Column("of dense 16 bits", groups.mean_of("pull_ratio_16"), ".3f", "pull_ratio_16"),
        Column("all messages, of dense", groups.mean_of("sent_ratio"), ".3f", "sent_ratio"),
        Column("same weights", groups.mean_of("same"), ".2f", "same"),
        only_in_csv("density", groups.mean_of("weights")),
    ),
    reference={"strength": "0"},
)

CLAIMS = (
    Claim(
        "The weights after the sparse pulls are those after dense pulls, bit for bit.",
        is_within("same", 1, 1),
    ),
    Claim(
        f"At strength {SPARSE}, a pull sends at most half of a dense one of float32.",
        is_at_most("pull_ratio", 0.5, methods={"strength": SPARSE}),
    ),
    Claim(
        f"At strength {SPARSE}, the test error is at most 0.05 above that without a regularizer.",
        is_no_worse("test_error", 0.05, methods={"strength": SPARSE}),
    ),
)

FIGURES = (
    Lines(
        file="density_against_steps.png",
        caption="The part of weights that is not zero, against steps with dense pulls",
        by="strength", band="range", size=(4.5, 3.4),
        x=(panels.Axis("step", "step", log=False),),
        y=panels.Axis("density", "weights that are not zero", log=False),
    ),
    Points(
        file="bytes_against_density.png",
        caption="Bytes of a sparse pull against the part of weights that is not zero",
        by="strength", size=(4.5, 3.4),
        x=panels.Axis("density", "weights that are not zero", log=False),
        y=panels.Axis("pull_ratio", "bytes of a pull, of dense float32", log=False),
    ),
)  # fmt: skip


def prose(results: Results) -> Sequence[str]:
    config = results.config
    return (
        f"digits, {config.workers} simulated workers, {config.steps} steps of {config.batch} "
        f"examples of plain SGD at the rate {config.learning_rate:g}, {config.seeds} seeds. Biases "
        "have no penalty. With the strength 0 the proximal operator is the identity.",
        readme.PROVENANCE,
        readme.TABLE,
        "± is the standard deviation over seeds. The room of a sparse pull is static: 1.2 times "
        "the largest part of a worker's updates that was not zero in any step of the third "
        "quarter, rounded up to a multiple of 2.5 %. So three quarters are pulled densely, and "
        "the last one from the same weights both densely and sparsely. Bytes are those of "
        "`jaxcomm.wire.account` for one worker, with indices and the flag; all messages include "
        "the rows of gradients, which stay dense.",
        "The updates of one worker's slices are less sparse than the weights, and vary from "
        "step to step, and the room is for the densest. A sparse pull costs more than a dense "
        "one if most updates are not zero, since every value has an index. One small network: a "
        "larger one may have another sparsity at the same test error.",
        readme.CLAIMS,
        readme.FIGURES,
    )


STUDY = Study(
    "proximal", Proximal, late("proximal.settings"), late("proximal.train"), TABLE, prose, FIGURES,
    CLAIMS, headline=("test_error", "weights", "pull_ratio"),
)  # fmt: skip
