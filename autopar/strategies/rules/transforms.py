"""Fourier transforms: they mix all elements of their dims, and are linear.

All of torch's are made of three: of complex numbers, of real ones, and back to these.
"""

from __future__ import annotations

from functools import partial

from autopar.strategies.registry import aten, register_rule
from autopar.strategies.rule import Saved
from autopar.strategies.rules.shapes import along_dims

register_rule(aten("_fft_c2c _fft_c2r"), along_dims)
register_rule("aten._fft_r2c", partial(along_dims, saved=Saved((0,))))
