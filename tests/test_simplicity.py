"""The plan is the simplest of what is about as fast as the fastest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autopar.mesh import Mesh
from autopar.planner.question import Found, Question
from autopar.planner.record import HOSTED, Record
from autopar.planner.rules import SIMPLER, TEMPLATE, SearchEntry
from autopar.states import BUFFER_BYTES, WHOLE, States
from autopar.states import HOSTED as ON_HOST

TWO_AXES, ONE_AXIS = (Mesh(dp=2, tp=4),), (Mesh(dp=8),)


def question(meshes: tuple[Mesh, ...] = ONE_AXIS, states: States = WHOLE, stages: int = 1):
    return Question(None, meshes, stages=stages, states=states)


def record_of(*ways: tuple[Question, float]) -> Record:
    record = Record()
    for asked, seconds in ways:
        candidate = SimpleNamespace(
            seconds=seconds,
            states=asked.states,
            meshes=asked.meshes,
            stages=asked.stages,
            is_hosted=asked.is_hosted,
            decisions=SimpleNamespace(keeps_on_host=False),
        )
        record.add(SearchEntry(asked, Found(candidate), TEMPLATE))
    return record


@pytest.mark.parametrize(
    "complex_way",
    [
        question(TWO_AXES),
        question(stages=2),
        question(states=States.of("zero1")),
        question(states=States(buffer_bytes=2 * BUFFER_BYTES)),
    ],
    ids=str,
)
def test_what_is_more_complex_has_to_gain_one_percent(complex_way: Question) -> None:
    for seconds, first in ((1 - 0.5 * SIMPLER, question()), (1 - 2 * SIMPLER, complex_way)):
        record = record_of((complex_way, seconds), (question(), 1.0))
        assert next(record.by_simplicity()).question == first
        assert record.fastest == seconds


def test_what_is_on_a_host_has_to_gain_ten_percent() -> None:
    hosted = question(states=ON_HOST[0])
    for seconds, first in ((1 - 0.5 * HOSTED, question()), (1 - 2 * HOSTED, hosted)):
        record = record_of((hosted, seconds), (question(), 1.0))
        assert next(record.by_simplicity()).question == first


def test_of_equally_simple_ways_the_fastest_is_taken() -> None:
    record = record_of((question((Mesh(tp=8),)), 1.0), (question(), 0.995))
    assert next(record.by_simplicity()).question == question()


def test_a_simpler_question_need_not_be_faster_to_be_asked() -> None:
    record = record_of((question(TWO_AXES), 1.0))
    assert record.cutoff(question()) == pytest.approx(1 + SIMPLER)
    assert record.cutoff(question(TWO_AXES)) == pytest.approx(1.0)
    hosted = question(states=ON_HOST[0])
    assert record.cutoff(hosted) == pytest.approx(1 / (1 + HOSTED), rel=2 * SIMPLER)
