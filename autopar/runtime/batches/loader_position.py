"""Loader position: how many batches of an epoch a loop has taken, and what its order follows from.

An order of samples is drawn where a loop begins. So a position holds the generators as they were
there: of torch and Python, and of the loader and its samplers. A loop that resumes draws
the same order from them, leaves out the batches that were taken, and then puts the generators of
torch and Python back, since a checkpoint has set them to where training stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InvalidInput


@dataclass(frozen=True)
class Generators:
    """States of the random generators that an order may follow from."""

    of_torch: Tensor
    of_python: Any
    of_loader: tuple[Tensor, ...]  # of the loader and its samplers

    @classmethod
    def of(cls, loader: Any) -> Generators:
        """Return the current states."""
        states = tuple(generator.get_state() for generator in _loader_generators(loader))
        return cls(torch.get_rng_state(), random.getstate(), states)

    def restore(self, loader: Any) -> None:
        """Set the generators to these states."""
        _restore_global(self)
        for generator, state in zip(_loader_generators(loader), self.of_loader):
            generator.set_state(state)


@dataclass(frozen=True)
class LoaderPosition:
    """A place in an epoch of a loader."""

    batches: int  # that were taken
    epoch: int | None  # that set_epoch() named last
    generators: Generators  # where the epoch began

    def to_plain(self) -> dict[str, Any]:
        """Return the position as plain data, which `extra=` of `ap.save` takes."""
        return {
            "batches": self.batches,
            "epoch": self.epoch,
            "torch": self.generators.of_torch,
            "python": self.generators.of_python,
            "generators": list(self.generators.of_loader),
        }

    @classmethod
    def from_plain(cls, data: Any, loader: Any) -> LoaderPosition:
        """Return a position that `to_plain` wrote for a loader like this one, or refuse it."""
        try:
            states = tuple(data["generators"])
            generators = Generators(data["torch"], data["python"], states)
            position = cls(int(data["batches"]), data["epoch"], generators)
        except (TypeError, KeyError, ValueError) as error:
            raise _refused(f"a {type(data).__name__} without {error}") from None
        if len(states) != (count := len(_loader_generators(loader))):
            raise _refused(f"one with {len(states)} generators, for a loader with {count}")
        return position


class Skipping:
    """Yields the values of an iterable after the first ones, whose order it draws all the same."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values, self.count = values, 0
        self.generators: Generators | None = None  # those to draw the order with

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        count, generators = self.count, self.generators
        self.count, self.generators = 0, None
        values = iter(self._values)
        if count:
            with generators_put_back(restored=generators):
                for _ in islice(values, count):
                    pass
        yield from values


@contextmanager
def generators_put_back(restored: Generators | None = None) -> Iterator[None]:
    """Put torch's and Python's generators back at the end; set them to `restored` before."""
    before = Generators(torch.get_rng_state(), random.getstate(), ())
    if restored is not None:
        _restore_global(restored)
    try:
        yield
    finally:
        _restore_global(before)


def _restore_global(generators: Generators) -> None:
    torch.set_rng_state(generators.of_torch)
    version, numbers, gauss = generators.of_python
    random.setstate((version, tuple(numbers), gauss))


def _loader_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    candidates: Mapping[int, Any] = {
        id(generator): generator for h in holders if (generator := getattr(h, "generator", None))
    }
    return [g for g in candidates.values() if isinstance(g, torch.Generator)]


def _refused(got: str) -> InvalidInput:
    return InvalidInput(
        "the position of a split loader is one that its state_dict() gave",
        got=got,
        remedy="load_state_dict() of what state_dict() of a loader like this one returned",
    )
