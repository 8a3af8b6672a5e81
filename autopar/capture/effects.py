"""Effects: what forward leaves behind in Python, carried out after each call of its program.

    self.aux = loss                 an attribute is set: its tensors are outputs of the program
    self.log.append(y.detach())     a list grows
    METRICS["loss"] = loss          an entry, or a global, is set

Tensors stand in an effect by number, as the program gives them; parameters, buffers and what the
model holds otherwise by their places, so that effects hold for a parallel module as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar._torch.export_graph import traced_node
from autopar.capture.fake import FakeTensor
from autopar.capture.graph_builder import GraphBuilder
from autopar.capture.holders import Change, Holder, Module, Place, tensors_in
from autopar.capture.object_contents import PLAIN
from autopar.capture.python_state import PythonState


@torch.library.custom_op("autopar::kept", mutates_args=())
def kept(tensors: Sequence[Tensor]) -> None:
    """The tensors that forward leaves behind, where it ends."""


kept.register_fake(kept._init_fn)
KEPT = torch.ops.autopar.kept.default
fx.node.has_side_effect(KEPT)


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that the program gives."""

    number: int


@dataclass(frozen=True)
class Standing:
    """What stands in a place of the model, or of the parallel module."""

    holder: Holder
    key: Any = None  # of an entry; None: what the holder is of

    def __str__(self) -> str:
        return self.holder.label(self.key)

    def at(self, root: nn.Module) -> Any:
        found = self.holder.at(root)
        return found if self.key is None else found[self.key]


@dataclass(frozen=True)
class Effect:
    """One thing that is put somewhere after each call."""

    holder: Holder
    key: Any
    kind: Literal["set", "grown", "rewritten"]
    value: Any  # with `KeptTensor` and `Standing` in it
    source: str | None = None

    @property
    def name(self) -> str:
        return self.holder.label(self.key)

    @property
    def place(self) -> Place:
        return self.holder.place, self.key

    @property
    def attribute(self) -> str | None:
        """Return which attribute of the model itself it sets, if any."""
        is_of_model = isinstance(self.holder, Module) and self.holder.path == ()
        return self.key if is_of_model else None

    @property
    def tensors(self) -> list[int]:
        """The numbers of the tensors in it."""
        leaves = pytree.tree_leaves(self.value)
        return [leaf.number for leaf in leaves if isinstance(leaf, KeptTensor)]

    def __str__(self) -> str:
        """Tells what is put there, the same for every copy of the model."""

        def said(leaf: Any) -> Any:
            is_own = isinstance(leaf, KeptTensor | Standing) or type(leaf) in PLAIN
            return str(leaf) if is_own else type(leaf).__name__

        return f"{self.name} {self.kind} {pytree.tree_map(said, self.value)}"

    def holders(self) -> Iterator[Holder]:
        """Yield that of what it changes, and those of what it puts there."""
        yield self.holder
        for leaf in pytree.tree_leaves(self.value):
            if isinstance(leaf, Standing):
                yield leaf.holder

    def renumbered(self, numbers: Mapping[int, int]) -> Effect:
        def one(kept: KeptTensor) -> KeptTensor:
            return KeptTensor(numbers[kept.number])

        return replace(self, value=pytree.tree_map_only(KeptTensor, one, self.value))

    def carry_out(self, root: nn.Module, kept: Sequence[Tensor]) -> None:
        def known(leaf: Any) -> Any:
            if isinstance(leaf, KeptTensor):
                return kept[leaf.number]
            return leaf.at(root) if isinstance(leaf, Standing) else leaf

        value, target = pytree.tree_map(known, self.value, is_leaf=_is_size), self.holder.at(root)
        grows = self.holder.of(target).get(self.key) if self.kind == "grown" else None
        if grows is None:
            self.holder.write(target, self.key, value, self.kind)
        else:
            grows.extend(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size)


class Holds(Exception):
    """A value holds tensors where nobody sees them."""


def effect_of(
    change: Change, state: PythonState, tensors: list[Tensor], source: str | None
) -> Effect:
    """Return the effect that a change has been, adding its tensors to those that a program gives;
    raise `Holds` where it has tensors in an object."""

    def standing(value: Any) -> Holder | None:
        return None if isinstance(value, tuple) else state.holder(value)

    def is_whole(value: Any) -> bool:
        return standing(value) is not None or _is_size(value)

    def placed(value: Any) -> Any:
        if (holder := standing(value)) is not None:
            return Standing(holder)
        if isinstance(value, Tensor):
            return _tensor(value, state, tensors)
        if any(isinstance(one, FakeTensor) for one in tensors_in(value)):
            raise Holds(type(value).__name__)
        return value

    value = pytree.tree_map(placed, change.value, is_leaf=is_whole)
    return Effect(change.holder, change.key, change.kind, value, source)


def _tensor(value: Tensor, state: PythonState, tensors: list[Tensor]) -> Any:
    if (place := state.place_of(value)) is not None:
        return Standing(*place)
    if traced_node(value)[0] is None:
        return value  # the user's own, a constant
    number = next((at for at, one in enumerate(tensors) if one is value), len(tensors))
    if number == len(tensors):
        tensors.append(value)
    return KeptTensor(number)


def carry_out_all(effects: Sequence[Effect], root: nn.Module, given: Sequence[Tensor]) -> None:
    """Put what a call gives, behind its outputs, where forward puts it."""
    count = len({number for effect in effects for number in effect.tensors})
    kept = given[len(given) - count :]
    for effect in effects:
        effect.carry_out(root, kept)


def keep(builder: GraphBuilder, effects: Sequence[Effect]) -> None:
    """Let a program give, beside the user's outputs, the tensors of these effects alone."""
    wanted = sorted({number for effect in effects for number in effect.tensors})
    numbers = {number: at for at, number in enumerate(wanted)}
    builder.effects = [effect.renumbered(numbers) for effect in effects]
    own = builder.output_spec.num_leaves - len(builder.output_constants)
    results: Any = builder.output.args[0]
    builder.output.args = ((*results[:own], *(results[own + number] for number in wanted)),)
