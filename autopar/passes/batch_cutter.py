"""Batch cutter: what each value is to micro-batches, and the program of one.

`microbatches.cut_batch` drives it: one live operator after another, by the rules of operators.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Hashable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.gradients import mark_learning
from autopar.capture.listing import operator_of, rule_for
from autopar.errors import InvalidInput
from autopar.layout import Layout, parts_of
from autopar.mesh import Mesh
from autopar.passes.flow import ancestors, copy_subgraph
from autopar.program.equality import number_calls
from autopar.search.propagation import propagate
from autopar.strategies import OperatorCall, localize_arguments, tensor_inputs, traits_of
from autopar.strategies.kernels.keyed_draws import DrawPlace
from autopar.strategies.node_info import info, name_beside
from autopar.strategies.results import has_results, is_result, maker, result_index
from autopar.strategies.rules.indexing import is_part
from autopar.tensor_type import TensorType
from autopar.text.units import counted

aten = torch.ops.aten
AXIS = "microbatch"
REMEDY = (
    "microbatches=1, in a pipeline too; or a loss that is a sum or mean over samples (that of "
    'ap.nn.MoE is one with over="sequence")'
)
TABLE = "give the table as an input, or microbatches=1"
APART = "hand over the parts as inputs, joined in forward: torch.cat([a, b]); or microbatches=1"
JOINED = "parts of equal numbers of rows, or multiples of the batch; or microbatches=1"
SAME, OWN, SUM = "the same for all", "a micro-batch's own", "a sum"


class BatchDim(NamedTuple):
    """Describe a dim that micro-batches cut, as a whole or each of its parts."""

    dim: int
    parts: int = 1

    @classmethod
    def of(cls, layout: Layout) -> BatchDim | None:
        """Read what micro-batches cut of a tensor; `None` if they leave it whole."""
        dim = layout.dim_of(AXIS)
        return None if dim is None else cls(dim, parts_of(layout.dims[dim]) or 1)

    def layout(self, ndim: int) -> Layout:
        """Return the layout over micro-batches of a tensor of `ndim` dims."""
        cut = (f"/{self.parts}", AXIS) if self.parts > 1 else (AXIS,)
        return Layout.replicated(ndim).with_dim(self.dim, cut)

    def shares(self, value: Tensor, count: int) -> list[Tensor]:
        """Return the piece of each of `count` micro-batches."""
        sizes = (self.parts, count, value.shape[self.dim] // (self.parts * count))
        blocks = value.unflatten(self.dim, sizes).unbind(self.dim + 1)
        return [share.flatten(self.dim, self.dim + 1) for share in blocks]


Status = BatchDim | str  # SAME, OWN (statistics), SUM, or the dim that is cut


class InseparableBatch(InvalidInput):
    """Refuse micro-batches because samples meet before the loss."""


class BatchCutter:
    """Hold what each value is across micro-batches, and the program of one as it grows."""

    rule = "the loss of a batch in micro-batches is the sum of their shares"
    remedy = REMEDY

    def __init__(
        self, captured: Captured, count: int, *, with_outputs: bool = False, keeps: bool = True
    ) -> None:
        """Start with the inputs. `with_outputs`: give all outputs, not only the loss; `keeps`: also
        give what forward leaves behind in Python."""
        self.captured, self.count, self.with_outputs = captured, count, with_outputs
        self.mesh = Mesh(**{AXIS: count})
        results: Any = captured.graph.output_node().args[0]
        others = len(results) - len(captured.mutations)
        self.loss: fx.Node | None = None
        with suppress(InvalidInput) if with_outputs else nullcontext():  # calls have no loss
            self.loss = results[captured.loss_index]
        self.outputs: tuple[fx.Node, ...] = results[:others]
        if not with_outputs:
            self.outputs = (self.loss, *(captured.kept if keeps else ()))
        self.live = ancestors([*self.outputs, *_mutated(captured)])
        self.tables: list[fx.Node] = []  # refused last, when it helps to hand them over as inputs
        self.status: dict[str, Status] = {}
        self.results: dict[fx.Node, tuple[Status, ...]] = {}  # of each result of an operator
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.constants = dict(captured.constants)
        self.summed: dict[fx.Node, fx.Node] = {}  # summed value -> placeholder of its total
        self.parts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}  # same for all -> its share
        self.names: set[str] = set()  # of operators that are put between others
        self.pieces: dict[Hashable, Tensor] = {}  # of one micro-batch, of tensors that are alike
        self.read: dict[fx.Node, fx.Node] = {}  # what the operator at hand reads instead
        self._enter_placeholders()
        self.live -= set(self.copies)

    def _enter_placeholders(self) -> None:
        """Find what is cut of inputs and constants, and how each operator then works."""
        decisions = propagate(self.captured, self.mesh) if self.count > 1 else None
        self.strategies = decisions.strategies if decisions else {}
        for node in self.captured.graph.find_nodes(op="placeholder"):
            layout = decisions.placeholders[node.name] if decisions else Layout()
            self._enter(node, BatchDim.of(layout))

    def visit(self, node: fx.Node) -> None:
        """Find the status of one live operator, and copy it."""
        if is_result(node):
            status = self.status[node.name] = self.results[maker(node)][result_index(node)]
            self._copy(node, (status,), node.args, {})
            return
        inputs = tensor_inputs(node)
        self.read.clear()
        values = info(node).values
        statuses = self._given(node, inputs) if self.count > 1 else (SAME,) * len(values)
        if statuses == (SUM,) and traits_of(node).counts and self._of_inputs(node):
            self._total(node)
            self.status[node.name], self.copies[node] = SAME, self.summed[node]
            return
        self.results[node] = statuses
        if not has_results(node):
            self.status[node.name] = statuses[0]
        types = tuple(
            TensorType.of(value, _layout(value, status))
            for value, status in zip(values, statuses)
            if isinstance(value, Tensor)
        )
        args, kwargs = localize_arguments(node, types, self.mesh, 0)
        if (place := traits_of(node).count) is not None:
            args = (*args[:place], args[place] // self.count, *args[place + 1 :])
        if isinstance(statuses[0], BatchDim):
            at, parts = statuses[0]
            args = tuple(
                a.in_batches(at, self.count, parts) if isinstance(a, DrawPlace) else a for a in args
            )
        if statuses == (SUM,):
            args, kwargs = self._numbers_shared(node, args, kwargs)
        self._copy(node, statuses, args, kwargs)

    def finish(self) -> Captured:
        """Return the program of one micro-batch."""
        loss = self.loss
        if self.count > 1 and loss is not None and self.status[loss.name] != SUM:
            self._refuse(loss, "the loss is not a sum over the samples of the batch")
        mutated = _mutated(self.captured)
        for node in mutated if self.count > 1 else ():
            if self.status[node.name] not in (SAME, OWN):
                reason = "a buffer is changed by more than one micro-batch's own statistics"
                self._refuse(node, reason)
        for node in self.tables:
            self._refuse_table(node)
        results = tuple(self.copies[node] for node in (*self.outputs, *mutated))
        output = self.graph.output(results)
        info(output).end(results)
        mark_learning(self.graph, [] if loss is None else [self.outputs.index(loss)])
        for node in reversed(list(self.graph.nodes)):  # the terms of totals have no reader left
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)
        for node in self.graph.nodes:  # nothing else is differentiated
            info(node).differentiable = info(node).learns
        mutations = {
            buffer: self.copies[node].name for buffer, node in zip(self.captured.mutations, mutated)
        }
        spec = self.captured.output_spec if self.with_outputs else pytree.tree_structure(0)
        leaves = self.captured.output_leaves if self.with_outputs else (self.loss,)
        return replace(
            self.captured,
            graph=self.graph,
            constants=self.constants,
            classes=number_calls(self.graph),
            mutations=mutations,
            output_spec=spec,
            output_leaves=tuple(
                self.copies[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves
            ),
        )

    def _refuse(self, node: fx.Node, reason: str, remedy: str | None = None) -> NoReturn:
        raise InseparableBatch(
            self.rule,
            got=f"{reason} ({node.name} in {info(node).module or 'the model'})",
            remedy=remedy or self.remedy,
            source=info(node).source,
        )

    def _refuse_table(self, node: fx.Node) -> NoReturn:
        shape, status = tuple(info(node).val.shape), self.status[node.name]
        assert isinstance(status, BatchDim)
        table = f"a table {shape} over {counted(shape[status.dim], 'sample')}"
        self._refuse(node, f"{table} is a constant that differs from sample to sample", TABLE)

    def joins(self) -> tuple[Status, ...]:
        """Return the status of each output: how those of micro-batches make that of the batch."""
        joins = tuple(self.status[node.name] for node in self.outputs)
        for node, status in zip(self.outputs, joins):
            if status == OWN and node is not self.loss:
                self._refuse(node, "an output is made of a micro-batch's own statistics alone")
        return joins

    def once(self) -> frozenset[str]:
        """Return the buffers whose new value is the same for all micro-batches.
        Not so a batch norm's count of changes: its statistics change with each micro-batch."""
        statuses = {
            buffer: self.status[node.name]
            for buffer, node in zip(self.captured.mutations, _mutated(self.captured))
        }
        norms = {buffer.rpartition(".")[0] for buffer, status in statuses.items() if status == OWN}
        return frozenset(buffer for buffer in statuses if buffer.rpartition(".")[0] not in norms)

    def counts(self) -> fx.Graph | None:
        """Return the graph from the batch's inputs to the totals; `None` without totals."""
        if not self.summed:
            return None
        graph = copy_subgraph(self.captured.graph, self.summed)
        copies = {node.name: node for node in graph.nodes}
        graph.output({total.name: copies[node.name] for node, total in self.summed.items()})
        return graph

    def _enter(self, node: fx.Node, cut: BatchDim | None) -> None:
        name, value = node.name, info(node).val
        is_kept = name in self.captured.parameters or name in self.captured.buffers
        if cut is not None and is_kept and node in self.live:
            self._refuse(node, "a parameter or buffer would be cut along the batch")
        status: Status = SAME if cut is None or is_kept else cut
        if name in self.constants and isinstance(status, BatchDim):
            pieces = status.shares(self.constants[name], self.count)
            if not all(torch.equal(pieces[0], piece) for piece in pieces[1:]):
                self.tables.append(node)
            self.constants[name] = pieces[0].clone()
        self.status[name] = status
        copy = self.graph.node_copy(node)
        copy.name, copy.meta = name, {**node.meta, "val": self._part(value, status)}
        self.copies[node] = copy

    def _given(self, node: fx.Node, inputs: tuple[fx.Node, ...]) -> tuple[Status, ...]:
        """Return the status of each result of an operator."""
        count = len(info(node).values)
        input_statuses = [self.status[value.name] for value in inputs]
        strategy, rule = self.strategies.get(node.name), self.captured.rules[node.name]
        if rule is None or strategy is None:
            if all(status in (SAME, OWN) for status in input_statuses):
                return (OWN if OWN in input_statuses else SAME,) * count
            reason = f"{operator_of(node)} has no rule that says how it treats the batch"
            self._refuse(node, reason, f"{rule_for(node)}; or microbatches=1")
        if not any(AXIS in axes for _, axes in strategy.cuts):
            return (self._uncut(node, inputs, input_statuses),) * count
        if rule.kernel(strategy) is not None:
            self._refuse(node, f"{operator_of(node)} looks at the place of a sample in the batch")
        signature = rule.signature(strategy)
        for value, layout, status in zip(inputs, signature.inputs, input_statuses):
            wanted = BatchDim.of(layout)
            if status == SUM and wanted is None:
                self._total(value)
            elif wanted is None and isinstance(status, BatchDim):
                reason = f"{operator_of(node)} lets samples of different micro-batches meet"
                self._refuse(node, reason)
            elif wanted is not None and status != wanted:
                self._refuse(node, f"{value.name} holds the whole batch where a part is needed")
        lacking = OWN if traits_of(node).statistics else SUM
        return tuple(BatchDim.of(layout) or lacking for layout in signature.outputs)

    def _uncut(self, node: fx.Node, inputs: tuple[fx.Node, ...], statuses: list[Status]) -> Status:
        """Return the status of what an operator makes of values without the batch as a dim."""
        if any(isinstance(status, BatchDim) for status in statuses):
            reason = f"{operator_of(node)} needs all samples of the batch together"
            self._refuse(node, reason, _remedy_of(node))
        rule = self.captured.rules[node.name]
        assert rule is not None
        summed = frozenset(index for index, status in enumerate(statuses) if status == SUM)
        if summed not in rule.passes:
            for index in summed:
                if self._of_inputs(inputs[index]):
                    self._total(inputs[index])
            summed = frozenset(i for i in summed if inputs[i] not in self.read)
        if not summed:
            return OWN if OWN in statuses else SAME
        terms = self._terms(node, summed)
        if terms is None or OWN in statuses:
            self._refuse(node, f"{operator_of(node)} is not linear in a sum over the batch")
        for index in terms - summed:
            self._share(node, inputs[index])
        return SUM

    def _terms(self, node: fx.Node, summed: frozenset[int]) -> frozenset[int] | None:
        """Return the inputs of whose sums an operator is linear, or `None`; `summed` are of them.

        Inputs that are the same for all become sums by their shares, as does a number that is
        added: this takes fractions."""
        rule = self.captured.rules[node.name]
        assert rule is not None
        if summed in rule.passes:
            return summed
        if not info(node).val.dtype.is_floating_point:
            return None
        all_inputs = frozenset(range(len(rule.inputs)))
        passes = [*rule.passes, all_inputs] if rule.added_numbers or rule.rounds else rule.passes
        return next((members for members in passes if summed <= members), None)

    def _numbers_shared(
        self, node: fx.Node, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a term of the sum, with its part of a number that is added."""
        rule = self.captured.rules[node.name]
        if rule is None or not rule.added_numbers:
            return args, kwargs
        declared = node.target._schema.arguments  # type: ignore[union-attr]
        shares = {a.name: self.count if a.name in rule.added_numbers else None for a in declared}
        parts = [v if n is None else v / n for v, n in zip(args, shares.values())]
        named = {k: v if shares[k] is None else v / shares[k] for k, v in kwargs.items()}
        return tuple(parts), named

    def _of_inputs(self, value: fx.Node) -> bool:
        """Return whether a value is made of the inputs and of constants, without gradient."""
        known = {*self.captured.constants, *self.captured.inputs}
        return not info(value).differentiable and all(
            node.op != "placeholder" or node.name in known for node in ancestors([value])
        )

    def _total(self, value: fx.Node) -> None:
        """Let the readers of a summed value have its sum over the whole batch."""
        if value in self.summed:
            self.read[value] = self.summed[value]
            return
        if not self._of_inputs(value):
            self._refuse(
                value, "a sum over the batch that is not made of the inputs alone is used again"
            )
        first_call = next((n for n in self.graph.nodes if n.op == "call_function"), None)
        assert first_call is not None
        with self.graph.inserting_before(first_call):
            name, place = name_beside(value, "total")
            total = self.graph.placeholder(name)
        total.meta = {**value.meta, "block": place}
        self.summed[value] = self.read[value] = total

    def _share(self, node: fx.Node, value: fx.Node) -> None:
        """Divide a term that all micro-batches have, as a regulariser: each adds its part.
        It is divided in the precision of the sum, if that is the finer one."""
        term, original = self.read.get(value, self.copies[value]), info(value).val
        dtype = torch.promote_types(original.dtype, info(node).val.dtype)
        if (value, dtype) not in self.parts:
            if original.dtype != dtype:
                term = self._call(node, value, original.to(dtype), aten.to.dtype, term, dtype)
            self.parts[value, dtype] = self._call(
                node, value, info(term).val, aten.div.Tensor, term, self.count
            )
        self.read[value] = self.parts[value, dtype]

    def _call(
        self, reader: fx.Node, like: fx.Node, value: Tensor, target: Any, *args: Any
    ) -> fx.Node:
        name, place = name_beside(reader, target.overloadpacket.__name__, self.names)
        self.names.add(name)
        call = self.graph.create_node("call_function", target, args, name=name)
        call.meta = {**like.meta, "val": value, "block": place}
        return call

    def _copy(
        self, node: fx.Node, statuses: tuple[Status, ...], args: tuple, kwargs: dict[str, Any]
    ) -> None:
        arguments = ChainMap(self.read, self.copies)
        new_args, new_kwargs = fx.map_arg((args, kwargs), arguments.__getitem__)
        # A shape in place of its own arguments is that of a reshape.
        is_reshape = traits_of(node).as_reshape and args is not node.args
        target = torch.ops.aten.reshape.default if is_reshape else node.target
        copy = self.graph.create_node("call_function", target, new_args, new_kwargs, node.name)
        copy.meta = dict(node.meta)
        parts = tuple(map(self._part, info(node).values, statuses))
        info(copy).update(val=parts if has_results(node) else parts[0])
        self.copies[node] = copy

    def _part(self, value: Any, status: Status) -> Any:
        """Return the value of one micro-batch."""
        if not isinstance(status, BatchDim):
            return value
        key = tuple(value.shape), value.stride(), value.dtype, value.device, status.dim
        if key not in self.pieces:
            self.pieces[key] = self._piece(value, status.dim)
        return self.pieces[key]

    def _piece(self, value: Tensor, dim: int) -> Tensor:
        shape, whole = list(value.shape), value.stride(dim) * value.shape[dim]
        shape[dim] //= self.count
        outside = [bool(whole) and stride >= whole for stride in value.stride()]
        # Which dims share memory, and which are apart, decides what is a view.
        strides = [s // self.count if out else s for s, out in zip(value.stride(), outside)]
        return value.new_empty_strided(shape, strides)


def _layout(value: Tensor, status: Status) -> Layout:
    if isinstance(status, BatchDim):
        return status.layout(value.ndim)
    return Layout.replicated(value.ndim)


def _mutated(captured: Captured) -> list[fx.Node]:
    results = captured.graph.output_node().args[0]
    return list(results[len(results) - len(captured.mutations) :])  # type: ignore[arg-type,index]


def _remedy_of(node: fx.Node) -> str:
    """Return the remedy for an operator that reads several samples at once."""
    if node.target is aten.cat.default:
        return JOINED
    if node.target is aten.slice.Tensor:
        call = OperatorCall(node)
        whole, size = (sizes[call.dim(call["dim"])] for sizes in (call.shapes[0], call.shape))
        if whole % size == 0 and is_part(call, whole // size):
            return APART
    return REMEDY
