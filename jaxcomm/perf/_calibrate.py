"""Measures the links of a mesh and the codecs on its devices."""

from collections.abc import Mapping

import jax
import optax
from jax.sharding import Mesh

from jaxcomm._require import require_transformation
from jaxcomm.perf._calibration import Calibration
from jaxcomm.perf._codec_times import codec_seconds
from jaxcomm.perf._collective_times import automatic, links_of_axis, slowest
from jaxcomm.perf._recommended import transformations
from jaxcomm.perf._require import require_at_least

AXIS = "data"


def calibrate(
    mesh: Mesh,
    methods: Mapping[str, optax.GradientTransformation] | None = None,
    *,
    axis_name: str = AXIS,
    repeats: int = 5,
) -> Calibration:
    """Measures what messages and codecs cost on a mesh.

    Each collective is timed over each axis in four sizes, and seconds per message and per byte are
    fitted. Each method is timed in updates of 4 million coordinates by one worker, which also
    decodes only its own payload. In a program of several processes all of them call this function.
    It returns the same calibration in all: the time of the slowest process.

    Args:
      mesh: The mesh that trains. Axes of one device send nothing and have no link.
      methods: Transformations by name, without an optimizer. By default the eight methods that
        `jaxcomm.advise` compares; their names are their code. An empty dict measures links only.
      axis_name: The axis that the methods name. The methods that are measured by default name it.
      repeats: The times that each is measured; the median counts.

    Returns:
      The calibration: print it, pass it to `perf.predict` as `link`, or save it.

    Raises:
      ValueError: If a method is not a transformation, or `repeats` is below 1.

    Example:
      >>> import jax
      >>> from jaxcomm import perf
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> measured = perf.calibrate(mesh, methods={}, repeats=1)
      >>> measured.codecs
      {}
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}.")
    require_at_least(1, repeats, "repeats")
    workers = mesh.shape.get(axis_name, mesh.devices.size)
    timed = transformations(axis_name, workers) if methods is None else methods
    for name, tx in timed.items():
        require_transformation(tx, f"methods[{name!r}]")
    plain = automatic(mesh)
    device = next(each for each in mesh.devices.flat if each.process_index == jax.process_index())
    links = {
        axis: links_of_axis(plain, axis, repeats) for axis, size in mesh.shape.items() if size > 1
    }
    own = codec_seconds(timed, device, axis_name, repeats) if timed else {}
    agreed = slowest(plain, list(own.values())) if own else []
    codecs = dict(zip(own, agreed, strict=True))
    return Calibration(links, codecs, device.device_kind, jax.__version__)
