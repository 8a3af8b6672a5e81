"""Tests: one file for each thing, by the rooms of the package."""

from autopar import errors

errors.WIDTH = 1 << 20  # what refusals say is looked for as one line, in all processes of a test
