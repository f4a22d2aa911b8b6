"""How long is a step on a slow link, and where does the time go?"""

import dataclasses
import math
from collections.abc import Sequence

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.lab.peers import METHODS as PEERS
from experiments.study import readme
from experiments.study.claims import Claim, Results
from experiments.study.columns import Column, Table, key, only_in_csv
from experiments.study.figure import Lines
from experiments.study.groups import Group, Value, extent, mean_of
from experiments.study.judges import is_at_most, is_within
from experiments.study.late import late
from experiments.study.panels import Axis, marked_style
from experiments.study.study import Study
from experiments.study.tidy import Row, of_kind

TOLERANCE = 0.08  # of counted bytes; headers of TCP and Ethernet are about 5 %.
ACCOUNTED = ("mean", "plain_jax_psum", "mean_bfloat16", "global_qsgd:8", "two_stage:4", "dpsgd")


def parse_bandwidth(text: str) -> str:
    """A bandwidth that `tc` reads."""
    import argparse

    from experiments.lab.network import bits_per_second

    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


@dataclasses.dataclass(frozen=True)
class Lab:
    """How long is a step on a slow link, and where does the time go?

    Question: several processes of one machine train one model, each in a network namespace. `tc`
    limits their links. How long is a step of each method, beside PyTorch's DistributedDataParallel
    on Gloo if it is installed? Which part is compute, which is compression, and which is the link?
    Are the bytes that the interface counts those of `jaxcomm.wire.account`?

    Command: `python -m experiments lab --preset race`, as root or where unprivileged user
    namespaces are permitted, on Linux with iproute2. Expected time: one hour on two idle cores.

    Number: the time of a step, divided by that of DDP, of its hooks, and of `mean`.
    """

    preset: str = option("race", "race: 12 methods; full: all methods", choices=("race", "full"))
    methods: tuple[str, ...] = option((), "methods instead of those of the preset", many=True)
    bandwidth: tuple[str, ...] = option(
        (), "bandwidths of each worker's link, such as 200mbit", parse_bandwidth, many=True
    )
    between: tuple[str, ...] = option(
        (),
        "bandwidths of the link between two clusters that are fast inside",
        parse_bandwidth,
        many=True,
    )
    delay: str | None = option(None, "delay per direction of shaped links, such as 5ms")
    model: str = option(
        "mlp",
        "what trains; words: methods for sparse updates",
        choices=("mlp", "transformer", "words"),
    )
    workers: int = option(4, "number of workers, each a process", positive_integer)
    threads: int = option(1, "threads that compute, per process", positive_integer)
    rounds: int = option(5, "rounds, in which all methods are measured in turn", positive_integer)
    steps: int = option(10, "timed steps of a measurement, at most", positive_integer)
    seconds: float = option(10.0, "time limit of a measurement", positive_number)
    drift: float = option(
        0.05, "largest change of the control around a measurement that counts", positive_number
    )
    attempts: int = option(4, "attempts at a measurement; the last one counts", positive_integer)
    record: str = options.record_option("lab")
    records: str = options.records_option()
    resume: str | None = options.resume_option()

    def before_jax(self) -> None:
        """Moves this process to a private network, which requires a single thread."""
        from experiments.lab.isolation import isolate

        isolate()


REFERENCES = {
    "over_mean": "mean",
    "over_plain_jax": "plain_jax_psum",
    "over_ddp": "ddp",
    "over_fp16_hook": "ddp_fp16",
    "over_hook_1": "ddp_power_sgd_1",
    "over_hook_2": "ddp_power_sgd_2",
    "over_hook_4": "ddp_power_sgd_4",
}


def derive(rows: Sequence[Row]) -> list[Row]:
    """Adds ratios to other methods of the round, and the parts of a step."""
    runs = {(row["link"], row["method"], row["seed"]): row for row in of_kind(rows, "run")}

    def time_of(link: str, method: str, seed: int) -> float:
        return runs.get((link, method, seed), {}).get("milliseconds", math.nan)

    def derived(row: Row) -> Row:
        seed, method = row["seed"], row["method"]
        fast = time_of("unshaped", method, seed)
        added = {
            name: row["milliseconds"] / time_of(row["link"], other, seed)
            for name, other in REFERENCES.items()
        }
        added |= {"codec": fast - time_of("unshaped", "no_communication", seed)}
        added |= {"waiting": row["milliseconds"] - fast}
        if row.get("accounted"):
            added["counted"] = row["sent"] / row["accounted"]
        return {**row, **added}

    return [derived(row) if row["kind"] == "run" else row for row in rows]


def total(name: str) -> Value:
    """The sum of a column over rounds."""
    return lambda group: sum(group.values(name))


def counted(group: Group) -> float:
    """The bytes of the interface over those of the account, for messages of 1 MB or more."""
    values = [
        row["counted"] for row in group.runs if row.get("accounted", 0) >= 1e6 and "counted" in row
    ]
    return max(values, key=lambda value: abs(value - 1), default=math.nan)


TABLE = Table(
    by=("link", "method"),
    columns=(
        key("link"),
        key("method"),
        Column("ms/step [range]", extent("milliseconds"), ".0f", "milliseconds"),
        Column("of mean's", mean_of("over_mean"), ".2f", "over_mean"),
        Column("of DDP's", mean_of("over_ddp"), ".2f", "over_ddp"),
        Column("MB sent", mean_of("sent"), ".2f", "sent", 1e-6),
        Column("counted / accounted", counted, ".3f", "counted"),
        Column("compression, ms", mean_of("codec"), ".0f", "codec"),
        Column("waiting for the link, ms", mean_of("waiting"), ".0f", "waiting"),
        Column("control, ms", mean_of("control"), ".0f", "control", hidden=True),
        Column("rejected", total("rejected"), ".0f", "rejected", hidden=True),
        *(
            only_in_csv(name, mean_of(name))
            for name in REFERENCES
            if name not in ("over_mean", "over_ddp")
        ),
    ),
    reference={"method": "mean"},
)

RECOMMENDED = (
    *("mean_bfloat16", "global_qsgd:8", "two_stage:4", "ef_top_1_percent"),
    *("power_sgd_rank_1", "power_sgd_rank_2", "power_sgd_rank_4"),
)
DRAWN = (
    *("mean", "mean_bfloat16", "global_qsgd:8", "power_sgd_rank_4"),
    *("ddp_fp16_kept_memory", "ddp_power_sgd_4_kept_memory"),
)
NAMES = {"mean": "`mean`", "plain_jax_psum": "one `psum` of plain JAX", "ddp": "DDP"}


def at_most(limit: float, column: str, *methods: str, link: str = "200mbit") -> Claim:
    """The claim that steps of methods take at most `limit` times those of the other method."""
    other = REFERENCES[column]
    shown = NAMES.get(other, f"`{other}`")
    text = (
        f"At {link}, a step of {', '.join(f'`{name}`' for name in methods)} takes at most "
        f"{limit:.3g} times that of {shown}."
    )
    return Claim(text, is_at_most(column, limit, methods={"link": link, "method": methods}))


CLAIMS = (
    Claim(
        "The interface counts the bytes of `wire.account` within 8 % if a step sends 1 MB.",
        is_within("counted", 1 - TOLERANCE, 1 + TOLERANCE, methods={"method": ACCOUNTED}),
    ),
    at_most(1.05, "over_ddp", "mean"),
    at_most(1.03, "over_plain_jax", "mean"),
    at_most(1.0, "over_fp16_hook", "mean_bfloat16"),
    at_most(1 / 3.3, "over_mean", "global_qsgd:8"),
    at_most(1 / 5, "over_mean", "two_stage:4"),
    at_most(0.29, "over_ddp", "ef_top_1_percent"),
    at_most(0.5, "over_hook_1", "power_sgd_rank_1"),
    at_most(0.6, "over_hook_2", "power_sgd_rank_2"),
    at_most(0.65, "over_hook_4", "power_sgd_rank_4"),
    at_most(1.0, "over_mean", *RECOMMENDED, link="1gbit"),
)


def prose(results: Results) -> list[str]:
    config = results.config
    runs = of_kind(results.rows, "run")
    unsteady = sum(not row["is_steady"] for row in runs)
    peers = any(row["method"] == "ddp" for row in runs)
    beside = (
        "PyTorch's DistributedDataParallel (DDP) runs on Gloo with its default buckets, except "
        "that its hook PowerSGD has one bucket, since it aborts on Gloo with more. DDP sends "
        "buckets while the backward pass computes the next ones. XLA does not overlap the two on "
        "CPUs, so jaxcomm sends after it. jaxcomm's processes keep freed memory, as "
        "`jaxcomm.launch` sets it. PyTorch's launcher does not, except in rows that end in "
        "`_kept_memory`."
        if peers
        else "A leaf with a sparse gradient is aggregated as in the study `sparse`, with the "
        "capacity that 20 batches need, and all other leaves by `mean`. The model has no methods "
        "of PyTorch."
        if config.model == "words"
        else "PyTorch is not installed, so this record has none of its methods."
    )
    return [
        f"{config.workers} processes of one machine train the model `{config.model}`. Each has "
        f"{config.threads} compute thread{'s' * (config.threads > 1)} and a network namespace. A "
        "token bucket (`tc tbf`) limits both directions of each link. In a link called `2 "
        "clusters`, two halves of the workers are fast inside and share one link. All methods "
        "have the same weights and batches. " + beside,
        readme.PROVENANCE,
        f"{config.rounds} rounds measure all methods in turn. A measurement is the median of at "
        f"most {config.steps} steps, in at most {config.seconds:g} s. It follows a measurement of "
        "the control, which does not communicate, and precedes another one. If the two controls "
        f"differ by more than {100 * config.drift:.0f} %, the measurement is rejected and "
        f"repeated. After {config.attempts} rejections the last one counts: {unsteady} of "
        f"{len(runs)} measurements.",
        readme.CLAIMS,
        readme.TABLE,
        "Brackets have the least and the largest round. Ratios are means over rounds of the ratio "
        "in a round. MB are those that the interface has counted, with the headers of TCP and "
        "Ethernet. The account is compared for messages of at least 1 MB. Compression is the time "
        "of a step without a limit of the link, minus that of the control. It includes the copies "
        "of messages between processes. Waiting for the link is the rest.",
        "These are times of steps, not of training: methods that send less may need more steps. "
        f"The {config.workers} processes share the cores of one machine, so compression takes a "
        "larger part of a step than on separate machines.",
        readme.FIGURES,
    ]


STUDY = Study(
    "lab", Lab, late("lab.settings"), late("lab.train"), TABLE, prose,
    (Lines(file="step_time_against_bandwidth.png", caption="Step time against bandwidth",
           by="method", only=DRAWN, at="megabits",
           x=(Axis("megabits", "Mbit/s of a worker's link"),),
           y=Axis("milliseconds", "milliseconds per step"), size=(6.0, 5.0),
           style=marked_style("mean", [*PEERS]), banded=lambda name: False),),
    CLAIMS, seeds=lambda config: range(config.rounds), interleaved=True, derive=derive,
    headline=("milliseconds", "over_mean"),
)  # fmt: skip
