"""What a call gives on the virtual mesh; tests/distributed/checks.py has the same on processes."""

from __future__ import annotations

import pytest

from autopar import Mesh
from tests.outputs import LAWS


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=4, tp=1)], ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_call_gives_what_the_model_gives(law, mesh: Mesh) -> None:
    law(mesh=mesh, backend="virtual")
