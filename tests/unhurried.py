"""Planning without a clock: what is found in some seconds depends on the machine.

weigh_all()   # from now on, in this process and in those that are forked from it
"""

from __future__ import annotations

from autopar.candidates.patience import SECONDS, Patience

_begun = Patience.begun


def weigh_all() -> None:
    """The seconds that a choice has by default end none; those that a test gives do."""
    Patience.begun = staticmethod(_begun_if_given)  # type: ignore[method-assign]


def _begun_if_given(seconds: float | None, captured: float = 0.0) -> Patience:
    return _begun(None if seconds == SECONDS else seconds, captured)
