"""Left out: of equal blocks in a row, export is shown the first and the last few.

    called     0, 1, 2, 3, 4, 5, 6, ..., 91, 92, 93, 94, 95
    exported   0, 1, 2, 3, 4, 5,             92, 93, 94, 95

A block in the middle is called, and what it reads of its modules is compared. If this is as in the
block before, and what it is given comes from where that one's came from, it returns stand-ins:
tensors that export does not know. The first block behind the middle reads the last real ones.
Whoever else looks into a stand-in makes capture begin again, with all blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from autopar.capture.graph_builder import fake_like

BEFORE, AFTER = 5, 4  # blocks that are shown; the outermost are often read otherwise


class LeftOut:
    """The blocks that are left out, and the tensors that stand for what they make."""

    def __init__(self) -> None:
        self._calls = 0
        # By identity of what a block made: the number of its call, and which of its results it is.
        self._sources: dict[int, tuple[int, int]] = {}
        self._real: dict[int, Tensor] = {}  # by identity of a stand-in: what it stands for
        self._turns: dict[tuple[int, ...], list[list[Tensor]]] = {}  # by identity of results
        self._alive: list[Tensor] = []  # identities are not used twice

    def without_stand_ins(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the flat arguments of a call with real tensors in the place of stand-ins."""
        return [self._real.get(id(leaf), leaf) for leaf in leaves]

    def has_stand_ins(self, leaves: Sequence[Any]) -> bool:
        """Return whether some of the arguments are stand-ins."""
        return any(id(leaf) in self._real for leaf in leaves)

    def sources(self, leaves: Sequence[Any]) -> Hashable:
        """Return where tensors come from: of which call before, or from anywhere else."""
        sources = list[Hashable]()
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                call, position = self._sources.get(id(leaf), (None, id(leaf)))
                sources.append((None if call is None else self._calls - call, position))
        return tuple(sources)

    def note(self, results: Sequence[Tensor]) -> None:
        """Remember what a block has made."""
        for position, tensor in enumerate(results):
            self._sources[id(tensor)] = self._calls, position
            self._alive.append(tensor)
        self._calls += 1

    def stand_ins(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors that stand for these, of the last block that is shown. Blocks take two
        turns: where something is read later than by the next but one, sources tell."""
        turns = self._turns.setdefault(tuple(map(id, results)), [])
        if len(turns) < 2:
            stand_ins = [fake_like(tensor.fake_mode, tensor) for tensor in results]  # type: ignore
            self._real |= {id(x): tensor for x, tensor in zip(stand_ins, results)}
            turns.append(stand_ins)
        else:
            turns.reverse()
        return turns[-1]
