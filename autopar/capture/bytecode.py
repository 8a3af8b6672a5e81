"""Reads from bytecode where control goes: what raises, what catches, what a `for` statement is.

A model may be typed at a prompt or run by `exec`, where no source text remains. Its bytecode is the
same everywhere, so it alone decides what capture accepts. Instructions are told apart by their
names, which Python 3.11 to 3.13 share but for a few.

Values are read only where the instructions of one expression show them: names, attributes, calls.
Everything else is `UNKNOWN`, and callers then assume the worst.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

from autopar.base.user_code import is_users_frame
from autopar.text.source_lines import describe

UNKNOWN = object()
GOES_ON = object()  # an outcome of an exception: nothing is raised any more
_NULL = object()  # what CALL expects beside a function
_NO_VALUES = {"NOP", "PRECALL", "KW_NAMES", "TO_BOOL", "EXTENDED_ARG"}
_BEGINS_STATEMENT = (
    *("STORE_", "DELETE_", "IMPORT_", "RETURN_", "YIELD_", "RERAISE", "RAISE_", "RESUME", "SEND"),
    *("FOR_ITER", "END_FOR", "BEFORE_", "PUSH_EXC", "POP_EXCEPT"),
)
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_DEREF"}
_APPENDS = {"LIST_APPEND", "SET_ADD", "MAP_ADD"}
_Stack = list[tuple[Any, ...]]  # of each place, all values that it may hold
Swallows = Callable[[Any, Any], bool]  # a manager, or the call that makes it, and an exception


@dataclass(frozen=True)
class CallResult:
    """What a call in an expression returns."""

    function: Any
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Scope:
    """Where the names of some code are looked up."""

    local: Mapping[str, Any]
    outer: Mapping[str, Any]

    def value(self, name: str, instruction: str) -> Any:
        """Return what an instruction finds by a name, or UNKNOWN."""
        if instruction != "LOAD_GLOBAL" and name in self.local:
            return self.local[name]
        is_global = instruction in ("LOAD_GLOBAL", "LOAD_NAME")
        return self.outer.get(name, getattr(builtins, name, UNKNOWN)) if is_global else UNKNOWN


@lru_cache(256)
def control_flow(code: CodeType) -> ControlFlow:
    """Return the control flow of some code, read once."""
    return ControlFlow(code)


class ControlFlow:
    """The instructions of some code, by number, and where each leads."""

    def __init__(self, code: CodeType) -> None:
        bytecode = dis.Bytecode(code)
        self.handlers = bytecode.exception_entries  # type: ignore[attr-defined]
        self.instructions = [*bytecode]
        self.numbers = {item.offset: number for number, item in enumerate(self.instructions)}

    def current(self, frame: FrameType) -> int:
        """Return the instruction at which a frame of this code stands, or in whose cache."""
        return bisect_right([*self.numbers], frame.f_lasti) - 1

    def name(self, number: int) -> str:
        """Return what an instruction is called."""
        return self.instructions[number].opname

    def target(self, number: int) -> int | None:
        """Return where an instruction may jump; None where it never does."""
        item = self.instructions[number]
        jumps = item.opcode in dis.hasjrel or item.opcode in dis.hasjabs
        return self.numbers[item.argval] if jumps else None

    def successors(self, number: int) -> tuple[int, ...]:
        """Return the instructions that may run next where nothing is raised."""
        name, target = self.name(number), self.target(number)
        if name in ("RAISE_VARARGS", "RERAISE", "RETURN_VALUE", "RETURN_CONST"):
            return ()
        if target is None:
            return (number + 1,)
        return (target,) if name.startswith(("JUMP_F", "JUMP_B")) else (number + 1, target)

    def branches(self, number: int) -> dict[bool, int] | None:
        """Return where an instruction that decides by a truth leads; None for any other."""
        name, target = self.name(number), self.target(number)
        if target is None or not ("IF_TRUE" in name or "IF_FALSE" in name):
            return None
        return {"IF_TRUE" in name: target, "IF_FALSE" in name: number + 1}

    def landing(self, number: int) -> int:
        """Return where an instruction leads without a decision. Of instructions that return one
        constant, which compilers copy, it is the last."""
        for _ in self.instructions:
            after = self.successors(number)
            if self.name(number) != "NOP" and after != (self.target(number),):
                break
            (number,) = after
        constant, numbers = self._constant(number), range(len(self.instructions))
        if constant is None:
            return number
        return max(item for item in numbers if self._constant(item) == constant)

    def _constant(self, number: int) -> int | None:
        """Return which constant is returned by an instruction, or by it and the next."""
        item, other = self.instructions[number], self.instructions[number + 1 : number + 2]
        is_load = item.opname == "LOAD_CONST" and [o.opname for o in other] == ["RETURN_VALUE"]
        return item.arg if is_load or item.opname == "RETURN_CONST" else None

    @cached_property
    def always_raises(self) -> frozenset[int]:
        """The instructions from which each way ends in a `raise`."""
        raises, returns = set[int](), set[int]()
        for known, ends in ((raises, "RAISE_V"), (returns, ("RETURN_", "YIELD_", "RERAISE"))):
            size = -1
            while size < len(known):
                size = len(known)
                for number in reversed(range(len(self.instructions))):
                    is_end = self.name(number).startswith(ends)
                    if is_end or any(item in known for item in self.successors(number)):
                        known.add(number)
        return frozenset(raises - returns)

    def begins_statement(self, number: int) -> bool:
        """Return whether an instruction is of no expression, so that values are used up by it."""
        if self.name(number) == "POP_TOP":  # behind a jump it is of `a or b` or of `a < b < c`
            return number == 0 or self.target(number - 1) is None
        return self.name(number).startswith(_BEGINS_STATEMENT)

    def returns_false(self, number: int) -> bool:
        """Return whether an instruction returns nothing, or a constant that is false."""
        name, before = self.name(number), self.instructions[number - 1]
        if name != "RETURN_VALUE":
            return name != "RETURN_CONST" or not self.instructions[number].argval
        is_constant = before.opname == "LOAD_CONST" and not before.argval
        return is_constant and not self.instructions[number].is_jump_target

    def question(self, number: int) -> tuple[int, bool] | None:
        """Return the branch that a truth asked by an instruction decides, and whether `not` is
        between; None where it is used otherwise. A generator may hand it on by its `yield`."""
        first, is_negated = number, False
        while self.branches(number) is None and self.name(number) != "YIELD_VALUE":
            item, after = (self.instructions[number : number + 2] * 2)[:2]
            is_negated ^= item.opname == "UNARY_NOT"
            if item.opname == "STORE_FAST" and after.opname == "LOAD_FAST":
                is_used = item.argval == after.argval  # `bad = not y.any()`, and `if bad:`
            else:
                is_used = item.opname == "STORE_FAST_LOAD_FAST" and len({*item.argval}) == 1
            number += 1 + (is_used and item.opname == "STORE_FAST")
            if not is_used and number - 1 > first and item.opname not in {"UNARY_NOT", *_NO_VALUES}:
                return None
        return number, is_negated

    def values(self, end: int, scope: Scope, *, below: int = 0) -> tuple[Any, ...]:
        """Return all values that an expression may leave to an instruction, so many places below
        the top of the stack."""
        start = end
        while start and not self.begins_statement(start - 1):
            start -= 1
        stack: _Stack = []
        if start and self.name(start - 1) == "STORE_FAST_LOAD_FAST":
            stack.append((scope.value(self.instructions[start - 1].argval[1], "LOAD_FAST"),))
        stacks: dict[int, _Stack] = {}  # by the instruction that is jumped to
        for number in range(start, end + 1):
            if (other := stacks.get(number)) is not None:
                both = len(stack) == len(other)
                stack = [*map(_union, stack, other)] if both else [*other]
            if number == end:
                break
            if (target := self.target(number)) is not None:
                is_kept = "OR_POP" in self.name(number) or self.successors(number) == (target,)
                stacks[target] = [*stack] if is_kept else stack[:-1]
            if self.successors(number) == (target,):
                stack = []
            else:
                _push(stack, self.instructions[number], scope)
        return stack[-1 - below] if len(stack) > below else (UNKNOWN,)

    def outcomes(
        self, starts: Iterable[tuple[int, Any]], scope: Scope, swallows: Swallows, *, thrown: bool
    ) -> set[Any]:
        """Return what may come of instructions: classes of exceptions that leave this code, None
        for one that is not known, and GOES_ON where forward may go on. Each start has a number and
        the class that is being handled, or, where it is `thrown`, that this instruction raises."""
        ends, seen = set[Any](), set[Any]()
        todo = [(number, raised, thrown) for number, raised in starts]
        while todo:
            state = number, raised, is_thrown = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            offset, name = self.instructions[number].offset, self.name(number)
            if is_thrown:
                handler = [item for item in self.handlers if item.start <= offset < item.end]
                todo += [(self.numbers[item.target], raised, False) for item in handler]
                ends |= set() if handler else {raised}
            elif name == "RERAISE":
                todo.append((number, raised, True))
            elif name == "RAISE_VARARGS":
                todo += [(number, item, True) for item in self._raised(number, raised, scope)]
            elif name.startswith("RETURN_") or name == "YIELD_VALUE":
                ends.add(GOES_ON)
            elif name in ("CHECK_EXC_MATCH", "WITH_EXCEPT_START"):
                truths = self._truths(number, raised, scope, swallows)
                branch, _ = self.question(number)  # type: ignore[misc]
                todo += [(self.branches(branch)[item], raised, False) for item in truths]  # type: ignore[index]
            else:
                todo += [(item, raised, False) for item in self.successors(number)]
        return ends

    def _raised(self, number: int, handled: Any, scope: Scope) -> Iterator[Any]:
        """Yield the classes that a `raise` may raise."""
        count = self.instructions[number].arg or 0
        if count == 0:
            yield handled
            return
        for value in self.values(number, scope, below=count - 1):
            kind = value.function if isinstance(value, CallResult) else value
            yield kind if isinstance(kind, type) and issubclass(kind, BaseException) else None

    def _truths(self, number: int, raised: Any, scope: Scope, swallows: Swallows) -> set[bool]:
        """Return whether an `except` clause, or a manager, may take an exception or leave it."""
        if self.name(number) == "CHECK_EXC_MATCH":
            return _matches(raised, self.values(number, scope))
        handler = self.instructions[number - 1].offset
        first = min(item.start for item in self.handlers if item.target == handler)
        entry = self.numbers[first] - 1
        is_seen = self.name(entry) == "BEFORE_WITH"
        managers = self.values(entry, scope) if is_seen else (UNKNOWN,)
        return {False} | ({True} if any(swallows(item, raised) for item in managers) else set())


def _matches(raised: Any, kinds: Collection[Any]) -> set[bool]:
    classes = [item for item in kinds if isinstance(item, type)]
    if any(item is BaseException or (raised and issubclass(raised, item)) for item in classes):
        return {True}
    is_known = raised is not None and len(classes) == len(kinds)
    return {False} if is_known else {True, False}


def _union(some: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    return some + tuple(other for other in others if all(other is not item for item in some))


def _push(stack: _Stack, item: dis.Instruction, scope: Scope) -> None:
    """Do to the values on a stack what an instruction does."""
    name, count = item.opname, item.arg or 0
    effect = dis.stack_effect(item.opcode, item.arg, jump=False)
    if name in _NO_VALUES:
        return
    if name == "PUSH_NULL":
        stack.append((_NULL,))
    elif name in _LOADS:
        stack += [(_NULL,)] * (effect - 1) + [(scope.value(item.argval, name),)]
    elif name == "LOAD_FAST_LOAD_FAST":
        stack += [(scope.value(local, "LOAD_FAST"),) for local in item.argval]
    elif name == "LOAD_ASSERTION_ERROR":
        stack.append((AssertionError,))
    elif name in ("LOAD_ATTR", "LOAD_METHOD") and stack:
        values = tuple(_attribute(owner, item.argval) for owner in stack.pop())
        stack += [(_NULL,)] * effect + [values]
    elif name == "BUILD_TUPLE" and len(stack) >= count > 0:
        stack[-count:] = [tuple(value for place in stack[-count:] for value in place)]
    elif name == "COPY" and len(stack) >= count:
        stack.append(stack[-count])
    elif name in ("CALL", "CALL_KW") and len(stack) >= count + 2 + (name == "CALL_KW"):
        del stack[len(stack) - (name == "CALL_KW") :]  # the names of its arguments
        places, stack[-count - 2 :] = stack[-count - 2 :], []
        functions, *arguments = [place for place in places if place[0] is not _NULL]
        values = tuple(value for place in arguments for value in place)
        stack.append(tuple(CallResult(function, values) for function in functions))
    else:
        del stack[len(stack) + min(effect, 0) :]
        changed = len(stack) if name in ("SWAP", "LOAD_SUPER_ATTR") else effect <= 0
        if name != "POP_TOP" and "JUMP" not in name:
            stack[len(stack) - changed :] = [(UNKNOWN,)] * changed
        stack += [(UNKNOWN,)] * effect


def _attribute(owner: Any, name: str) -> Any:
    """Return an attribute as it is stored: no property of the user's runs."""
    if owner is UNKNOWN or isinstance(owner, CallResult):
        return UNKNOWN
    value = inspect.getattr_static(owner, name, UNKNOWN)
    is_plain = isinstance(value, type | FunctionType) or not hasattr(type(value), "__get__")
    return value if is_plain else UNKNOWN


def starts_for_statement(frame: FrameType) -> bool:
    """Return whether a frame begins a `for` statement, and not a comprehension."""
    flow = control_flow(frame.f_code)
    start = flow.current(frame)
    loop = start + 1
    while flow.name(loop) == "EXTENDED_ARG":
        loop += 1
    if (flow.name(start), flow.name(loop)) != ("GET_ITER", "FOR_ITER"):
        return False
    body = range(loop + 1, flow.target(loop) or 0)
    loops = [range(item, flow.target(item) or 0) for item in body if flow.name(item) == "FOR_ITER"]
    return not any(  # what appends to a list that stands outside of the loop
        (flow.instructions[item].arg or 0) - 1 > sum(item in inner for inner in loops)
        for item in body
        if flow.name(item) in _APPENDS
    )


def passing_answer(frame: FrameType) -> tuple[FrameType, bool, list[int]] | None:
    """Return how a truth that a frame asks lets forward pass the `raise` or `assert` that depends
    on it: the frame of the statement, the answer, and the instructions that then do not run. None
    where the truth decides anything else."""
    flow, is_negated = control_flow(frame.f_code), False
    asked = flow.question(flow.current(frame))
    while asked is not None and frame.f_code.co_name == "<genexpr>" and frame.f_back is not None:
        frame = frame.f_back  # calls `any`, or `all`, which reads the generator
        flow, is_negated = control_flow(frame.f_code), is_negated ^ asked[1]
        asked = flow.question(flow.current(frame))
    branches = asked and flow.branches(asked[0])
    if asked is None or not branches:
        return None
    names = [flow.name(number) for number in range(flow.current(frame), asked[0])]
    is_kept = any(name.startswith("STORE_") for name in names)
    if is_kept and flow.always_raises.isdisjoint(branches.values()):
        return None  # a variable holds it, which a later question may read
    branches = {answer: flow.landing(item) for answer, item in branches.items()}
    for join in _region(flow, branches.values()):
        chances = {answer: _chance(flow, item, join) for answer, item in branches.items()}
        if join in flow.always_raises or None in chances.values():
            continue
        if chances[True] != chances[False]:
            answer = chances[True] < chances[False]  # type: ignore[operator]
            region = _region(flow, branches.values(), join)
            barred = [item for item in region if item in flow.always_raises]
            return frame, answer ^ is_negated ^ asked[1], barred
    return None


def _region(flow: ControlFlow, starts: Iterable[int], join: int | None = None) -> list[int]:
    """Return the instructions that run from some on until a statement ends, or until a join; the
    nearest first."""
    region = [*dict.fromkeys(starts)]
    for number in region:
        is_end = number == join or number in flow.always_raises or flow.begins_statement(number)
        after = () if is_end else map(flow.landing, flow.successors(number))
        region += [item for item in after if item not in region]
    return region


def _chance(flow: ControlFlow, number: int, join: int) -> float | None:
    """Return how likely a `raise` runs before a join, where each branch is as likely as the other;
    None where a statement runs besides. Of the two sides of a question in a test of `and`, `or` and
    `not`, the likelier one is nearer to the `raise`."""
    while number != join and number not in flow.always_raises:
        after = [flow.landing(item) for item in flow.successors(number)]
        if flow.begins_statement(number) or any(item <= number and item != join for item in after):
            return None
        if len(after) > 1:
            ways = [_chance(flow, item, join) for item in after]
            return None if None in ways else sum(map(float, ways)) / 2  # type: ignore[arg-type]
        (number,) = after
    return float(number != join)


def raised_by_user(error: BaseException) -> str | None:
    """Return the user's line that raised an error, by `raise` or `assert` and for no other error;
    None where something else did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or error.__context__ is not None or not is_users_frame(trace.tb_frame):
        return None
    code = trace.tb_frame.f_code
    is_raise = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return describe(code.co_filename, trace.tb_lineno) if is_raise else None
