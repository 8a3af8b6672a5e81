"""Micro-batches: the program of one part of the batch, whose results add up to the whole batch's.

    parts = cut_batch(captured, count=4)
    totals = parts.totals(inputs)                    # counts over the whole batch, e.g. of targets
    for batch in parts.split(inputs, totals):
        loss += run(parts.captured, ..., batch)      # this micro-batch's share of the loss
        ...                                          # gradients of the shares add up likewise

Comes before all decisions: `parts.captured` is what they are made about. That the shares add up is
shown by the rules, as if the micro-batches were ranks that cut the batch: each value is then the
same for all, a part, or a term of a sum. What is the same for all and is added to such a sum (a
regulariser, a number) is added by each in part. A sum that takes no gradient and comes from the
inputs alone (the count under a mean) is a *total*, computed before the step from the whole batch.
Any other place where samples meet before the loss is refused. Batch norm is the exception: each
micro-batch is normalised by its own statistics, which is another loss. A buffer that changes in the
same way in every micro-batch (a counter of steps) changes once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, fx

from autopar.capture.captured import Captured
from autopar.capture.execute import evaluate
from autopar.capture.verifier import verify
from autopar.errors import InvalidInput
from autopar.passes.batch_cutter import SUM, BatchCutter, BatchDim, Status
from autopar.strategies import traits_of
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class Microbatches:
    """The program of one micro-batch, and what it takes from the inputs of a whole batch."""

    count: int
    captured: Captured  # it gives the share of the loss, and what is kept, if not all outputs
    cut: Mapping[str, int]  # the inputs that have the batch as first dim, and its parts
    counts: fx.Graph | None  # from the inputs of a whole batch to the totals
    whole: Captured  # the program of a whole batch
    once: frozenset[str] = frozenset()  # the buffers that a step changes once, not every turn
    joins: tuple[Status, ...] = ()  # of each output, what it is to micro-batches

    def totals(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over the whole batch that every micro-batch needs, by placeholder."""
        if self.counts is None:
            return {}
        with torch.no_grad():
            return dict(evaluate(self.counts, {**self.whole.constants, **inputs}))

    def split(
        self,
        inputs: Mapping[str, Tensor],
        totals: Mapping[str, Tensor] | None = None,
        parts: Mapping[str, int] | None = None,
    ) -> list[dict[str, Tensor]]:
        """The inputs of every micro-batch, in order. `totals`, if they are not those of these
        inputs. `parts`: of how many parts of an input each micro-batch takes its share, if not of
        one."""
        totals = self.totals(inputs) if totals is None else dict(totals)
        pieces = {
            name: BatchDim(0, own * (1 if parts is None else parts[name])).shares(
                inputs[name], self.count
            )
            for name, own in self.cut.items()
        }
        return [
            {name: pieces[name][i] if name in self.cut else v for name, v in inputs.items()}
            | totals
            | self._key(inputs, i)
            for i in range(self.count)
        ]

    def join(
        self, outputs: Sequence[Sequence[Tensor]], wanted: Sequence[int], parts: int = 1
    ) -> list[Tensor]:
        """The outputs of the batch that are `wanted`, from those of all micro-batches in order,
        each of which took its share of `parts` of the batch."""

        def joined(values: Sequence[Tensor], status: Status) -> Tensor:
            if isinstance(status, BatchDim):
                pieces = [value.chunk(parts * status.parts, status.dim) for value in values]
                return torch.cat([one for part in zip(*pieces) for one in part], status.dim)
            return reduce(torch.add, values) if status == SUM else values[0]

        joins = (self.joins[number] for number in wanted)
        return [joined(values, status) for values, status in zip(zip(*outputs), joins)]

    def _key(self, inputs: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
        """What random numbers of a micro-batch follow from."""
        name = self.whole.key
        if name is None:
            return {}
        return {name: inputs[name] + torch.tensor([0, number], device=inputs[name].device)}


def cut_batch(captured: Captured, count: int, tells: bool = False) -> Microbatches:
    """The program of one of `count` equal micro-batches, which returns its share of the loss, and
    its share or part of what forward keeps; if it `tells`, of every output."""
    try:
        return _cut_batch(captured, count, tells=tells)
    except InvalidInput as error:
        if not captured.effects or tells:
            raise
        _cut_batch(captured, count, keeps=False)
        raise InvalidInput(
            "what forward keeps of a step in micro-batches is joined from those of each, or summed",
            got=f"{', '.join(one.name for one in captured.effects if one.tensors)}: {error.got}",
            remedy="microbatches=1, or keep what each sample gives, or a sum or mean over samples",
            source=error.source,
        ) from error


def _cut_batch(
    captured: Captured, count: int, *, tells: bool = False, keeps: bool = True
) -> Microbatches:
    batch = _require_parts(captured, count)
    cutter = BatchCutter(captured, count, tells=tells, keeps=keeps)
    for node in captured.graph.nodes:
        if node in cutter.live:
            cutter.visit(node)
    small = cutter.finish()
    verify(small.graph, "captured")
    statuses = {name: cutter.status.get(name) for name in captured.inputs if name is not None}
    cut = {
        name: status.parts
        for name, status in statuses.items()
        if isinstance(status, BatchDim) and status.dim == 0
    }
    if count > 1 and not cut:
        raise InvalidInput(
            "micro-batches cut the first dim of the inputs",
            got=f"no input of the loss has the batch of {batch} as its first dim",
            remedy="put the batch first, or microbatches=1",
        )
    about = cutter.counts(), captured, cutter.once(), cutter.joins()
    return Microbatches(count, small, cut, *about)


def batch_statistics(captured: Captured) -> tuple[fx.Node, ...]:
    """The operators that take means over the batch, in micro-batches each over its own."""
    return tuple(node for node in captured.graph.nodes if traits_of(node).statistics)


def batch_size(captured: Captured) -> int | None:
    """The first dim of the first input that has one."""
    nodes = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    shapes = [info(nodes[name]).val.shape for name in captured.inputs if name is not None]
    return next((int(shape[0]) for shape in shapes if len(shape)), None)


def _require_parts(captured: Captured, count: int) -> int:
    """The batch, if it has so many equal parts."""
    batch = batch_size(captured)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidInput(
            "a step has a whole number of micro-batches, at least 1",
            got=f"microbatches={count!r}",
            remedy="microbatches=4",
        )
    if batch is None or batch % count:
        given, such = "no input with a batch", ""
        if batch is not None:
            some = [n for n in range(1, batch + 1) if batch % n == 0]
            near = sorted(some, key=lambda n: abs(n - count))[:2]
            given, such = f"a batch of {batch}", f", as {' or '.join(map(str, sorted(near)))}"
        raise InvalidInput(
            "the micro-batches of a step are equal parts of the batch",
            got=f"{given} in {count} parts",
            remedy="a number of micro-batches (with schedules that halve them: twice the number) "
            f"that divides the batch{such}",
        )
    return batch
