"""Ring attention: each member of a group has some queries, and some keys with their values.

In step t a member computes with the keys and values of the one t places before it, while those of
the next step are on their way, and puts what they give for its queries together. Backward does the
same, and returns what it finds for keys and values to where they are from. So a member holds its
own pieces and those of two others, and keeps for backward its own pieces, its output and a number
for each row.

Causal queries see the keys before them, so that the last member would work longest. Where queries
and keys are cut alike, half of the steps are enough: in step t all that came to the first t members
would be later. They get queries instead, of the one t places before them around the ring, and
return what their own keys give for these. So each computes one block a step; in the last step of an
even number, where two members have one block in common, half of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.collectives.joint_kernels import (
    CommVolume,
    JointKernel,
    KernelGroup,
    Piece,
    RingShift,
    Steps,
)
from autopar.strategies.kernels.attention.attention_blocks import (
    AttentionBlock,
    AttentionOptions,
    RowResults,
    attend,
    block_gradients,
    cut_mask,
    empty_results,
    merge,
    wide_of,
)
from autopar.strategies.kernels.keyed_draws import DrawPlace

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class RingTask:
    """What a member computes in a step: for some rows of a member's queries, by a member's keys."""

    queries: int
    keys: int
    rows: slice
    is_help: bool  # the queries are another member's
    part: slice  # of what came: these rows, or all keys


@dataclass(frozen=True)
class Ring:
    """Who computes what in which step."""

    rows: tuple[Piece, ...]
    columns: tuple[Piece, ...]
    weights: AttentionOptions
    groups: int = 1  # of heads of queries, for each of keys

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def is_shared(self) -> bool:
        """Whether members help others."""
        return self.weights.is_causal and self.rows == self.columns

    @property
    def steps(self) -> range:
        return range(1, self.count // 2 + 1 if self.is_shared else self.count)

    def task(self, member: int, step: int) -> RingTask | None:
        """That of a member in a step; None where it would see nothing."""
        other = (member - step) % self.count
        is_help = self.is_shared and member < step
        queries, keys = (other, member) if is_help else (member, other)
        (row, length), (column, width) = self.rows[queries], self.columns[keys]
        first, last = 0, length
        if self.is_shared and 2 * step == self.count:
            first, last = (length // 2, length) if is_help else (0, length // 2)
        is_later = self.weights.is_causal and column >= row + last
        if first == last or width == 0 or is_later:
            return None
        rows = slice(first, last)
        return RingTask(queries, keys, rows, is_help, rows if is_help else slice(0, width))


class RingInputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    drawn: Tensor | None  # the key by which weights are dropped


class _Member:
    """One member: what it has, what of this others compute with, and what they give back."""

    queries: Tensors  # go to a member that helps, [..., groups, rows, width]
    keys: Tensors  # go to a member that has queries, [..., columns, width]
    for_queries: Tensors  # what comes back is like these
    for_keys: Tensors

    def __init__(self, ring: Ring, at: int, inputs: RingInputs) -> None:
        self.ring, self.at = ring, at
        query, self.key, self.value, mask, self.drawn = inputs
        self.query, self.wide = _grouped(query, ring.groups), wide_of(query.dtype)
        if mask is not None:
            mask = mask if mask.ndim > 1 else mask.unsqueeze(0)
            is_each = mask.ndim > 2 and mask.shape[-3] > 1
            mask = _grouped(mask, ring.groups if is_each else 1)
        self.mask = mask

    def compute(self, task: RingTask, came: Tensors) -> Tensors:
        """Compute with what came, and give what goes back."""
        raise NotImplementedError

    def take(self, task: RingTask, came: Tensors) -> None:
        """Add what came back of a task of another member."""
        raise NotImplementedError

    def around(self) -> Steps:
        """All steps."""
        ring, returning = self.ring, None
        coming = (yield self._given(1)) if ring.steps else None
        if (task := ring.task(self.at, 0)) is not None:
            self.take(task, self.compute(task, self.keys))
        for step in ring.steps:
            came = yield coming
            if step + 1 in ring.steps:
                coming = yield self._given(step + 1)
            task = ring.task(self.at, step)
            found = () if task is None else self.compute(task, came)
            if returning is not None:
                self._take(step - 1, (yield returning))
            if self.for_keys or ring.is_shared:
                returning = yield self._returned(step, found)
        if returning is not None:
            self._take(ring.steps[-1], (yield returning))

    def _given(self, step: int) -> RingShift:
        """To the member `step` places on, what it computes with then."""
        theirs = self._task_of_next(step)
        given: Tensors = ()
        if theirs is not None:
            sent = self.queries if theirs.is_help else self.keys
            given = tuple(x[..., theirs.part, :] for x in sent)
        own = self.ring.task(self.at, step)
        return _shift(step, given, own, self.queries, self.keys)

    def _returned(self, step: int, found: Tensors) -> RingShift:
        theirs = self._task_of_next(step)
        return _shift(-step, found, theirs, self.for_queries, self.for_keys)

    def _take(self, step: int, came: Tensors) -> None:
        if (theirs := self._task_of_next(step)) is not None:
            self.take(theirs, came)

    def _task_of_next(self, step: int) -> RingTask | None:
        return self.ring.task((self.at + step) % self.ring.count, step)

    def _block(self, task: RingTask, came: Tensors) -> AttentionBlock:
        """What a task computes."""
        query = came[0] if task.is_help else self.query[..., task.rows, :]
        key, value = (self.key, self.value) if task.is_help else came[:2]
        mask = self.mask
        if mask is not None:
            mask = cut_mask(mask, task.rows, self._columns(task))
        row = self.ring.rows[task.queries][0] + task.rows.start
        return AttentionBlock(query, key, value, row, self._columns(task).start, mask, self.drawn)

    def _columns(self, task: RingTask) -> slice:
        start, width = self.ring.columns[task.keys]
        return slice(start, start + width)


def _shift(
    step: int, given: Tensors, task: RingTask | None, queries: Tensors, keys: Tensors
) -> RingShift:
    """A message, and for another task one that comes. All are as many tensors."""
    shapes: list[tuple[int, ...]] = []
    if task is not None:
        length = task.part.stop - task.part.start
        like = queries if task.is_help else keys
        shapes = [(*x.shape[:-2], length, x.shape[-1]) for x in like]
    longer = queries if len(queries) > len(keys) else keys
    places = zip_longest(given, longer)
    sent = tuple(like.new_empty(0) if one is None else one for one, like in places)
    return RingShift(sent, step, [*shapes, *[(0,)] * (len(longer) - len(shapes))])


class _ForwardMember(_Member):
    """The output of the own queries."""

    def __init__(self, ring: Ring, at: int, inputs: RingInputs) -> None:
        super().__init__(ring, at, inputs)
        whole = AttentionBlock(self.query, self.key, self.value, 0, 0)
        self.output, self.sums = empty_results(whole, self.wide)
        self.queries, self.keys = (self.query,), (self.key, self.value)
        like = self.query.new_empty(1).expand(self.output.shape)
        self.for_queries, self.for_keys = (like, self.sums), ()

    def compute(self, task: RingTask, came: Tensors) -> Tensors:
        output, sums = attend(self._block(task, came), self.ring.weights)
        if task.is_help:
            return output.to(self.query.dtype), sums
        self._merge(task, output, sums)
        return ()

    def take(self, task: RingTask, came: Tensors) -> None:
        if task.is_help:
            self._merge(task, *came)

    def _merge(self, task: RingTask, output: Tensor, sums: Tensor) -> None:
        merge(self.output[..., task.rows, :], self.sums[..., task.rows, :], output, sums)


class _BackwardMember(_Member):
    """The gradients of the own queries, keys, values and mask."""

    def __init__(
        self, ring: Ring, at: int, inputs: RingInputs, whole: RowResults, learns: bool
    ) -> None:
        super().__init__(ring, at, inputs)
        self.whole = whole
        self.of_query, self.of_key, self.of_value = (
            torch.zeros_like(x, dtype=self.wide) for x in (self.query, self.key, self.value)
        )
        self.of_mask = None
        if learns and self.mask is not None:
            self.of_mask = torch.zeros_like(self.mask, dtype=self.wide)
        self.queries, self.keys = (self.query, *whole), (self.key, self.value)
        self.for_queries, self.for_keys = (self.query,), self.keys

    def compute(self, task: RingTask, came: Tensors) -> Tensors:
        block = self._block(task, came)
        whole = RowResults(*came[1:]) if task.is_help else self.whole.part(task.rows)
        of_mask = None
        if self.of_mask is not None:
            of_mask = cut_mask(self.of_mask, task.rows, self._columns(task))
        found = block_gradients(block, self.ring.weights, whole, of_mask)
        if task.is_help:
            self.of_key += found.key
            self.of_value += found.value
            return (found.query.to(self.query.dtype),)
        self.of_query[..., task.rows, :] += found.query
        return found.key.to(self.key.dtype), found.value.to(self.value.dtype)

    def take(self, task: RingTask, came: Tensors) -> None:
        if task.is_help:
            self.of_query[..., task.rows, :] += came[0]
        else:
            self.of_key += came[0]
            self.of_value += came[1]


def ring_attention(
    group: KernelGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    drawn: Tensor | None = None,
    place: DrawPlace | None = None,
) -> Steps:
    """Scaled dot product attention, its queries, and its keys with their values, in pieces."""
    is_grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    groups = query.shape[-3] // key.shape[-3] if is_grouped else 1
    weights = AttentionOptions(
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        is_causal,
        None if place is None else _placed(place, groups),
        dropout_p,
    )
    ring = Ring(group.input(0).pieces, group.input(1).pieces, weights, groups)
    member = _ForwardMember(ring, group.index, RingInputs(query, key, value, attn_mask, drawn))
    yield from member.around()
    output = _ungrouped(member.output, is_grouped).to(query.dtype)
    given = [x for x in (attn_mask, drawn) if x is not None]
    return (output,), (query, key, value, output, member.sums, *given), (ring, is_grouped)


def causal_ring_attention(group: KernelGroup, **arguments: Any) -> Steps:
    """The same, whose traffic is that of causal queries that are cut as the keys are."""
    return (yield from ring_attention(group, **arguments))


def ring_attention_backward(
    group: KernelGroup, saved: Tensors, rest: tuple[Ring, bool], slope: Tensor
) -> Steps:
    """The gradients of all tensors that were given."""
    ring, is_grouped = rest
    query, key, value, output, sums, *given = saved
    drawn = given.pop() if ring.weights.place is not None else None
    mask = given.pop() if given else None
    learns = mask is not None and group.needs[3]
    whole = RowResults(_grouped(output, ring.groups), sums, _grouped(slope, ring.groups))
    inputs = RingInputs(query, key, value, mask, drawn)
    member = _BackwardMember(ring, group.index, inputs, whole, learns)
    yield from member.around()
    found: list[Tensor | None] = [None] * len(group.needs)
    found[0] = _ungrouped(member.of_query, is_grouped).to(query.dtype)
    found[1], found[2] = member.of_key.to(key.dtype), member.of_value.to(value.dtype)
    if mask is not None and member.of_mask is not None:
        found[3] = member.of_mask.reshape(mask.shape).to(mask.dtype)
    return found


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Heads of queries with the groups that read the same keys apart."""
    if groups == 1:
        return x.unsqueeze(-3)
    return x.unflatten(-3, (x.shape[-3] // groups, groups))


def _ungrouped(x: Tensor, is_grouped: bool) -> Tensor:
    return x.flatten(-4, -3) if is_grouped else x.squeeze(-3)


def _placed(place: DrawPlace, groups: int) -> DrawPlace:
    """Of weights with groups."""
    if len(place.shape) > 2:
        return place.unflattened(len(place.shape) - 3, groups)
    batch = None if place.batch is None else (place.batch[0] + 1, place.batch[1])
    starts = (0, *place.starts, 0, 0)[:3]
    parts = (1, *place.parts) if place.parts else ()
    return place._replace(shape=(1, *place.shape), starts=starts, batch=batch, parts=parts)


def _traffic(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
    **_: int,
) -> CommVolume:
    """Keys and values of all others come, and their gradients go back."""
    once = (("shift", inputs[1] + inputs[2]),) * (count - 1)
    return CommVolume(once, once * 2, (count - 1, count - 1))


def _causal_traffic(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
    e: int,
    itemsize: int,
) -> CommVolume:
    """In each step some members get keys and values, and others queries, for which they return the
    output, with a number for each row; in backward these come with both and the gradient. In the
    last step it may be half."""
    query, keys, output = inputs[0], inputs[1] + inputs[2], outputs[0]
    sums = output * max(itemsize, 4) / (itemsize * e)
    forward: list[tuple[str, float]] = []
    backward: list[tuple[str, float]] = []
    for step in range(1, count // 2 + 1):
        part = 0.5 if 2 * step == count else 1.0
        forward += [("shift", max(keys, part * query)), ("shift", part * (output + sums))]
        backward.append(("shift", max(keys, part * (query + 2 * output + sums))))
        backward.append(("shift", max(keys, part * query)))
    return CommVolume(tuple(forward), tuple(backward), (count // 2, count // 2))


RING = JointKernel(ring_attention, ring_attention_backward, _traffic, True)
CAUSAL_RING = JointKernel(
    causal_ring_attention,
    ring_attention_backward,
    _causal_traffic,
    is_hidden=True,
    told=("e", "itemsize"),
    crossed=_traffic,  # queries that other axes cut, too, are not cut as the keys are
)
