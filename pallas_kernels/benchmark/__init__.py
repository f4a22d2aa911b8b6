"""The parts of `python -m pallas_kernels.bench`."""
