"""Finds clips of each worker's own gradient, and noise, before an aggregator in a chain."""

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
# Those that add noise: their keys are equal on all workers.
_NOISE = {"add_noise"}
_PRIVATE = {"differentially_private_aggregate"}
# What comes before these is meant for each worker, or is an error of theirs.
_OF_EACH_WORKER = (
    *("jaxcomm._per_worker", "jaxcomm.gossip", "jaxcomm.synchronization", "jaxcomm.scheduling"),
    "jaxcomm.aggregation._zeroth_order",
)
_AGGREGATORS = ("jaxcomm.aggregation", "jaxcomm.methods")


class _Holds(NamedTuple):
    """What a transformation consists of: its first part of the sets above, and an aggregator."""

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
        if (aggregates or holds.aggregates) and _PRIVATE & {clip, holds.clip}:
            raise ValueError(
                "`optax.contrib.differentially_private_aggregate` takes the gradient of each "
                "example, which workers must not average, and its noise is equal on all of them. "
                "Return the mean of the examples' clipped gradients from `gradients=` of the step, "
                "and add noise after the aggregator, as in `optax.chain(jaxcomm.mean(), "
                "optax.add_noise((noise_multiplier * max_norm / global_batch) ** 2, 0.0, key=key), "
                "...)`."
            )
        if holds.aggregates and clip in _NOISE:
            raise ValueError(
                f"`tx` would add the same noise on all workers, and the mean would have all of it: "
                f"`optax.{clip}` comes before an aggregator. Place it after the aggregator."
            )
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
    if module.startswith("optax.") and name in NOT_LINEAR | _NOISE | _PRIVATE:
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
    """Raises a ValueError if one that is not linear, or adds noise, comes before an aggregator.

    It is silent about what no chain of optax shows: functions of the user.
    """
    _held(tx, ())
