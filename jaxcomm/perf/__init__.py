"""Predicts the seconds of a step: on a nominal link, or on one that was measured."""

from jaxcomm.perf._calibrate import calibrate
from jaxcomm.perf._calibration import Calibration, read_calibration
from jaxcomm.perf._error import ErrorModel, error_of
from jaxcomm.perf._link import Link, parse_link
from jaxcomm.perf._predict import Prediction, overlapped_seconds, predict
from jaxcomm.perf._presets import DEVICES, LINKS, Device

__all__ = [
    "DEVICES",
    "LINKS",
    "Calibration",
    "Device",
    "ErrorModel",
    "Link",
    "Prediction",
    "calibrate",
    "error_of",
    "overlapped_seconds",
    "parse_link",
    "predict",
    "read_calibration",
]
