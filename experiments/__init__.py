"""Experiments with jaxcomm: `python -m experiments --help`. Nothing in jaxcomm imports this."""
