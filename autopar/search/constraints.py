"""Constraints: what the user's annotations ask, resolved to layouts on one mesh.

Numbers of slices become axes here: a number takes the first axes of the mesh, still free in its
call, whose sizes multiply to it. Annotations of a function's or a leaf module's inputs *bind* the
one operator that reads them; all others fix a value and leave its readers free.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn

from autopar.capture.annotations import marked_modules, parameter_annotations, stage_pins
from autopar.capture.captured import Captured
from autopar.capture.marker import ANNOTATE, Annotation, Entry
from autopar.errors import InvalidInput
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.recompute import Recompute
from autopar.strategies import Rule, Strategy, rule_of, tensor_inputs
from autopar.strategies.node_info import info
from autopar.text.source_lines import frames_to_caller

Marked = tuple[fx.Node, Annotation]  # a marker, and what it says


@dataclass(frozen=True)
class LayoutConstraint:
    """Fix the layout of one value, with the source line that asked for it."""

    layout: Layout
    source: str


@dataclass(frozen=True)
class Constraints:
    """Hold all layouts that annotations fix."""

    values: Mapping[str, LayoutConstraint] = field(default_factory=dict)  # by marker node
    parameters: Mapping[str, LayoutConstraint] = field(default_factory=dict)  # by name in the model
    inputs: Mapping[str, LayoutConstraint] = field(default_factory=dict)  # by placeholder
    # by operator and input
    bound: Mapping[str, Mapping[int, LayoutConstraint]] = field(default_factory=dict)

    # An axis that cuts the batch and no parameter, and by operator the factors that it cuts.
    batch_axis: str = ""
    batch_cuts: Mapping[str, frozenset[str]] = field(default_factory=dict)

    # Regions that are recomputed, by the names of capture/regions.py.
    recompute: Mapping[str, Recompute] = field(default_factory=dict)

    @property
    def fixed(self) -> dict[str, Layout]:
        """Return the layout of each marker."""
        return {name: constraint.layout for name, constraint in self.values.items()}

    @property
    def axes(self) -> frozenset[str]:
        """Return every axis that some annotation names."""
        constraints = [*self.values.values(), *self.parameters.values(), *self.inputs.values()]
        return frozenset(axis for constraint in constraints for axis in constraint.layout.axes)

    def agrees(self, operator: str, strategy: Strategy) -> bool:
        """Return whether the axis that cuts the batch cuts nothing else of an operator."""
        cut = {factor for factor, axes in strategy.cuts if self.batch_axis in axes}
        return cut == self.batch_cuts.get(operator, cut)


def read_constraints(
    captured: Captured,
    mesh: Mesh,
    parameters: Mapping[str, Sequence[Annotation]],
    known_layouts: Mapping[str, Layout] | None = None,
) -> Constraints:
    """Resolve the markers of a graph and the annotations of parameters.
    `known_layouts`: those of markers that another program has as well."""
    known_layouts = known_layouts or {}
    calls: dict[int, list[Marked]] = {}
    for node, annotation in markers_of(captured):
        calls.setdefault(annotation.call, []).append((node, annotation))
    values: dict[str, LayoutConstraint] = {}
    bound: dict[str, dict[int, LayoutConstraint]] = {}
    for group in calls.values():
        input_markers = [pair for pair in group if pair[1].role in ("input", "leaf")]
        operator = _only_reader([node for node, _ in input_markers]) if input_markers else None
        rule = rule_of(operator) if operator is not None else None
        if all(node.name in known_layouts for node, _ in group):
            for node, annotation in group:
                values[node.name] = LayoutConstraint(known_layouts[node.name], annotation.source)
            bound |= _bound_as_known(input_markers, operator, values, mesh)
        elif operator is not None and rule is not None:
            resolved = _bind(operator, rule, input_markers, mesh)
            bound[operator.name] = resolved
            arguments = tensor_inputs(operator)
            for position, constraint in resolved.items():
                values[arguments[position].name] = constraint
        for node, annotation in group:
            if node.name not in values:
                layout = _resolve(annotation, tuple(info(node).val.shape), mesh)
                values[node.name] = LayoutConstraint(layout, annotation.source)
                for reader in node.users if annotation.role == "leaf" else ():
                    if reader.target is not ANNOTATE and rule_of(reader) is not None:
                        position = tensor_inputs(reader).index(node)
                        bound.setdefault(reader.name, {})[position] = values[node.name]
    return Constraints(values, _parameters(captured, mesh, parameters), bound=bound)


def require_used(model: nn.Module, captured: Captured, mode: str, stages: int | None) -> None:
    """Refuse annotations that no plan keeps.
    These are layouts with `mode="data"`, those of parameters that the model no longer has, of
    modules that forward does not run or of tensors that nothing reads, and stages without a
    pipeline. `stages`: how many there are to be; `None` if that is open."""
    marked, parameters = markers_of(captured), parameter_annotations(model)
    if mode == "data":
        marks = [annotation for _, annotation in marked]
        for annotation in itertools.chain(marks, *parameters.values()):
            raise InvalidInput(
                'mode="data" cuts the batch, and nothing else',
                got=f"an annotation of {annotation.what}",
                remedy='mode="propagate" keeps annotations, and cuts the batch over all other axes',
                source=annotation.source,
            )
    for pin in stage_pins(model) if stages == 1 else ():
        if pin.stage > 0:
            raise InvalidInput(
                "a module starts a stage of a pipeline",
                got=f"stage={pin.stage} for {pin.module}, and no pipeline",
                remedy="a mesh with an axis for the pipeline (ap.Mesh(pp=2)), or no stage=",
                source=pin.source,
            )
    names = {*captured.parameters.values(), *captured.tied}
    for name in sorted(parameters.keys() - names):
        raise InvalidInput(
            "what is annotated is a parameter of the model that is planned",
            got=f"{name}, which it no longer has",
            remedy="annotate the model as it is when it is planned",
            source=parameters[name][0].source,
        )
    for annotation, within in captured.unread_annotations.items():
        if within:  # which may return it, and who calls the module does not read it
            warnings.warn(
                f"{annotation.source}: an annotation of {annotation.what} in {within} says "
                "nothing: nothing reads its result",
                stacklevel=frames_to_caller(),
            )
            continue
        raise InvalidInput(
            "shard() returns the tensor that it annotates, and something reads that tensor",
            got=f"an annotation of {annotation.what} whose result nothing reads",
            remedy="x = ap.shard(x, ...), or no annotation",
            source=annotation.source,
        )
    used = {(info(node).module, annotation.source) for node, annotation in marked}
    for module, paths, source in marked_modules(model):
        if not any((path, source) in used for path in paths):
            raise InvalidInput(
                "a module whose inputs or outputs are annotated runs inside the model that is "
                "planned",
                got=f"{paths[0] or type(module).__name__}, which forward does not run",
                remedy="annotate a module that it runs, or remove the annotation",
                source=source,
            )


def _parameters(
    captured: Captured, mesh: Mesh, parameters: Mapping[str, Sequence[Annotation]]
) -> dict[str, LayoutConstraint]:
    shapes = {
        captured.parameters[node.name]: tuple(info(node).val.shape)
        for node in captured.graph.nodes
        if node.op == "placeholder" and node.name in captured.parameters
    }
    constraints: dict[str, LayoutConstraint] = {}
    for alias, marks in parameters.items():
        name = captured.tied.get(alias, alias)
        for annotation in marks:
            constraint = LayoutConstraint(
                _resolve(annotation, shapes[name], mesh), annotation.source
            )
            if constraints.setdefault(name, constraint).layout != constraint.layout:
                raise InvalidInput(
                    "two annotations of one parameter must agree",
                    got=f"{name}: {constraints[name].layout} at {constraints[name].source}\n"
                    f"and {constraint.layout} at {constraint.source}",
                    remedy="remove one of them",
                    source=constraint.source,
                )
    return constraints


def markers_of(captured: Captured) -> list[Marked]:
    """Return the markers of a graph, in order, each with its annotation."""
    nodes = (node for node in captured.graph.nodes if node.target is ANNOTATE)
    return [(node, Annotation.decode(node.args[1])) for node in nodes]


def _bound_as_known(
    inputs: Sequence[Marked],
    operator: fx.Node | None,
    values: Mapping[str, LayoutConstraint],
    mesh: Mesh,
) -> dict[str, dict[int, LayoutConstraint]]:
    """Return the known layouts of inputs by reader, if its sizes can be cut so."""
    bound: dict[str, dict[int, LayoutConstraint]] = {}
    for node, annotation in inputs:
        for reader in node.users if annotation.role == "leaf" or operator is not None else ():
            if reader.target is not ANNOTATE and rule_of(reader) is not None:
                position = tensor_inputs(reader).index(node)
                bound.setdefault(reader.name, {})[position] = values[node.name]
    rules = {user.name: rule_of(user) for node, _ in inputs for user in node.users}

    def can_be_cut(name: str) -> bool:
        rule = rules[name]
        return rule is not None and all(
            not axes or (len(dim) > 0 and rule.fits(dim[0], mesh.degree(axes)))
            for position, constraint in bound[name].items()
            for dim, axes in zip(rule.inputs[position], constraint.layout.dims)
        )

    return {name: layouts for name, layouts in bound.items() if can_be_cut(name)}


def _only_reader(markers: Sequence[fx.Node]) -> fx.Node | None:
    """Return the one operator that reads all markers of a call; `None` if there are several."""
    readers = {user for marker in markers for user in marker.users}
    if len(readers) != 1 or any(len(marker.users) != 1 for marker in markers):
        return None
    (reader,) = readers
    return reader if reader.op == "call_function" and reader.target is not ANNOTATE else None


def _bind(
    operator: fx.Node, rule: Rule, markers: Sequence[tuple[fx.Node, Annotation]], mesh: Mesh
) -> dict[int, LayoutConstraint]:
    """Resolve the annotations of all inputs of one operator together, factor by factor."""
    positions = {argument: index for index, argument in enumerate(tensor_inputs(operator))}
    chosen: dict[str, tuple[Entry, Annotation]] = {}
    for node, annotation in markers:
        shape = info(node).val.shape
        for size, dim, entry in zip(shape, rule.inputs[positions[node]], annotation.dims):
            factor = next((f for f in dim if rule.sizes[f] > 1), None)
            if factor is None:
                _axes(entry, size, mesh, set(), annotation)
                continue
            wanted = None if entry in (1, ()) else entry
            reason = rule.why_whole(factor) if wanted is not None else None
            if reason is not None and not any(factor in j.factors for j in rule.joints.values()):
                raise InvalidInput(
                    f"a dim that an operator keeps whole is not cut: {reason}",
                    got=f"{annotation.dims} for input {annotation.index} of {annotation.what}, dim "
                    f"{factor!r}; the rule is {rule.text!r}",
                    remedy="give None (or 1) for this dim",
                    source=annotation.source,
                )
            earlier, other = chosen.setdefault(factor, (wanted, annotation))
            if earlier != wanted:
                raise InvalidInput(
                    "the annotations of one operator contradict each other",
                    got=f"dim {factor!r} of {annotation.what}: {earlier!r} for input {other.index} "
                    f"at {other.source}\nand {wanted!r} for input {annotation.index} at "
                    f"{annotation.source}",
                    remedy=f"cut it the same way in both; the rule is {rule.text!r}",
                    source=annotation.source,
                )
    axes: dict[str, tuple[str, ...]] = {}
    used: dict[str, tuple[str, Annotation]] = {}
    for factor, (entry, annotation) in chosen.items():
        compatible = {axis for axis, (other, _) in used.items() if rule.joint_of({other, factor})}
        axes[factor] = _axes(entry, rule.sizes[factor], mesh, set(used) - compatible, annotation)
        for axis in axes[factor]:
            if axis in used and rule.joint_of({used[axis][0], factor}) is None:
                earlier_factor, other = used[axis]
                raise InvalidInput(
                    "an axis may cut one factor of an operator; the annotations contradict",
                    got=f"{axis!r} cuts {earlier_factor!r} at {other.source}\nand {factor!r} at "
                    f"{annotation.source}; the rule is {rule.text!r}",
                    remedy="use another axis for one of them, or leave it uncut",
                    source=annotation.source,
                )
            used[axis] = (factor, annotation)
    _require_joints(rule, axes, mesh, markers[0][1])
    constraints = {}
    for node, annotation in markers:
        dims = [
            tuple(axis for factor in dim for axis in axes.get(factor, ()))
            for dim in rule.inputs[positions[node]]
        ]
        constraints[positions[node]] = LayoutConstraint(Layout(*dims), annotation.source)
    return constraints


def _require_joints(
    rule: Rule, axes: Mapping[str, tuple[str, ...]], mesh: Mesh, annotation: Annotation
) -> None:
    """Refuse a cut that only a joint makes without the rest of the joint, and joints that clash."""
    for factor in axes:
        cut = {other for other in axes if {*axes[other]} & {*axes[factor]}}
        reason = rule.why_whole(factor) if rule.cut_alone(factor) == factor else None
        if axes[factor] and len(cut) == 1 and reason is not None:
            raise InvalidInput(
                f"a dim that an operator keeps whole is not cut: {reason}",
                got=f"{axes[factor][0]!r} for dim {factor!r} of {annotation.what} alone; the rule "
                f"is {rule.text!r}",
                remedy="cut what goes with it by the same axis, too: "
                + " or ".join(
                    " and ".join(map(repr, joint.factors))
                    for joint in rule.joints.values()
                    if factor in joint.factors
                ),
                source=annotation.source,
            )
    choices = dict[str | None, list[str]]()
    for axis in dict.fromkeys(axis for names in axes.values() for axis in names):
        choice = rule.joint_of({factor for factor in axes if axis in axes[factor]})
        choices.setdefault(choice, []).append(axis)
    joints = {choice: names for choice, names in choices.items() if choice is not None}
    fits = all(rule.fits(name, mesh.degree(joints[name])) for name in joints.keys() & rule.joints)
    if len(joints) < len(choices) or not fits or not rule.can_combine(joints, mesh):
        cuts = ", ".join(
            f"{factor!r} by {'@'.join(names)}" for factor, names in axes.items() if names
        )
        raise InvalidInput(
            "an operator has one joint, whose factors are large enough for all their axes",
            got=f"{cuts} of {annotation.what} on {mesh}; the rule is {rule.text!r} with "
            f"{dict(rule.sizes)}",
            remedy="cut fewer dims, or by fewer axes",
            source=annotation.source,
        )


def _resolve(annotation: Annotation, shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return the layout that one annotation asks of one tensor."""
    dims: list[tuple[str, ...]] = []
    entry_axes = [axis for entry in annotation.dims for axis in _names(entry)]
    axes = [part for axis in entry_axes for part in mesh.split_axes(axis) or (axis,)]
    for axis in axes:
        if axes.count(axis) > 1:
            raise InvalidInput(
                "an axis may be used once on one tensor",
                got=f"{annotation.dims} for {annotation.what} uses {axis!r} {axes.count(axis)} "
                "times",
                remedy="keep one of the uses",
                source=annotation.source,
            )
    for entry, size in zip(annotation.dims, shape):
        used = {axis for dim in dims for axis in dim} | set(axes)
        dims.append(_axes(entry, size, mesh, used, annotation))
    return Layout(*dims)


def _names(entry: Entry) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def _lacking(axis: str, mesh: Mesh) -> str:
    """Return the remedy for an annotation that names an axis which the mesh lacks."""
    names = ", ".join(map(repr, mesh.names))
    suggestion = f"use one of {names}; or " if names else ""
    sizes = ", ".join(f"{name}={size}" for name, size in {**mesh.sizes, axis: 1}.items())
    return f"{suggestion}give the mesh that axis, {axis}=1 to cut nothing: ap.Mesh({sizes})"


def _axes(
    entry: Entry, size: int, mesh: Mesh, used: set[str], annotation: Annotation
) -> tuple[str, ...]:
    """Return the axes of one entry: as named, or the first free ones of its number."""
    for axis in _names(entry):
        if not mesh.split_axes(axis):
            raise InvalidInput(
                "an axis of a strategy must be one of the mesh's",
                got=f"{axis!r} in {annotation.dims} for {annotation.what}; the mesh is {mesh}",
                remedy=_lacking(axis, mesh),
                source=annotation.source,
            )
    if not isinstance(entry, int):
        axes = tuple(part for axis in _names(entry) for part in mesh.split_axes(axis))
        if axes and mesh.degree(axes) > size:
            raise InvalidInput(
                "a dim is cut into at most as many pieces as it has elements",
                got=f"{entry!r} in {annotation.dims} for {annotation.what} cuts {size} into "
                f"{mesh.degree(axes)}",
                remedy="use fewer or smaller axes on this dim",
                source=annotation.source,
            )
        return tuple(axis for axis in axes if mesh[axis] > 1)
    if size % entry:
        raise InvalidInput(
            "a number of slices must divide the dim",
            got=f"{entry} slices of a dim of size {size}, in {annotation.dims} for "
            f"{annotation.what}",
            remedy=f"a divisor of {size}; or name the axes, which may cut unevenly",
            source=annotation.source,
        )
    free = [axis for axis in mesh.names if axis not in used and mesh[axis] > 1]
    origins = dict.fromkeys(axis.partition(".")[0] for axis in free)  # a split axis counts as one
    for count in range(len(origins) + 1):
        for selected in itertools.combinations(origins, count):
            axes = tuple(axis for axis in free if axis.partition(".")[0] in selected)
            if mesh.degree(axes) == entry:
                return axes
    raise InvalidInput(
        "a number of slices must be the size of a free axis of the mesh, or a product of such",
        got=f"{entry} in {annotation.dims} for {annotation.what}; free in {mesh}: "
        f"{', '.join(f'{axis}={mesh[axis]}' for axis in free) or 'nothing'}",
        remedy="use such a number, or another mesh",
        source=annotation.source,
    )
