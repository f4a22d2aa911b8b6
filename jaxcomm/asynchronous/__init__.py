"""Asynchronous training that really runs: policies of events, on processes of Ray."""

from jaxcomm.asynchronous._messages import Row
from jaxcomm.asynchronous._summary import Summary
from jaxcomm.asynchronous._train import Trained, train

__all__ = ["Row", "Summary", "Trained", "train"]
