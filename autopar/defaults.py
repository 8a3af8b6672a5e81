"""The words and numbers of options, for what has to know them without loading torch."""

from __future__ import annotations

from typing import Literal, get_args

Mode = Literal["auto", "propagate", "data"]
MODES: tuple[Mode, ...] = get_args(Mode)
# The decisions about a whole step that `plan.explain` is asked about.
DECISIONS = ("stages", "schedule", "microbatches", "mesh", "states", "recompute")
QUESTIONS = (*DECISIONS, "search")
VERIFIED_RANKS = 4  # of `verify`, where neither mesh nor machines are given
