"""Micro-batches: the program of one part of the batch, whose results add up to the whole batch's.

    parts = cut_batch(captured, count=4)
    totals = parts.totals(inputs)                    # counts over the whole batch, e.g. of targets
    for batch in parts.split(inputs, totals):
        loss += run(parts.captured, ..., batch)      # this micro-batch's share of the loss

Rules prove that the shares add up, as if the micro-batches were ranks that cut the batch. A sum
over the inputs alone (the count under a mean) is a *total* of the whole batch. Any other meeting of
samples before the loss is refused, but for batch norm, which takes each micro-batch's statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor, fx

from autopar.capture.captured import Captured
from autopar.capture.execute import evaluate
from autopar.capture.verifier import verify
from autopar.errors import InvalidInput
from autopar.passes.batch_cutter import SUM, BatchCutter, BatchDim, Status
from autopar.program.equal_blocks import is_regular
from autopar.program.written_out import write_out
from autopar.strategies import traits_of
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class Microbatches:
    """Hold the program of one micro-batch, and what it takes from the inputs of a whole batch."""

    count: int
    captured: Captured  # it gives the share of the loss, and what is kept, if not all outputs
    cut: Mapping[str, int]  # the inputs that have the batch as first dim, and its parts
    counts: fx.Graph | None  # from the inputs of a whole batch to the totals
    whole: Captured  # the program of a whole batch
    once: frozenset[str] = frozenset()  # the buffers that a step changes once, not every turn
    joins: tuple[Status, ...] = ()  # of each output, what it is to micro-batches

    def totals(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over the whole batch that every micro-batch needs, by placeholder."""
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
        """Return the inputs of every micro-batch, in order.
        `totals`: `None` to compute them from these inputs. `parts`: into how many parts each input
        is divided before each part is shared out; `None` for one."""
        totals = self.totals(inputs) if totals is None else dict(totals)
        pieces = {
            name: BatchDim(0, blocks * (1 if parts is None else parts[name])).shares(
                inputs[name], self.count
            )
            for name, blocks in self.cut.items()
        }
        return [
            {name: pieces[name][i] if name in self.cut else v for name, v in inputs.items()}
            | totals
            | self._key(inputs, i)
            for i in range(self.count)
        ]

    def join(
        self, outputs: Sequence[Sequence[Tensor]], numbers: Sequence[int], parts: int = 1
    ) -> list[Tensor]:
        """Return some outputs of the batch, by `numbers`, from those of all micro-batches in order.
        Each micro-batch took its share of `parts` of the batch."""

        def joined(values: Sequence[Tensor], status: Status) -> Tensor:
            if isinstance(status, BatchDim):
                pieces = [value.chunk(parts * status.parts, status.dim) for value in values]
                return torch.cat([piece for row in zip(*pieces) for piece in row], status.dim)
            return reduce(torch.add, values) if status == SUM else values[0]

        joins = (self.joins[number] for number in numbers)
        return [joined(values, status) for values, status in zip(zip(*outputs), joins)]

    def _key(self, inputs: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
        """Return the key of a micro-batch's random numbers."""
        name = self.whole.key
        if name is None:
            return {}
        return {name: inputs[name] + torch.tensor([0, number], device=inputs[name].device)}


def cut_batch(captured: Captured, count: int, *, with_outputs: bool = False) -> Microbatches:
    """Return the program of one of `count` equal micro-batches, which gives its share of the loss.
    It also gives its part of what forward keeps in Python; `with_outputs` of every output."""
    try:
        return _cut_batch(captured, count, with_outputs=with_outputs)
    except InvalidInput as error:
        if not captured.effects or with_outputs:
            raise
        _cut_batch(captured, count, keeps=False)
        raise InvalidInput(
            "what forward keeps of a step in micro-batches is joined from those of each, or summed",
            got=f"{', '.join(e.name for e in captured.effects if e.tensors)}: {error.got}",
            remedy="microbatches=1, or keep what each sample gives, or a sum or mean over samples",
            source=error.source,
        ) from error


def _cut_batch(
    captured: Captured, count: int, *, with_outputs: bool = False, keeps: bool = True
) -> Microbatches:
    batch = _require_parts(captured, count)
    cutter = BatchCutter(captured, count, with_outputs=with_outputs, keeps=keeps)
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
    return Microbatches(count, small, cut, cutter.counts(), captured, cutter.once(), cutter.joins())


def of_all_blocks(batches: Microbatches, whole: Captured) -> Microbatches:
    """Return the micro-batches of a `whole` program, from those of the folded one."""
    small = batches.captured
    total_nodes = () if batches.counts is None else batches.counts.nodes
    is_of_block = any(info(node).block is not None for node in total_nodes)
    if is_of_block or not is_regular(small.graph):
        return cut_batch(whole, batches.count)
    graph = write_out(small.graph)
    nodes, leaves = {node.name: node for node in graph.nodes}, small.output_leaves
    captured = replace(
        small,
        graph=graph,
        parameters=whole.parameters,
        buffers=whole.buffers,
        classes={
            name: small.classes[twin]
            for name in nodes
            if (twin := small.twins.get(name, name)) in small.classes
        },
        output_leaves=tuple(nodes[o.name] if isinstance(o, fx.Node) else o for o in leaves),
        unfolded=None,
    )
    return replace(batches, captured=captured, whole=whole)


def batch_statistics(captured: Captured) -> tuple[fx.Node, ...]:
    """Return the operators that take means over the batch, in micro-batches each over its own."""
    return tuple(node for node in captured.graph.nodes if traits_of(node).statistics)


def batch_size(captured: Captured) -> int | None:
    """Return the first dim of the first input that has one; `None` without any."""
    nodes = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    shapes = [info(nodes[name]).val.shape for name in captured.inputs if name is not None]
    return next((int(shape[0]) for shape in shapes if len(shape)), None)


def _require_parts(captured: Captured, count: int) -> int:
    """Return the batch, if it has `count` equal parts."""
    batch = batch_size(captured)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidInput(
            "a step has a whole number of micro-batches, at least 1",
            got=f"microbatches={count!r}",
            remedy="microbatches=4",
        )
    if batch is None or batch % count:
        batch_text, examples = "no input with a batch", ""
        if batch is not None:
            divisors = [n for n in range(1, batch + 1) if batch % n == 0]
            nearest = sorted(divisors, key=lambda n: abs(n - count))[:2]
            batch_text = f"a batch of {batch}"
            examples = f", as {' or '.join(map(str, sorted(nearest)))}"
            if batch < count:
                examples += '; or schedule="terapipe", which slices sequences'
        raise InvalidInput(
            "the micro-batches of a step are equal parts of the batch",
            got=f"{batch_text} in {count} parts",
            remedy="a number of micro-batches (with schedules that halve them: twice the number) "
            f"that divides the batch{examples}",
        )
    return batch
