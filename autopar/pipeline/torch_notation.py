"""Cells of torch.distributed.pipelining's schedule files that are no actions of a schedule here.

>>> read_cells(["0F0", "0SEND_F0", "0RECV_B0", "0BW0", "0RESHARD"])
['0F0', '0B0']
>>> read_cells(["0F0", "0B0", "0W0"])  # as torch wrote the halves of backward up to 2.5
['0F0', '0I0', '0W0']

- ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``: messages, which follow from the order. They are
  checked against it, and left out.
- ``UNSHARD``, ``RESHARD``: when parameters are gathered and freed. `states` of a plan decide that
  here, so they are left out.
- ``BW``, and ``B`` beside a ``W``: the older names of ``B`` and ``I``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from autopar.errors import InvalidInput

_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")
_COPY = re.compile(r"\d+(UNSHARD|RESHARD)")
_COMPUTED = re.compile(r"(\d+)(F|BW|B|I|W)(\d+)")


def read_cells(cells: Iterable[str]) -> list[str]:
    """Return the cells of a rank that are actions here, in the names of today.

    Raises `InvalidInput` for a message that the order contradicts.
    """
    words = [cell.strip() for cell in cells if cell.strip()]
    computed: dict[tuple[str, str], dict[str, int]] = {}  # by stage and micro-batch, kinds
    for at, word in enumerate(words):
        for stage, kind, microbatch in _COMPUTED.findall(word):
            computed.setdefault((stage, microbatch), {}).setdefault(kind, at)
    read = []
    for at, word in enumerate(words):
        if (message := _MESSAGE.fullmatch(word)) is not None:
            stage, way, kind, microbatch = message.groups()
            _require_order(word, at, way, kind, computed.get((stage, microbatch), {}))
        elif _COPY.fullmatch(word) is None:
            read.append(_COMPUTED.sub(lambda cell: _renamed(cell, computed), word))
    return read


def _require_order(word: str, at: int, way: str, kind: str, kinds: dict[str, int]) -> None:
    """Refuse a message that is sent before it is computed, or received after it is read."""
    places = [
        kinds[name] for name in (("F",) if kind == "F" else ("B", "BW", "I")) if name in kinds
    ]
    is_sent = way == "SEND"
    if not places or (at < places[0]) == is_sent:
        raise InvalidInput(
            "a message is sent behind the action that computes it, and received before the one "
            "that reads it",
            got=f"{word} {'before' if is_sent else 'behind'} that action" if places else word,
            remedy="move it, or leave all messages out: they follow from the order of the actions",
        )


def _renamed(cell: re.Match[str], computed: dict[tuple[str, str], dict[str, int]]) -> str:
    stage, kind, microbatch = cell.groups()
    kinds = computed[stage, microbatch]
    is_half = kind == "B" and "W" in kinds and "I" not in kinds
    return f"{stage}{'I' if is_half else kind[0]}{microbatch}"
