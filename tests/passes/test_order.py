"""The table of passes."""

from autopar.capture.verifier import STAGES
from autopar.passes import PASSES


def test_what_must_come_before_a_pass_does():
    runs = [step.run for step in PASSES]
    for place, step in enumerate(PASSES):
        assert set(step.after) <= set(runs[:place]), step.run.__name__
        assert step.gives in STAGES
