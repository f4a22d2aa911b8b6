"""What `python -m pallas_kernels.bench` is made of."""
