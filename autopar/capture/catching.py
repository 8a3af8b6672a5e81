"""Catching: whether forward may go on after what one of its instructions raises.

Around it stand `try` statements, and `with` statements whose managers may swallow.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from types import FrameType
from typing import Any

from autopar.base.user_code import is_users_class, is_users_frame, is_users_space
from autopar.capture.bytecode import GOES_ON, UNKNOWN, CallResult, Scope, control_flow

_EXPORT = "torch.export"  # calls forward


def is_caught(barred: Iterable[int], frame: FrameType) -> bool:
    """Whether forward may go on after what a frame raises where it comes to such instructions."""
    flow, scope = control_flow(frame.f_code), Scope(frame.f_locals, frame.f_globals)
    outcomes = flow.outcomes(
        [(number, None) for number in barred], scope, _may_swallow, thrown=False
    )
    outer = frame.f_back
    while outer is not None and not str(outer.f_globals.get("__name__")).startswith(_EXPORT):
        if GOES_ON in outcomes:
            return True
        if outer.f_globals is vars(contextlib) and outer.f_code.co_name == "inner":  # a decorator
            manager = outer.f_locals.get("self")
            function = getattr(manager, "func", type(manager))
            if any(_may_swallow(CallResult(function, ()), raised) for raised in outcomes):
                return True
        if is_users_frame(outer):
            flow, scope = control_flow(outer.f_code), Scope(outer.f_locals, outer.f_globals)
            starts = [(flow.current(outer), raised) for raised in outcomes]
            outcomes = flow.outcomes(starts, scope, _may_swallow, thrown=True)
        outer = outer.f_back
    return GOES_ON in outcomes


def _may_swallow(manager: Any, raised: Any) -> bool:
    """Whether a manager may swallow an exception of this class (None: of any)."""
    if manager is UNKNOWN or (isinstance(manager, CallResult) and manager.function is UNKNOWN):
        return True
    maker = manager.function if isinstance(manager, CallResult) else type(manager)
    if maker is contextlib.suppress and isinstance(manager, CallResult):
        are_known = raised and all(isinstance(kind, type) for kind in manager.arguments)
        return not are_known or issubclass(raised, manager.arguments)
    if isinstance(maker, type) and issubclass(maker, contextlib.ExitStack | contextlib.suppress):
        return True
    function = inspect.unwrap(maker) if callable(maker) else maker
    is_class = isinstance(function, type)
    function = inspect.unwrap(getattr(function, "__exit__", function)) if is_class else function
    code = getattr(function, "__code__", None)
    if code is None:  # what is built in lets them pass
        return not is_class and is_users_class(type(maker))
    if not is_users_space(function.__globals__):
        return False
    flow, scope = control_flow(code), Scope({}, function.__globals__)
    numbers = range(len(flow.instructions))
    if is_class:
        return not all(flow.returns_false(number) for number in numbers)
    if not inspect.isgeneratorfunction(function):
        return True  # which manager it returns is not seen
    yields = [(number, raised) for number in numbers if flow.name(number) == "YIELD_VALUE"]
    return GOES_ON in flow.outcomes(yields, scope, _may_swallow, thrown=True)
