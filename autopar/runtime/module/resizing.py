"""Resizing: one program runs calls of other sizes than the one that it was captured for.

    pm.step(ids[:, :8]); pm.step(ids[:, :9]); pm.step(ids[:, :12])     # three captures, one form
    pm.step(ids[:, :16])                                               # no capture

Calls of three sizes made programs that are laid side by side. Where their graphs, layouts and calls
differ in whole numbers alone that lie on a line over the size, the last of them runs other sizes,
with its numbers put in. Before it first runs a size, forward is rehearsed at that size
(`capture/rehearsal.py`): all that it calls has to be what the lines say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.rehearsal import Rehearsal
from autopar.plans.runtime_program import RuntimeProgram
from autopar.runtime.backends.backend import Backend
from autopar.runtime.execution.call_numbers import (
    Affine,
    NumberForms,
    SetSize,
    Unalike,
    filled,
    forms_in,
)
from autopar.runtime.execution.sized_constants import sized_constants, sized_facts
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType

Inputs = dict[str, Tensor]
Dim = tuple[int, int]  # number of a flat input, and a dim of it
# Of each dim of a flat input how its size follows; None: it does not vary.
SizeForms = Mapping[int, tuple[Affine | None, ...]]
ALIKE = 3  # programs that show how numbers follow the size
_LEAST = 2  # torch takes sizes of 0 and 1 to be special


@dataclass(frozen=True)
class SizedForm:
    """A form of a running program, at one size of its inputs."""

    program: RuntimeProgram
    backend: Backend


class Resizing:
    """Runs a program at other sizes than its own."""

    def __init__(self, members: Sequence[SizedForm]) -> None:
        """Lay programs of several sizes side by side; raise `Unalike` where they differ in more.

        The last member is the one that runs."""
        last = members[-1]
        wholes = [member.program.original for member in members]
        _require_plain(wholes)
        self._program, self._backend = last.program, last.backend
        if self._program.schedule.slices:
            raise Unalike("each slice of tokens has a program of its own")
        shapes = [_shapes(whole) for whole in wholes]
        self.root, self._inputs = _input_forms(shapes)
        sizes = [shape[self.root[0]][self.root[1]] for shape in shapes]
        self.size = self.own_size = sizes[-1]  # that the backend is set to, and was made for
        self._forms = NumberForms(sizes)
        self._conditions: list[tuple[Affine, int]] = []  # what a number is a multiple of
        self._setters = self._lay_side_by_side(members)
        self._constants = sized_constants([m.program.captured for m in members], self._forms)
        self._facts = sized_facts(wholes, self._forms)
        self._rehearsal = Rehearsal(wholes[-1])
        self._expected = self._record_of([_leaves(whole) for whole in wholes])
        self._verdicts: dict[int, bool] = {}  # whether a size is served
        self._own_shapes = self._program.whole_shapes
        self._varying = {
            name: [
                known if form is None else form
                for known, form in zip(self._own_shapes[name], forms)
            ]
            for at, forms in self._inputs.items()
            if (name := wholes[-1].inputs[at]) is not None
        }

    def bind(self, leaves: Sequence[Any]) -> Inputs | None:
        """Return the inputs of a call of another size, by placeholder; None if it is not served.

        `leaves`: its flat arguments."""
        at, dim = self.root
        root = leaves[at]
        if not isinstance(root, Tensor) or root.ndim <= dim:
            return None
        size = root.shape[dim]
        shapes = self._own_shapes | {
            name: tuple(form if isinstance(form, int) else form(size) for form in forms)
            for name, forms in self._varying.items()
        }
        inputs = self._program.bind_flat(leaves, shapes)
        if inputs is not None and size not in self._verdicts:
            self._verdicts[size] = self._serves(size, leaves)
        return inputs if self._verdicts.get(size) else None

    def size_of(self, inputs: Inputs) -> int:
        """Return the size of a call that is served, from its inputs by placeholder."""
        name = self._program.original.inputs[self.root[0]]
        assert name is not None
        return inputs[name].shape[self.root[1]]

    def set_size(self, size: int) -> None:
        """Have the backend run calls of this size from now on."""
        if size == self.size:
            return
        self.size = size
        for set_size in self._setters:
            set_size(size)
        for name, recipe in self._constants.items():
            value = recipe.value(size)
            for stage in self._backend.stages.values():
                stage.graph_run.set_constant(name, value)

    def _serves(self, size: int, leaves: Sequence[Any]) -> bool:
        """Return whether the program is the one of a call of another size, with its numbers."""
        if size < _LEAST:
            return False
        if not all(form.fits(size) and form(size) >= 0 for form in self._forms.seen):
            return False
        if any(form(size) % degree or not form(size) for form, degree in self._conditions):
            return False
        if not all(fact.holds(size) for fact in self._facts):
            return False
        record = self._rehearsal.run(leaves, is_known=False)
        calls, numbers = self._expected
        return record is not None and record.is_same(calls, filled(numbers, size))

    def _record_of(self, calls: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
        """Return the record of forward in these calls, its numbers as a template."""
        records = [self._rehearsal.run(leaves) for leaves in calls]
        known = [record for record in records if record is not None]
        if len(known) < len(records) or not all(
            record.is_same(known[-1].calls, record.numbers) for record in known
        ):
            raise Unalike("ways that forward takes")
        numbers = [record.numbers for record in known]
        return known[-1].calls, NumberForms(self._forms.sizes).of(numbers)

    def _lay_side_by_side(self, members: Sequence[SizedForm]) -> list[SetSize]:
        setters: list[SetSize] = []
        backends = [member.backend for member in members]
        if any(member.backend.local_inputs for member in members):
            raise Unalike("inputs in slices")
        if len({tuple(backend.stages) for backend in backends}) > 1:
            raise Unalike("stages")
        setters += self._totals([member.program for member in members])
        types = self._types([member.program.graph for member in members])
        for index in backends[-1].stages:
            stages = [backend.stages[index].stage for backend in backends]
            if any(stage.update is not None for stage in stages):
                raise Unalike("buffers that change at the end of a step")
            types |= self._types([stage.graph for stage in stages])
            runs = [backend.stages[index].graph_run for backend in backends]
            setters.append(runs[-1].resizable(runs[:-1], self._forms))
        resized = self._backend.resized

        def set_types(size: int) -> None:
            for name, (type_, shape) in types.items():
                resized[name] = replace(type_, shape=tuple(filled(shape, size)))

        return [*setters, set_types]

    def _shape_form(self, node: fx.Node, types: Sequence[TensorType]) -> tuple[Any, ...]:
        """Return the shape of a value as a template; what is cut keeps pieces of one size."""
        self._forms.of([(type_.dtype, type_.layout) for type_ in types])
        shape = self._forms.of([tuple(type_.shape) for type_ in types])
        for dim, axes in enumerate(types[-1].layout.dims):
            if axes and isinstance(shape[dim], Affine):
                degree = self._backend.mesh.degree(axes)
                if any(type_.shape[dim] % degree for type_ in types):
                    raise Unalike(f"uneven pieces of {node.name}")
                self._conditions.append((shape[dim], degree))
        return shape

    def _totals(self, programs: Sequence[RuntimeProgram]) -> list[SetSize]:
        """Return how the totals that micro-batches need of a batch take another size."""
        batches = [program.batches for program in programs]
        present = [cut for cut in batches if cut is not None]
        cuts = [(cut.count, dict(cut.cut), cut.once, cut.joins) for cut in present]
        if present and (len(present) < len(batches) or any(cut != cuts[-1] for cut in cuts)):
            raise Unalike("micro-batches")
        counts = [cut.counts for cut in present if cut.counts is not None]
        varying: list[tuple[fx.Node, Any]] = []
        for row in self._forms.pair(counts) if len(counts) == len(programs) else ():
            read = [program.original.constants.get(n.name) for program, n in zip(programs, row)]
            if row[-1].op == "placeholder" and any(forms_in(self._forms.of(read))):
                raise Unalike("totals of micro-batches")
            template = self._forms.of([(node.target, node.args, node.kwargs) for node in row])
            if any(forms_in(template)):
                varying.append((row[-1], template))

        def set_totals(size: int) -> None:
            for node, template in varying:
                _, node.args, node.kwargs = filled(template, size)

        return [set_totals]

    def _types(self, graphs: Sequence[fx.Graph]) -> dict[str, Any]:
        """Return the types, and shapes as templates, of values whose shapes vary, by node."""
        types_by_node: dict[str, Any] = {}
        for row in self._forms.pair(graphs):
            if "type" not in row[-1].meta:
                continue
            columns = [info(node).types for node in row]
            if len({*map(len, columns)}) > 1:
                raise Unalike(f"results of {row[-1].name}")
            for types in zip(*columns):
                shape = self._shape_form(row[-1], types)
                if any(forms_in(shape)):
                    types_by_node[row[-1].name] = types[-1], shape
        return types_by_node


def _require_plain(programs: Sequence[Captured]) -> None:
    """Raise where a program leaves more behind than its outputs, or gives numbers."""
    for program in programs:
        if program.effects or program.writes or program.contents or program.bounds:
            raise Unalike("what forward leaves behind")
        if program.decisions or program.numbers:
            raise Unalike("what forward decides by values")
    plain = [[leaf for leaf in p.output_leaves if not isinstance(leaf, fx.Node)] for p in programs]
    structures = [
        (p.input_spec, p.output_spec, [*p.mutations], p.inputs, p.caches) for p in programs
    ]
    if any(p != plain[-1] for p in plain) or any(s != structures[-1] for s in structures):
        raise Unalike("arguments or outputs")


def _leaves(program: Captured) -> list[Any]:
    """Return the flat inputs of the call that was captured."""
    example = program.example
    return pytree.tree_leaves((example.args, dict(example.kwargs)))


def _shapes(program: Captured) -> list[tuple[int, ...]]:
    """Return the shape of every flat input; () of one that is no tensor."""
    return [tuple(x.shape) if isinstance(x, Tensor) else () for x in _leaves(program)]


def _input_forms(shapes: Sequence[Sequence[tuple[int, ...]]]) -> tuple[Dim, SizeForms]:
    """Return the dim that is the size, and by it the forms of all dims that vary."""
    if len({tuple(map(len, shape)) for shape in shapes}) > 1:
        raise Unalike("dims of inputs")
    dims = [
        (at, dim)
        for at, rows in enumerate(zip(*shapes))
        for dim, sizes in enumerate(zip(*rows))
        if len({*sizes}) > 1
    ]
    for root in dims:
        sizes = [shape[root[0]][root[1]] for shape in shapes]
        if len({*sizes}) < len(sizes):
            continue
        forms = {
            (at, dim): Affine.through(sizes, [shape[at][dim] for shape in shapes])
            for at, dim in dims
        }
        if all(form is not None and form.divisor == 1 for form in forms.values()):
            inputs = {at for at, _ in dims}
            return root, {
                at: tuple(forms.get((at, dim)) for dim in range(len(shapes[-1][at])))
                for at in inputs
            }
    raise Unalike("sizes that do not follow one of them")
