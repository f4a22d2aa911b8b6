"""Pallas kernels for GPU and TPU, each with the plain JAX code that defines it.

Each op has a folder: `api` (the public functions), `reference` (the definition, in jnp),
`mosaic_gpu`, `mosaic_tpu`. The package imports nothing from jaxcomm.
"""

from pallas_kernels._dispatch import implementation
from pallas_kernels._measurements import measured

__all__ = ["implementation", "measured"]
