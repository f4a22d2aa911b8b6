"""Finds clips of each worker's own gradient, which come before an aggregator in a chain."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import optax

# Transformations of optax without state that are not linear: of the mean over workers they are not
# the mean of those of the workers. Those with state raise, since it differs by worker.
NOT_LINEAR = {
    *("adaptive_grad_clip", "clip", "clip_by_block_rms", "clip_by_global_norm"),
    *("keep_params_nonnegative", "normalize", "normalize_by_update_norm", "scale_by_sign"),
    "scale_by_trust_ratio",
}
# What comes before these is meant for each worker, or is an error of theirs.
_OF_EACH_WORKER = (
    *("jaxcomm._per_worker", "jaxcomm.gossip", "jaxcomm.synchronization", "jaxcomm.scheduling"),
    "jaxcomm.aggregation._zeroth_order",
)
_AGGREGATORS = ("jaxcomm.aggregation", "jaxcomm.methods")


class _Holds(NamedTuple):
    """What a transformation consists of: its first part that is not linear, and an aggregator."""

    clip: str = ""
    aggregates: bool = False


def _closed_over(function: Any) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # The variable has no value yet.
            continue
    return found


def _in_turn(parts: Iterable[Any], path: tuple[Any, ...]) -> _Holds:
    clip, aggregates = "", False
    for part in parts:
        holds = _held(part, path)
        if holds.aggregates and clip:
            raise ValueError(
                f"`tx` would clip each worker's own gradient: `optax.{clip}` comes before an "
                "aggregator, and the mean of what it returns is not what one device computes from "
                "the whole batch. Place it after the aggregator, as in `optax.chain("
                f"jaxcomm.mean(), optax.{clip}(...), ...)`; or, if each worker should clip its "
                f"own, write `jaxcomm.per_worker(optax.{clip}(...))`."
            )
        clip, aggregates = clip or holds.clip, aggregates or holds.aggregates
    return _Holds(clip, aggregates)


def _beside(parts: Iterable[Any], path: tuple[Any, ...]) -> _Holds:
    held = [_held(part, path) for part in parts]
    return _Holds(
        next((each.clip for each in held if each.clip), ""), any(each.aggregates for each in held)
    )


def _held(node: Any, path: tuple[Any, ...]) -> _Holds:
    """What a transformation or update function consists of, from the variables of its functions.

    Functions that are neither of optax nor of jaxcomm hold nothing.
    """
    if any(node is other for other in path):
        return _Holds()
    path = (*path, node)
    if isinstance(node, optax.GradientTransformation):
        return _held(node.update, path)
    if hasattr(node, "needs_whole"):  # The update function of an aggregator.
        of_each = node.update.__module__.startswith(_OF_EACH_WORKER)
        return _Holds(aggregates=not of_each)
    if isinstance(node, Mapping):
        return _beside(node.values(), path)
    if isinstance(node, tuple | list):
        return _beside(node, path)
    if not inspect.isfunction(node):
        return _Holds()
    module, (name, *inside) = node.__module__ or "", node.__qualname__.split(".")
    if module.startswith("optax.") and name in NOT_LINEAR:
        return _Holds(clip=name)
    if not inside or not module.startswith(("optax.", "jaxcomm.")):
        return _Holds(aggregates=module.startswith(_AGGREGATORS) and "inner_factory" in path)
    if module.startswith(_OF_EACH_WORKER):
        return _Holds()
    variables = _closed_over(node)
    if name == "chain" and "update_fns" in variables:
        return _in_turn(variables["update_fns"], path)
    if name == "named_chain" and "transforms" in variables:
        return _in_turn([tx for _, tx in variables["transforms"]], path)
    if name == "inject_hyperparams":
        return _beside([*variables.values()], (*path, "inner_factory"))
    return _beside(variables.values(), path)


def require_clips_of_the_mean(tx: optax.GradientTransformation) -> None:
    """Raises a ValueError if a transformation that is not linear comes before an aggregator.

    It is silent about what no chain of optax shows: functions of the user.
    """
    _held(tx, ())
