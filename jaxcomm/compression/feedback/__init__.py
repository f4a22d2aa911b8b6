"""Feedback: functions from codec to codec that compensate compression errors in later steps."""

from jaxcomm.compression.feedback._error_feedback import ecq, error_feedback
from jaxcomm.compression.feedback._loop import feedback_loop
from jaxcomm.compression.feedback._momentum import local_clip, momentum, momentum_correction
from jaxcomm.compression.feedback._shifted import diana, ef21

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
