"""The command `timeline`: a simulated step of each plan, as a table and a picture."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.networks import NETWORKS, Leaf
from experiments.study.plot import save
from experiments.study.run import Command
from jaxcomm import scheduling
from jaxcomm.scheduling import AlphaBeta, LayerTimes
from jaxcomm.scheduling._timeline import Timeline

COLORS = {  # Readable by the color-blind, and in this order from dark to light in grey.
    "backward": "#4c6a92",
    "encode": "#b5508c",
    "send": "#e07b39",
    "decode": "#8fbf6a",
    "forward": "#a9c5e8",
}
LANES = {"compute": 1, "link": 0}


def network_times(leaves: Sequence[Leaf], compute_seconds: float) -> LayerTimes:
    """Times of float32 leaves: a third of the computation is the forward pass.

    Seconds are proportional to multiplications, an assumption: batch norm is free in it.
    """
    coordinates = [math.prod(shape) for shape, _ in leaves]
    products = [size * times for size, (_, times) in zip(coordinates, leaves, strict=True)]
    share = compute_seconds / math.fsum(products)
    return LayerTimes(
        sizes=[4 * size for size in coordinates],
        backward=[2 / 3 * share * each for each in products],
        forward=[1 / 3 * share * each for each in products],
    )


def timelines(times: LayerTimes, link: AlphaBeta, encode: float) -> dict[str, Timeline]:
    """A simulated step of each plan; the sparsified one also selects coordinates."""
    plans = {
        "at the end": scheduling.at_end_plan(times),
        "wait-free": scheduling.wait_free_plan(times),
        "buckets of 25 MiB": scheduling.bucket_plan(times),
        "merged (MG-WFBP)": scheduling.merge_plan(times, link),
        "priority (P3)": scheduling.priority_plan(times, link),
    }
    found = {name: scheduling.timeline(times, link, plan) for name, plan in plans.items()}
    selected = dataclasses.replace(times, encode=[encode * size / 4 for size in times.sizes])
    sparse = scheduling.sparsified_plan(selected, link)
    return {**found, "sparsified (LAGS)": scheduling.timeline(selected, link, sparse)}


def messages(found: Timeline) -> int:
    """The number of messages of a step."""
    return sum(event.kind == "send" for event in found.events)


def describe(name: str, found: Timeline) -> str:
    """What is said about a plan."""
    step, waiting = 1e3 * found.step_seconds, 1e3 * found.exposed_seconds
    return f"{name}: {step:.1f} ms, {waiting:.1f} ms of them waiting, messages: {messages(found)}"


def _draw(axes: Axes, found: Timeline) -> None:
    """Bars for what each stream does; these alternate between two shades."""
    for stream, height in LANES.items():
        own = [event for event in found.events if event.stream == stream]
        for number, event in enumerate(own):
            axes.barh(
                height,
                1e3 * (event.end - event.start),
                left=1e3 * event.start,
                color=COLORS[event.kind],
                alpha=0.7 if number % 2 else 1.0,
            )
    axes.axvline(1e3 * found.step_seconds, color="black", linewidth=1)
    axes.set_yticks([*LANES.values()], [*LANES])


def picture(found: Mapping[str, Timeline], title: str) -> Figure:
    """A panel per timeline with two lanes, computation above the link, over the same seconds."""
    figure = Figure(figsize=(9.0, 0.6 + 1.0 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), sharex=True)
    for axes, (name, each) in zip(panels, found.items(), strict=True):
        _draw(axes, each)
        axes.set_title(describe(name, each), size=9, loc="left", pad=3)
    panels[-1].set_xlabel("milliseconds since the start of the backward pass")
    keys = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=keys, ncols=len(keys), loc="outside lower center", frameon=False)
    figure.suptitle(title, size=10)
    return figure


@dataclasses.dataclass(frozen=True)
class Options:
    """When do the bytes of a step move? Draws a simulated step of several plans.

    Question: how long is a step of a network if its gradients are sent at its end, layer by layer,
    merged, sparsified or by priority? The seconds are those of a model, and nothing trains.

    Command: `python -m experiments timeline`.

    Expected time: seconds.

    Number: the seconds of a step under each plan, and those in which computation waits.
    """

    network: Literal["resnet50", "resnet152", "densenet161", "densenet201"] = "densenet201"
    """the network"""
    compute: float = 0.361
    """seconds of a forward and a backward pass"""
    latency: float = 9.08e-4
    """seconds of a message without its bytes"""
    bandwidth: float = 1.352e9
    """bytes per second of the whole collective"""
    encode: float = 2e-9
    """seconds a coordinate to select those of a sparse message"""
    figure: str = "timeline.png"
    """the file of the picture"""


def main(config: Options) -> int:
    """Runs `python -m experiments timeline`; returns the exit code."""
    times = network_times(NETWORKS[config.network], config.compute)
    link = AlphaBeta(config.latency, config.bandwidth)
    found = timelines(times, link, config.encode)
    print(*itertools.starmap(describe, found.items()), sep="\n")
    title = (
        f"{config.network}, {len(times)} leaves, {sum(times.sizes) / 1e6:.0f} MB; a message of s "
        f"bytes takes {1e3 * config.latency:g} ms + s / ({config.bandwidth / 1e9:g} GB/s)"
    )
    print(save(picture(found, title), Path(config.figure)))
    return 0


TIMELINE = Command(Options, main)
