"""Find and place the initial values of a parallel module's parameters and buffers.

They come from `weights=`; else from rank 0's model. Tensors without data there, which were built on
the meta device, come from the model's initialisers, which every rank runs by itself. A rank keeps
its pieces, and holds at most the full tensors of one module beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar._torch.modules import state_names
from autopar.capture.captured import Captured
from autopar.capture.fake import has_no_data
from autopar.errors import InvalidInput
from autopar.runtime.backends.backend import Backend
from autopar.runtime.parameters.initialisers import Initialisers
from autopar.runtime.parameters.placing import is_convertible, narrow_to
from autopar.runtime.parameters.weight_files import StoredTensor, WeightSource, open_weights
from autopar.strategies.node_info import info
from autopar.tensor_type import TensorType

# The names of tensors without data on rank 0, and its random state; None if nothing is drawn.
RankZeroFacts = tuple[list[str], Tensor | None]


class InitialValues:
    """The sources of one model's values: the model, `init` and `weights` of `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        init: Callable[[nn.Module], object] | None = None,
        weights: Any = None,
    ) -> None:
        self._model, self._init, self._weights_argument = model, init, weights
        self._weights: WeightSource | None = None
        self._read_as: dict[str, list[str]] = {}  # name of a tensor -> names in the weights
        self._deferred: list[str] = []  # names of the tensors that initialisers fill
        self._initialisers: Initialisers | None = None

    def validate(self) -> None:
        """Refuse arguments that this process can judge alone, before anything is read or made."""
        if self._init is not None and not callable(self._init):
            raise InvalidInput(
                "init is a function that fills the tensors of one module in place",
                got=f"init={self._init!r}",
                remedy="init=fn, which is called as model.apply(fn) calls it",
            )
        if self._weights_argument is not None:
            self._weights = open_weights(self._weights_argument)
            self._read_as = _match_names(self._model, self._weights)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers by name, tied ones under their first name."""
        return dict([*self._model.named_parameters(), *self._model.named_buffers()])

    @cached_property
    def rank0_facts(self) -> RankZeroFacts:
        """Return this process's facts about missing data, which rank 0's replace on all ranks."""
        without = [name for name, value in self.tensors.items() if value.is_meta]
        draws = any(name not in self._read_as for name in without)
        return without, torch.get_rng_state() if draws else None

    def accept(self) -> None:
        """Refuse a model with a tensor that nothing fills."""
        without, _ = self.rank0_facts
        if self._init is not None and not without:
            raise InvalidInput(
                "init makes the values of what was built on the meta device",
                got="init= with a model that has its values",
                remedy="model.apply(init) before",
            )
        self._deferred = [n for n in without if n not in self._read_as and n in self.tensors]
        if self._deferred:
            self._initialisers = Initialisers(self._model, self._init)
            wanted = {id(self.tensors[name]): name for name in self._deferred}
            deferred = [self.tensors[name] for name in self._deferred]
            if unfilled := self._initialisers.find_unfilled(deferred):
                raise InvalidInput(
                    "every parameter and buffer has values, or an initialiser that makes them",
                    got=f"on the meta device: {', '.join(wanted[id(t)] for t in unfilled)}",
                    remedy="parallelize(..., init=fn), whose fn(module) fills a module's own "
                    "tensors in place; or a reset_parameters() of the module that does so; or "
                    "weights=; or build these with device='cpu'",
                )

    def place(self, backend: Backend, types: Mapping[str, TensorType]) -> dict[str, Tensor | None]:
        """Place this rank's piece of each parameter and buffer, None where it has none.

        All ranks place together."""
        placed: dict[str, Tensor | None] = {}
        for name, like in self.tensors.items():
            if name in self._read_as:
                assert self._weights is not None
                read = partial(self._weights.read_tied, self._read_as[name])
                placed[name] = backend.place_part(name, like, types[name], read)
            elif name not in self._deferred:
                placed[name] = backend.place_tensor(name, like, types[name])
        if self._initialisers is not None:
            assert self.rank0_facts[1] is not None
            names = {id(self.tensors[name]): name for name in self._deferred}
            wanted = [self.tensors[name] for name in self._deferred]
            with _random_state(self.rank0_facts[1]):
                for like, value in self._initialisers.make_values(wanted):
                    name, read = names[id(like)], partial(narrow_to, value)
                    placed[name] = backend.place_part(name, like, types[name], read)
                    del value, read
        return placed


@contextmanager
def _random_state(state: Tensor) -> Iterator[None]:
    """Return a context that draws random numbers from a state.

    Afterwards the process goes on with its former state, unless that was this one."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        if not torch.equal(before, state):
            torch.set_rng_state(before)


def _match_names(model: nn.Module, weights: WeightSource) -> dict[str, list[str]]:
    """Return the names that the weights have for each tensor of the model, or refuse misfits."""
    first: dict[int, str] = {}
    names: dict[str, Tensor] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            first.setdefault(id(tensor), name)
            names[name] = tensor
    stored_names: dict[str, list[str]] = {}
    wrong = []
    for name, tensor in names.items():
        stored = weights.tensors.get(name)
        if stored is None:
            continue
        stored_names.setdefault(first[id(tensor)], []).append(name)
        if stored.shape != tuple(tensor.shape) or not is_convertible(stored.dtype, tensor.dtype):
            wrong.append(f"misshapen: {name} {_format_type(stored)}, not {_format_type(tensor)}")
    needed = dict.fromkeys(first[id(names[name])] for name in state_names(model))
    wrong += [f"missing: {name}" for name in needed if name not in stored_names]
    wrong += [f"unexpected: {name}" for name in weights.tensors if name not in names]
    if wrong:
        raise InvalidInput(
            "weights have the names and shapes of the model's parameters and buffers, and their "
            "dtypes, but for the precision of floating-point numbers",
            got="\n".join(wrong),
            remedy="give the weights of this model, or a mapping of its names to tensors",
        )
    return stored_names


def _format_type(tensor: Tensor | StoredTensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def require_constants(captured: Captured) -> None:
    """Refuse tensors on the meta device that are no buffers: nothing fills them."""
    unknown = [name for name, value in captured.constants.items() if has_no_data(value)]
    if unknown:
        users = [
            info(user).source
            for name in unknown
            for node in captured.graph.find_nodes(op="placeholder")
            if node.name == name
            for user in node.users
        ]
        raise InvalidInput(
            "tensors that are plain attributes of a module have values when it is built",
            got=f"{', '.join(unknown)} on the meta device",
            remedy="build them with device='cpu', or make them buffers",
            source=next(iter(users), None),
        )


def require_data(model: nn.Module, inputs: Any, doing: str, remedy: str) -> None:
    """Refuse parameters, buffers and inputs on the meta device."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, value in [*named, *(("an input", leaf) for leaf in leaves)]:
        if value.is_meta:
            raise InvalidInput(
                f"{doing} needs parameters and inputs with data",
                got=f"{name} is on the meta device",
                remedy=remedy,
            )
