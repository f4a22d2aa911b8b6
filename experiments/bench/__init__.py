"""The cost of every method: time, memory and compiled programs."""
