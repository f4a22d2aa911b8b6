"""What was left out comes back: functions from codec to codec."""

from jaxcomm.compression.feedback._error_feedback import error_feedback
from jaxcomm.compression.feedback._loop import FeedbackMemory, feedback_loop

__all__ = ["FeedbackMemory", "error_feedback", "feedback_loop"]
