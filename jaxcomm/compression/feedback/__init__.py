"""Feedback: functions from codec to codec that compensate compression errors in later steps."""

from jaxcomm.compression.feedback._error_feedback import ecq, error_feedback
from jaxcomm.compression.feedback._momentum import local_clip, momentum, momentum_correction
from jaxcomm.compression.feedback._shifted import diana, ef21

__all__ = [
    "diana",
    "ecq",
    "ef21",
    "error_feedback",
    "local_clip",
    "momentum",
    "momentum_correction",
]
