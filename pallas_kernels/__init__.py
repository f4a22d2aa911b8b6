"""Pallas kernels for GPU and TPU, each beside the plain JAX that defines it.

One op, one folder: `api` (what users call), `reference` (the definition, in jnp), `mosaic_gpu`,
`mosaic_tpu`. Imports nothing of jaxcomm.
"""
