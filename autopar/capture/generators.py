"""Generators: what draws in forward besides the modules `random` and `numpy.random`.

A generator that the user holds goes on from draw to draw, while a program would have what it gave
once: those that a model reaches are the same before and after forward, or it is refused. One that
forward makes from a seed gives the same in every step, and may; one without a seed may not.
"""

from __future__ import annotations

import dis
import os
import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, cast

import numpy
from torch import nn

from autopar.base.user_code import (
    is_users_class,
    is_users_frame,
    is_users_function,
    is_users_module,
)
from autopar.capture.drawn_elsewhere import refused
from autopar.capture.hooks import replaced
from autopar.capture.object_contents import (
    LEAVES,
    PLAIN,
    attributes_of,
    bases_of,
    class_space_of,
    is_a,
    items_of,
    space_of,
    values_in,
)
from autopar.text.source_lines import caller, describe

_KINDS = (random.Random, numpy.random.Generator, numpy.random.RandomState)
_MAKERS = ((random, "Random"), (numpy.random, "RandomState"), (numpy.random, "default_rng"))
_OF_THE_SYSTEM = ((random, "_urandom"), (os, "urandom"))
_urandom = os.urandom
_MOST = 10_000  # of what a container holds, that is looked at


@contextmanager
def generators_kept(
    found: Sequence[tuple[str, Any]], functions: Sequence[FunctionType]
) -> Iterator[None]:
    """While the forward of a model runs, refuse draws of the generators that were found (see
    `generators_reached`), or are made anew in each step."""
    before = [_state(one) for _, one in found]
    with ExitStack() as stack:
        for owner, name in _MAKERS:
            stack.enter_context(replaced(owner, name, _seeded(owner, name)))
        for owner, name in _OF_THE_SYSTEM:
            stack.enter_context(replaced(owner, name, _drawn_by_the_system))
        yield
    for (name, one), state in zip(found, before, strict=True):
        if _state(one) != state:
            got = f"draws of {name}, a {type(one).__module__}.{type(one).__qualname__},"
            raise refused(got, (), _line_with(name, functions))


def _state(generator: Any) -> bytes:
    match generator:
        case random.Random():
            return pickle.dumps(generator.getstate())
        case numpy.random.RandomState():
            return pickle.dumps(generator.get_state(legacy=False))
    return pickle.dumps(generator.bit_generator.state)


def generators_reached(model: nn.Module) -> tuple[list[tuple[str, Any]], list[FunctionType]]:
    """The generators that code of a model reaches, each by a name that it has there; and that
    code: what its modules hold, and what their functions read."""
    found, functions = list[tuple[str, Any]](), list[FunctionType]()
    seen, left = {id(model)}, [("model", cast(Any, model))]
    for name, one in left:  # which grows meanwhile
        if is_a(one, *_KINDS):
            if not is_a(one, random.SystemRandom):
                found.append((name, one))
            continue
        if is_a(one, FunctionType):
            functions.append(one)
        for inner, value in _held(name, one):
            if id(value) not in seen and type(value) not in PLAIN and not is_a(value, *LEAVES):
                seen.add(id(value))
                left.append((inner, value))
    return found, functions


def _held(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with the name by which code says it."""
    if is_a(one, FunctionType):
        if is_users_function(one):
            yield from _read(one)
    elif is_a(one, type):
        if is_users_class(one):
            yield from class_space_of(one).items()
            yield from ((name, base) for base in bases_of(one))
    elif is_a(one, ModuleType):
        return  # of which functions say what they read
    elif (items := items_of(one)) is not None:
        if len(items) <= _MOST:
            yield from ((name, value) for value in items.values())
    elif is_a(one, nn.Module) or is_users_class(type(one)):
        yield from attributes_of(one).items()
        yield name, type(one)
    else:
        yield from ((name, value) for value in values_in(one))


def _read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads: its cells, defaults, and the globals that its code names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():
            yield name, cell.cell_contents
    yield "", (function.__defaults__, function.__kwdefaults__, vars(function))
    names = _names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if not is_a(value, ModuleType):
            yield name, value
        elif is_users_module(value):
            space = space_of(value) or {}
            yield from ((other, space[other]) for other in names & space.keys())


@cache
def _names(code: CodeType) -> frozenset[str]:
    """The names that code asks for, with that of the functions in it."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)


def _line_with(name: str, functions: Sequence[FunctionType]) -> str | None:
    """The first line of code that says a name."""
    for code in (one.__code__ for one in functions if one.__name__ != "__init__"):
        for step in (
            dis.get_instructions(code) if name in _names(code) | {*code.co_freevars} else ()
        ):
            line = step.positions.lineno if step.positions is not None else None
            if step.argval == name and line is not None:
                return describe(code.co_filename, line)
    return None


def _seeded(owner: Any, name: str) -> Any:
    """What makes generators, refused where the user's code gives it no seed."""
    plain = getattr(owner, name)

    def make(*args: Any, **kwargs: Any) -> Any:
        if _asked_by_users(__name__) and all(seed is None for seed in (*args, *kwargs.values())):
            raise refused(f"{owner.__name__}.{name} without a seed", (), caller())
        with replaced(random, "_urandom", _urandom):  # numpy asks, and has a seed all the same
            return plain(*args, **kwargs)

    if not isinstance(plain, type):
        return make

    class Kind(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, plain)

        def __getattr__(cls, attribute: str) -> Any:
            return getattr(plain, attribute)

    return Kind(name, (), {"__new__": lambda cls, *args, **kwargs: make(*args, **kwargs)})


def _asked_by_users(*between: str) -> bool:
    """Whether the user's code called what is called now, through these modules at most."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in between:
        frame = frame.f_back
    return frame is not None and is_users_frame(frame)


def _drawn_by_the_system(size: int) -> bytes:
    """`os.urandom`, by which `SystemRandom` and `secrets` draw, refused in the user's code."""
    if _asked_by_users(__name__, "random", "secrets"):
        raise refused("a number of the system", (), caller())
    return _urandom(size)
