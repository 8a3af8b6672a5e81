"""Stale weights: older versions of parameters, at which an asynchronous step takes its gradients.

    with stale.reading(parameters, is_first=True):
        ...                            # forward and backward read W(t-1); then it is W(t) again
    optimizer.step()                   # applies these gradients to W(t)

Of a parameter with a delay of d updates a rank keeps d versions more than the newest. A parameter's
memory holds the version that is read now: versions exchange their contents. A step reads the oldest
one that is there, which at the start, and after `clear`, is the only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopar._torch.autograd import unchanged_for_autograd
from autopar._torch.tensors import local_of
from autopar.errors import InvalidInput


@dataclass(eq=False)
class _Versions:
    """The versions of one parameter on this process."""

    parameter: Tensor  # this process's part, whose memory holds the version that is read
    delay: int
    # In the order of updates, `parameter` among them: where it stands, that version is read.
    holders: list[Tensor] = field(default_factory=list)
    steps_frozen: int = 0  # since it has stopped to learn

    def read(self, steps_ahead: int) -> bool:
        """Read what a step so many after the next update reads; return whether that changed."""
        at = max(0, len(self.holders) - 1 - self.delay + steps_ahead)
        return self._read(self.holders[at])

    def read_newest(self) -> bool:
        return self._read(self.holders[-1])

    def _read(self, holder: Tensor) -> bool:
        if holder is self.parameter:
            return False
        now, then = (_index(self.holders, tensor) for tensor in (self.parameter, holder))
        values = self.parameter.clone()
        self.parameter.copy_(holder)
        holder.copy_(values)
        self.holders[now], self.holders[then] = holder, self.parameter
        return True

    def keep_newest(self) -> None:
        """Keep a copy of the newest version, which an update is about to change."""
        if self.delay:
            is_full = len(self.holders) > self.delay
            copy = self.holders.pop(0) if is_full else torch.empty_like(self.parameter)
            self.holders.insert(len(self.holders) - 1, copy.copy_(self.parameter))


class StaleWeights:
    """Keeps older versions of the parameters whose steps have delays."""

    def __init__(self, delays: Mapping[str, int]) -> None:
        """`delays`: by parameter name, how many updates old its gradients are."""
        self._delays = delays
        self._versions: dict[str, _Versions] = {}
        self._parameters: list[Tensor] = []  # that have versions
        self.is_running = False  # steps follow one another without a drain

    @property
    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the older versions of each parameter that has some."""
        return {
            name: [tensor for tensor in versions.holders if tensor is not versions.parameter]
            for name, versions in self._versions.items()
        }

    def clear(self) -> None:
        """Forget the older versions: the next step reads the newest."""
        if self.is_running:
            raise InvalidInput(
                "weights are loaded between runs: micro-batches that are under way read older ones",
                got="weights that are loaded inside of module.run()",
                remedy="leave the loop over run() first",
            )
        self._versions.clear()
        self._parameters.clear()

    @contextmanager
    def reading(self, tensors: Mapping[str, Tensor], *, is_first: bool) -> Iterator[None]:
        """Give parameters the values that a step reads, for this step; an update follows it.

        `is_first`: no gradients exist yet. A step that breaks off changes no version.
        """
        if not any(self._delays.values()):
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
        if self.is_running:
            raise InvalidInput(
                "steps and runs of a pipeline follow one another",
                got="step() inside of module.run(), whose micro-batches are under way",
                remedy="leave the loop over run() first",
            )
        self.take_up(tensors)
        self.read(tensors)
        try:
            yield
        finally:
            self.read_newest()
        self.keep_newest()

    def take_up(self, tensors: Mapping[str, Tensor]) -> None:
        """Follow the parameters that learn, or have lately: steps read what these were before.
        Those that are new are of one version yet."""
        known, self._versions, self._parameters = self._versions, {}, []
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                continue
            newest, versions = local_of(tensor), known.get(name)
            if versions is None or versions.parameter is not newest:
                versions = _Versions(newest, self._delays.get(name, 0), [newest])
                versions.steps_frozen = versions.delay  # if it is: of no older version
            versions.steps_frozen = 0 if tensor.requires_grad else versions.steps_frozen + 1
            if versions.steps_frozen <= versions.delay:
                self._versions[name] = versions
                self._parameters.append(tensor)

    def read(self, names: Iterable[str], steps_ahead: int = 0) -> bool:
        """Have parameters hold what a step reads, so many after the one that is next updated;
        return whether one changed."""
        every = [self._versions[name] for name in names if name in self._versions]
        with torch.no_grad(), unchanged_for_autograd([v.parameter for v in every]):
            changes = [versions.read(steps_ahead) for versions in every]
        return any(changes)

    def read_newest(self) -> bool:
        """Have all parameters hold their newest version; return whether one changed."""
        every = [*self._versions.values()]
        with torch.no_grad(), unchanged_for_autograd([v.parameter for v in every]):
            changes = [versions.read_newest() for versions in every]
        return any(changes)

    def keep_newest(self) -> None:
        """Keep the newest version of all parameters, which an update is about to change."""
        with torch.no_grad():
            for versions in self._versions.values():
                versions.keep_newest()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return the context of an update while micro-batches that read other versions are under
        way: autograd does not count it as a change of what they read."""
        # torch counts the changes of a DTensor and of its local tensor apart.
        with unchanged_for_autograd([*self._parameters, *map(local_of, self._parameters)]):
            yield


def _index(tensors: list[Tensor], wanted: Tensor) -> int:
    return next(at for at, tensor in enumerate(tensors) if tensor is wanted)
