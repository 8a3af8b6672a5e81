"""The parity law: every model under every schedule, at 2, 4 and 8 ranks.

Every form runs with every model and with every number of ranks, and every model with every number
of ranks, with three micro-batches, which is odd, and less than the ranks where these are 4 or 8:
with each number of ranks the models take turns over the forms, and begin with another. Forms that
do not take part in all turns run with two models on 4 ranks: two chunks on each of 8 ranks need 16
layers, and run with GPT-2 alone. More micro-batches: every second form with GPT-2, 4 on 4 ranks
(through `parallelize`, in test_executor.py), and 12 on 8 ranks those that fill a pipeline in ways
of their own. With data and tensor parallelism inside: the other forms with a GPT, one with each of
the other models. Four pipes on two ranks do not exist.

A model is planned once for so many stages and slices, and all schedules that want these share it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar as ap
from autopar.pipeline import schedule
from autopar.runtime.backends.virtual_backend import VirtualBackend
from tests.annotations import megatron
from tests.models import gpt
from tests.parity import assert_equal, parallel_outcome
from tests.pipeline.models import (
    BATCH,
    FORMS,
    MAKERS,
    assert_recorded,
    reference,
    share_captures,  # noqa: F401
    shared,
)

ALONE = ap.Mesh(dp=1)
SQUARE = ap.Mesh(dp=2, tp=2)
MODELS = ["gpt2", "llama", "residuals"]
TWO_CHUNKS = [form for form in FORMS if form[0] in ("interleaved", "zb-v", "dualpipe-v")]
ONE_CHUNK = [form for form in FORMS if form not in TWO_CHUNKS]
TWO_PIPES = [form for form in FORMS if form[1].get("pipes") != 4]
FILLING = [form for form in ONE_CHUNK if form[1] or form[0] == "zb-h1"]
INSIDE = [
    *(("gpt", form) for form in FORMS[::2]),
    ("llama", ("zb-v", {})),
    ("residuals", ("chimera", {"scale": "halving"})),
]
MAKERS["gpt"] = lambda batch, layers: gpt(
    batch=batch, layers=layers, hidden=16, heads=2, sequence=6, vocabulary=29
)


@cache
def planned(name: str, batch: int, layers: int, stages: int, slices: int, inner: ap.Mesh):
    case = shared(name, batch, layers)
    if inner != ALONE:
        megatron(case)
    return ap.plan(
        case.model,
        case.args,
        case.kwargs,
        mode="propagate",
        mesh=ap.Mesh(pp=stages, **dict(zip(inner.names, inner.shape))),
        microbatches=slices,
        schedule="gpipe",
    )


def law(name, ranks, microbatches, form, batch=BATCH, layers=8, inner=ALONE):
    made = schedule(form[0], stages=ranks, microbatches=microbatches, **form[1])
    case = shared(name, batch, layers)
    plan = planned(name, batch, layers, made.stages, made.all_parts, inner)
    mesh = ap.Mesh(pp=ranks, **dict(zip(inner.names, inner.shape)))
    program = replace(plan.program, pipelining=replace(plan.pipelining, mesh=mesh, schedule=made))
    backend = VirtualBackend(program, torch.device("cpu"), check=inner != ALONE)
    module = ap.ParallelModule(case.model, program, plan, backend)
    assert_equal(parallel_outcome(module, case), reference(name, made.all_parts, batch, layers))
    assert_recorded(module, made)
    return module


def named(form: object) -> str | None:
    if not isinstance(form, tuple):
        return None
    return "-".join([form[0], *(f"{name}={value}" for name, value in form[1].items())])


def turns(first: int, forms: list) -> list:
    """Each form with one model."""
    return [(MODELS[(FORMS.index(form) + first) % len(MODELS)], form) for form in forms]


@pytest.mark.parametrize(("name", "form"), turns(0, TWO_PIPES), ids=named)
def test_two_ranks(name, form):
    law(name, 2, 3, form)


@pytest.mark.parametrize(
    ("name", "form"),
    [*turns(1, FORMS), *turns(2, TWO_CHUNKS), *turns(0, [f for f in FORMS if f not in TWO_PIPES])],
    ids=named,
)
def test_four_ranks(name, form):
    law(name, 4, 3, form)


@pytest.mark.parametrize(("name", "form"), turns(2, ONE_CHUNK), ids=named)
def test_eight_ranks(name, form):
    law(name, 8, 3, form)


@pytest.mark.parametrize("form", FILLING, ids=named)
def test_eight_ranks_with_more_microbatches(form):
    law("gpt2", 8, 12, form)


@pytest.mark.parametrize("form", TWO_CHUNKS, ids=named)
def test_eight_ranks_with_two_chunks(form):
    law("gpt2", 8, 3, form, layers=16)


@pytest.mark.parametrize(("name", "form"), INSIDE, ids=named)
def test_data_and_tensor_parallel_inside_stages(name, form):
    """Everywhere movements over both axes, and a gradient of the tied embedding over all three."""
    module = law(name, 2, 3, form, batch=12, layers=4, inner=SQUARE)
    assert {record.axis for record in module.plan.movements()} == {"dp", "tp"}
