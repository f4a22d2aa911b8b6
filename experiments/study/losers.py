"""Sentences on which methods lose to the mean and why, and on what the others save."""

import math
from collections.abc import Mapping, Sequence

from experiments.study.columns import Line
from experiments.study.groups import Group, Value
from experiments.study.tidy import is_missing


def loses(p_value: Value, significance: float) -> Value:
    """Whether the p-value is below the significance; the reference has none."""

    def value(group: Group) -> bool:
        found = p_value(group)
        return not is_missing(found) and found < significance

    return value


def _ratio(line: Line) -> float:
    return line["loss_ratio"] if math.isfinite(line["loss_ratio"]) else math.inf


def _times(line: Line) -> str:
    ratio = _ratio(line)
    return f"{ratio:.2f} times" if math.isfinite(ratio) else "diverged"


def _named(lines: Sequence[Line], form: str = "`{0[method]}` ({1})") -> str:
    return ", ".join(form.format(line, _times(line)) for line in lines)


def _describe_losers(judged: Sequence[Line], reasons: Mapping[str, str]) -> list[str]:
    losers = sorted((line for line in judged if line["loses"]), key=_ratio, reverse=True)
    if not losers:
        return [f"None of {len(judged)} methods loses to `mean` in loss."]
    groups = {kind: [line for line in losers if line["kind"] == kind] for kind in reasons}
    return [f"{len(losers)} of {len(judged)} methods lose to `mean` in loss."] + [
        f"{_named(group)}: {reasons[kind]}." for kind, group in groups.items() if group
    ]


def _describe_savings(judged: Sequence[Line]) -> list[str]:
    sentences = []
    if paying := [line for line in judged if not line["saves"] and line["kind"] != "exact"]:
        sentences.append(
            f"In bytes {_named(paying, '`{0[method]}`')} save nothing: their payloads cannot be "
            "added, and each worker's goes to all the others."
        )
    saving = [line for line in judged if line["saves"] and not line["loses"]]
    if saving := sorted(saving, key=lambda line: line["bytes_ratio"]):
        named = _named(saving, "`{0[method]}` ({0[bytes_ratio]:.3f}; {1})")
        sentences.append(
            f"Not told apart from `mean` in loss, for these parts of its bytes: {named}."
        )
    return sentences


def _describe_targets(judged: Sequence[Line]) -> list[str]:
    reaching = [line for line in judged if not is_missing(line["target_bytes_ratio"])]
    if not reaching:
        return []
    fewest = sorted(reaching, key=lambda line: line["target_bytes_ratio"])[:3]
    named = _named(
        fewest, "`{0[method]}` ({0[target_bytes_ratio]:.3f}, {0[steps_to_target]:.0f} steps)"
    )
    return [
        f"{len(reaching)} of {len(judged)} methods reach the loss that `mean` has after half its "
        f"steps, with every seed. Those that send the fewest bytes until then, relative to `mean`: "
        f"{named}."
    ]


def describe(lines: Sequence[Line], reasons: Mapping[str, str]) -> str:
    """Which methods lose to the mean and why, which save no bytes, and the savings of the others.

    Args:
      lines: The lines of a setting, with the columns `method`, `kind`, `p`, `loss_ratio`,
        `bytes_ratio`, `target_bytes_ratio`, `steps_to_target`, `loses` and `saves`.
      reasons: Per kind of methods, why they may lose.
    """
    judged = [line for line in lines if not is_missing(line["p"])]
    if not judged:
        return "None is judged, which takes `mean` and two seeds."
    sentences = _describe_losers(judged, reasons) + _describe_savings(judged)
    return " ".join(sentences + _describe_targets(judged))


def describe_settings(lines: Sequence[Line], reasons: Mapping[str, str]) -> list[str]:
    """The description of every setting, such as `text, sgd: 2 of 4 methods lose ...`."""
    settings: dict[str, list[Line]] = {}
    for line in lines:
        keys = [str(value) for name, value in line.group.keys.items() if name != "method"]
        settings.setdefault(", ".join(keys), []).append(line)
    return [f"{where}: {describe(of_setting, reasons)}" for where, of_setting in settings.items()]
