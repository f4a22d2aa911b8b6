"""The command `timeline`: a simulated step of each plan, as a table and a picture."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.bench.networks import NETWORKS, network_times
from experiments.cli.configs import Timeline as Config
from experiments.study.drawing import save
from jaxcomm import scheduling
from jaxcomm.scheduling import AlphaBeta, LayerTimes, Plan
from jaxcomm.scheduling._timeline import Timeline

COLORS = {  # Readable by the color-blind, and in this order from dark to light in grey.
    "backward": "#4c6a92",
    "encode": "#b5508c",
    "send": "#e07b39",
    "decode": "#8fbf6a",
    "forward": "#a9c5e8",
}
LANES = {"compute": 1, "link": 0}
_FEW = 80  # Events of a lane whose borders are drawn.


def plans(times: LayerTimes, link: AlphaBeta) -> dict[str, Plan]:
    """The plans that send all coordinates, by the names of their panels."""
    return {
        "at the end": scheduling.at_end_plan(times),
        "wait-free": scheduling.wait_free_plan(times),
        "buckets of 25 MiB": scheduling.bucket_plan(times),
        "merged (MG-WFBP)": scheduling.merge_plan(times, link),
        "priority (P3)": scheduling.priority_plan(times, link),
    }


def timelines(times: LayerTimes, link: AlphaBeta, encode: float) -> dict[str, Timeline]:
    """A simulated step of each plan; the sparsified one also selects coordinates."""
    found = {
        name: scheduling.timeline(times, link, plan) for name, plan in plans(times, link).items()
    }
    selected = dataclasses.replace(times, encode=[encode * size / 4 for size in times.sizes])
    sparse = scheduling.sparsified_plan(selected, link)
    return {**found, "sparsified (LAGS)": scheduling.timeline(selected, link, sparse)}


def messages(found: Timeline) -> int:
    """The number of messages of a step."""
    return sum(event.kind == "send" for event in found.events)


def _draw_lanes(axes: Axes, found: Timeline) -> None:
    """Bars for what each stream does; messages alternate between two shades."""
    for stream, height in LANES.items():
        own = [event for event in found.events if event.stream == stream]
        for number, event in enumerate(own):
            axes.broken_barh(
                [(1e3 * event.start, 1e3 * (event.end - event.start))],
                (height - 0.4, 0.8),
                facecolor=COLORS[event.kind],
                alpha=0.7 if stream == "link" and number % 2 else 1.0,
                edgecolor="white" if len(own) <= _FEW else "none",
                linewidth=0.5 if len(own) <= _FEW else 0,
            )


def picture(found: Mapping[str, Timeline], title: str) -> Figure:
    """A panel per timeline with two lanes, computation above the link, over the same seconds."""
    figure = Figure(figsize=(9.0, 0.6 + 1.0 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    latest = max(1e3 * each.step_seconds for each in found.values())
    for axes, (name, each) in zip(panels, found.items(), strict=True):
        _draw_lanes(axes, each)
        end = 1e3 * each.step_seconds
        axes.axvline(end, color="black", linewidth=1)
        count = messages(each)
        sent = f"{count} message" + "s" * (count > 1)
        text = f"{name}: {end:.0f} ms, {1e3 * each.exposed_seconds:.0f} ms of them waiting, {sent}"
        axes.set_title(text, size=9, loc="left", pad=3)
        axes.set_yticks([*LANES.values()], [*LANES], size=8)
        axes.set_ylim(-0.5, 1.5)
        axes.set_xlim(0, 1.02 * latest)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    panels[-1].set_xlabel("milliseconds since the start of the backward pass", size=9)
    kinds = {event.kind for each in found.values() for event in each.events}
    keys = [Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in kinds]
    figure.legend(
        handles=keys, ncols=len(keys), loc="outside lower center", fontsize=8, frameon=False
    )
    figure.suptitle(title, size=10)
    return figure


def main(config: Config) -> int:
    """Runs `python -m experiments timeline`; returns the exit code."""
    times = network_times(NETWORKS[config.network](), config.compute)
    link = AlphaBeta(config.latency, config.bandwidth)
    found = timelines(times, link, config.encode)
    print("| plan | step, ms | waiting, ms | messages |\n| --- | ---: | ---: | ---: |")
    for name, each in found.items():
        numbers = f"{1e3 * each.step_seconds:.1f} | {1e3 * each.exposed_seconds:.1f}"
        print(f"| {name} | {numbers} | {messages(each)} |")
    title = (
        f"{config.network}, {len(times)} leaves, {sum(times.sizes) / 1e6:.0f} MB; a message of s "
        f"bytes takes {1e3 * config.latency:g} ms + s / ({config.bandwidth / 1e9:g} GB/s)"
    )
    print(save(picture(found, title), Path(config.figure)))
    return 0
