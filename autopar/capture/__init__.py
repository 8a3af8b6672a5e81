"""Capture: a model becomes one flat, normalised fx graph."""

from autopar.capture.captured import Captured
from autopar.capture.execute import run
from autopar.capture.export import capture
from autopar.capture.listing import listing
from autopar.capture.verifier import verify

__all__ = ["Captured", "capture", "listing", "run", "verify"]
