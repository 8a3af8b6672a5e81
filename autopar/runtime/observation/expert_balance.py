"""Expert balance: how evenly a batch is routed, of which prices assume that it is.

print(parallel.expert_balance(ids, labels))

module    experts  tokens each  most/even  on ranks   most/even  planned  dropped
blocks.0  6        2 to 13      1.62       4 over ep  2.00       1.33     0 of 48

What is asked for is computed for it: the program forward as far as the last router, in the layouts
of the plan. Steps pay nothing.
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
from autopar.plan.plan import Plan
from autopar.strategies import tensor_inputs
from autopar.strategies.kernels.experts.expert_kernels import EXPERTS
from autopar.strategies.node_info import info
from autopar.tables import table

CHOSEN, DOWN = 1, 3  # among the tensor inputs of the operator


@dataclass(frozen=True)
class CallBalance:
    """Of one call of a mixture of experts."""

    module: str
    tokens: tuple[int, ...]  # that each expert has
    choices: int  # of all tokens, also those that are dropped
    axes: tuple[str, ...]  # that cut the experts
    pieces: tuple[int, ...]  # how many experts each rank along these has

    @property
    def dropped(self) -> int:
        """The choices that no expert takes."""
        return self.choices - sum(self.tokens)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The tokens of each rank along these axes."""
        experts = iter(self.tokens)
        return tuple(sum(next(experts) for _ in range(piece)) for piece in self.pieces)

    @property
    def most(self) -> float:
        """What the fullest expert has, in even shares."""
        return _most(self.tokens)

    @property
    def most_of_ranks(self) -> float:
        """What the fullest rank has, in even shares."""
        return _most(self.ranks)

    @property
    def planned(self) -> float:
        """The same of routing that is balanced."""
        return _most(self.pieces)


@dataclass(frozen=True)
class ExpertBalance:
    """Of all calls of a program, in its order; prints as a table."""

    calls: tuple[CallBalance, ...]

    def __iter__(self) -> Iterator[CallBalance]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, at: int) -> CallBalance:
        return self.calls[at]

    def __str__(self) -> str:
        head = ("module", "experts", "tokens each", "most/even")
        rows = [(*head, "on ranks", "most/even", "planned", "dropped")]
        for one in self.calls:
            where = f"{len(one.pieces)} over {', '.join(one.axes)}" if one.axes else "each has all"
            rows.append(
                (
                    one.module or "the model",
                    str(len(one.tokens)),
                    f"{min(one.tokens):,} to {max(one.tokens):,}",
                    f"{one.most:.2f}",
                    where,
                    f"{one.most_of_ranks:.2f}",
                    f"{one.planned:.2f}",
                    f"{one.dropped:,} of {one.choices:,}",
                )
            )
        return "\n".join(table(rows))


def _most(counts: tuple[int, ...]) -> float:
    return max(counts) * len(counts) / max(sum(counts), 1)


def routing_of(captured: Captured) -> Captured:
    """The program that gives the choices of each call of experts, and changes nothing."""
    graph = captured.graph
    asked = [tensor_inputs(node)[CHOSEN] for node in expert_calls(graph)]
    if not asked:
        raise InvalidInput(
            "expert_balance() is of a model that has mixtures of experts",
            got=f"{type(captured.example.model).__name__}, in which none was recognised",
            remedy="ap.nn.MoE, or experts as transformers writes them for grouped products",
        )
    part = copy_subgraph(graph, [*graph.find_nodes(op="placeholder"), *asked])
    copies = {node.name: node for node in part.nodes}
    results = tuple(copies[node.name] for node in asked)
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
    """How evenly a batch is routed, in the mode that the module is in: of every call of a mixture
    of experts, the tokens of each expert and of the ranks that have some, and the choices that a
    capacity drops. Called as the model is, by all ranks together; nothing is learned or changed."""
    with module.backend.local_checks():
        call = module._accept(args, kwargs, step=False)
    module._programs.meet(call)
    with module.backend.local_checks():
        module._find(call)
    running = module._programs.make(call)
    made, backend = module._programs.inside(running, routing_of)
    with module.backend.guard(), torch.no_grad(), switched(()):
        kept = module._tensors.values
        backend.bind(kept)
        chosen = backend.call(kept, call.bound | backend.draw(made.program))
    return balance_of(running.plan, chosen)


def expert_calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is EXPERTS]


def balance_of(plan: Plan, chosen: list[Tensor]) -> ExpertBalance:
    """`chosen`: for the calls of the program that a plan is of, in order."""
    decided = {node.name: node for node in plan.rewritten.nodes}
    found = []
    for node, one in zip(expert_calls(plan.captured.graph), chosen):
        count = info(tensor_inputs(node)[DOWN]).val.shape[0]
        rule, strategy = plan.captured.rules[node.name], info(decided[node.name]).strategy
        assert rule is not None
        assert strategy is not None
        axes = rule.signature(strategy).inputs[DOWN].dims[0]
        parts = plan.mesh.degree(axes)
        taken = one[(one >= 0) & (one < count)]
        tokens = torch.bincount(taken.flatten(), minlength=count).tolist()
        pieces = tuple(chunk(count, parts, at)[1] for at in range(parts))
        found.append(CallBalance(info(node).module, tuple(tokens), one.numel(), axes, pieces))
    return ExpertBalance(tuple(found))
