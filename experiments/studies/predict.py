"""How well does the cost model predict a record of the lab?"""

import dataclasses
import statistics
from pathlib import Path

import jax
import optax
import tyro

import jaxcomm
from experiments.errors import ExperimentError
from experiments.lab import inputs
from experiments.lab.methods import CODES, CONTROL, LABELS, PLAIN, find
from experiments.lab.models import LOSSES
from experiments.lab.network import UNSHAPED, bits_per_second
from experiments.lab.peers import PEERS
from experiments.study.record import grouped, of_kind, read, read_settings
from experiments.study.run import Command
from jaxcomm import advise, perf
from jaxcomm.perf import Calibration, Link
from jaxcomm.perf._predict import overlapped_seconds

GOODPUT = 1448 / 1514
"""Of the nominal rate: the payload of a TCP segment in an Ethernet frame of 1500 bytes."""


@dataclasses.dataclass(frozen=True)
class Predict:
    """How well does the cost model predict a record of the lab? Prints a table.

    Question: the computation is that of the control, the time of each codec is from the unshaped
    link, and the bandwidth is nominal. What is the error of `jaxcomm.perf` on the shaped links, and
    is the method with the least predicted time the fastest?

    Command: `python -m experiments predict RECORD`.

    Expected time: a minute.

    Number: the median error per link.
    """

    folder: tyro.conf.Positional[str]
    """the folder of a record of the study `lab`"""


class Measured:
    """What a record has, and what predictions may use of it: the unshaped link.

    Attributes:
      workers: The number of workers.
      shapes: The shapes of the weights, which have `coordinates` numbers.
      milliseconds: The mean over rounds, by link and method.
      sent: The counted bytes of a step over the unshaped link, by method.
      links: The shaped links, on which each worker has a bandwidth of its own.
      compute: The seconds of the control on the unshaped link.
    """

    def __init__(self, folder: Path):
        """Reads a record, in which all methods were measured on the unshaped link.

        Raises:
          ExperimentError: If it is no record of the lab, or its model is not predicted.
        """
        settings, runs = read_settings(folder), of_kind(read(folder), "run")
        if settings.get("study") != "lab" or settings.get("model") not in LOSSES:
            raise ExperimentError(
                f"{folder} is not a record of the study `lab` with a model {' or '.join(LOSSES)}."
            )
        self.workers, weights = settings["workers"], inputs.load(settings["model"]).first_weights
        self.shapes = jax.eval_shape(lambda: weights(0))
        self.coordinates = sum(each.size for each in self.shapes.values())
        self.milliseconds = {
            pair: statistics.fmean(row["milliseconds"] for row in rows)
            for pair, rows in grouped(runs, ("link", "method")).items()
        }
        self.compute = self.milliseconds[UNSHAPED, CONTROL] / 1e3
        self.sent = {run["method"]: run["sent"] for run in runs if run["link"] == UNSHAPED}
        self.links = [
            Link(GOODPUT * bits_per_second(name) / 8, 0.0, name, "nominal, less headers")
            for name in dict.fromkeys(run["link"] for run in runs)
            if name != UNSHAPED and "clusters" not in name
        ]

    def codec(self, method: str) -> float:
        """The seconds that a method takes on the unshaped link beyond the control."""
        return max(self.milliseconds[UNSHAPED, method] / 1e3 - self.compute, 0.0)


def predict(measured: Measured, name: str) -> dict[str, float]:
    """The predicted milliseconds of a method on every shaped link."""
    workers, codec, found = measured.workers, measured.codec(name), {}
    method = find(name) if name.partition(":")[0] in LABELS else None
    if method is None or method.share is None:
        for link in measured.links:  # Steps of PyTorch, or steps that differ: their counted bytes.
            network = measured.sent[name] * GOODPUT / link.bytes_per_second
            seconds = measured.compute + codec + network
            if name in PEERS:  # DDP sends buckets during the backward pass.
                size = 4 * measured.coordinates
                seconds = overlapped_seconds(measured.compute, codec, network, size)
            found[link.name] = 1e3 * seconds
        return found
    sizes = {"cluster": 2, "data": workers // 2} if method.clusters else {"data": workers}
    tx, params = method.build(workers, optax.sgd(0.1)), measured.shapes
    if method.own_parameters:
        params = jax.eval_shape(lambda each: jaxcomm.replicate(each, workers), params)
    for link in measured.links:
        found[link.name] = (
            1e3
            * perf.predict(
                tx,
                params,
                link=link,
                compute_seconds=measured.compute,
                workers=sizes,
                axis_name=tuple(sizes),
                share=method.share,
                codec_seconds=codec,
            ).seconds
        )
    return found


def advised(measured: Measured, link: Link) -> tuple[str, dict[str, float]]:
    """What `jaxcomm.advise` says from the same numbers.

    Returns:
      The method of the lab that it recommends; and of each method that it may recommend, the factor
      on the number of steps by which it multiplies the time of a step.
    """
    labels = {code: label for label, code in CODES.items()}
    codecs = {
        code: measured.codec(label) / measured.coordinates
        for code, label in labels.items()
        if (UNSHAPED, label) in measured.milliseconds
    }
    calibration = Calibration({}, codecs).with_link(link)
    found = advise(
        measured.shapes, measured.workers, link=calibration, step_seconds=measured.compute
    )
    steps = {labels[row.code]: row.steps for row in found.rows if row.steps is not None}
    return labels[found.recommended.code], steps


def summary(measured: Measured, link: Link, predicted: dict[str, float]) -> str:
    """The median error on a link, and how good the choices by predicted times are."""
    took = {name: measured.milliseconds[link.name, name] for name in predicted}
    errors = [abs(predicted[name] / took[name] - 1) for name in predicted if name != CONTROL]
    ours = took.keys() - {CONTROL, PLAIN} - PEERS.keys()
    best, chosen = min(ours, key=took.__getitem__), min(ours, key=predicted.__getitem__)
    recommended, steps = advised(measured, link)
    weighed = {name: took[name] * factor for name, factor in steps.items() if name in took}
    return (
        f"{link.name}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of "
        f"{len(errors)} methods. Fastest: {best}; predicted: {chosen}, "
        f"{took[chosen] / took[best]:.2f} x its time. `advise`, which weighs steps too: "
        f"{recommended}, {took[recommended] / took[best]:.2f} x its time, and "
        f"{weighed[recommended] / min(weighed.values()):.2f} x the least measured time with the "
        "same weights."
    )


def main(config: Predict) -> int:
    """Runs `python -m experiments predict`; returns the exit code."""
    with jax.default_device(jax.devices("cpu")[0]):
        measured = Measured(Path(config.folder))
        by_link = {link.name: {} for link in measured.links}
        print("link       method                          measured ms  predicted ms    error")
        for method in measured.sent:
            for name, predicted in predict(measured, method).items():
                if took := measured.milliseconds.get((name, method)):
                    by_link[name][method] = predicted
                    print(
                        f"{name:10} {method:30} {took:12.0f} {predicted:13.0f} "
                        f"{predicted / took - 1:+8.1%}"
                    )
        for link in measured.links:
            if CODES.keys() & by_link[link.name].keys():
                print(summary(measured, link, by_link[link.name]))
    return 0


PREDICT = Command(Predict, main)
