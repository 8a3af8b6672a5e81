"""Copies: parameters as readers want them, cast and gathered in groups before their use, and let go
after.

A copy is a tensor that stays the same from step to step; its memory comes and goes. A group is
gathered at once: the pieces that its ranks keep go to one flat buffer, and from there to their
places. While one group is read the next one is on its way, so that two are here at a time; those
that last stay to the end of the step. In backward the readers of a group say when it is wanted
again. A program asks in one order on all ranks, so collectives come in one order.

What torch keeps for backward is the copy itself: its memory is written through `.data`, which torch
does not count as a change, and holds the same values when backward comes. Once parameters have
changed, torch is told, and refuses a backward from before.
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
from autopar.runtime.backends.host_copies import HostLink
from autopar.runtime.parameters.piece_exchange import PendingExchange, PieceExchange


@dataclass(eq=False)
class GatheredGroup:
    """Copies that come together."""

    number: int
    exchange: PieceExchange | None  # None: every rank has all the pieces
    parameters: list[Tensor]
    sources: list[Tensor]  # this rank's pieces
    targets: list[Tensor]  # the copies
    lasts: bool  # to the end of a step
    needs: Sequence[GatheredGroup] = ()  # those that hold its sources
    link: HostLink | None = None  # by which the pieces come from the host
    is_here: bool = False
    _work: PendingExchange | None = None
    _age: int | None = None  # of the parameters, since `forget`
    _filled: int | None = None  # of those that the copies were made of last
    _has_memory: bool = False

    @cached_property
    def bytes(self) -> int:
        return sum(target.nbytes for target in self.targets)

    @cached_property
    def _memory(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Of each copy, and its bytes while it is here."""
        return [(target.untyped_storage(), target.nbytes) for target in self.targets]

    @cached_property
    def _data(self) -> list[Tensor]:
        return [target.data for target in self.targets]

    @property
    def is_coming(self) -> bool:
        return self._work is not None

    @property
    def is_direct(self) -> bool:
        """Whether there is no buffer beside the copies."""
        return self.exchange is None or self.exchange.is_direct

    def start(self) -> None:
        """Send for the pieces of the other ranks."""
        self._require_unchanged()
        if self.is_coming or (self.exchange is None and self.link is None):
            return
        if self.is_direct:
            self._grow()
        if self.exchange is not None:
            self._work = self.exchange.gather(self._data, self.sources, self.link)
        elif self.link is not None:
            self._work = PendingExchange(copied=self.link.up(self._data, self.sources))

    def finish(self) -> None:
        """Wait for them, and put them in their places."""
        self._grow()
        if self._work is not None:
            wait_for(self._work)
        else:
            copy_each(self._data, self.sources)
        self._work, self.is_here = None, True

    def let_go(self) -> None:
        """Give the memory back."""
        if self._work is not None:
            self._work.then = None
            wait_for(self._work)  # it writes there
        self._work, self.is_here = None, False
        if self._has_memory:
            for storage, _ in self._memory:
                storage.resize_(0)
            self._has_memory = False

    def forget(self) -> None:
        """Another pass begins, with parameters as they are then."""
        self.let_go()
        self._age = None

    def _grow(self) -> None:
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
        if self._filled not in (None, age):
            with torch.no_grad():
                for target in self.targets:
                    target.view(-1)[:0].zero_()  # torch counts that as a change of the copy
        self._filled = age


def changed_before_backward() -> InvalidInput:
    return InvalidInput(
        "parameters and inputs stay as they are from forward to the end of its backward",
        got="one that was changed in between, by an optimizer perhaps",
        remedy="call backward before optimizer.step(), or forward after it",
    )


class GatherWindow:
    """The groups of one rank, of which few are here at a time."""

    def __init__(self, groups: Sequence[GatheredGroup | None] = ()) -> None:
        """By number; None of those whose parameters other ranks hold."""
        self.groups: list[GatheredGroup | None] = []
        # By number, those that are here or coming; that which was wanted last at the end. After
        # parameters were replaced, one may be that of a backward from before.
        self._here: dict[int, GatheredGroup] = {}
        self._read: set[GatheredGroup] = set()  # in a forward that is under way
        self._wanted: set[GatheredGroup] = set()  # in backward
        self._held: set[GatheredGroup] = (
            set()
        )  # in backward, by what waits for a forward that runs again
        self._is_again = False  # a forward runs again in backward
        self.most = 0  # bytes of a group that does not last
        self.take(groups)

    def take(self, groups: Sequence[GatheredGroup | None]) -> None:
        """Have these groups from now on, of which some were there before."""
        self.groups = list(groups)
        here = [group for group in self.groups if group is not None]
        self.most = max((group.bytes for group in here if not group.lasts), default=0)

    @property
    def calls(self) -> dict[Any, Callable[..., None]]:
        """What a program's calls do."""
        return {have_copies: self.have, leave_copies: self.leave, watch_readers: self.watch}

    def have(self, number: int, following: int) -> None:
        """A forward is about to read a group; the other one comes after it."""
        if self._is_again:
            return
        group = self._of(number)
        self._read.add(group)
        self._wanted.clear()
        self._bring(group)
        if following != NO_GROUP:
            self._start(self._of(following))

    def leave(self, number: int) -> None:
        """Forward has read a group for the last time."""
        if not self._is_again:
            self._read.discard(self._of(number))

    def watch(self, made: Any, numbers: tuple[int, ...], following: int) -> None:
        """Have groups here when the backward of what was made of them begins."""
        if self._is_again:
            return
        nodes = {tensor.grad_fn for tensor in made} if isinstance(made, tuple | list) else None
        for node in {made.grad_fn} if nodes is None else nodes:
            if node is not None:
                groups = tuple(map(self._of, numbers))
                after = self._of(following) if following != NO_GROUP else None
                node.register_prehook(partial(self._want, groups, after))

    @property
    def copies(self) -> list[Tensor]:
        """All, of which few have memory."""
        return [target for group in self.groups if group is not None for target in group.targets]

    @contextmanager
    def again(self) -> Iterator[None]:
        """A forward runs again in backward, which sees to what comes and goes: the groups that the
        backward wants stay here if there is room, and are here at the end."""
        before = self._is_again, self._wanted, self._held
        self._is_again, self._held = True, self._wanted | self._held
        try:
            yield
        finally:
            self._is_again, self._wanted, self._held = before
        for group in sorted(self._wanted, key=lambda group: group.number):
            self._bring(group)

    def bringing(self, function: Callable[..., Any], numbers: tuple[int, ...]) -> Any:
        """`function`, which reads these groups: where it runs again they are brought first."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_again:
                self._want(tuple(map(self._of, numbers)), None, None)
            return function(*args, **kwargs)

        return call

    def bring_lasting(self) -> None:
        """Have all groups here that last."""
        for group in self.groups:
            if group is not None and group.lasts:
                self._bring(group)

    def forget(self) -> None:
        """Let go of everything: a pass has ended, or another begins."""
        for group in [*self._here.values(), *self.groups]:
            if group is not None:
                group.forget()
        self._here.clear()
        self._read.clear()
        self._wanted.clear()
        self._held.clear()

    def _want(
        self, groups: tuple[GatheredGroup, ...], following: GatheredGroup | None, _: Any
    ) -> None:
        self._wanted = {*groups}
        for group in groups:
            self._bring(group)
        if following is not None:
            self._start(following)

    def _of(self, number: int) -> GatheredGroup:
        group = self.groups[number]
        assert group is not None
        return group

    def _start(self, group: GatheredGroup) -> None:
        other = self._here.get(group.number)
        if other is not None and other is not group:
            self._let_go(other)
        if group.is_here or group.is_coming:
            return
        with torch.no_grad():
            for needed in group.needs:
                self._bring(needed)
            if not group.lasts:
                self._make_room(group, lambda: len(self._passing) >= LIVE_GROUPS)
            group.start()
        self._here[group.number] = group

    def _bring(self, group: GatheredGroup) -> None:
        if not group.is_here:
            self._start(group)
            more = 0 if group.is_direct else group.bytes  # beside its buffer
            if not group.lasts:
                self._make_room(group, lambda: self._bytes + more > LIVE_GROUPS * self.most)
            with torch.no_grad():
                group.finish()
        self._here[group.number] = self._here.pop(group.number, group)

    @property
    def _passing(self) -> list[GatheredGroup]:
        return [group for group in self._here.values() if not group.lasts]

    @property
    def _bytes(self) -> int:
        return sum(group.bytes for group in self._passing)

    def _make_room(self, wanted: GatheredGroup, is_full: Callable[[], bool]) -> None:
        """Let go of groups that nobody reads, the one whose last use is the longest ago first;
        then of those that come before they are wanted, and those that are only held."""
        kept = {wanted, *self._read, *self._wanted}
        others = [group for group in self._passing if group not in kept]
        for group in sorted(others, key=lambda one: (one in self._held, not one.is_here)):
            if is_full():
                self._let_go(group)

    def _let_go(self, group: GatheredGroup) -> None:
        group.let_go()
        del self._here[group.number]
