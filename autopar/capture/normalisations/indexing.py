"""Indexing: a dim that is named by its own numbers is kept; what lies in it can then be cut."""

from __future__ import annotations

import itertools
import math

import torch
from torch import fx

from autopar.capture.graph_builder import GraphBuilder, Site, shape_of
from autopar.capture.normalisations.constants import Evaluator
from autopar.capture.normalisations.shapes import as_call
from autopar.strategies.node_info import info

aten = torch.ops.aten


def counted_dims_are_kept(builder: GraphBuilder) -> None:
    """mask[arange(rows)[:, None], places] is mask[:, places], its dims in another order.

    So for each index of 0, 1, ... over a whole dim, where no other index changes along with it.
    """
    evaluator = None
    for node in builder.calls(aten.index.Tensor):
        call = Site(builder, node)
        if all(map(_is_number, call.inputs[1:])):
            evaluator = evaluator or Evaluator(builder)
            kept = _counted(call, evaluator)
            if kept:
                with builder.graph.inserting_before(node):
                    new = _of_others(call, kept)
                builder.substitute(node, new)


def own_elements_are_gathered(builder: GraphBuilder) -> None:
    """x[arange(rows), places] names all rows by number; a gather leaves them as they lie."""
    evaluator = None
    for node in builder.calls(aten.index.Tensor):
        call = Site(builder, node)
        if len(call["indices"]) != 2 or None in call["indices"]:
            continue
        (rows, places), size = call["indices"], call.shapes[0][0]
        evaluator = evaluator or Evaluator(builder)
        is_of_rows = shape_of(rows) == shape_of(places) == (size,)
        if is_of_rows and _counts(evaluator, rows) and _is_number(places):
            with builder.graph.inserting_before(node):
                new = _gathered(call, places)
            builder.substitute(node, new)


def masked_writes_are_choices(builder: GraphBuilder) -> None:
    """x[mask] = y, one y for all that the mask chooses, is where(mask, y, x); under a mask that
    chooses all, whatever y is, it is y."""
    evaluator = None
    for node in builder.calls(aten.index_put.default):
        call = Site(builder, node)
        present = [(dim, mask) for dim, mask in enumerate(call["indices"]) if mask is not None]
        if len(present) != 1 or info(present[0][1]).val.dtype != torch.bool:
            continue
        ((dim, mask),) = present
        covered, shape = len(shape_of(mask)), shape_of(call["values"])
        own = len(call.shape) - dim - covered  # the dims behind those of the mask
        at = max(len(shape) - own, 0)
        before, chosen, behind = shape[: max(at - 1, 0)], shape[max(at - 1, 0) : at], shape[at:]
        evaluator = evaluator or Evaluator(builder)
        if covered and chosen in ((), (1,)):
            size = [*before, *chosen * covered, *behind]
        elif covered and _is_all(evaluator, mask):
            size = [*before, *shape_of(mask), *behind]
        else:
            continue
        with builder.graph.inserting_before(node):
            new = _chosen(call, mask, own, size)
        builder.substitute(node, new)


def _is_all(evaluator: Evaluator, mask: fx.Node) -> bool:
    return evaluator.is_constant(mask) and bool(evaluator.ask(mask, _is_true))


def _chosen(call: Site, mask: fx.Node, behind: int, size: list[int]) -> fx.Node:
    """Where the mask, that so many dims are behind, says so: what is written, of that size."""
    given = call.make(aten.reshape.default, call["values"], size)
    if call.get("accumulate", False):
        given = call.make(aten.add.Tensor, call["self"], given)
    wide = call.make(aten.reshape.default, mask, [*shape_of(mask), *[1] * behind])
    return call.make(aten.where.self, wide, given, call["self"])


def _counted(call: Site, evaluator: Evaluator) -> dict[int, int]:
    """The dims whose index counts them, and the dim of all indices together that this lies in."""
    kept = {}
    shapes = call.shapes[1:]
    count = max(map(len, shapes))
    varies = [
        {dim - len(shape) + count for dim, n in enumerate(shape) if n > 1} for shape in shapes
    ]
    present = [(dim, index) for dim, index in enumerate(call["indices"]) if index is not None]
    for (dim, index), along in zip(present, varies):
        is_own = len(along) == 1 and sum(bool(along & other) for other in varies) == 1
        size = call.shapes[0][dim]
        if is_own and math.prod(shape_of(index)) == size and _counts(evaluator, index):
            kept[dim] = next(iter(along))
    return kept


def _counts(evaluator: Evaluator, node: fx.Node) -> bool:
    """Whether a value is 0, 1, ..."""
    return evaluator.is_constant(node) and bool(evaluator.ask(node, _is_counting))


def _is_true(value: torch.Tensor) -> bool:
    return bool(value.all())


def _is_counting(value: torch.Tensor) -> bool:
    return torch.equal(value.flatten(), torch.arange(value.numel(), dtype=value.dtype))


def _is_number(index: fx.Node) -> bool:
    return info(index).val.dtype in (torch.int32, torch.int64)


def _of_others(call: Site, kept: dict[int, int]) -> fx.Node:
    """The elements that the other indices name, with the kept dims where theirs would stand."""
    indices = [*call["indices"], *[None] * (len(call.shapes[0]) - len(call["indices"]))]
    count = max(map(len, call.shapes[1:]))
    others = [dim for dim in range(count) if dim not in kept.values()]
    left: list[fx.Node | None] = []
    for dim, index in enumerate(indices):
        if index is None or dim in kept:
            left.append(None)
            continue
        shape = (1,) * (count - len(shape_of(index))) + shape_of(index)
        left.append(call.make(aten.reshape.default, index, [shape[other] for other in others]))
    found = call["self"]
    # Dims are known by what they are: a dim of the tensor, or one of the indices together.
    holds = _order(indices, [("index", dim) for dim in range(count)])
    homes = {("index", place): ("self", dim) for dim, place in kept.items()}
    order = [homes.get(dim, dim) for dim in holds]
    if any(index is not None for index in left):
        found = call.make(aten.index.Tensor, found, left)
        has = _order(left, [("index", dim) for dim in others])
    else:
        has = [("self", dim) for dim in range(len(indices))]
    places = [has.index(dim) for dim in order if dim in has]
    if places != sorted(places):
        found = call.make(*as_call(found, places))
    return call.make(aten.reshape.default, found, list(call.shape))


def _order(indices: list[fx.Node | None], together: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """What an index gives: the dims of the indices `together`, and the others of the tensor."""
    present = [dim for dim, index in enumerate(indices) if index is not None]
    adjacent = all(b == a + 1 for a, b in itertools.pairwise(present))
    at = present[0] if adjacent else 0
    rest = [("self", dim) for dim, index in enumerate(indices) if index is None]
    return rest[:at] + together + rest[at:]


def _gathered(call: Site, places: fx.Node) -> fx.Node:
    rows, size, *rest = call.shapes[0]
    if info(places).val.dtype != torch.int64:
        places = call.make(aten.to.dtype, places, torch.int64)
    is_from_the_end = call.make(aten.lt.Scalar, places, 0)
    moved = call.make(aten.add.Tensor, places, size)
    places = call.make(aten.where.self, is_from_the_end, moved, places)
    places = call.make(aten.reshape.default, places, [rows, 1, *(1 for _ in rest)])
    places = call.make(aten.expand.default, places, [rows, 1, *rest])
    found = call.make(aten.gather.default, call["self"], 1, places)
    return call.make(aten.reshape.default, found, [rows, *rest])
