"""Token slices: the program of one slice of each sequence, in a pipeline of slices (TeraPipe).

    slices = [cut_tokens(captured, (5, 3), number) for number in (0, 1)]

Each operator computes a token from itself, which the rules of operators prove; causal attention
reads earlier ones, too: it becomes `sliced_attention`. A program of a slice reads the whole inputs.
What is made of inputs alone (shifted labels, masks, counts), or of parameters alone (embeddings of
positions), is made whole, and cut where it meets the tokens of the slice. Anything else that reads
several tokens is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, fx

from autopar.capture.captured import Captured
from autopar.capture.listing import operator_of, rule_for
from autopar.capture.verifier import verify
from autopar.errors import InvalidInput
from autopar.mesh import Mesh
from autopar.passes.batch_cutter import SAME, SUM, BatchCutter, BatchDim, Status
from autopar.strategies import (
    OperatorCall,
    Strategy,
    arguments_of_piece,
    tensor_inputs,
    traits_of,
)
from autopar.strategies.kernels.attention import dropped_attention
from autopar.strategies.kernels.attention.attention_blocks import wide_of
from autopar.strategies.kernels.attention.sliced import SequenceTensors, sliced_attention
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import info, name_beside
from autopar.strategies.results import is_result, maker, result_index
from autopar.text.units import counted

aten = torch.ops.aten
AXIS = "slice"
ATTENTION = (aten.scaled_dot_product_attention.default, dropped_attention.attention)
REMEDY = "another schedule, as 1f1b with several micro-batches"
CAUSAL = "scaled_dot_product_attention(..., is_causal=True) without a mask; or another schedule"


class TokenDim(NamedTuple):
    """Describe where the tokens of a slice are in a dim: `parts` times, each `unit` numbers."""

    cut: BatchDim
    unit: int = 1

    @classmethod
    def at(cls, value: Tensor, dim: int, parts: int, tokens: int) -> TokenDim:
        return cls(BatchDim(dim, parts), value.shape[dim] // (parts * tokens))


def token_count(captured: Captured) -> int:
    """Return the number of tokens of a sequence: the second dim of the inputs."""
    nodes = {node.name: node for node in captured.graph.find_nodes(op="placeholder")}
    shapes = [info(nodes[name]).val.shape for name in captured.inputs if name is not None]
    count = next((int(shape[1]) for shape in shapes if len(shape) > 1), 0)
    if count < 1:
        raise InvalidInput(
            "the slices of terapipe cut the second dim of the inputs, which counts tokens",
            got="no input with two dims",
            remedy=f"inputs of batch and tokens; or {REMEDY}",
        )
    return count


def slice_lengths(captured: Captured, slices: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths in tokens of slices that are given in proportion."""
    tokens, total = token_count(captured), sum(slices)
    ends = [round(tokens * end / total) for end in accumulate(slices)]
    lengths = tuple(end - start for start, end in pairwise([0, *ends]))
    if min(lengths) < 1:
        raise InvalidInput(
            "each slice of terapipe has a token",
            got=f"{counted(len(slices), 'slice')} of {counted(tokens, 'token')}",
            remedy="fewer slices, or longer sequences",
        )
    return lengths


def require_slices(captured: Captured, slices: Sequence[int]) -> None:
    """Refuse slices that are not those of the sequences of a program, or that cannot be cut."""
    if not slices:
        return
    tokens = token_count(captured)
    if len({*slices}) > 1 and sum(slices) != tokens:
        raise InvalidInput(
            "the slices of terapipe make up the sequence",
            got=f"slices of {' + '.join(map(str, slices))} for {counted(tokens, 'token')}",
            remedy=f"lengths whose sum is {tokens}, or a number of slices",
        )
    cut_tokens(captured, slice_lengths(captured, slices), 0)


def cut_tokens(captured: Captured, lengths: Sequence[int], number: int) -> Captured:
    """Return the program of slice `number` of the tokens, which gives its share of the loss."""
    if captured.kept:
        raise InvalidInput(
            "what forward keeps in Python is of whole sequences",
            got=f"{', '.join(e.name for e in captured.effects if e.tensors)} in slices of tokens",
            remedy=REMEDY,
        )
    cutter = TokenCutter(captured, lengths, number)
    for node in captured.graph.nodes:
        if node in cutter.live:
            cutter.visit(node)
    small = cutter.finish()
    verify(small.graph, "captured")
    return small


def sequence_gradients(nodes: Iterable[fx.Node], mesh: Mesh) -> float:
    """Return the bytes of the gradients of keys and values that slices share, of a rank."""
    size = 0.0
    for node in nodes:
        for value in tensor_inputs(node)[1:3] if node.target in ATTENTION else ():
            type_ = info(value).type
            size += type_.local_bytes(mesh) / type_.dtype.itemsize * wide_of(type_.dtype).itemsize
    return size


class TokenCutter(BatchCutter):
    """Hold what each value is across slices of tokens, and the program of one as it grows."""

    rule = "terapipe computes each token from itself and, in causal attention, from earlier ones"
    remedy = REMEDY

    def __init__(self, captured: Captured, lengths: Sequence[int], number: int) -> None:
        self.tokens, self.offset = sum(lengths), sum(lengths[:number])
        self.length = lengths[number]
        self.free: set[fx.Node] = set()  # made of inputs and constants alone, whole
        self.hints: dict[fx.Node, BatchDim] = {}  # where free values have tokens
        self.slices: dict[tuple[fx.Node, TokenDim], fx.Node] = {}
        self.buffers: list[str] = []
        super().__init__(captured, len(lengths))

    def _enter_placeholders(self) -> None:
        captured = self.captured
        held = {*captured.parameters, *captured.buffers}
        for node in captured.graph.find_nodes(op="placeholder"):
            self._enter(node, None)
            shape = info(node).val.shape
            if node.name not in held and node.name != captured.key:
                self.free.add(node)
            if node.name in captured.inputs and len(shape) > 1 and shape[1] == self.tokens:
                self.hints[node] = BatchDim(1)

    def visit(self, node: fx.Node) -> None:
        """Find the status of one live operator, and copy it."""
        if is_result(node):
            status = self.status[node.name] = self.results[maker(node)][result_index(node)]
            self._copy(node, (status,), node.args, {})
            if maker(node) in self.free:
                self.free.add(node)
            return
        inputs = tensor_inputs(node)
        self.read.clear()
        if not info(node).differentiable and self.free.issuperset(inputs):
            self._visit_free(node, inputs)
            return
        cuts = [s if isinstance(s := self.status[v.name], BatchDim) else None for v in inputs]
        if not any(cuts):
            cuts = [self.hints.get(value) for value in inputs]
        if any(cuts) and node.target in ATTENTION and OperatorCall(node)["is_causal"]:
            self._attend(node, inputs, cuts)
        elif any(cuts):
            self._visit_cut(node, inputs, cuts)
        else:
            statuses = [self.status[value.name] for value in inputs]
            is_ruled = self.captured.rules.get(node.name) is not None
            status = self._uncut(node, inputs, statuses) if is_ruled else SAME
            if not is_ruled and SUM in statuses:
                self._refuse_unruled(node)
            args, kwargs = node.args, dict(node.kwargs)
            if status == SUM:
                args, kwargs = self._numbers_shared(node, args, kwargs)
            self._end(node, (status,) * len(info(node).values), args, kwargs)

    def finish(self) -> Captured:
        """Return the program of one slice."""
        small = super().finish()
        return replace(small, sequence_buffers=tuple(self.buffers))

    def _visit_free(self, node: fx.Node, inputs: tuple[fx.Node, ...]) -> None:
        """Copy what is made of the inputs alone, whole."""
        self.free.add(node)
        hints = [self.hints.get(value) for value in inputs]
        if any(hints) and len(info(node).values) == 1:
            with suppress(InvalidInput):
                status = self._cut(node, inputs, hints)[1][0]
                if isinstance(status, BatchDim):
                    self.hints[node] = status
        self._end(node, (SAME,) * len(info(node).values), node.args, dict(node.kwargs))

    def _visit_cut(
        self, node: fx.Node, inputs: tuple[fx.Node, ...], cuts: Sequence[BatchDim | None]
    ) -> None:
        """Copy an operator that works on the tokens of the slice."""
        wanted, statuses = self._cut(node, inputs, cuts)
        for value, want in zip(inputs, wanted):
            self._read_as(node, value, want)
        value, status = info(node).values[0], statuses[0]
        shape = self._shape(value, status.dim) if isinstance(status, BatchDim) else value.shape
        args, kwargs = arguments_of_piece(node, tuple(shape))
        args = tuple(self._placed(node, a, status) for a in args)
        self._end(node, statuses, args, kwargs)

    def _end(self, node: fx.Node, statuses: tuple[Status, ...], args: tuple, kwargs: dict) -> None:
        self.results[node] = statuses
        if len(statuses) == 1:
            self.status[node.name] = statuses[0]
        self._copy(node, statuses, args, kwargs)

    def _cut(
        self, node: fx.Node, inputs: tuple[fx.Node, ...], cuts: Sequence[BatchDim | None]
    ) -> tuple[list[BatchDim | None], tuple[Status, ...]]:
        """Return what an operator reads of each input, and the status of each result, where
        inputs are cut as `cuts` say."""
        if traits_of(node).in_order and cuts[0] is not None:
            return self._reshaped(node, inputs, cuts[0])
        rule = self.captured.rules.get(node.name)
        if rule is None:
            self._refuse_unruled(node)
        dims = [dims[cut.dim] for cut, dims in zip(cuts, rule.inputs) if cut is not None]
        factors = {dim[0] if len(dim) == 1 else None for dim in dims}
        factor, parts = next(iter(factors)), next(cut.parts for cut in cuts if cut is not None)
        is_one = len(factors) == 1 and factor is not None
        if not is_one or len({cut.parts for cut in cuts if cut is not None}) > 1:
            self._refuse_meeting(node)
        assert factor is not None
        strategy = Strategy.of(**{factor: AXIS})
        if rule.why_whole(factor) is not None or rule.kernel(strategy) is not None:
            self._refuse_meeting(node)
        if traits_of(node).statistics:
            self._refuse(node, f"{operator_of(node)} takes statistics over tokens")
        signature = rule.signature(strategy)
        wanted = [self._dim_of(layout.dim_of(AXIS), parts) for layout in signature.inputs]
        if any(cut is not None and cut != want for cut, want in zip(cuts, wanted)):
            self._refuse_meeting(node)
        outputs = (self._dim_of(layout.dim_of(AXIS), parts) for layout in signature.outputs)
        return wanted, tuple(cut or SUM for cut in outputs)

    @staticmethod
    def _dim_of(dim: int | None, parts: int) -> BatchDim | None:
        return None if dim is None else BatchDim(dim, parts)

    def _reshaped(
        self, node: fx.Node, inputs: tuple[fx.Node, ...], cut: BatchDim
    ) -> tuple[list[BatchDim | None], tuple[Status, ...]]:
        """Return where the tokens are after a reshape: with as many numbers before and behind."""
        before, after = info(inputs[0]).val, info(node).val
        unit = TokenDim.at(before, cut.dim, cut.parts, self.tokens).unit
        outer, inner = prod(before.shape[: cut.dim]) * cut.parts, unit
        inner *= prod(before.shape[cut.dim + 1 :])
        for dim, size in enumerate(after.shape):
            behind = prod(after.shape[dim + 1 :])
            run = self.tokens * (inner // behind)
            if inner % behind or size % run or prod(after.shape[:dim]) * (size // run) != outer:
                continue
            reached = BatchDim(dim, size // run)
            return [cut, *[reached] * (len(inputs) - 1)], (reached,)
        self._refuse_meeting(node)

    def _read_as(self, reader: fx.Node, value: fx.Node, want: BatchDim | None) -> None:
        """Have an operator read a value as it wants it: a whole one is cut to the slice."""
        status = self.status[value.name]
        if want is None or status == want:
            if want is None and status != SAME:
                self._refuse_meeting(reader)
            return
        if status != SAME:
            self._refuse_meeting(reader)
        at = TokenDim.at(info(value).val, want.dim, want.parts, self.tokens)
        if (value, at) not in self.slices:
            self.slices[value, at] = self._slice(reader, value, at)
        if self.read.get(value, self.slices[value, at]) is not self.slices[value, at]:
            self._refuse_meeting(reader)
        self.read[value] = self.slices[value, at]

    def _slice(self, reader: fx.Node, value: fx.Node, at: TokenDim) -> fx.Node:
        """Cut a whole value to the tokens of the slice."""
        (dim, parts), unit = at.cut, at.unit
        start, end = self.offset * unit, (self.offset + self.length) * unit
        tensor, node = info(value).val, self.copies[value]
        shape = tensor.shape
        if parts > 1:
            split = [*shape[:dim], parts, self.tokens * unit, *shape[dim + 1 :]]
            tensor = tensor.reshape(split)
            node = self._call(reader, value, tensor, aten.reshape.default, node, split)
        along = dim + (parts > 1)
        tensor = tensor.narrow(along, start, end - start)
        node = self._call(reader, value, tensor, aten.slice.Tensor, node, along, start, end)
        if parts > 1:
            joined = [*shape[:dim], parts * (end - start), *shape[dim + 1 :]]
            tensor = tensor.reshape(joined)
            node = self._call(reader, value, tensor, aten.reshape.default, node, joined)
        return node

    def _attend(
        self, node: fx.Node, inputs: tuple[fx.Node, ...], cuts: Sequence[BatchDim | None]
    ) -> None:
        """Replace causal attention by that of the slice."""
        call, ndim = OperatorCall(node), info(node).val.ndim
        shapes = call.shapes[:3]
        is_own = all(cut == BatchDim(ndim - 2) for cut in cuts[:3])
        if call["attn_mask"] is not None or not is_own or {s[-2] for s in shapes} != {self.tokens}:
            self._refuse_meeting(node)
        if len({shape[:-3] for shape in shapes}) > 1 or any(len(shape) < 3 for shape in shapes):
            self._refuse(node, f"{operator_of(node)} has keys and queries of unlike shapes")
        buffers = [
            self._buffer(node, inputs[1 + at % 2], name)
            for at, name in enumerate(SequenceTensors._fields)
        ]
        query, key, value = (self.copies[each] for each in inputs[:3])
        drawn = self.copies[call["drawn"]] if "drawn" in call.arguments else None
        status = BatchDim(ndim - 2)
        self.results[node], self.status[node.name] = (status,), status
        copy = self.graph.create_node(
            "call_function",
            sliced_attention,
            (query, key, value, *buffers, drawn, call.get("place"), call["dropout_p"], self.offset),
            {"scale": call["scale"], "enable_gqa": call["enable_gqa"]},
            node.name,
        )
        copy.meta = dict(node.meta)
        info(copy).val = self._part(info(node).val, status)
        self.copies[node] = copy

    def _buffer(self, node: fx.Node, like: fx.Node, kind: str) -> fx.Node:
        """Return a placeholder for keys or values of the whole sequence, or their gradients."""
        first_call = next((n for n in self.graph.nodes if n.op == "call_function"), None)
        assert first_call is not None
        name, place = name_beside(node, kind)
        with self.graph.inserting_before(first_call):
            buffer = self.graph.placeholder(name)
        value = info(like).val
        dtype = wide_of(value.dtype) if kind.endswith("gradients") else value.dtype
        buffer.meta = dict(node.meta)
        info(buffer).update(
            val=value.new_empty(value.shape, dtype=dtype), differentiable=False, learns=False
        )
        info(buffer).block = place
        self.buffers.append(name)
        return buffer

    def _placed(self, node: fx.Node, argument: object, status: Status) -> object:
        """Return an argument, a place of random numbers as that of the slice."""
        if not isinstance(argument, DrawPlace) or not isinstance(status, BatchDim):
            return argument
        at = TokenDim.at(info(node).values[0], status.dim, status.parts, self.tokens)
        if status.parts > 1 or at.unit > 1:
            self._refuse(node, "random numbers of tokens that are joined with other dims")
        if status.dim >= len(argument.shape) or argument.shape[status.dim] == 1:
            return argument
        return argument._replace(sliced=(status.dim, self.offset))

    def _shape(self, value: Tensor, dim: int) -> list[int]:
        shape = list(value.shape)
        shape[dim] = shape[dim] * self.length // self.tokens
        return shape

    def _piece(self, value: Tensor, dim: int) -> Tensor:
        whole = value.stride(dim) * value.shape[dim]
        outside = [bool(whole) and stride >= whole for stride in value.stride()]
        strides = [
            stride * self.length // self.tokens if out else stride
            for stride, out in zip(value.stride(), outside)
        ]
        return value.new_empty_strided(self._shape(value, dim), strides)

    def _refuse_unruled(self, node: fx.Node) -> NoReturn:
        reason = f"{operator_of(node)} has no rule that says how it treats tokens"
        self._refuse(node, reason, f"{rule_for(node)}; or {REMEDY}")

    def _refuse_meeting(self, node: fx.Node) -> NoReturn:
        is_attention = node.target in ATTENTION
        reason = f"{operator_of(node)} reads several tokens together"
        self._refuse(node, reason, CAUSAL if is_attention else REMEDY)
