"""Slices: what each rank brings of a batch, with `local_inputs=True`.

The batch is the slices of the ranks one after another. A step in micro-batches cuts each where it
is: micro-batch i is the i-th part of every slice. Random numbers and outputs follow the order of
the batch:

    batch               slice of rank 0: a b c d     slice of rank 1: e f g h
    two micro-batches   a b e f                      c d g h

Ranks that stand alike on the axes that cut the batch bring the same slice; so do those of all
stages of a pipeline, whether they read it or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import InvalidInput
from autopar.passes.localize import Axes
from autopar.plan.runtime_program import Program
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.module.call_outputs import join_pieces
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.text.units import counted


def batch_axes(program: Program) -> Axes:
    """The axes that cut the batch, the same for all inputs that they cut; or refuse it."""
    found: dict[Axes, str] = {}
    for name in _batched_inputs(program):
        if axes := program.type_of(name).layout.dims[0]:
            found.setdefault(axes, name)
    if len(found) > 1:
        cut = (f"{name} over {', '.join(axes)}" for axes, name in found.items())
        raise InvalidInput(
            "a rank's slices of all inputs hold the same samples",
            got=f"inputs whose batch is cut in different ways: {'; '.join(cut)}",
            remedy="shard() the inputs alike, or hand every rank the global batch",
        )
    return next(iter(found), ())


def require_even_slices(program: Program) -> None:
    """Refuse micro-batches that would take more of some slices than of others."""
    parts, batches = math.prod(program.mesh[axis] for axis in batch_axes(program)), program.batches
    count = 1 if batches is None else batches.count
    for name in _batched_inputs(program) if count > 1 else ():
        size = program.whole_shapes[name][0]
        if size % (parts * count):
            raise InvalidInput(
                "local inputs have equal parts of every micro-batch",
                got=f"a batch of {size} in slices of {counted(parts, 'rank')}, for "
                + counted(count, "micro-batch"),
                remedy="a batch that ranks times micro-batches divide, or hand every rank the "
                "global batch",
            )


def _batched_inputs(program: Program) -> list[str]:
    """The inputs whose first dim is the batch."""
    if program.batches is not None:
        return sorted(program.batches.cut)
    shapes = program.whole_shapes
    size = next((shape[0] for shape in shapes.values() if shape), None)
    return [name for name, shape in shapes.items() if shape and shape[0] == size]


class BatchSlices:
    """Those of one rank, of a program in micro-batches."""

    def __init__(self, program: Program, groups: Groups, rank: int) -> None:
        """`rank` on the mesh of the program, `groups` are those over each axis alone."""
        self._program, self._groups, self._rank = program, groups, rank
        self.parts = math.prod(program.mesh[axis] for axis in batch_axes(program))

    def placed(self, graph: fx.Graph) -> None:
        """What operators draw is that of samples of these slices."""
        for node in graph.nodes:
            node.args = tuple(map(self._placed, node.args))
            node.kwargs = {name: self._placed(given) for name, given in node.kwargs.items()}

    def _placed(self, given: Any) -> Any:
        return given._replace(slices=self.parts) if isinstance(given, DrawPlace) else given

    def split(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """This rank's inputs of every micro-batch, from its slices."""
        batches, program = self._program.batches, self._program
        assert batches is not None
        counted = () if batches.counts is None else batches.counts.find_nodes(op="placeholder")
        wholes = {n.name: self._whole(n.name, inputs[n.name]) for n in counted if n.name in inputs}
        parts = {
            name: 1 if program.type_of(name).layout.dims[0] else self.parts for name in batches.cut
        }
        return batches.split(inputs, batches.totals(wholes), parts)

    def _whole(self, name: str, piece: Tensor) -> Tensor:
        """The same of all ranks."""
        program = self._program
        type_ = replace(program.type_of(name), shape=program.whole_shapes[name])
        with torch.no_grad():
            return join_pieces(piece, type_, program.mesh, self._groups, self._rank)
