"""Sized constants: constants of a program that follow a size of its inputs, as positions and masks.

recipe = SizedRecipe.of(recipes, forms)      # of programs of several sizes, side by side
recipe.value(16)                             # arange(16), where these were arange(8), arange(9)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.exact_values import is_same_tensor
from autopar.capture.captured import Captured
from autopar.capture.graph_builder import Recipe
from autopar.runtime.execution.call_numbers import NumberForms, Unalike, filled, forms_in


@dataclass(frozen=True)
class SizedRecipe:
    """Computes a constant at a size."""

    calls: tuple[tuple[fx.Node, Any], ...]  # with templates of function, arguments and keywords
    held: Mapping[str, Tensor]  # placeholder -> value
    result: fx.Node

    @classmethod
    def of(cls, recipes: Sequence[Recipe], forms: NumberForms) -> SizedRecipe:
        """Lay recipes of several sizes side by side."""
        rows = forms.pair([recipe.graph for recipe in recipes])
        forms.of([dict(recipe.constants) for recipe in recipes])
        calls = tuple(
            (row[-1], forms.of([(node.target, node.args, node.kwargs) for node in row]))
            for row in rows
            if row[-1].op == "call_function"
        )
        result: Any = recipes[-1].graph.output_node().args[0]
        return cls(calls, recipes[-1].constants, result)

    @property
    def varies(self) -> bool:
        """Return whether the size stands in it."""
        return any(forms_in([template for _, template in self.calls]))

    @torch.no_grad()
    def value(self, size: int) -> Tensor:
        """Return the constant at a size."""
        values: dict[fx.Node, Any] = {}

        def read(node: fx.Node) -> Any:
            return self.held[node.name] if node.op == "placeholder" else values[node]

        for node, template in self.calls:
            function, args, kwargs = filled(template, size)
            values[node] = function(*fx.map_arg(args, read), **fx.map_arg(kwargs, read))
        value: Tensor = read(self.result)
        return value


@dataclass(frozen=True)
class SizedFact:
    """Tells whether a constant is at a size what the program relies on."""

    recipe: SizedRecipe
    question: Any  # a template
    answer: Any

    def holds(self, size: int) -> bool:
        """Return whether the question has the same answer at a size."""
        return bool(filled(self.question, size)(self.recipe.value(size)) == self.answer)


def sized_constants(programs: Sequence[Captured], forms: NumberForms) -> dict[str, SizedRecipe]:
    """Return the constants that vary, by placeholder, of programs of several sizes."""
    last, constants = programs[-1], dict[str, SizedRecipe]()
    if any([*program.constants] != [*last.constants] for program in programs):
        raise Unalike("constants")
    for name, value in last.constants.items():
        others = [program.constants[name] for program in programs]
        if all(_is_same(value, other) for other in others):
            continue
        if not all(name in program.recipes for program in programs):
            raise Unalike(f"the constant {name}")
        recipe = SizedRecipe.of([program.recipes[name] for program in programs], forms)
        if not all(_is_same(recipe.value(n), other) for n, other in zip(forms.sizes, others)):
            raise Unalike(f"the constant {name}")
        constants[name] = recipe
    return constants


def sized_facts(programs: Sequence[Captured], forms: NumberForms) -> list[SizedFact]:
    """Return what programs of several sizes rely on of constants that vary."""
    columns, facts = [program.value_facts for program in programs], list[SizedFact]()
    if len({*map(len, columns)}) > 1:
        raise Unalike("questions to constants")
    for row in zip(*columns):
        recipe = SizedRecipe.of([fact.recipe for fact in row], forms)
        question = forms.of([fact.question for fact in row])
        answer = forms.of([fact.answer for fact in row])
        if any(forms_in(answer)):
            raise Unalike("answers of constants")
        if recipe.varies or any(forms_in(question)):
            facts.append(SizedFact(recipe, question, answer))
    return facts


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and is_same_tensor(one, other)
