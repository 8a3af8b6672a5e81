"""The tables of passes."""

import pytest

from autopar.capture.verifier import STAGES
from autopar.passes import LOCAL_PASSES, PASSES


@pytest.mark.parametrize("table", [PASSES, LOCAL_PASSES], ids=["all ranks", "one rank"])
def test_passes_come_after_those_that_they_need(table):
    runs = [step.run for step in table]
    for place, step in enumerate(table):
        assert set(step.requires) <= set(runs[:place]), step.run.__name__
        assert step.invariants in STAGES
