"""The study of slow workers in real time."""
