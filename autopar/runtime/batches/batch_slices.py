"""Batch slices: the part of a batch that each rank brings with `local_inputs=True`.

The batch is the slices of all ranks one after another. A step in micro-batches cuts each slice
locally: micro-batch i is the i-th part of every slice. Random numbers and outputs follow the order
of the batch:

    batch               slice of rank 0: a b c d     slice of rank 1: e f g h
    two micro-batches   a b e f                      c d g h

Ranks with the same position on the axes that cut the batch bring the same slice. So do the ranks
of all stages of a pipeline, even if a stage does not read it.
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
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.process_groups import Groups
from autopar.runtime.module.call_outputs import join_pieces
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.text.units import counted


def batch_axes(program: RuntimeProgram) -> Axes:
    """Return the axes that cut the batch. Refuse inputs that are cut over different axes."""
    first_inputs: dict[Axes, str] = {}
    for name in _batched_inputs(program):
        if axes := program.type_of(name).layout.dims[0]:
            first_inputs.setdefault(axes, name)
    if len(first_inputs) > 1:
        cut = (f"{name} over {', '.join(axes)}" for axes, name in first_inputs.items())
        raise InvalidInput(
            "a rank's slices of all inputs hold the same samples",
            got=f"inputs whose batch is cut in different ways: {'; '.join(cut)}",
            remedy="shard() the inputs alike, or hand every rank the global batch",
        )
    return next(iter(first_inputs), ())


def require_even_slices(program: RuntimeProgram) -> None:
    """Refuse micro-batches that would take larger parts of some slices than of others."""
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


def _batched_inputs(program: RuntimeProgram) -> list[str]:
    """Return the inputs whose first dim is the batch."""
    if program.batches is not None:
        return sorted(program.batches.cut)
    shapes = program.whole_shapes
    size = next((shape[0] for shape in shapes.values() if shape), None)
    return [name for name, shape in shapes.items() if shape and shape[0] == size]


class BatchSlices:
    """Cuts the slices of one rank into the micro-batches of a program."""

    def __init__(self, program: RuntimeProgram, groups: Groups, rank: int) -> None:
        """Take this rank's position on the mesh of the program, and the groups over single axes."""
        self._program, self._groups, self._rank = program, groups, rank
        self.parts = math.prod(program.mesh[axis] for axis in batch_axes(program))

    def place_draws(self, graph: fx.Graph) -> None:
        """Have random operators of a graph draw the numbers of the samples of these slices."""
        for node in graph.nodes:
            node.args = tuple(map(self._with_slices, node.args))
            node.kwargs = {
                name: self._with_slices(argument) for name, argument in node.kwargs.items()
            }

    def _with_slices(self, argument: Any) -> Any:
        is_place = isinstance(argument, DrawPlace)
        return argument._replace(slices=self.parts) if is_place else argument

    def split(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return this rank's inputs of every micro-batch, cut from its slices."""
        batches, program = self._program.batches, self._program
        assert batches is not None
        count_inputs = () if batches.counts is None else batches.counts.find_nodes(op="placeholder")
        gathered = {
            node.name: self._gather(node.name, inputs[node.name])
            for node in count_inputs
            if node.name in inputs
        }
        parts = {
            name: 1 if program.type_of(name).layout.dims[0] else self.parts for name in batches.cut
        }
        return batches.split(inputs, batches.totals(gathered), parts)

    def _gather(self, name: str, piece: Tensor) -> Tensor:
        """Return the whole input of which this rank has a slice."""
        program = self._program
        type_ = replace(program.type_of(name), shape=program.whole_shapes[name])
        with torch.no_grad():
            return join_pieces(piece, type_, program.mesh, self._groups, self._rank)
