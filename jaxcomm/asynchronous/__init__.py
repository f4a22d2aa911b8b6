"""Asynchronous training on processes of Ray, by the policies of `synchronization.events`.

It is for workers that are slow, differ, or fail, where each exchange of a synchronous program would
wait for the slowest, and a death would stop all. An owner has the parameters, or workers have them
and average in pairs. It needs `pip install "jaxcomm[ray]"`.
"""

from jaxcomm.asynchronous._messages import Island, Row
from jaxcomm.asynchronous._summary import Summary
from jaxcomm.asynchronous._train import Trained, train

__all__ = ["Island", "Row", "Summary", "Trained", "train"]
