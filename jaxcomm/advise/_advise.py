"""Ranks the recommended methods for a model, a number of workers and a link."""

import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcomm._contract import PyTree
from jaxcomm._gradients import LossFn
from jaxcomm.advise._advice import Advice, Row
from jaxcomm.advise._sizes import parse_count, shapes_of_count
from jaxcomm.compression.quantizers._dither import DEFAULT_LEVELS, choose_field, most_levels
from jaxcomm.perf import Calibration, Device, predict
from jaxcomm.perf._link import to_link, to_seconds
from jaxcomm.perf._network import LinkLike, links_of
from jaxcomm.perf._predict import BACKWARD
from jaxcomm.perf._presets import LINKS, to_device
from jaxcomm.perf._recommended import RECOMMENDED, Method
from jaxcomm.perf._require import require_workers
from jaxcomm.perf._traced import Traced, count_of_tree, shapes_of, traced

TIMED = 5


def advise(
    model: LossFn | PyTree | int | str,
    workers: int | Mesh,
    *,
    link: LinkLike,
    step_seconds: float | str | None = None,
    params: PyTree = None,
    batch: PyTree = None,
    axis_name: str = "data",
    device: Device | str = "a100",
) -> Advice:
    """Recommends a method, or not to compress, from predicted times.

    Eight methods are predicted with :func:`jaxcomm.perf.predict`. They are ranked by the seconds of
    a step, times a factor on the number of steps that the table states: what our records measured
    for a model of their own, or else an assumption. The exact mean and that in 16 bits are ranked
    by their time with overlap, all others by the sum of their parts. This favors not to compress.

    Args:
      model: The parameters, arrays or `jax.ShapeDtypeStruct`; or their number, such as 125_000_000
        or "125M", which is taken as 12 or more square matrices; or `loss_fn`, with `params=` and
        `batch=`.
      workers: The number of workers, or the mesh that trains.
      link: A :class:`jaxcomm.perf.Link`, a bandwidth such as "10Gbit", a preset's name, or a
        :class:`jaxcomm.perf.Calibration`. If it has timed codecs, only these methods and the exact
        mean are compared.
      step_seconds: The seconds of a step that does not communicate, such as 0.3 or "300ms". If it
        is not given, `loss_fn` and its gradient are timed on one device.
      params: The parameters, if `model` is a loss.
      batch: One worker's batch, if `step_seconds` is to be measured.
      axis_name: The axis of the workers.
      device: The device whose memory limits codecs that are not calibrated.

    Returns:
      The advice: print it, or read its `rows`, `recommended` and `line`. Its assumptions name the
      methods that are omitted, e.g. since a leaf is too large for a codec, and why.

    Raises:
      ValueError: If `step_seconds` is not positive, or is missing and cannot be measured; if there
        is no worker, or the mesh lacks the axis; if the link has no bandwidth; if a number of
        parameters cannot be read.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> params = {"w": jax.ShapeDtypeStruct((10_000, 10_000), jnp.float32)}
      >>> jaxcomm.advise(params, 64, link="1Gbit", step_seconds=0.3).recommended.code
      'jaxcomm.power_sgd("data", rank=4)'
      >>> jaxcomm.advise("100M", 64, link="100Gbit", step_seconds="300ms").compress
      False
    """
    tree = _parameters(model, params)
    shapes = shapes_of(tree)
    count = _count(workers, axis_name)
    measured = step_seconds is None
    if step_seconds is None:
        step_seconds = _measured(model, tree, batch)
    step_seconds = to_seconds(step_seconds, "step_seconds")
    links_of(link)  # Raises for what is no link.
    used = to_device(device)
    timed = _timed(link, axis_name)
    rows, omitted = [], []
    for method in timed or RECOMMENDED:
        try:
            rows.append(_row(method, shapes, count, axis_name, link, step_seconds, used))
        except ValueError as error:
            if method.steps == 1:  # The exact mean has no limits of its own.
                raise
            omitted.append(f"Omitted: {method.code(axis_name)}: {error}")
    field = choose_field(DEFAULT_LEVELS, None, count)
    ranked = sorted(rows, key=lambda row: (row.cost, row.prediction.seconds))
    assumptions = (
        f"{count_of_tree(shapes):,} parameters, {count} workers, "
        f"{1e3 * step_seconds:.4g} ms of computation ({'measured' if measured else 'given'}); "
        f"overlap: at most {BACKWARD:.0%} of it hide messages.",
        f"Link: {_described(link)}.",
        f"Levels: global_qsgd has {field.levels} in {field.width} bits for each of {count} "
        f"workers; bits=8 has room for {most_levels(8, count) or 'none'}.",
        f"Codecs: {_codecs(used, link, [method.code(axis_name) for method in timed])}.",
        *omitted,
    )
    return Advice(tuple(ranked), assumptions)


def _parameters(model: Any, params: PyTree) -> PyTree:
    if isinstance(model, int | float | str) and not isinstance(model, bool):
        return shapes_of_count(parse_count(str(model)))
    if not callable(model):
        return model
    if params is None:
        raise ValueError("`params` is required if the first argument is a loss.")
    return params


def _count(workers: int | Mesh, axis_name: str) -> int:
    if not axis_name:
        raise ValueError(f"`axis_name` must be the name of a mesh axis, got {axis_name!r}.")
    if not isinstance(workers, Mesh):
        require_workers(workers)
        return workers
    if axis_name not in workers.shape:
        raise ValueError(
            f"`axis_name`={axis_name!r} must be an axis of the mesh, which has "
            f"{tuple(workers.axis_names)}."
        )
    return workers.shape[axis_name]


def _measured(loss_fn: Any, params: PyTree, batch: PyTree) -> float:
    """The median seconds of the loss and its gradient."""
    if not callable(loss_fn) or batch is None:
        raise ValueError(
            "`step_seconds` is required: the seconds of a step that does not communicate. Or pass "
            "a loss, `params=` and `batch=`, which are then timed."
        )
    run = jax.jit(jax.value_and_grad(loss_fn))
    jax.block_until_ready(run(params, batch))
    seconds = []
    for _ in range(TIMED):
        started = time.perf_counter()
        jax.block_until_ready(run(params, batch))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


@functools.lru_cache(maxsize=256)  # Links and step times are often varied for one model.
def _traced(
    method: Method,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    structure: jax.tree_util.PyTreeDef,
    workers: int,
    axis_name: str,
) -> Traced:
    shapes = jax.tree.unflatten(structure, leaves)
    return traced(method.build(axis_name), shapes, workers, axis_name)


def _row(
    method: Method,
    shapes: PyTree,
    workers: int,
    axis_name: str,
    link: LinkLike,
    step_seconds: float,
    device: Device,
) -> Row:
    code = method.code(axis_name)
    leaves, structure = jax.tree.flatten(shapes)
    found = _traced(method, tuple(leaves), structure, workers, axis_name)
    known = isinstance(link, Calibration) and code in link.codecs
    prediction = predict(
        found.account,
        shapes,
        link=link,
        compute_seconds=step_seconds,
        device=device,
        method=code if known else None,
        state_bytes=found.state_bytes,
        error=method.error(count_of_tree(shapes), workers),
    )
    return Row(
        code,
        method.paste(axis_name),
        prediction,
        found.state_bytes,
        method.steps,
        method.risk,
        method.overlaps,
    )


def _described(link: LinkLike) -> str:
    if isinstance(link, Calibration):
        given = {str(one) for each in link.links.values() for one in each.values()}
        return given.pop() if len(given) == 1 else f"calibrated on {link.device}"
    if isinstance(link, Mapping):
        return "; ".join(f"{axis}: {to_link(each, LINKS)}" for axis, each in link.items())
    return str(to_link(link, LINKS))


def _timed(link: LinkLike, axis_name: str) -> list[Method]:
    """The methods whose codecs the calibration has timed: others would be of another device.

    The exact mean is always there, since it encodes nothing, and all others are compared with it.
    """
    codecs = link.codecs if isinstance(link, Calibration) else {}
    timed = [method for method in RECOMMENDED if method.code(axis_name) in codecs]
    return [method for method in RECOMMENDED if method in timed or method.steps == 1] * bool(timed)


def _codecs(device: Device, link: LinkLike, timed: list[str]) -> str:
    if isinstance(link, Calibration) and timed:
        count = sum(code in link.codecs for code in timed)
        beside = "" if count == len(timed) else " with the exact mean, which encodes nothing"
        return (
            f"calibrated; {count} of {len(RECOMMENDED)} methods were timed and are compared{beside}"
        )
    return (
        f"a quarter of the memory bandwidth of {device.name} ({device.source}), which "
        "`perf.calibrate` replaces"
    )
