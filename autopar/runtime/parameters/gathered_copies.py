"""Keep gathered copies of parameters: cast, all-gathered in groups before their use, then freed.

A copy is a tensor that stays from step to step; its memory comes and goes. While one group is read
the next is prefetched, so two have memory at a time; groups that live for a step stay to its end.
In backward, hooks on the readers of a group request it again. A program requests groups in one
order on all ranks, so collectives come in one order.

torch keeps the copy itself for backward. Its memory is written through `.data`, not counted
as a change, and has equal values when backward comes. After parameters have changed, the
change is counted, and torch refuses a backward of an earlier forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from autopar._torch.communication import wait_for
from autopar._torch.tensors import copy_each, version_of
from autopar.cost.gather_groups import LIVE_GROUPS
from autopar.errors import InvalidInput
from autopar.passes.gathers import NO_GROUP, have_copies, leave_copies, watch_readers
from autopar.pipeline.running.movement_spans import Begin, MovementSpan, names_text, not_recorded
from autopar.runtime.backends.host_copies import HostLink
from autopar.runtime.parameters.piece_exchange import PendingExchange, PieceExchange


@dataclass(eq=False)
class GatheredGroup:
    """Copies of parameters that are gathered together."""

    number: int
    names: Sequence[str]  # of the parameters
    exchange: PieceExchange | None  # None: every rank has all the pieces
    parameters: list[Tensor]
    sources: list[Tensor]  # this rank's pieces
    targets: list[Tensor]  # the copies
    is_step_long: bool  # the copies stay to the end of a step
    needs: Sequence[GatheredGroup] = ()  # the groups whose copies are its sources
    link: HostLink | None = None  # by which the pieces come from the host; None: from the device
    is_gathered: bool = False
    _work: PendingExchange | None = None
    _span: MovementSpan | None = None  # of the work, in a recorded step
    _age: int | None = None  # of the parameters, since `reset`
    _filled_age: int | None = None  # of the parameters when the copies were last filled
    _has_memory: bool = False

    @cached_property
    def bytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    @cached_property
    def _memory(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Return the storage of each copy, and its bytes when it is gathered."""
        return [(target.untyped_storage(), target.nbytes) for target in self.targets]

    @cached_property
    def _data(self) -> list[Tensor]:
        return [target.data for target in self.targets]

    @property
    def is_in_flight(self) -> bool:
        return self._work is not None

    @property
    def is_direct(self) -> bool:
        """Return whether a gather needs no buffer beside the copies."""
        return self.exchange is None or self.exchange.is_direct

    def start(self, begin: Begin = not_recorded) -> None:
        """Begin to gather the pieces of all ranks; `begin` returns the span of that."""
        self._require_unchanged()
        if self.is_in_flight or (self.exchange is None and self.link is None):
            return
        if self.is_direct:
            self._allocate()
        if self.exchange is not None:
            self._work = self.exchange.gather(self._data, self.sources, self.link)
        elif self.link is not None:
            self._work = PendingExchange(copied=self.link.upload(self._data, self.sources))
        self._span = begin(f"gather of {names_text(self.names)}")
        if self._span is not None and self._work is not None and self._data[0].device.type == "cpu":
            self._span.watch(self._work.works)

    def finish(self) -> None:
        """Wait for the pieces, and fill the copies."""
        self._allocate()
        if self._work is not None:
            wait_for(self._work)
        else:
            copy_each(self._data, self.sources)
        self._end_span()
        self._work, self.is_gathered = None, True

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.finish()
            self._span = None

    def free(self) -> None:
        """Free the memory of the copies."""
        if self._work is not None:
            self._work.on_arrival = None
            wait_for(self._work)  # it writes into that memory
        self._end_span()
        self._work, self.is_gathered = None, False
        if self._has_memory:
            for storage, _ in self._memory:
                storage.resize_(0)
            self._has_memory = False

    def reset(self) -> None:
        """Free the copies, and let the next pass begin with changed parameters."""
        self.free()
        self._age = None

    def _allocate(self) -> None:
        if self._has_memory:
            return
        self._has_memory = True
        for storage, nbytes in self._memory:
            storage.resize_(nbytes)

    def _require_unchanged(self) -> None:
        age = sum(map(version_of, self.parameters))
        if self._age not in (None, age):
            raise changed_before_backward()
        self._age = age
        if self._filled_age not in (None, age):
            with torch.no_grad():
                for target in self.targets:
                    target.view(-1)[:0].zero_()  # torch counts that as a change of the copy
        self._filled_age = age


def changed_before_backward() -> InvalidInput:
    """Return the error for a parameter or input that was changed between forward and backward."""
    return InvalidInput(
        "parameters and inputs stay as they are from forward to the end of its backward",
        got="one that was changed in between, by an optimizer perhaps",
        remedy="call backward before optimizer.step(), or forward after it",
    )


class GatherWindow:
    """The groups of one rank, of which few have memory at a time."""

    def __init__(self, groups: Sequence[GatheredGroup | None] = ()) -> None:
        """Hold groups by number; None for one whose parameters other ranks hold."""
        self.groups: list[GatheredGroup | None] = []
        # By number, those that are gathered or in flight, by the time of their last use. After
        # parameters were replaced, one may be the group of an earlier backward.
        self._live: dict[int, GatheredGroup] = {}
        self._read: set[GatheredGroup] = set()  # in a forward that is under way
        self._wanted: set[GatheredGroup] = set()  # in backward
        self._suspended: set[GatheredGroup] = set()  # wanted by a backward that a rerun interrupts
        self._is_rerunning = False  # a forward runs again in backward
        self.begin: Begin = not_recorded  # the span of a gather
        self.largest_bytes = 0  # of a group that does not live for a step
        self.set_groups(groups)

    def set_groups(self, groups: Sequence[GatheredGroup | None]) -> None:
        """Replace the groups, of which some may be there already."""
        self.groups = list(groups)
        local = [group for group in self.groups if group is not None]
        sizes = (group.bytes for group in local if not group.is_step_long)
        self.largest_bytes = max(sizes, default=0)

    @property
    def calls(self) -> dict[Any, Callable[..., None]]:
        """Return the methods that carry out a program's calls."""
        watch = self.watch_backward
        return {have_copies: self.request, leave_copies: self.release, watch_readers: watch}

    def request(self, number: int, following: int) -> None:
        """Gather a group that forward is about to read, and prefetch the `following` one."""
        if self._is_rerunning:
            return
        group = self._group_at(number)
        self._read.add(group)
        self._wanted.clear()
        self._gather(group)
        if following != NO_GROUP:
            self._start(self._group_at(following))

    def release(self, number: int) -> None:
        """Note that forward has read a group for the last time."""
        if not self._is_rerunning:
            self._read.discard(self._group_at(number))

    def watch_backward(self, results: Any, numbers: tuple[int, ...], following: int) -> None:
        """Have groups gathered when the backward of results that read them begins."""
        if self._is_rerunning:
            return
        is_many = isinstance(results, tuple | list)
        nodes = {tensor.grad_fn for tensor in results} if is_many else None
        for node in {results.grad_fn} if nodes is None else nodes:
            if node is not None:
                groups = tuple(map(self._group_at, numbers))
                after = self._group_at(following) if following != NO_GROUP else None
                node.register_prehook(partial(self._request_in_backward, groups, after))

    @property
    def copies(self) -> list[Tensor]:
        """Return all copies, of which few have memory."""
        return [target for group in self.groups if group is not None for target in group.targets]

    @contextmanager
    def rerun_forward(self) -> Iterator[None]:
        """Return a context in which a forward runs again and backward decides what is gathered.

        The groups that backward wants stay gathered if there is room, and are at the end."""
        before = self._is_rerunning, self._wanted, self._suspended
        self._is_rerunning, self._suspended = True, self._wanted | self._suspended
        try:
            yield
        finally:
            self._is_rerunning, self._wanted, self._suspended = before
        for group in sorted(self._wanted, key=lambda group: group.number):
            self._gather(group)

    def gather_in_rerun(self, function: Callable[..., Any], numbers: tuple[int, ...]) -> Any:
        """Return `function`, which reads these groups, so that a rerun gathers them first."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_rerunning:
                self._request_in_backward(tuple(map(self._group_at, numbers)), None, None)
            return function(*args, **kwargs)

        return call

    def gather_step_long(self) -> None:
        """Gather all groups that live for a step."""
        for group in self.groups:
            if group is not None and group.is_step_long:
                self._gather(group)

    def reset(self) -> None:
        """Free all groups: a pass has ended, or another begins."""
        for group in [*self._live.values(), *self.groups]:
            if group is not None:
                group.reset()
        self._live.clear()
        self._read.clear()
        self._wanted.clear()
        self._suspended.clear()

    def _request_in_backward(
        self, groups: tuple[GatheredGroup, ...], following: GatheredGroup | None, _: Any
    ) -> None:
        self._wanted = {*groups}
        for group in groups:
            self._gather(group)
        if following is not None:
            self._start(following)

    def _group_at(self, number: int) -> GatheredGroup:
        group = self.groups[number]
        assert group is not None
        return group

    def _start(self, group: GatheredGroup) -> None:
        other = self._live.get(group.number)
        if other is not None and other is not group:
            self._free(other)
        if group.is_gathered or group.is_in_flight:
            return
        with torch.no_grad():
            for needed in group.needs:
                self._gather(needed)
            if not group.is_step_long:
                self._make_room(group, lambda: len(self._short_lived) >= LIVE_GROUPS)
            group.start(self.begin)
        self._live[group.number] = group

    def _gather(self, group: GatheredGroup) -> None:
        if not group.is_gathered:
            self._start(group)
            more = 0 if group.is_direct else group.bytes  # beside its buffer
            if not group.is_step_long:
                limit = LIVE_GROUPS * self.largest_bytes
                self._make_room(group, lambda: self._bytes + more > limit)
            with torch.no_grad():
                group.finish()
        self._live[group.number] = self._live.pop(group.number, group)

    @property
    def _short_lived(self) -> list[GatheredGroup]:
        return [group for group in self._live.values() if not group.is_step_long]

    @property
    def _bytes(self) -> int:
        return sum(group.bytes for group in self._short_lived)

    def _make_room(self, wanted: GatheredGroup, is_full: Callable[[], bool]) -> None:
        """Free groups that nobody reads, least recently used first.

        Then prefetched groups go, and last those that an interrupted backward wants."""
        in_use = {wanted, *self._read, *self._wanted}
        others = [group for group in self._short_lived if group not in in_use]
        others.sort(key=lambda group: (group in self._suspended, not group.is_gathered))
        for group in others:
            if is_full():
                self._free(group)

    def _free(self, group: GatheredGroup) -> None:
        group.free()
        del self._live[group.number]
