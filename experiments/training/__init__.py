"""The training loop, and training over windows and in real time."""
