"""Ring attention (context parallel): each member has some queries, and some keys with values.

In step t a member computes with the keys and values of the member t places before it, while those
of the next step travel. Backward does the same, and returns gradients of keys and values to their
owners. A member holds pieces of three members, and keeps its pieces, its output and row sums.

With a causal mask the last member would work longest. Where queries and keys are cut alike, half of
the steps are enough: in step t the first t members would see nothing. They help: they get queries
of the member t places before them around the ring, and return the results by their own keys. In the
last step of an even ring, where two members share one block, each computes half of it.
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
    grouped,
    merge,
    ungrouped,
    wide_of,
    with_groups,
)
from autopar.strategies.kernels.keyed_draws import DrawPlace

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class RingTask:
    """The block that a member computes in a step: some rows of queries by some member's keys."""

    queries: int
    keys: int
    rows: slice
    is_help: bool  # the queries are another member's
    part: slice  # of the received tensors: these rows, or all keys


@dataclass(frozen=True)
class Ring:
    """The tasks of all members in all steps."""

    rows: tuple[Piece, ...]
    columns: tuple[Piece, ...]
    weights: AttentionOptions
    groups: int = 1  # of heads of queries, for each of keys

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def is_shared(self) -> bool:
        """Return whether members help others."""
        return self.weights.is_causal and self.rows == self.columns

    @property
    def steps(self) -> range:
        return range(1, self.count // 2 + 1 if self.is_shared else self.count)

    def task(self, member: int, step: int) -> RingTask | None:
        """Return the task of a member in a step; None where it would see nothing."""
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
    """The tensors of one member."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    drawn: Tensor | None  # the key of the dropout of weights


class _Member:
    """A member of the ring: its tensors, those that others compute with, and their results."""

    queries: Tensors  # sent to a member that helps, [..., groups, rows, width]
    keys: Tensors  # sent to a member that has queries, [..., columns, width]
    for_queries: Tensors  # results that come back are like these
    for_keys: Tensors

    def __init__(self, ring: Ring, at: int, inputs: RingInputs) -> None:
        self.ring, self.at = ring, at
        query, self.key, self.value, mask, self.drawn = inputs
        self.query, self.wide = grouped(query, ring.groups), wide_of(query.dtype)
        if mask is not None:
            mask = mask if mask.ndim > 1 else mask.unsqueeze(0)
            is_each = mask.ndim > 2 and mask.shape[-3] > 1
            mask = grouped(mask, ring.groups if is_each else 1)
        self.mask = mask

    def compute(self, task: RingTask, came: Tensors) -> Tensors:
        """Compute a task with received tensors, and return the results for their owner."""
        raise NotImplementedError

    def take(self, task: RingTask, came: Tensors) -> None:
        """Add the results of a task of another member."""
        raise NotImplementedError

    def around(self) -> Steps:
        """Run all steps of the ring."""
        ring, returning = self.ring, None
        coming = (yield self._send(1)) if ring.steps else None
        if (task := ring.task(self.at, 0)) is not None:
            self.take(task, self.compute(task, self.keys))
        for step in ring.steps:
            came = yield coming
            if step + 1 in ring.steps:
                coming = yield self._send(step + 1)
            task = ring.task(self.at, step)
            results = () if task is None else self.compute(task, came)
            if returning is not None:
                self._take(step - 1, (yield returning))
            if self.for_keys or ring.is_shared:
                returning = yield self._send_back(step, results)
        if returning is not None:
            self._take(ring.steps[-1], (yield returning))

    def _send(self, step: int) -> RingShift:
        """Return the message to the member `step` places on, with the tensors of its task."""
        theirs = self._task_of_next(step)
        sent: Tensors = ()
        if theirs is not None:
            tensors = self.queries if theirs.is_help else self.keys
            sent = tuple(x[..., theirs.part, :] for x in tensors)
        return _shift(step, sent, self.ring.task(self.at, step), self.queries, self.keys)

    def _send_back(self, step: int, results: Tensors) -> RingShift:
        theirs = self._task_of_next(step)
        return _shift(-step, results, theirs, self.for_queries, self.for_keys)

    def _take(self, step: int, came: Tensors) -> None:
        if (theirs := self._task_of_next(step)) is not None:
            self.take(theirs, came)

    def _task_of_next(self, step: int) -> RingTask | None:
        return self.ring.task((self.at + step) % self.ring.count, step)

    def _block(self, task: RingTask, came: Tensors) -> AttentionBlock:
        """Return the attention block of a task."""
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
    step: int, tensors: Tensors, task: RingTask | None, queries: Tensors, keys: Tensors
) -> RingShift:
    """Return a message of tensors, all of one number, and the shapes of those for `task`."""
    shapes: list[tuple[int, ...]] = []
    if task is not None:
        length = task.part.stop - task.part.start
        like = queries if task.is_help else keys
        shapes = [(*x.shape[:-2], length, x.shape[-1]) for x in like]
    longer = queries if len(queries) > len(keys) else keys
    pairs = zip_longest(tensors, longer)
    sent = tuple(like.new_empty(0) if x is None else x for x, like in pairs)
    return RingShift(sent, step, [*shapes, *[(0,)] * (len(longer) - len(shapes))])


class _ForwardMember(_Member):
    """A member in forward: computes the output of its queries."""

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
    """A member in backward: computes the gradients of its queries, keys, values and mask."""

    def __init__(
        self, ring: Ring, at: int, inputs: RingInputs, whole: RowResults, *, is_mask_learned: bool
    ) -> None:
        super().__init__(ring, at, inputs)
        self.whole = whole
        self.of_query, self.of_key, self.of_value = (
            torch.zeros_like(x, dtype=self.wide) for x in (self.query, self.key, self.value)
        )
        self.of_mask = None
        if is_mask_learned and self.mask is not None:
            self.of_mask = torch.zeros_like(self.mask, dtype=self.wide)
        self.queries, self.keys = (self.query, *whole), (self.key, self.value)
        self.for_queries, self.for_keys = (self.query,), self.keys

    def compute(self, task: RingTask, came: Tensors) -> Tensors:
        block = self._block(task, came)
        whole = RowResults(*came[1:]) if task.is_help else self.whole.part(task.rows)
        of_mask = None
        if self.of_mask is not None:
            of_mask = cut_mask(self.of_mask, task.rows, self._columns(task))
        gradients = block_gradients(block, self.ring.weights, whole, of_mask)
        if task.is_help:
            self.of_key += gradients.key
            self.of_value += gradients.value
            return (gradients.query.to(self.query.dtype),)
        self.of_query[..., task.rows, :] += gradients.query
        return gradients.key.to(self.key.dtype), gradients.value.to(self.value.dtype)

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
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    drawn: Tensor | None = None,
    place: DrawPlace | None = None,
) -> Steps:
    """Return scaled dot product attention of pieces of queries, and of keys with values."""
    is_grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    groups = query.shape[-3] // key.shape[-3] if is_grouped else 1
    weights = AttentionOptions(
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        is_causal,
        None if place is None else with_groups(place, groups),
        dropout_p,
    )
    ring = Ring(group.input(0).pieces, group.input(1).pieces, weights, groups)
    member = _ForwardMember(ring, group.index, RingInputs(query, key, value, attn_mask, drawn))
    yield from member.around()
    output = ungrouped(member.output, is_grouped=is_grouped).to(query.dtype)
    optional = [x for x in (attn_mask, drawn) if x is not None]
    return (output,), (query, key, value, output, member.sums, *optional), (ring, is_grouped)


def causal_ring_attention(group: KernelGroup, **arguments: Any) -> Steps:
    """Like `ring_attention`, for causal queries that are cut as the keys are: members help."""
    return (yield from ring_attention(group, **arguments))


def ring_attention_backward(
    group: KernelGroup, saved: Tensors, rest: tuple[Ring, bool], slope: Tensor
) -> Steps:
    """Return the gradients of all tensor arguments."""
    ring, is_grouped = rest
    query, key, value, output, sums, *optional = saved
    drawn = optional.pop() if ring.weights.place is not None else None
    mask = optional.pop() if optional else None
    learns = mask is not None and group.needs[3]
    whole = RowResults(grouped(output, ring.groups), sums, grouped(slope, ring.groups))
    inputs = RingInputs(query, key, value, mask, drawn)
    member = _BackwardMember(ring, group.index, inputs, whole, is_mask_learned=learns)
    yield from member.around()
    gradients: list[Tensor | None] = [None] * len(group.needs)
    gradients[0] = ungrouped(member.of_query, is_grouped=is_grouped).to(query.dtype)
    gradients[1], gradients[2] = member.of_key.to(key.dtype), member.of_value.to(value.dtype)
    if mask is not None and member.of_mask is not None:
        gradients[3] = member.of_mask.reshape(mask.shape).to(mask.dtype)
    return gradients


def _traffic(
    count: int,
    inputs: Sequence[float],
    outputs: Sequence[float],
    needs: Sequence[bool],
    **_: int,
) -> CommVolume:
    """Return the traffic: all other keys and values come, and their gradients go back."""
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
    """Return the traffic of causal members that help.

    In each step some members get keys and values, and others queries, for which they return the
    output and row sums. In backward queries come with these and the gradient. In the last step of
    an even ring it is half.
    """
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
