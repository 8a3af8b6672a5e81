"""Capture: a model and its example inputs become one flat graph of normalised operators.

>>> captured = capture(model, (ids,), {"labels": labels})
>>> print(listing(captured.graph))

The road: copy the model onto fake tensors (fake.py), export it, make the graph flat (flatten.py),
normalise it (normalise.py), and verify the result (verifier.py). The model may live on the meta
device, the inputs too. The user's model is never changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from autopar._torch.fake_shapes import grouped_products_of_floats
from autopar.base.garbage_collection import deferred_collection
from autopar.capture.assigned import buffers_written
from autopar.capture.autocasts import (
    active,
    idle_refused,
    inside,
    require_casting,
    require_on,
    switched,
)
from autopar.capture.blind_losses import looks_at_no_values
from autopar.capture.caches import emptied_afterwards
from autopar.capture.captured import Captured, Example
from autopar.capture.checkpoints import checkpoints_marked, warn_of_buffers
from autopar.capture.containers import Content, contents_seen
from autopar.capture.containers import by_placeholder as contents_of
from autopar.capture.data_attribute import data_is_detached
from autopar.capture.decisions import by_placeholder, decisions_made
from autopar.capture.drawn_elsewhere import draws_elsewhere_refused
from autopar.capture.each import loops_over_experts
from autopar.capture.effects import keep
from autopar.capture.failure import (
    EXAMPLE,
    check_call,
    explain,
    require_one_dtype,
    require_products_of_one_dtype,
)
from autopar.capture.fake import (
    FakeTensorMode,
    computing,
    fake_inputs,
    fake_model,
    home,
    masters,
    new_mode,
    outside_fake_mode,
)
from autopar.capture.flatten import flatten
from autopar.capture.folding import complete_program
from autopar.capture.functions import own_backwards_kept
from autopar.capture.fused import mark_parts
from autopar.capture.generators import generators_kept, generators_reached
from autopar.capture.gradients import mark_learning
from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.grouped import groups_followed
from autopar.capture.guards import refusals_kept
from autopar.capture.hidden import Hiding, Needed
from autopar.capture.hooks import hooks_refused, refuse_hooks, warn_of_memory
from autopar.capture.host import cross_to_host
from autopar.capture.joined import mark_joined
from autopar.capture.key_value_caches import ReturnedCache, caches_seen, register_caches
from autopar.capture.learning_queries import learning_queries_noted
from autopar.capture.listing import operator_name
from autopar.capture.lookups import require_rows
from autopar.capture.mapped import trained_anywhere
from autopar.capture.maps import maps_are_operators
from autopar.capture.model_tensors import by_every_name
from autopar.capture.module_casts import casts_change_nothing
from autopar.capture.normalise import normalise
from autopar.capture.number_formulas import is_number, number_tensor
from autopar.capture.number_inputs import numbers_given
from autopar.capture.overlaps import require_no_overlaps
from autopar.capture.parameter_aliases import aliases_of
from autopar.capture.plainly import answered_plainly
from autopar.capture.policies import CheckpointPolicies
from autopar.capture.python_changes import (
    Noted,
    changes_noted,
    settled,
    tensors_put_back,
    varies,
)
from autopar.capture.refused import packed_sequences_refused
from autopar.capture.repeated import FEWEST, blocks_followed_once
from autopar.capture.scripted import scripts_run_plainly
from autopar.capture.shared_containers import require_separate
from autopar.capture.source import whole_stacks
from autopar.capture.verifier import verify
from autopar.capture.warned import users_warnings_shown
from autopar.capture.writes import by_placeholder as writes_to
from autopar.capture.writes import require_apart
from autopar.precision import Precision
from autopar.program.equality import number_calls
from autopar.program.names import path_above
from autopar.states import StateBytes
from autopar.strategies.node_info import info

KEPT = ("val", "source", "module", "differentiable", "checkpoint", "policy")


@deferred_collection()
def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    precision: Precision | None = None,
    given: str = EXAMPLE,
    values: Sequence[Any] | None = None,
    numbers: Collection[int] = (),
) -> Captured:
    """The normalised program of `model(*args, **kwargs)`, in the mode (train, eval) it is in.

    With a `precision` it begins with casts of what is kept and given to what it computes in.
    `given`: what errors call these arguments. `values`: the flat arguments as they were handed
    over, if these are their shapes only. `numbers`: the flat arguments that are Python numbers and
    inputs of the program (`number_inputs.py`). Forward may be followed again, with more of its
    blocks (hidden.py)."""
    register_caches()
    check_call(model, args, kwargs, given)
    attempt = partial(_captured, model, args, kwargs, precision, given, values, numbers)
    shown: int | None = FEWEST - 1
    for _ in range(2):
        try:
            return attempt(shown)
        except Needed as needed:
            shown = needed.count
    return attempt(None)


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    precision: Precision | None,
    given: str,
    values: Sequence[Any] | None,
    numbers: Collection[int],
    shown: int | None,
) -> Captured:
    """The same, where so many blocks of each kind are `shown` (repeated.py)."""
    kwargs, autocasts = dict(kwargs or {}), active()
    refuse_hooks(model)
    blind, spaces = looks_at_no_values(), dict[int, dict[str, Any]]()
    with (
        outside_fake_mode() as own,
        torch.inference_mode(False),
        torch.enable_grad(),
        switched(()),
        blind,
        grouped_products_of_floats(),
    ):
        mode = new_mode()
        leaves, input_spec = pytree.tree_flatten((args, kwargs))
        device = home(model, leaves)
        leaves = [number_tensor(leaf) if at in numbers else leaf for at, leaf in enumerate(leaves)]
        require_on(device, autocasts)
        copy = fake_model(model, mode, device)
        fakes = fake_inputs(leaves, mode, device)
        call = pytree.tree_unflatten(fakes, input_spec)
        run, inputs = (
            (copy, fakes) if precision is None else computing(copy, fakes, mode, precision)
        )
        is_kept, values = varies(len(leaves)), leaves if values is None else values
        values = [
            number_tensor(v) if at in numbers and is_number(v) else v for at, v in enumerate(values)
        ]
        around = partial(numbers_given, run, _arguments_at(input_spec, numbers))
        noted, asked = Noted(), decisions_made(run, values, numbers, around)
        contents, caches = list[Content](), list[ReturnedCache]()
        learning_queries, policies = list[str](), CheckpointPolicies()
        with hooks_refused() as lines, inside(run, autocasts), asked as decided:
            own_args, own_kwargs = pytree.tree_unflatten(inputs, input_spec)
            with (
                tensors_put_back(run),
                emptied_afterwards(run, spaces, own),
                caches_seen(run, caches),
                learning_queries_noted(run, learning_queries),
                buffers_written(run, is_kept, noted.lines),
                changes_noted(run, noted, is_kept),
            ):
                program, left_out = _export(
                    run, mode, own_args, own_kwargs, given, spaces, shown, contents, policies
                )
        with tensors_put_back(run), emptied_afterwards(run, spaces, own):
            effects = settled(noted, run, mode, pytree.tree_unflatten(inputs, input_spec))
        require_casting(program)
        aliases_of(run).require_none(program, run)
        held = masters(copy, mode, precision) | dict(copy.named_buffers())
        fake = {name: one for name, one in held.items() if not path_above(name, left_out)}
        names = _canonical(copy)
        read = {name: one for name, one in by_every_name(run) if names[name] in fake}
        builder = flatten(program, mode, names, fake, read, input_spec, fakes)
        keep(builder, effects)
        require_products_of_one_dtype(builder, precision)
        normalise(builder)
        require_rows(builder)
        example = Example(copy, call[0], call[1], device, precision, autocasts)
        captured = complete_program(_freeze(builder, example), held, left_out)
        captured = policies.decided(captured)
        require_no_overlaps(model, captured)
        decisions = by_placeholder(decided, captured.inputs)
        writes = writes_to(builder.writes, captured.inputs)
        left = contents_of(contents, captured.inputs)
        captured = replace(captured, decisions=decisions, writes=writes, contents=left)
        named_numbers = frozenset(
            name for at in numbers if (name := captured.inputs[at]) is not None
        )
        captured = replace(
            captured,
            numbers=named_numbers,
            caches=tuple(caches),
            asks_what_learns=bool(learning_queries),
            attributes_read=frozenset(name for _, name in noted.read),
        )
        if captured.changes_containers:
            require_separate(args, kwargs)
        for write in writes:
            named = zip(captured.inputs, leaves, strict=True)
            require_apart(write, {name: leaf for name, leaf in named if name is not None})
    warn_of_memory(lines)
    warn_of_buffers(captured)
    verify(captured.graph, "captured")
    if precision is not None:
        require_one_dtype(captured)
    return captured


def _export(
    model: nn.Module,
    mode: FakeTensorMode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: str,
    spaces: dict[int, dict[str, Any]],
    shown: int | None,
    contents: list[Content],
    policies: CheckpointPolicies,
) -> tuple[ExportedProgram, set[str]]:
    """The exported program and the paths of blocks that it has not; note `contents`, `policies`."""
    hiding = Hiding()
    try:
        with ExitStack() as stack:
            stack.enter_context(generators_kept(*generators_reached(model)))
            stack.enter_context(whole_stacks(spaces))
            for around in AROUND_FORWARD:
                stack.enter_context(around())
            hiding = stack.enter_context(blocks_followed_once(model, shown))
            stack.enter_context(contents_seen(model, contents))
            stack.enter_context(checkpoints_marked(policies))
            program = torch.export.export(model, args, kwargs, strict=False)
            hiding.require_unread(program)
            return program, hiding.left_out
    except Exception as error:
        if hiding.is_any:
            raise Needed(None) from error
        with users_warnings_shown():
            raise explain(error, model, mode, args, kwargs, given) from error


def _arguments_at(spec: pytree.TreeSpec, numbers: Collection[int]) -> list[int | str]:
    """The arguments at these places of the flat ones: by number, or keyword."""
    positional, named = spec.children()
    names: list[int | str] = [*range(positional.num_children), *named.context]
    counts = [child.num_leaves for child in (*positional.children(), *named.children())]
    starts = itertools.accumulate(counts, initial=0)
    return [
        name for name, start, count in zip(names, starts, counts) if count == 1 and start in numbers
    ]


def _canonical(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> the first name of the same tensor."""
    names: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in by_every_name(model):
        names[name] = first.setdefault(id(tensor), name)
    return names


def _in_several_dtypes(parameter: fx.Node, precision: Precision) -> StateBytes:
    """Of a parameter that the program begins by casting, if it is one."""
    casts = parameter.users if len(parameter.users) == 1 else ()
    read = next((info(n).val.dtype for n in casts if n.target is torch.ops.aten.to.dtype), None)
    return StateBytes.of(info(parameter).val.dtype, read, precision.reduce)


def _freeze(builder: GraphBuilder, example: Example) -> Captured:
    """A fresh graph, its nodes named by their operators in order, and all that goes with it."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in builder.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
        is_call = node.op == "call_function"
        name = operator_name(node.target).replace(".", "_") if is_call else node.name
        new[node] = graph.create_node(node.op, node.target, args, kwargs, name)
        new[node].meta = {key: node.meta[key] for key in KEPT if key in node.meta}
    if example.precision is not None:
        for node in graph.find_nodes(op="placeholder"):
            if node.name in builder.parameters:
                info(node).state_bytes = _in_several_dtypes(node, example.precision)
    constant = {p: n for p, n in builder.buffers.items() if n not in builder.mutated}
    cross_to_host(graph, example.model, builder.parameters | constant, builder.tied)
    outputs: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    info(graph.output_node()).end(outputs)
    count = len(outputs) - len(builder.mutated)
    tensors = iter(outputs[:count])
    leaves = [
        builder.output_constants[index] if index in builder.output_constants else next(tensors)
        for index in range(builder.output_spec.num_leaves)
    ]
    captured = Captured(
        graph=graph,
        parameters=builder.parameters,
        buffers=builder.buffers,
        constants=builder.constants,
        inputs=builder.inputs,
        tied=builder.tied,
        classes={},
        mutations={name: node.name for name, node in zip(builder.mutated, outputs[count:])},
        input_spec=builder.input_spec,
        output_spec=builder.output_spec,
        output_leaves=tuple(leaves),
        example=example,
        static_inputs=builder.static_inputs,
        key=builder.key,
        bounds=builder.bounds,
        effects=tuple(builder.effects),
        unread_annotations=builder.unread_annotations,
        recipes=builder.recipes,
        value_facts=tuple(builder.value_facts),
    )
    mark_learning(graph, captured.differentiated)
    mark_joined(graph, captured.inputs)
    mark_parts(graph, captured.parameters)
    size = sum(info(node).val.nbytes for node in captured.kept)
    return replace(captured, classes=number_calls(graph), kept_bytes=size)


# Around forward while it is followed.
AROUND_FORWARD = (
    users_warnings_shown,
    own_backwards_kept,
    idle_refused,
    answered_plainly,
    trained_anywhere,
    draws_elsewhere_refused,
    refusals_kept,
    maps_are_operators,
    groups_followed,
    casts_change_nothing,
    data_is_detached,
    loops_over_experts,
    packed_sequences_refused,
    scripts_run_plainly,
)
