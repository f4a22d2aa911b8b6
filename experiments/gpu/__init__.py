"""What ten minutes with a GPU can show: `python -m experiments.gpu`, or `tools/gpu`.

Of the other experiments it imports only the shapes of networks, so it needs JAX, optax, flax and
pytest only.
"""
