"""Normalise: fewer forms, the same program. Each step is a small function of a Draft.

The order matters: first the program becomes functional, then every node becomes one tensor, then
each operator gets its one form, and at the end what nothing uses is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.capture.draft import Draft
from autopar.capture.normalisations import cleanup, inplace, shapes, tuples
from autopar.capture.values import propagate

Normalisation = Callable[[Draft], None]

NORMALISATIONS: tuple[Normalisation, ...] = (
    cleanup.drop_assertions,
    inplace.functionalise,
    propagate,  # values and gradients of the functional program
    cleanup.drop_dead_code,
    tuples.split_into_slices,
    tuples.single_results,
    cleanup.canonical_casts,
    cleanup.drop_copies,
    cleanup.drop_dropout,
    shapes.canonical_reshapes,
    shapes.canonical_transposes,
    shapes.canonical_expands,
    shapes.canonical_slices,
    cleanup.drop_identities,
    shapes.merge_reshapes,
    cleanup.drop_identities,
    cleanup.drop_dead_code,
)


def normalise(draft: Draft) -> None:
    """Apply every normalisation, in order."""
    for normalisation in NORMALISATIONS:
        normalisation(draft)
