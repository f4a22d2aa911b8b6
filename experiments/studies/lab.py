"""How long is a step on a slow link, and where does the time go?"""

import dataclasses
import functools
import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from experiments.errors import ExperimentError, select
from experiments.lab.methods import CONTROL, LABELS, find
from experiments.lab.network import UNSHAPED, Link, bits_per_second, isolate
from experiments.lab.peers import PEERS, installed, require_torch
from experiments.lab.processes import Lab, describe_measurements
from experiments.methods import expand
from experiments.sparse_methods import SPARSE_METHODS
from experiments.study import run as readme
from experiments.study.claims import Claim, Results, is_at_most, is_within
from experiments.study.plot import Axis, Lines, marked_style
from experiments.study.record import Row, of_kind
from experiments.study.run import Options, Setting, Study, Trainer
from experiments.study.table import (
    Column,
    Group,
    Table,
    extent,
    key,
    mean_of,
    only_in_csv,
    to_markdown,
)

TOLERANCE = 0.08  # of counted bytes; headers of TCP and Ethernet are about 5 %.
ACCOUNTED = ("mean", "plain_jax_psum", "mean_bfloat16", "global_qsgd:8", "two_stage:4", "dpsgd")
LONGEST = 10  # Operations of a table.
RACE = (
    *("mean", "plain_jax_psum", "mean_bfloat16", "global_qsgd:8", "two_stage:4"),
    *("ef_top_1_percent", "power_sgd_rank_1", "power_sgd_rank_4"),
    *("ddp", "ddp_fp16", "ddp_power_sgd_1", "ddp_power_sgd_4"),
)


@dataclasses.dataclass(frozen=True)
class LabConfig(Options):
    """How long is a step on a slow link, and where does the time go?

    Question: several processes of one machine train one model, each in a network namespace. `tc`
    limits their links. How long is a step of each method, beside PyTorch's DistributedDataParallel
    on Gloo if it is installed? Which part is compute, which is compression, and which is the link?
    Are the bytes that the interface counts those of `jaxcomm.wire.account`?

    Command: `python -m experiments lab`, as root or where unprivileged user namespaces are
    permitted, on Linux with iproute2. Expected time: one hour on two idle cores.

    Number: the time of a step, divided by that of DDP, of its hooks, and of `mean`. With `--traces
    FOLDER` also the milliseconds of each operation of the compiled step, in the first worker.
    """

    methods: tuple[str, ...] = ()
    """methods, or all; by default 12 methods, and with --model words all"""
    bandwidth: tuple[str, ...] = ()
    """bandwidths of each worker's link (default: 1gbit 200mbit 100mbit)"""
    between: tuple[str, ...] = ()
    """bandwidths of the link between two clusters that are fast inside"""
    model: Literal["mlp", "transformer", "words"] = "mlp"
    """what trains; words: methods for sparse updates"""
    workers: int = 4
    """number of workers, each a process"""
    rounds: int = 5
    """rounds, in which all methods are measured in turn"""
    steps: int = 10
    """timed steps of a measurement, at most"""
    seconds: float = 10.0
    """time limit of a measurement"""
    attempts: int = 4
    """attempts at a measurement; the last one counts"""
    traces: str | None = None
    """folder for a trace of each method of jaxcomm on each shaped link"""

    def before_jax(self) -> None:
        """Moves this process to a private network."""
        isolate()


def labels(config: LabConfig) -> list[str]:
    """The methods of a config, and the control."""
    if config.model == "words":
        return [CONTROL, *select(config.methods or ("all",), [*SPARSE_METHODS], "--methods")]
    chosen = config.methods or installed(RACE)
    return [*dict.fromkeys((CONTROL, *expand(chosen, (*LABELS, *PEERS))))]


def links(config: LabConfig) -> dict[str, Link]:
    """The links of a config by name; first the unshaped one."""
    rates = config.bandwidth or (() if config.between else ("1gbit", "200mbit", "100mbit"))
    found = [Link(), *map(Link, rates), *(Link(rate, 2) for rate in config.between)]
    return {link.name: link for link in found}


def settings(config: LabConfig) -> list[Setting]:
    """Every method on every link; methods for clusters on those that have two, and unshaped.

    Raises:
      ExperimentError: If an option is invalid, or PyTorch is required and not installed.
    """
    if config.workers < 2 or (config.between and config.workers % 2):
        raise ExperimentError(
            f"--workers must be at least 2, and even with --between; got {config.workers}."
        )
    for link in links(config).values():
        bits_per_second(link.rate)
    names, flat = labels(config), []
    for name in names:
        if name in PEERS:
            require_torch()
        if name in PEERS or config.model == "words" or not find(name).clusters:
            flat.append(name)
    return [
        {"link": link.name, "method": name}
        for link in links(config).values()
        for name in (names if link.clusters == 2 or (config.between and link == Link()) else flat)
    ]


def operations(trace: Path) -> Counter[str]:
    """Microseconds by the name of an operation, without those inside it, over all threads."""
    threads = defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if name := event.get("args", {}).get("hlo_op"):
            begin, took = float(event["ts"]), float(event.get("dur", 0))
            threads[event["pid"], event["tid"]].append((begin, -took, name))
    total = Counter()
    for events in threads.values():
        outer = []
        for begin, minus, name in sorted(events):
            while outer and outer[-1][0] <= begin:
                outer.pop()
            total[name] -= minus
            if outer:
                total[outer[-1][1]] += minus
            outer.append((begin - minus, name))
    return total


def keep_trace(lab: Lab, method: str, steps: int, folder: Path) -> None:
    """Keeps a trace of steps of the first worker, and a table of the longest operations."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "_", f"{method}_{lab.network.link.name}")
    file = folder.resolve() / f"{name}.trace.json.gz"
    lab.group(method).ask("profile", method=method, steps=steps, file=str(file))
    found = operations(file)
    longest, total = found.most_common(LONGEST), found.total()
    rest = total - sum(took for _, took in longest)
    lines = [
        [operation, f"{took / 1e3 / steps:.1f}", f"{took / total:.0%}"]
        for operation, took in (*longest, ("all others", rest), ("total", total))
    ]
    table = to_markdown(["operation", "ms per step", "of all operations"], lines)
    (folder / f"{name}.md").write_text(table)


@functools.cache
def lab_of(config: LabConfig) -> Lab:
    """The workers, which stay for all measurements."""
    return Lab(config, config.model)


def train(config: LabConfig, setting: Setting) -> Trainer:
    """The trainer of one method on one link."""
    link, lab = links(config)[setting["link"]], lab_of(config)

    def trainer(setting, seed, parameters, *, validation):
        method = setting["method"]
        found = lab.time_steps(method, link, config.steps)
        if config.traces and link.rate != UNSHAPED and method not in PEERS:
            keep_trace(lab, method, found["steps"], Path(config.traces))
        if link.rate != UNSHAPED and link.clusters == 1:
            megabits = bits_per_second(link.rate) / 1e6
            yield {"megabits": megabits, "milliseconds": found["milliseconds"]}
        yield found

    return trainer


REFERENCES = {
    "over_mean": "mean",
    "over_ddp": "ddp",
    "over_plain_jax": "plain_jax_psum",
    "over_fp16_hook": "ddp_fp16",
    "over_hook_1": "ddp_power_sgd_1",
    "over_hook_2": "ddp_power_sgd_2",
    "over_hook_4": "ddp_power_sgd_4",
}


def derive(rows: Sequence[Row]) -> list[Row]:
    """Adds ratios to other methods of the round, and the parts of a step."""
    runs = of_kind(rows, "run")
    times = {(row["link"], row["method"], row["seed"]): row["milliseconds"] for row in runs}

    def derived(row: Row) -> Row:
        link, seed, took = row["link"], row["seed"], row["milliseconds"]
        added = {
            name: took / times.get((link, other, seed), math.nan)
            for name, other in REFERENCES.items()
        }
        fast = times.get((UNSHAPED, row["method"], seed), math.nan)
        added["codec"] = fast - times.get((UNSHAPED, CONTROL, seed), math.nan)
        added["waiting"] = took - fast
        if row.get("accounted"):
            added["counted"] = row["sent"] / row["accounted"]
        return {**row, **added}

    return [derived(row) if row["kind"] == "run" else row for row in rows]


def counted(group: Group) -> float:
    """The bytes of the interface over those of the account, for messages of 1 MB or more."""
    values = [row["counted"] for row in group.runs if row.get("accounted", 0) >= 1e6]
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
        *(only_in_csv(name, mean_of(name)) for name in [*REFERENCES][2:]),
    ),
    reference={"method": "mean"},
)

RECOMMENDED = (
    *("mean_bfloat16", "global_qsgd:8", "two_stage:4", "ef_top_1_percent"),
    *("power_sgd_rank_1", "power_sgd_rank_2", "power_sgd_rank_4"),
)
DRAWN = {
    "mean": "mean(), in float32",
    "ddp_fp16_kept_memory": "DDP, fp16_compress_hook",
    "global_qsgd:8": "global_qsgd(bits=8)",
    "power_sgd_rank_4": "power_sgd(rank=4)",
    "ddp_power_sgd_4_kept_memory": "DDP, powerSGD_hook, rank 4",
}
NAMES = {"plain_jax_psum": "one `psum` of plain JAX", "ddp": "DDP"}


def at_most(limit: float, column: str, *methods: str, link: str = "200mbit") -> Claim:
    """The claim that steps of methods take at most `limit` times those of the other method."""
    other = REFERENCES[column]
    return Claim(
        f"At {link}, a step of {', '.join(f'`{name}`' for name in methods)} takes at most "
        f"{limit:.3g} times that of {NAMES.get(other, f'`{other}`')}.",
        is_at_most(column, limit, methods={"link": link, "method": methods}),
    )


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
    config, runs = results.config, of_kind(results.rows, "run")
    beside = "PyTorch is not installed, so this record has none of its methods."
    if any(row["method"] == "ddp" for row in runs):
        beside = (
            "PyTorch's DistributedDataParallel (DDP) runs on Gloo with its default buckets, except "
            "that its hook PowerSGD has one bucket, since it aborts on Gloo with more. DDP sends "
            "buckets while the backward pass computes the next ones. XLA does not overlap the two "
            "on CPUs, so jaxcomm sends after it. jaxcomm's processes keep freed memory, as "
            "`jaxcomm.launch` sets it. PyTorch's launcher does not, except in rows that end in "
            "`_kept_memory`."
        )
    if config.model == "words":
        beside = (
            "A leaf with a sparse gradient is aggregated as in the study `sparse`, with the "
            "capacity that 20 batches need, and all other leaves by `mean`. The model has no "
            "methods of PyTorch."
        )
    return [
        f"{config.workers} processes of one machine train the model `{config.model}`. Each has "
        "1 compute thread and a network namespace. A "
        "token bucket (`tc tbf`) limits both directions of each link. In a link called `2 "
        "clusters`, two halves of the workers are fast inside and share one link. All methods "
        "have the same weights and batches. " + beside,
        readme.PROVENANCE,
        f"{config.rounds} rounds measure all methods in turn. "
        + describe_measurements(config, config.steps, runs),
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


LAB = Study(
    "lab", LabConfig, settings, train, TABLE, prose,
    (Lines(file="step_time_against_bandwidth.png", caption="Step time against bandwidth",
           by="method", only=DRAWN, at="megabits",
           x=(Axis("megabits", "Mbit/s of a worker's link"),),
           y=Axis("milliseconds", "milliseconds per step"), size=(6.0, 5.0),
           style=marked_style("mean", [*PEERS]), banded=lambda name: False),),
    CLAIMS, seeds=lambda config: range(config.rounds), interleaved=True, derive=derive,
)  # fmt: skip
