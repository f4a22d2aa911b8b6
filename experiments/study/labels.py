"""Labels next to the points of a figure, with the least overlap."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

# Offsets of a label from its point in points, and its alignment, in the order of preference.
OFFSETS = (
    (7, 0, "left", "center"),
    (-7, 0, "right", "center"),
    (0, 7, "center", "bottom"),
    (0, -7, "center", "top"),
    (6, 6, "left", "bottom"),
    (6, -6, "left", "top"),
    (-6, 6, "right", "bottom"),
    (-6, -6, "right", "top"),
    (6, 18, "left", "bottom"),
    (6, -18, "left", "top"),
)

RANK_COST = 15  # Square pixels of overlap that outweigh one rank of preference.


class Label(NamedTuple):
    """The text at a point."""

    text: str
    x: float
    y: float
    color: Any


def _overlap(first: Bbox, second: Bbox) -> float:
    common = Bbox.intersection(first, second)
    return common.width * common.height if common else 0.0


def place_labels(axes: Axes, labels: Iterable[Label], occupied: Iterable[Bbox]) -> None:
    """Places each label at the offset with the least overlap.

    Args:
      axes: Axes with their final limits, of a figure that has a canvas.
      labels: The labels, in the order in which they are placed.
      occupied: Boxes in pixels that labels should not overlap.
    """
    renderer = axes.get_figure().canvas.get_renderer()
    frame, occupied = axes.get_window_extent(renderer), list(occupied)

    def draw(label: Label, offset: tuple[float, float, str, str]) -> Text:
        x, y, horizontal, vertical = offset
        return axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(x, y),
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            fontsize=8,
            color=label.color,
        )

    def cost(text: Text) -> float:
        box = text.get_window_extent(renderer)
        text.remove()
        outside = box.width * box.height - _overlap(box, frame)
        return 10 * outside + sum(_overlap(box, other) for other in occupied)

    for label in labels:
        costs = [
            cost(draw(label, offset)) + RANK_COST * rank for rank, offset in enumerate(OFFSETS)
        ]
        text = draw(label, OFFSETS[costs.index(min(costs))])
        occupied.append(text.get_window_extent(renderer))
