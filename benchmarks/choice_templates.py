"""Templates: plans that an expert would write down, in a short notation that is also their name.

>>> [way] = ways(8, ["pp2 dp2 tp2"], ["zero1 selective"], ["interleaved-2"])
>>> way.name, way.microbatches
('pp2 dp2 tp2, 4 micro-batches, zero1 selective, interleaved-2', 4)

A mesh is its axes with their sizes, outermost first. What saves memory are states and recomputation
("zero3 full"), and the size of buckets where it is not the default ("zero3 full 512MiB"). States
that are cut in part are numbers of parts ("8:8:all none"). Micro-batches follow from the rows that
each rank sees of one of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import autopar as ap
from autopar.states import NAMED, Factor

DATA_AXES = ("dp", "ep")  # cut the batch
RECOMPUTE = {"none": None, "selective": "selective", "full": "full", "auto": "auto"}


@dataclass(frozen=True, kw_only=True)
class Template:
    """A way to run a step, of which nothing but layouts is left to choose."""

    axes: str  # "pp8 dp4 tp4"
    microbatches: int  # 384
    saving: str  # "zero1 full", "zero3 selective 512MiB"
    schedule: str = ""  # "interleaved-2": chunks are part of the name; "" without a pipeline

    @property
    def name(self) -> str:
        """Return all of its settings in words."""
        count = f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        return ", ".join(part for part in (self.axes, count, self.saving, self.schedule) if part)

    @property
    def mesh(self) -> ap.Mesh:
        """Return the mesh of all ranks."""
        return ap.Mesh(**_sizes(self.axes))

    @property
    def states(self) -> ap.States:
        """Return how states are cut, and in which buckets they travel."""
        word, *more = self.saving.split()
        if word in NAMED:
            states = NAMED[word]
        else:
            parameters, gradients, optimizer = map(_factor, word.split(":"))
            states = ap.States(parameters, gradients, optimizer)
        buckets = [int(one.removesuffix("MiB")) for one in more if one.endswith("MiB")]
        return replace(states, buffer_bytes=buckets[0] << 20) if buckets else states

    def options(self) -> dict[str, Any]:
        """Return the options of `autopar.plan` that ask for this way."""
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "microbatches": self.microbatches,
            "states": self.states,
            "recompute": RECOMPUTE[self.saving.split()[1]],
        }
        if not self.schedule:
            return {**options, "pipeline": None}
        schedule, _, chunks = self.schedule.partition("-")
        if chunks.isdigit():
            return {**options, "schedule": schedule, "schedule_options": {"chunks": int(chunks)}}
        return {**options, "schedule": self.schedule}


def ways(
    batch: int,
    meshes: Iterable[str],
    savings: Iterable[str],
    schedules: Iterable[str] = ("1f1b",),
    rows: Iterable[int] = (1,),
) -> Iterator[Template]:
    """Yield every combination for which the batch has a whole number of micro-batches.

    `rows`: what each rank sees of a micro-batch. Schedules are for the meshes with an axis `pp`.
    """
    for axes, count, saving in itertools.product(meshes, rows, savings):
        sizes = _sizes(axes)
        ranks = count
        for axis in DATA_AXES:
            ranks *= sizes.get(axis, 1)
        if batch % ranks == 0:
            for schedule in schedules if "pp" in sizes else [""]:
                about = {"axes": axes, "saving": saving, "schedule": schedule}
                yield Template(microbatches=batch // ranks, **about)


def _sizes(axes: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"([a-z]+)(\d+)", axes)}


def _factor(text: str) -> Factor:
    return int(text) if text.isdigit() else "all"
