"""A second mesh of the same processes, and copies of arrays between the two."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm._contract import PyTree
from jaxcomm._workers import state_specs


def second_mesh(mesh: Mesh) -> Mesh:
    """A mesh like `mesh` over other devices of the same processes, for exchanges beside steps.

    On CPU, `jax.config.update("jax_num_cpu_devices", 2)` gives a process two devices. It is called
    before JAX starts, and `mesh` then has one device of each process.

    Args:
      mesh: The mesh of the steps.

    Returns:
      A mesh of the same shape, axis names and axis types. Its device at each position belongs to
      the process of the device of `mesh` there. Nothing is sent.

    Raises:
      ValueError: If a process has too few devices that are not in `mesh`.

    Example:
      >>> import jax, jaxcomm
      >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
      >>> jaxcomm.training.second_mesh(mesh).devices.flat[0] == jax.devices()[0]
      False
    """
    used = set(mesh.devices.flat)
    spare: dict[int, list[jax.Device]] = {}
    for device in jax.devices(mesh.devices.flat[0].platform):
        if device not in used:
            spare.setdefault(device.process_index, []).append(device)

    def beside(device: jax.Device) -> jax.Device:
        if not spare.get(device.process_index):
            raise ValueError(
                f"Process {device.process_index} has no device beside each of its devices in "
                "`mesh`. On CPU, call `jax.config.update('jax_num_cpu_devices', 2)` before JAX "
                "starts, and make `mesh` of one device per process."
            )
        return spare[device.process_index].pop(0)

    devices = np.empty(mesh.devices.shape, object)
    devices.flat = [beside(device) for device in mesh.devices.flat]
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def moved(tree: PyTree, source: Mesh, target: Mesh) -> PyTree:
    """Copies arrays to the devices at the same positions of another mesh, within each process."""
    if source == target:
        return tree
    device_of = dict(zip(source.devices.flat, target.devices.flat, strict=True))

    def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = one(jax.random.key_data(x), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        parts = [jax.device_put(s.data, device_of[s.device]) for s in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(target, spec), parts)

    return jax.tree.map(one, tree, state_specs(tree))


def require_beside(mesh: Mesh, exchange_mesh: Mesh) -> None:
    """Raises unless the meshes differ in their devices only, within each process."""
    if not isinstance(exchange_mesh, Mesh):
        raise ValueError(f"`exchange_mesh` must be a `jax.sharding.Mesh`, got {exchange_mesh!r}.")
    shapes = [(dict(each.shape), each.axis_types) for each in (mesh, exchange_mesh)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"`exchange_mesh` must have the axes of `mesh`, {shapes[0]}, got {shapes[1]}."
        )
    if both := set(mesh.devices.flat) & set(exchange_mesh.devices.flat):
        raise ValueError(
            f"`exchange_mesh` shares {sorted(map(str, both))} with `mesh`, and programs of one "
            "device wait for each other: use `jaxcomm.training.second_mesh(mesh)`."
        )
    for one, other in zip(mesh.devices.flat, exchange_mesh.devices.flat, strict=True):
        if one.process_index != other.process_index:
            raise ValueError(
                f"`exchange_mesh` has {other} where `mesh` has {one} of another process: use "
                "`jaxcomm.training.second_mesh(mesh)`."
            )
