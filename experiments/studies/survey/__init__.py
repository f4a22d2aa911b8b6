"""The study of all methods at tuned learning rates."""
