"""Feedback: functions from codec to codec that compensate compression errors in later steps."""

from jaxcomm.compression.feedback._diana import diana
from jaxcomm.compression.feedback._ecq import ecq
from jaxcomm.compression.feedback._ef21 import ef21
from jaxcomm.compression.feedback._error_feedback import error_feedback
from jaxcomm.compression.feedback._local_clip import local_clip
from jaxcomm.compression.feedback._loop import feedback_loop
from jaxcomm.compression.feedback._momentum import momentum
from jaxcomm.compression.feedback._momentum_correction import momentum_correction

__all__ = [
    "diana",
    "ecq",
    "ef21",
    "error_feedback",
    "feedback_loop",
    "local_clip",
    "momentum",
    "momentum_correction",
]
