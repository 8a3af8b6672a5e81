"""Expert balance: how evenly a batch is routed to experts; prices assume an even routing.

print(parallel.expert_balance(ids, labels))

module    experts  tokens each  most/even  on ranks   most/even  planned  dropped
blocks.0  6        2 to 13      1.62       4 over ep  2.00       1.33     0 of 48

Each call runs the program forward as far as the last router, in the layouts of the plan. Steps pay
nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture.autocasts import switched
from autopar.capture.captured import Captured
from autopar.capture.gradients import mark_learning
from autopar.errors import InvalidInput
from autopar.layout import chunk
from autopar.passes.flow import copy_subgraph
from autopar.plans.plan import Plan
from autopar.strategies import tensor_inputs
from autopar.strategies.kernels.experts.expert_kernels import EXPERTS
from autopar.strategies.node_info import info
from autopar.text.tables import table

CHOICES, DOWN = 1, 3  # positions among the tensor inputs of the operator


@dataclass(frozen=True)
class ExpertCallBalance:
    """Counts how evenly one call of a mixture of experts is routed."""

    module: str
    tokens: tuple[int, ...]  # of each expert
    choices: int  # of all tokens, also dropped ones
    axes: tuple[str, ...]  # that cut the experts
    pieces: tuple[int, ...]  # experts of each rank along these axes

    @property
    def dropped(self) -> int:
        """Return the number of choices that no expert takes."""
        return self.choices - sum(self.tokens)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the tokens of each rank along the axes that cut the experts."""
        experts = iter(self.tokens)
        return tuple(sum(next(experts) for _ in range(piece)) for piece in self.pieces)

    @property
    def most(self) -> float:
        """Return the tokens of the fullest expert, in even shares."""
        return _fullest_share(self.tokens)

    @property
    def most_of_ranks(self) -> float:
        """Return the tokens of the fullest rank, in even shares."""
        return _fullest_share(self.ranks)

    @property
    def planned(self) -> float:
        """Return the tokens of the fullest rank if all experts had as many, in even shares."""
        return _fullest_share(self.pieces)


@dataclass(frozen=True)
class ExpertBalance:
    """The balance of all calls of a program, in its order; prints as a table."""

    calls: tuple[ExpertCallBalance, ...]

    def __iter__(self) -> Iterator[ExpertCallBalance]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, at: int) -> ExpertCallBalance:
        return self.calls[at]

    def __str__(self) -> str:
        head = ("module", "experts", "tokens each", "most/even")
        rows = [(*head, "on ranks", "most/even", "planned", "dropped")]
        for call in self.calls:
            ranks = (
                f"{len(call.pieces)} over {', '.join(call.axes)}" if call.axes else "each has all"
            )
            rows.append(
                (
                    call.module or "the model",
                    str(len(call.tokens)),
                    f"{min(call.tokens):,} to {max(call.tokens):,}",
                    f"{call.most:.2f}",
                    ranks,
                    f"{call.most_of_ranks:.2f}",
                    f"{call.planned:.2f}",
                    f"{call.dropped:,} of {call.choices:,}",
                )
            )
        return "\n".join(table(rows))


def _fullest_share(counts: tuple[int, ...]) -> float:
    return max(counts) * len(counts) / max(sum(counts), 1)


def routing_of(captured: Captured) -> Captured:
    """Return the program whose results are the choices of each call of experts, without effects."""
    graph = captured.graph
    choices = [tensor_inputs(node)[CHOICES] for node in expert_calls(graph)]
    if not choices:
        raise InvalidInput(
            "expert_balance() is of a model that has mixtures of experts",
            got=f"{type(captured.example.model).__name__}, in which none was recognised",
            remedy="ap.nn.MoE, or experts as transformers writes them for grouped products",
        )
    part = copy_subgraph(graph, [*graph.find_nodes(op="placeholder"), *choices])
    copies = {node.name: node for node in part.nodes}
    results = tuple(copies[node.name] for node in choices)
    info(part.output(results)).end(results)
    mark_learning(part, [])
    for node in part.nodes:
        info(node).differentiable = False
    return replace(
        captured,
        graph=part,
        classes={name: number for name, number in captured.classes.items() if name in copies},
        mutations={},
        effects=(),
        kept_bytes=0,
        output_spec=pytree.tree_structure([0] * len(results)),
        output_leaves=results,
    )


def expert_balance(module: Any, *args: Any, **kwargs: Any) -> ExpertBalance:
    """Return how evenly a batch is routed, in the mode that the module is in.

    Counts for every call of a mixture of experts the tokens of each expert and of each rank, and
    the choices that a capacity drops. Takes the arguments of the model, on all ranks together;
    nothing is learned or changed."""
    with module.backend.local_checks():
        call = module._accept(args, kwargs, is_step=False)
    module._programs.exchange_numbers(call)
    with module.backend.local_checks():
        module._look_up(call)
    running = module._programs.build(call)
    routing_plan, backend = module._programs.inner_program(running, routing_of)
    with module.backend.guard(), torch.no_grad(), switched(()):
        tensors = module._tensors.values
        backend.bind(tensors)
        chosen = backend.call(tensors, call.bound | backend.draw(routing_plan.program))
    return balance_of(running.plan, chosen)


def expert_calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph that call experts, in order."""
    return [node for node in graph.nodes if node.target is EXPERTS]


def balance_of(plan: Plan, chosen: list[Tensor]) -> ExpertBalance:
    """Count tokens by expert and rank; `chosen` has the choices of a plan's calls in order."""
    decided = {node.name: node for node in plan.rewritten.nodes}
    calls = []
    for node, choices in zip(expert_calls(plan.captured.graph), chosen):
        count = info(tensor_inputs(node)[DOWN]).val.shape[0]
        rule, strategy = plan.captured.rules[node.name], info(decided[node.name]).strategy
        assert rule is not None
        assert strategy is not None
        axes = rule.signature(strategy).inputs[DOWN].dims[0]
        parts = plan.mesh.degree(axes)
        accepted = choices[(choices >= 0) & (choices < count)]
        tokens = torch.bincount(accepted.flatten(), minlength=count).tolist()
        pieces = tuple(chunk(count, parts, at)[1] for at in range(parts))
        calls.append(
            ExpertCallBalance(info(node).module, tuple(tokens), choices.numel(), axes, pieces)
        )
    return ExpertBalance(tuple(calls))
