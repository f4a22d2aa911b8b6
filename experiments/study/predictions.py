"""The command `predict`: the cost model against the step times of a record of the lab."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.cli.configs import Predict
from experiments.cli.errors import ExperimentError
from experiments.lab.accounts import sent_by, shapes_of_model
from experiments.lab.methods import CONTROL, PLAIN
from experiments.lab.models import LOSSES
from experiments.lab.network import UNSHAPED, bits_per_second
from experiments.study.store import read, read_settings
from experiments.study.tidy import Row, of_kind
from jaxcomm import advise, perf
from jaxcomm.perf import Calibration, Link
from jaxcomm.perf._predict import overlapped_seconds

GOODPUT = 1448 / 1514
"""Of the nominal rate: the payload of a TCP segment in an Ethernet frame of 1500 bytes."""

CODES = {
    "mean": 'jaxcomm.mean("data")',
    "mean_bfloat16": 'jaxcomm.mean("data", wire_dtype="bfloat16")',
    "global_qsgd:8": 'jaxcomm.global_qsgd("data")',
    "two_stage:4": (
        "jaxcomm.two_stage_mean(jaxcomm.compression.blockwise("
        'jaxcomm.quantizers.dither(bits=4), 256), axis_name="data")'
    ),
    "ef_top_1_percent": 'jaxcomm.top_k_sgd("data", ratio=0.01)',
    "power_sgd_rank_4": 'jaxcomm.power_sgd("data", rank=4)',
    "power_sgd_rank_1": 'jaxcomm.power_sgd("data", rank=1)',
}
"""The methods of the lab that `jaxcomm.advise` compares, and their code there."""


class Line(NamedTuple):
    """A method on a link: milliseconds."""

    link: str
    method: str
    measured: float
    predicted: float
    is_ours: bool

    @property
    def error(self) -> float:
        """The error, relative to what was measured."""
        return self.predicted / self.measured - 1


class Measured(NamedTuple):
    """What a record has, and what predictions may use of it: the unshaped link.

    Attributes:
      settings: The options of the study.
      milliseconds: The mean over rounds, by link and method.
      sent: The counted bytes of a step over the unshaped link, by method.
    """

    settings: dict[str, Any]
    milliseconds: dict[tuple[str, str], float]
    sent: dict[str, float]

    @property
    def compute(self) -> float:
        """The seconds of the control on the unshaped link."""
        return self.milliseconds[UNSHAPED, CONTROL] / 1e3

    def codec(self, method: str) -> float:
        """The seconds that a method takes on the unshaped link beyond the control."""
        return max(self.milliseconds[UNSHAPED, method] / 1e3 - self.compute, 0.0)


def read_measured(folder: Path) -> Measured:
    """Reads a record of the lab.

    Raises:
      ExperimentError: If it is no such record, its model is not predicted, or the control or a
        method was not measured on the unshaped link.
    """
    settings = read_settings(folder)
    if settings.get("study") != "lab":
        raise ExperimentError(f"{folder} is not a record of the study `lab`.")
    if settings.get("model") not in LOSSES:
        raise ExperimentError(f"{folder} must have one of the models {', '.join(LOSSES)}.")
    rows: Sequence[Row] = of_kind(read(folder), "run")
    pairs = list(dict.fromkeys((str(row["link"]), str(row["method"])) for row in rows))
    milliseconds = {
        pair: statistics.fmean(
            row["milliseconds"] for row in rows if (row["link"], row["method"]) == pair
        )
        for pair in pairs
    }
    for method in {CONTROL, *(method for _, method in pairs)}:
        if (UNSHAPED, method) not in milliseconds:
            raise ExperimentError(f"{folder} lacks `{method}` on the unshaped link.")
    sent = {str(row["method"]): float(row["sent"]) for row in rows if row["link"] == UNSHAPED}
    return Measured(settings, milliseconds, sent)


def _shaped(measured: Measured) -> dict[str, Link]:
    """The links on which each worker has a bandwidth of its own."""
    links = {}
    for name in dict.fromkeys(link for link, _ in measured.milliseconds):
        try:
            bits = bits_per_second(name)
        except ValueError:  # Two clusters, whose halves share a link.
            continue
        if name != UNSHAPED:
            links[name] = Link(GOODPUT * bits / 8, 0.0, name, "nominal, less headers")
    return links


def predicted_lines(measured: Measured) -> list[Line]:
    """Every method on every shaped link."""
    model, workers = measured.settings["model"], measured.settings["workers"]
    shapes = shapes_of_model(model)
    size = sum(4 * each.size for each in shapes.values())
    lines = []
    methods = [method for link, method in measured.milliseconds if link == UNSHAPED]
    for method in methods:
        sent = sent_by(method, model, workers)
        codec, compute = measured.codec(method), measured.compute
        for name, link in _shaped(measured).items():
            if (name, method) not in measured.milliseconds:
                continue
            if sent:
                seen = perf.predict(
                    sent.account,
                    shapes,
                    link=link,
                    compute_seconds=compute,
                    codec_seconds=codec,
                    share=sent.share,
                )
                seconds = seen.seconds
            else:  # DDP sends buckets during the backward pass.
                network = measured.sent[method] / (link.bytes_per_second / GOODPUT)
                is_ddp = method.startswith("ddp")
                overlapped = overlapped_seconds(compute, codec, network, size)
                seconds = overlapped if is_ddp else compute + codec + network
            took = measured.milliseconds[name, method]
            lines.append(Line(name, method, took, 1e3 * seconds, not method.startswith("ddp")))
    return lines


def _advised(measured: Measured, link: Link) -> tuple[str, dict[str, float]]:
    """What `jaxcomm.advise` says from the same numbers.

    Returns:
      The method of the lab that it recommends; and of each method that it may recommend, the factor
      on the number of steps by which it multiplies the time of a step.
    """
    shapes = shapes_of_model(measured.settings["model"])
    count = sum(each.size for each in shapes.values())
    known = {label: code for label, code in CODES.items() if (UNSHAPED, label) in
             measured.milliseconds}  # fmt: skip
    codecs = {code: measured.codec(label) / count for label, code in known.items()}
    calibration = Calibration({}, codecs).with_link(link)
    found = advise(
        shapes, measured.settings["workers"], link=calibration, step_seconds=measured.compute
    )
    codes = {code: label for label, code in CODES.items()}
    steps = {codes[row.code]: row.steps for row in found.rows if row.steps is not None}
    return codes[found.recommended.code], steps


def summary(measured: Measured, lines: Sequence[Line]) -> list[str]:
    """The median error per link, and how good the choices by predicted times are."""
    texts = []
    for name, link in _shaped(measured).items():
        errors = [abs(line.error) for line in lines if line.link == name and line.method != CONTROL]
        ours = {
            line.method: line
            for line in lines
            if line.link == name and line.is_ours and line.method not in (CONTROL, PLAIN)
        }
        if not errors or not ours:
            continue
        best = min(ours.values(), key=lambda line: line.measured)
        chosen = min(ours.values(), key=lambda line: line.predicted)
        advised, steps = _advised(measured, link)
        weighed = {name: ours[name].measured * steps[name] for name in steps if name in ours}
        texts.append(
            f"{name}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of "
            f"{len(errors)} methods. Fastest: {best.method}; predicted: {chosen.method}, "
            f"{chosen.measured / best.measured:.2f} x its time. `advise`, which weighs steps too: "
            f"{advised}, {ours[advised].measured / best.measured:.2f} x its time, and "
            f"{weighed[advised] / min(weighed.values()):.2f} x the least measured time with the "
            "same weights."
        )
    return texts


def main(config: Predict) -> int:
    """Runs `python -m experiments predict`; returns the exit code.

    Raises:
      ExperimentError: If the record cannot be read or predicted.
    """
    folder = Path(config.folder)
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            measured = read_measured(folder)
            lines = predicted_lines(measured)
            texts = summary(measured, lines)
    except (KeyError, TypeError, ValueError) as error:  # Of another program.
        raise ExperimentError(f"{folder} cannot be predicted: {error!r}.") from error
    print("link       method                          measured ms  predicted ms    error")
    for line in lines:
        print(
            f"{line.link:10} {line.method:30} {line.measured:12.0f} {line.predicted:13.0f} "
            f"{line.error:+8.1%}"
        )
    print(*texts, sep="\n")
    return 0
