"""Imported by the process that ranks of tests are forked from, and by no other: it has loaded what
they load, and captured once. That is most of what a rank would do; its own captures are its own.
"""

from __future__ import annotations

import gc

import torch

import tests.distributed.checks  # noqa: F401
from autopar import planning
from tests import models
from tests.unhurried import weigh_all

weigh_all()
torch.set_num_threads(1)  # no threads before a fork
_case = models.gpt(layers=1)
planning.capture(_case.model, _case.args, _case.kwargs)
gc.collect()
gc.freeze()
