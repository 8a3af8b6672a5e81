"""Pipeline schedules as plain data: made by name, checked, simulated, drawn and saved.

>>> from autopar import pipeline
>>> chimera = pipeline.schedule("chimera", stages=4, microbatches=4)
>>> print(*chimera.orders[0])
0F0 0F1 3F2@1 3B2@1 3F3@1 3B3@1 0B0 0B1
>>> pipeline.check(chimera)
>>> timeline = pipeline.simulate(chimera, forward=1, backward=2)
>>> timeline.makespan, timeline.bubble_ratio, timeline.peak_activations
(16.0, 0.25, (3.0, 4.0, 4.0, 3.0))
>>> pipeline.from_text(pipeline.to_text(chimera)) == chimera
True
"""

from autopar.pipeline.checker import check
from autopar.pipeline.notation import from_csv, from_text, load, save, to_csv
from autopar.pipeline.schedule import Action, Schedule, to_text
from autopar.pipeline.schedules import NAMES, option_names, schedule
from autopar.pipeline.simulation.simulator import simulate
from autopar.pipeline.simulation.timeline import CriticalPath, Synchronization, Timeline
from autopar.pipeline.token_slicing import TokenSlices, token_slices

__all__ = [
    "NAMES",
    "Action",
    "CriticalPath",
    "Schedule",
    "Synchronization",
    "Timeline",
    "TokenSlices",
    "check",
    "from_csv",
    "from_text",
    "load",
    "option_names",
    "save",
    "schedule",
    "simulate",
    "to_csv",
    "to_text",
    "token_slices",
]
