"""What ten minutes with a GPU can show: `python -m experiments.gpu`, or `tools/gpu`.

It imports nothing else of the experiments, so it needs JAX, optax and pytest only.
"""
