"""Arguments that several commands share: the model, the machines, the mesh, an amount of memory.

A model comes from a function of the user's, `file.py:function` or `package.module:function`, which
returns (model, args) or (model, args, kwargs). The model may be on the meta device.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autopar.capture.source import of_traceback
from autopar.cluster import Cluster
from autopar.commands.parsers import SPEC
from autopar.errors import AutoparError, InvalidInput, error_text
from autopar.mesh import Mesh
from autopar.pipeline import NAMES as SCHEDULES
from autopar.pipeline import load as load_schedule
from autopar.pipeline.schedule import Schedule
from autopar.plans.plan import Plan, SavedPlan
from autopar.text.source_lines import describe

Call = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]  # with an example of a global batch


def read_decisions(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the decisions as options of `plan`, without those that were not given."""
    decisions = {
        "mesh": read_mesh(arguments.mesh),
        "mode": arguments.mode,
        "microbatches": _number(arguments.microbatches),
        "pipeline": _or_none(_number(arguments.pipeline)),
        "schedule": read_schedule(arguments.schedule),
        "states": arguments.states,
        "recompute": _or_none(arguments.recompute),
    }
    may_be_none = ("pipeline", "recompute")
    return {name: v for name, v in decisions.items() if v is not None or name in may_be_none}


def _or_none(value: int | str) -> int | str | None:
    """Return a value; None for the word none."""
    return None if value == "none" else value


def read_schedule(text: str) -> str | Schedule:
    """Return the name of a schedule, or the schedule in a file."""
    is_file = text not in SCHEDULES and text.endswith((".csv", ".txt"))
    return load_schedule(text) if is_file else text


def load_call(spec: str) -> Call:
    """Return the model and inputs that the function named by `spec` makes."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise InvalidInput(
            f"a model is given as {SPEC}", got=repr(spec), remedy="autopar.examples:gpt"
        )
    module = _import(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(name, known, 3) or known[:5]
        raise InvalidInput(
            "a model comes from a function of its module",
            got=f"{name!r}, which {place} has not",
            remedy=f"it has {', '.join(close) or 'none'}",
        )
    with _of_user(f"{place}:{name}()", place):
        call = function()
    if isinstance(call, tuple) and len(call) in (2, 3) and isinstance(call[0], nn.Module):
        model, args, kwargs = (*call, {}) if len(call) == 2 else call
        if isinstance(args, tuple | list) and isinstance(kwargs, Mapping):
            return model, tuple(args), dict(kwargs)
    raise InvalidInput(
        "the function of a model returns (model, args) or (model, args, kwargs)",
        got=f"{type(call).__name__} from {spec}",
        remedy="return model, (ids,), {'labels': labels}",
    )


def load_plan(path: str, spec: str | None) -> Plan | SavedPlan:
    """Return a plan from a file, attached to its model if one is given."""
    saved = Plan.load(path)
    return saved if spec is None else saved.attach(*load_call(spec))


def at_least_one(option: str, number: int, most: int | None = None) -> int:
    """Return a number that is at least 1 and at most `most`; refuse any other."""
    if number < 1 or (most is not None and number > most):
        upto = "" if most is None else f", at most {most}"
        raise InvalidInput(
            f"{option} is a whole number, at least 1{upto}", got=f"{number}", remedy=f"{option} 2"
        )
    return number


def check_out(arguments: argparse.Namespace, option: str = "--out") -> None:
    """Refuse, before long work, an output that cannot be written, or that is one of the inputs.

    Folders of the output are created.
    """
    path = arguments.out
    if path is None:
        return
    place = Path(path)
    wrong = "it is a folder" if place.is_dir() else None
    try:
        for name, value in vars(arguments).items():
            files = (value, value.rpartition(":")[0]) if isinstance(value, str) else ()
            if name != "out" and any(file and _is_same(place, Path(file)) for file in files):
                wrong = "it is what the command is made of"
        place.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            wrong = os.strerror(errno.EACCES)
    except OSError as error:
        wrong = error.strerror
    if wrong is not None:
        raise InvalidInput(
            "what a command makes can be written",
            got=f"{path}: {wrong}",
            remedy=f"give another path for {option}",
        )


def _is_same(path: Path, other: Path) -> bool:
    return path.is_file() and other.is_file() and path.samefile(other)


def read_cluster(text: str, nodes: int | None) -> Cluster:
    """Return the cluster of a preset or of a TOML file."""
    if text.endswith(".toml"):
        if nodes is not None:
            raise InvalidInput(
                "a cluster file says itself how many nodes there are",
                got=f"--nodes {nodes} with {text}",
                remedy="leave out --nodes, or change count in the file",
            )
        return Cluster.load(text)
    return Cluster.preset(text, nodes=1 if nodes is None else nodes)


def read_mesh(text: str | None) -> Mesh | None:
    """Return the mesh that a text such as `dp=2,tp=4` names."""
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        count = _number(size)
        if not equals or not name.isidentifier() or isinstance(count, str) or name in sizes:
            raise InvalidInput(
                "a mesh is given as its axes with their sizes",
                got=repr(text),
                remedy="--mesh dp=2,tp=4",
            )
        sizes[name] = count
    return Mesh(**sizes)


def _number(text: str) -> int | str:
    is_number = text.isascii() and text.isdecimal() and len(text) <= 18
    return int(text) if is_number else text


def _import(place: str) -> ModuleType:
    with _of_user(f"import of {place}", place):
        if place.endswith(".py"):
            return _import_file(Path(place))
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidInput(
            "a model's file exists", got=str(path), remedy=f"give {SPEC}, from where you are"
        )
    name, place = path.stem, path.resolve()
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(place):
        name = f"{name} of {place}"  # another module has the plain one
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(place.parent) not in sys.path:  # for what lies beside it
        sys.path.insert(0, str(place.parent))
    sys.modules[name] = module  # where dataclasses, pickle and annotations look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _of_user(what: str, place: str) -> Iterator[None]:
    """Turn an error that the user's code raises into a message with its line."""
    try:
        yield
    except (AutoparError, KeyboardInterrupt):
        raise
    except BaseException as error:
        source, words = of_traceback(error.__traceback__), error_text(error)
        if isinstance(error, SyntaxError) and error.filename:
            source = describe(error.filename, error.lineno or 0, error.text)
            words = f"{type(error).__name__}: {error.msg}"
        if isinstance(error, SystemExit):
            words = f"sys.exit({error.code!r})"
        raise InvalidInput(
            "the user's function builds the model without an error",
            got=f"{what} raised {words}",
            remedy="mend it there",
            source=source or place,
        ) from error
