"""RuntimeProgram: the planned program that the runtime carries out, and the check of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.base.exact_values import is_same_value
from autopar.capture.captured import Captured
from autopar.capture.decisions import are_decided_alike
from autopar.capture.gradients import reached
from autopar.capture.number_formulas import DTYPES, is_number, number_tensor
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.passes.microbatches import Microbatches
from autopar.passes.stages import Stage
from autopar.pipeline.pipelining import Pipelining
from autopar.pipeline.schedule import Schedule, one_stage
from autopar.search.decisions import Decisions
from autopar.states import BUFFER_BYTES
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType


@dataclass(frozen=True)
class RuntimeProgram:
    """One program for all ranks of a mesh, with the names of everything that goes in and out."""

    captured: Captured
    decisions: Decisions
    graph: fx.Graph
    batches: Microbatches | None = None  # the program is that of one micro-batch
    pipelining: Pipelining | None = None
    stages: tuple[Stage, ...] = ()  # of a pipeline
    slices: tuple[tuple[Stage, ...], ...] = ()  # the stages that run each slice of tokens, if any
    buffer_bytes: int = BUFFER_BYTES  # of what travels together

    @property
    def original(self) -> Captured:
        """The captured program of a whole batch."""
        return self.captured if self.batches is None else self.batches.whole

    @property
    def mesh(self) -> Mesh:
        return self.decisions.mesh

    @property
    def whole_mesh(self) -> Mesh:
        """The mesh of all ranks, the axis of a pipeline among its axes."""
        return self.pipelining.mesh if self.pipelining else self.mesh

    @cached_property
    def schedule(self) -> Schedule:
        """The order of a step."""
        if self.pipelining is not None:
            return self.pipelining.schedule
        return one_stage(1 if self.batches is None else self.batches.count)

    @cached_property
    def placeholders(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes if node.op == "placeholder"}

    @cached_property
    def results(self) -> tuple[fx.Node, ...]:
        """The user's outputs, tensors that forward leaves in Python, new values of buffers."""
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @cached_property
    def was_trainable(self) -> dict[str, bool]:
        """Whether each parameter of the model took a gradient when it was planned, by name."""
        names, nodes = self.original.parameters, self.original.graph.nodes
        return {names[n.name]: info(n).differentiable for n in nodes if n.name in names}

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return self.results[: len(self.results) - len(self.captured.mutations)]

    @cached_property
    def side_outputs(self) -> range:
        """The positions among `outputs` of tensors that forward does not return.

        It leaves them behind in Python, for instance as attributes of modules.
        """
        return range(len(self.outputs) - len(self.captured.kept), len(self.outputs))

    def type_of(self, placeholder: str) -> TensorType:
        return info(self.placeholders[placeholder]).type

    def kept_layout(self, placeholder: str) -> Layout:
        """Return the layout that a parameter or buffer has from step to step."""
        places = info(self.placeholders[placeholder]).places
        return self.type_of(placeholder).layout if places is None else places.optimizer

    @cached_property
    def on_host(self) -> frozenset[str]:
        """The parameters and buffers that are on the host from step to step."""
        named = (self.captured.parameters | self.captured.buffers).items()
        nodes = {name: info(self.placeholders[placeholder]) for placeholder, name in named}
        return frozenset(name for name, node in nodes.items() if (node.places or node).on_host)

    @cached_property
    def has_loss(self) -> bool:
        """Whether a step knows what to differentiate."""
        return self.captured.has_loss

    @cached_property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of a step's loss; float32 for a program without one."""
        loss = self.outputs[self.captured.loss_index] if self.has_loss else None
        return torch.float32 if loss is None else info(loss).val.dtype

    @cached_property
    def parameters_by_output(self) -> tuple[frozenset[str], ...]:
        """For each output, the parameters (names in the model) that its backward reaches."""
        parameters, graph = self.captured.parameters, self.captured.graph
        outputs: Any = graph.output_node().args[0]
        return tuple(
            frozenset(parameters[n.name] for n in reached([output]) if n.name in parameters)
            for output in outputs[: len(self.outputs)]
        )

    @property
    def graphs(self) -> list[fx.Graph]:
        """Return the graphs that move data: of all stages, and of those of each slice."""
        return [self.graph, *(stage.graph for stages in self.slices for stage in stages)]

    def stage_of(self, index: int, microbatch: int) -> Stage:
        """Return the stage that runs a micro-batch, or a slice of one, of a schedule."""
        if not self.slices:
            return self.stages[index]
        return self.slices[self.schedule.slice_of(microbatch)[1]][index]

    @property
    def buffers_updated_once(self) -> frozenset[str]:
        """The buffers that a step in micro-batches changes once, at its end."""
        return frozenset() if self.batches is None else self.batches.once

    def split(self, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the inputs of every micro-batch of a step, in order."""
        return [dict(inputs)] if self.batches is None else self.batches.split(inputs)

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a whole batch's inputs, on all ranks together."""
        inputs = [node for node in self.original.graph.nodes if node.name in self.original.inputs]
        return {node.name: tuple(info(node).val.shape) for node in inputs}

    def structure(self, outputs: Sequence[Any]) -> Any:
        """Return `outputs` in the structure that the user's forward returns."""
        values = iter(outputs)
        leaves = [
            next(values) if isinstance(leaf, fx.Node) else leaf
            for leaf in self.captured.output_leaves
        ]
        return pytree.tree_unflatten(leaves, self.captured.output_spec)

    @cached_property
    def _keywords(self) -> tuple[tuple[str, ...], bool]:
        """The names of keyword arguments, and whether no argument is a container of others."""
        groups = self.captured.input_spec.children()
        is_flat = all(argument.is_leaf() for group in groups for argument in group.children())
        return tuple(groups[1].context or ()), is_flat

    def in_order(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the keyword arguments of a call in the program's order, if they are its own."""
        names, _ = self._keywords
        return {name: kwargs[name] for name in names} if kwargs.keys() == {*names} else kwargs

    def flat_arguments(self, args: tuple, kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the flat arguments of a call in the program's order; None if it has others."""
        names, is_flat = self._keywords
        kwargs = self.in_order(kwargs)
        count = len(args) + len(kwargs)
        if is_flat and count == len(self.captured.inputs) and tuple(kwargs) == names:
            return [*args, *kwargs.values()]  # what flattening gives, in a tenth of the time
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        return leaves if spec == self.captured.input_spec else None

    def bind(
        self, args: tuple, kwargs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor] | None:
        """Return the tensors of a call by placeholder; None if the call is another program's.

        `shapes` are those expected on this rank: with local inputs, those of its slices.
        """
        leaves = self.flat_arguments(args, kwargs)
        return None if leaves is None else self.bind_flat(leaves, shapes)

    def bind_flat(
        self, leaves: Sequence[Any], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor] | None:
        """Like `bind`, for flat arguments in the program's order."""
        bound = {}
        for index, (leaf, placeholder) in enumerate(zip(leaves, self.captured.inputs)):
            if placeholder is None:
                if not self._is_static(index, leaf):
                    return None
            elif placeholder in self.original.numbers:
                dtype = info(self.placeholders[placeholder]).val.dtype
                if not is_number(leaf) or DTYPES[type(leaf)] != dtype:
                    return None
                bound[placeholder] = number_tensor(leaf)
            elif not self._takes(placeholder, leaf, shapes[placeholder]):
                return None
            else:
                # Autograd keeps no tensor that was made in inference mode.
                is_copied = leaf.is_inference() and not torch.is_inference_mode_enabled()
                bound[placeholder] = leaf.clone() if is_copied else leaf
        numbers, decisions = self.original.numbers, self.captured.decisions
        if not are_decided_alike(decisions, numbers, bound):
            return None
        for decision in decisions:
            decision.require(bound)
        return bound

    def _is_static(self, index: int, leaf: Any) -> bool:
        """Return whether an argument that is no tensor has the value of the program."""
        captured = self.captured.static_inputs[index]
        return is_same_value(leaf, captured)

    def _takes(self, placeholder: str, leaf: Any, shape: tuple[int, ...]) -> bool:
        known = info(self.placeholders[placeholder])
        if not isinstance(leaf, Tensor) or tuple(leaf.shape) != shape:
            return False
        if leaf.dtype != known.val.dtype or leaf.is_meta:
            return False
        needs = leaf.requires_grad and torch.is_grad_enabled()
        return known.differentiable or not needs
