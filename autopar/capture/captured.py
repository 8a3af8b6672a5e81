"""Captured: a model as one flat fx graph with every tensor's origin known by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.autocasts import Autocast
from autopar.capture.containers import Content
from autopar.capture.decisions import Decision
from autopar.capture.effects import Effect
from autopar.capture.graph_builder import Recipe, ValueFact
from autopar.capture.key_value_caches import ReturnedCache
from autopar.capture.loss import index_of_loss
from autopar.capture.marker import ANNOTATE, Annotation
from autopar.capture.randomness import is_random
from autopar.capture.writes import ValueRange, Write
from autopar.errors import InvalidInput
from autopar.precision import Precision
from autopar.program.segments import Program
from autopar.strategies import Rule, observed_rule, rule_of
from autopar.strategies.node_info import info


@dataclass(frozen=True)
class Example:
    """The call that was captured, on fake tensors: it can be captured again, in another mode."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    device: torch.device  # where the program runs
    precision: Precision | None = None
    autocasts: tuple[Autocast, ...] = ()  # that were switched on around it

    @property
    def modes(self) -> dict[str, bool]:
        """Which modules are in training mode, by path."""
        modules = self.model.named_modules(remove_duplicate=False)
        return {path: module.training for path, module in modules}


@dataclass(frozen=True, eq=False)
class Captured:
    """The graph that capture hands on; nothing later changes it.

    Placeholders come in the order parameters, buffers, constants, inputs, and that which random
    numbers follow from, if some are drawn. The output node holds
    one flat tuple: the user's outputs (tensors only), the tensors that `effects` keep, then the new
    values of mutated buffers.
    What is known of every node is in `info(node)` (`strategies/node_info.py`). A call is of a
    functional operator, or of one of autopar's kernels; if it has several results, each is a node
    of its own that reads it (`strategies/results.py`).
    """

    graph: fx.Graph
    parameters: dict[str, str]  # placeholder -> name in the model
    buffers: dict[str, str]  # placeholder -> name in the model
    constants: dict[str, torch.Tensor]  # placeholder -> value
    inputs: tuple[str | None, ...]  # placeholder of each flat user argument; None if not a tensor
    tied: dict[str, str]  # alias -> the name under which the parameter or buffer is kept
    classes: dict[str, int]  # a number for each call; equal for those that cost the same anywhere
    mutations: dict[str, str]  # name of buffer -> name of the node with its new value
    input_spec: pytree.TreeSpec  # of (args, kwargs)
    output_spec: pytree.TreeSpec
    # Each flat output: a node (the next of the output's tuple, in order) or a constant.
    output_leaves: tuple[object, ...]
    example: Example
    static_inputs: dict[int, object] = field(default_factory=dict)  # flat arguments not tensors
    key: str | None = None  # the placeholder of that which random numbers follow from
    decisions: tuple[Decision, ...] = ()  # what the values of the inputs decided
    numbers: frozenset[str] = frozenset()  # the placeholders of inputs that are Python numbers
    caches: tuple[ReturnedCache, ...] = ()  # key-value caches in the output, in order
    writes: tuple[Write, ...] = ()  # to inputs
    contents: tuple[Content, ...] = ()  # of the containers that forward changes
    bounds: Mapping[str, ValueRange] = field(default_factory=dict)  # of parameters, by name
    effects: tuple[Effect, ...] = ()  # what forward leaves behind in Python
    # The names of attributes of modules that forward reads, as other calls may have left them.
    attributes_read: frozenset[str] = frozenset()
    # Those of tensors that are computed for nothing, and the modules in which they stand.
    unread_annotations: Mapping[Annotation, str] = field(default_factory=dict)
    kept_bytes: int = 0  # of the tensors in these, on each rank and from step to step
    program: Program | None = None  # its segments, of the program of a whole batch
    # The placeholders of keys and values of a whole sequence, in the program of some of its tokens.
    sequence_buffers: tuple[str, ...] = ()
    unfolded: Captured | None = None  # with all blocks, if one here stands for several
    asks_what_learns: bool = False  # forward goes by which tensors take a gradient
    # How constants were computed, by placeholder, and what the program relies on of their values.
    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    value_facts: tuple[ValueFact, ...] = ()

    def draw(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """The key of one step by placeholder, on the host if not told otherwise."""
        return {} if self.key is None else {self.key: new_key().to(device)}

    @cached_property
    def loss_index(self) -> int:
        """Which of the user's outputs, among the tensors, a step differentiates; or refuse it."""
        leaves = self.output_leaves
        nodes = [leaf if isinstance(leaf, fx.Node) else None for leaf in leaves]
        values = [leaf if node is None else info(node).val for leaf, node in zip(leaves, nodes)]
        learned = [node is not None and info(node).differentiable for node in nodes]
        place = index_of_loss(pytree.tree_unflatten(values, self.output_spec), learned)
        return sum(node is not None for node in nodes[:place])

    @cached_property
    def has_loss(self) -> bool:
        """Whether a step knows what to differentiate."""
        with suppress(InvalidInput):
            return self.loss_index >= 0
        return False

    @cached_property
    def differentiated(self) -> tuple[int, ...]:
        """Which of the results a step differentiates: the loss, or all outputs if there is none."""
        with suppress(InvalidInput):
            return (self.loss_index,)
        results: Any = self.graph.output_node().args[0]
        return tuple(range(len(results) - len(self.mutations)))

    @property
    def kept(self) -> tuple[fx.Node, ...]:
        """The results that `effects` keep: they stand behind the tensors that the model returns."""
        results: Any = self.graph.output_node().args[0]
        own = sum(isinstance(leaf, fx.Node) for leaf in self.output_leaves)
        return tuple(results[own : len(results) - len(self.mutations)])

    @cached_property
    def operators(self) -> tuple[fx.Node, ...]:
        """The calls of operators, in order: what takes one of several results is none."""
        return tuple(node for node in self.graph.nodes if node.name in self.classes)

    @property
    def changes_containers(self) -> bool:
        """Whether forward changes containers of its arguments, such as caches."""
        return bool(self.contents) or any(cache.is_changed for cache in self.caches)

    @property
    def is_folded(self) -> bool:
        """Whether some block of it stands for several."""
        return self.unfolded is not None

    @cached_property
    def twins(self) -> Mapping[str, str]:
        """By name of each node of the program with all blocks what stands for it here."""
        places = ((node.name, place) for node in self.graph.nodes if (place := info(node).block))
        return {
            place.blocks.node_name(place.name, place.number + later): name
            for name, place in places
            for later in range(place.count)
        }

    @property
    def length(self) -> int:
        """How many operators there are, in the program that it stands for."""
        return sum(info(node).count for node in self.operators)

    @cached_property
    def rules(self) -> dict[str, Rule | None]:
        """The rule of each call, found once for all that are alike; None: it runs replicated."""
        return self._of_each_kind(rule_of)

    @cached_property
    def priced(self) -> dict[str, Rule | None]:
        """What each call costs: its rule, or what is seen of a call without; None: of a mark."""

        def price(node: fx.Node) -> Rule | None:
            is_seen = self.rules[node.name] is None and node.target is not ANNOTATE
            return observed_rule(node) if is_seen else self.rules[node.name]

        return self._of_each_kind(price)

    def _of_each_kind(self, ask: Callable[[fx.Node], Rule | None]) -> dict[str, Rule | None]:
        """What is said of the first of those calls that are alike."""
        found: dict[int, Rule | None] = {}
        for node in self.operators:
            if self.classes[node.name] not in found:
                found[self.classes[node.name]] = ask(node)
        return {name: found[number] for name, number in self.classes.items()}

    @cached_property
    def random(self) -> tuple[fx.Node, ...]:
        """The calls that draw random numbers from torch's generator."""
        return tuple(filter(is_random, self.operators))


def new_key() -> torch.Tensor:
    """What the random numbers of a step follow from: a key, which torch's generator of the host
    gives, and the number of the micro-batch."""
    ends = torch.iinfo(torch.int64)
    drawn = torch.randint(ends.min, ends.max, (1,), dtype=torch.int64, device="cpu")
    return torch.cat([drawn, torch.zeros_like(drawn)])
