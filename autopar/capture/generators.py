"""Generators: what draws in forward besides the modules `random` and `numpy.random`.

A generator that the user holds goes on from draw to draw, while a program would have what it gave
once: those that a model reaches are the same before and after forward, or it is refused. One that
forward makes from a seed gives the same in every step, and may; one without a seed may not.
"""

from __future__ import annotations

import inspect
import linecache
import os
import pickle
import random
import secrets
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from autopar.capture.drawn_elsewhere import refused
from autopar.capture.hooks import replaced
from autopar.lines import caller, describe, is_users

_KINDS = (random.Random, numpy.random.Generator, numpy.random.RandomState)
_MAKERS = ((random, "Random"), (numpy.random, "RandomState"), (numpy.random, "default_rng"))
_OF_THE_SYSTEM = ((random, "_urandom"), (os, "urandom"))
_urandom = os.urandom
_TORCH = f"{Path(torch.__file__).parent}/"
_MOST = 10_000  # of what a container holds, that is looked at


@contextmanager
def generators_kept(model: nn.Module) -> Iterator[None]:
    """While the forward of a model runs, refuse draws of generators that it would hold, or make
    anew in each step."""
    found, functions = _reached(model)
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


def _reached(model: nn.Module) -> tuple[list[tuple[str, Any]], list[FunctionType]]:
    """The generators that code of a model reaches, each by a name that it has there; and that
    code: what its modules hold, and what their functions read."""
    found, functions = list[tuple[str, Any]](), list[FunctionType]()
    seen, left = set[int](), deque[tuple[str, Any]]([("model", model)])
    while left:
        name, one = left.popleft()
        if id(one) in seen or isinstance(one, Tensor | str | bytes | int | float):
            continue
        seen.add(id(one))
        if isinstance(one, _KINDS):
            if not isinstance(one, random.SystemRandom):
                found.append((name, one))
            continue
        if isinstance(one, FunctionType):
            functions.append(one)
        left.extend(_held(name, one))
    return found, functions


def _held(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with the name by which code says it."""
    match one:
        case dict():
            if len(one) <= _MOST:
                yield from ((name, value) for value in one.values())
        case list() | tuple() | set() | frozenset() | deque():
            if len(one) <= _MOST:
                yield from ((name, value) for value in one)
        case MethodType():
            yield from ((name, one.__self__), (name, one.__func__))
        case partial():
            yield from ((name, value) for value in (one.func, one.args, one.keywords))
        case staticmethod() | classmethod():
            yield name, one.__func__
        case property():
            yield name, one.fget
        case FunctionType():
            if _is_own(one.__code__.co_filename):
                yield from _read(one)
        case type():
            file = _file(one)
            if _is_own(file):
                yield from vars(one).items()
                yield from ((name, base) for base in one.__bases__)
            elif is_users(file):  # an installed package: what its file holds itself
                around = vars(sys.modules[one.__module__]).items()
                yield from (pair for pair in around if isinstance(pair[1], _KINDS))
        case ModuleType():
            return  # of which functions say what they read
        case _ if isinstance(one, nn.Module) or not _file(type(one)).startswith(_TORCH):
            yield from getattr(one, "__dict__", {}).items()
            yield name, type(one)


def _read(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function reads: its cells, defaults, and the globals that its code names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # empty
            continue
    yield "", (function.__defaults__, function.__kwdefaults__)
    if inspect.unwrap(function) is not function:
        yield function.__name__, inspect.unwrap(function)
    names = {*_names(function.__code__)}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield name, value
        elif _is_own(getattr(value, "__file__", None) or "<"):
            yield from ((other, vars(value)[other]) for other in names & vars(value).keys())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _file(kind: type) -> str:
    """Where a class is written; of one that is built in, nowhere."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"


def _is_own(file: str) -> bool:
    """Whether code is of the user's own, and not of an installed package."""
    return is_users(file) and "/site-packages/" not in file


def _line_with(name: str, functions: list[FunctionType]) -> str | None:
    """The first line of code that says a name."""
    for code in (one.__code__ for one in functions if one.__name__ != "__init__"):
        if name in (*_names(code), *code.co_freevars):
            lines = sorted({line for _, _, line in code.co_lines() if line is not None})
            for line in lines[1:]:
                if name in linecache.getline(code.co_filename, line):
                    return describe(code.co_filename, line)
    return None


def _seeded(owner: Any, name: str) -> Any:
    """What makes generators, refused where the user's code gives it no seed."""
    plain = getattr(owner, name)

    def make(*args: Any, **kwargs: Any) -> Any:
        if _asked_by_users(__file__) and all(seed is None for seed in (*args, *kwargs.values())):
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
    """Whether the user's code called what is called now, through these files at most."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in between:
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def _drawn_by_the_system(size: int) -> bytes:
    """`os.urandom`, by which `SystemRandom` and `secrets` draw, refused in the user's code."""
    if _asked_by_users(__file__, random.__file__, secrets.__file__):
        raise refused("a number of the system", (), caller())
    return _urandom(size)
