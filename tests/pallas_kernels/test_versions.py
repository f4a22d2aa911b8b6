"""What differs between versions of JAX."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import _gpu, _vma
from tests.pallas_kernels.lowering import INTERPRET_GPU


def test_a_moved_interpreter_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.pallas.mosaic_gpu.interpret.params", None)
    with pytest.raises(ImportError, match="JAX has moved `InterpretGPUParams`"):
        _gpu.gpu_interpret_params()


def test_results_of_gpu_kernels_vary_as_they_declare() -> None:
    mesh = jax.make_mesh((2,), ("w",), axis_types=(AxisType.Auto,))
    seen = []

    def double(x_ref, *out_refs):
        for out_ref in out_refs:
            out_ref[lax.axis_index("row")] = x_ref[lax.axis_index("row")] * 2

    def worker(x: jax.Array, common: jax.Array) -> jax.Array:
        for operand in (x, common):
            struct = _vma.like(operand, operand.shape, operand.dtype)
            kernel = _gpu.gpu_kernel(
                double, out_type=(struct, struct), grid={"row": 3}, interpret=INTERPRET_GPU
            )
            results = kernel(operand)
            seen.extend(set(jax.typeof(result).manual_axis_type.varying) for result in results)
        return results[0]

    common = jnp.arange(384.0).reshape(3, 128)
    x = jnp.concatenate([common, -common])
    mapped = jax.shard_map(worker, mesh=mesh, in_specs=(P("w"), P()), out_specs=P())
    assert jax.jit(mapped)(x, common).tolist() == (2 * common).tolist()
    assert seen == [{"w"}, {"w"}, set(), set()]
