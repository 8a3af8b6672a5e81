"""Stale weights: the parameters of the step before, at which an asynchronous step takes gradients.

    with stale.reading(parameters, is_first=True):
        ...                            # forward and backward read W(t-1); then it is W(t) again
    optimizer.step()                   # applies these gradients to W(t)

The first step reads W(0), and so does the first one after `clear`, when values were loaded. A rank
keeps one more version of its pieces of the parameters that learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar._torch.tensors import local_of
from autopar.errors import InvalidInput


class StaleWeights:
    """Keeps the version of parameters before the newest, if steps have a delay of one update."""

    def __init__(self, delay: int) -> None:
        assert delay in (0, 1)
        self._delay = delay
        # By name: this process's part of a parameter, and what it was in the step before.
        self._versions: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the older version of each parameter that has one."""
        return {name: before for name, (_, before) in self._versions.items()}

    def clear(self) -> None:
        """Forget the older versions: the next step reads the newest."""
        self._versions.clear()

    @contextmanager
    def reading(self, tensors: Mapping[str, Tensor], *, is_first: bool) -> Iterator[None]:
        """Give parameters the values of the step before, for one step.

        `is_first`: no gradients exist yet. A step that breaks off changes no version.
        """
        if not self._delay:
            yield
            return
        if not is_first:
            raise InvalidInput(
                "an asynchronous schedule makes an update of each step: all of its gradients are "
                "those of one version of the weights",
                got="a step that adds to gradients which are there already",
                remedy="optimizer.zero_grad() before each step; microbatches=n of parallelize "
                "makes one update of n parts",
            )
        self._take_up(tensors)
        pairs = [*self._versions.values()]
        with torch.no_grad():
            for newest, before in pairs:
                _exchange(newest, before)
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for newest, before in pairs:
                    _exchange(newest, before)
            raise
        with torch.no_grad():
            for newest, before in pairs:
                newest.copy_(before)

    def _take_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Follow the parameters that learn now; those that are new are of one version yet."""
        known, self._versions = self._versions, {}
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                newest = local_of(tensor)
                pair = known.get(name)
                is_same = pair is not None and pair[0] is newest
                self._versions[name] = (
                    pair if pair is not None and is_same else (newest, newest.detach().clone())
                )


def _exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the values of two tensors."""
    values = one.clone()
    one.copy_(other)
    other.copy_(values)
