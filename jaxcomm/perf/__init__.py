"""Predicts the seconds of a step: on a nominal link, or on one that was measured."""

from jaxcomm.perf._calibrate import calibrate
from jaxcomm.perf._link import Calibration, Device, Link, read_calibration
from jaxcomm.perf._predict import predict

__all__ = [
    "Calibration",
    "Device",
    "Link",
    "calibrate",
    "predict",
    "read_calibration",
]
