"""What a model means does not depend on where its code stands: in a file, on standard input, in
`exec`, or in an installed package. Messages alone name the place."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import contextlib, json, random
import numpy as np
import torch
import torch.nn.functional as F
from functools import lru_cache
from torch import nn
from torch.utils import checkpoint
from autopar.capture import capture
from autopar.errors import InvalidInput

RNG, NUMBERS, SEEN = random.Random(0), np.random.default_rng(0), []

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.kept, self.count = nn.Linear(4, 4), [], 0
        self.register_buffer("state", torch.zeros(4))

@lru_cache
def table(count):
    return torch.arange(count) * 1.0

def hook(self, h):
    h.register_hook(lambda g: 3 * g)
    return h

def node_hook(self, h):
    h.grad_fn.register_hook(lambda *g: None)
    return h

def saved(self, h):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return h * h

def backward(self, h):
    h.sum().backward()
    return h

def gradient(self, h):
    return torch.autograd.grad(h.sum(), h)[0]

def seed(self, h):
    torch.manual_seed(0)
    return h

def draw(self, h):
    return h * random.gauss(0, 1)

def generator(self, h):
    return h * RNG.random()

def numbers(self, h):
    return h * NUMBERS.random()

def unseeded(self, h):
    return h * np.random.default_rng().random()

def branch(self, h):
    return h * 2 if h.sum() > 0 else h

def kept(self, h):
    self.kept.append(h)
    return h + (self.kept[-2] if len(self.kept) > 1 else 0)

def exported(self, h):
    return h * 2 if torch.compiler.is_exporting() else h

def cached(self, h):
    return h + table(4)

def guard(self, h):
    if torch.isnan(h).any() or not all((row < 1e9).all() for row in h):
        raise ValueError
    assert (h < 1e9).all() and not torch.isnan(h).any()
    assert 0 <= h.abs().max() <= 1e9
    return h

def negated(self, h):
    return not h.isnan().any()

def look(h):
    too_large = not (h < 1e9).all()
    if too_large:
        message = "it is too large"
        raise ValueError(message if len(h) else "empty")

class Lets:
    def __enter__(self): pass
    def __exit__(self, *error): return None

class Swallows(Lets):
    def __exit__(self, kind, *error): return kind is ValueError

@contextlib.contextmanager
def reraising():
    try:
        yield
    except ValueError:
        raise

@contextlib.contextmanager
def swallowing():
    try:
        yield
    except ValueError:
        pass

def uncaught(self, h):
    try:
        with Lets() if self.training else reraising(), contextlib.suppress(KeyError):
            look(h)
    except KeyError:
        return h
    except ValueError as error:
        raise RuntimeError from error
    finally:
        h = h * 2
    return h

def caught(self, h):
    try:
        look(h)
    except (KeyError, ValueError):
        return h
    return h * 2

def swallowed(self, h):
    with Swallows():
        look(h)
    return h

def swallowed_by_a_function(self, h):
    with swallowing():
        look(h)
    return h

def suppressed(self, h):
    with contextlib.suppress(ValueError):
        look(h)
    return h

def returned(self, h):
    try:
        look(h)
    finally:
        return h

def loop(self, h):
    mask = F.one_hot(h.topk(2)[1], 4).permute(2, 1, 0)
    y, up = torch.zeros_like(h), torch.stack([self.l.weight] * 4)
    for expert in (mask.sum((-1, -2)) > 0).nonzero():
        _, token = torch.where(mask[expert[0]])
        y.index_add_(0, token, h[token] @ up[expert[0]])
    return y

def comprehension(self, h):
    mask = F.one_hot(h.topk(2)[1], 4).permute(2, 1, 0)
    return h * len([one for one in (mask.sum((-1, -2)) > 0).nonzero()])

CASES = [guard, negated, uncaught, caught, swallowed, swallowed_by_a_function, suppressed, returned,
         loop, comprehension, hook, node_hook, saved, backward, gradient, seed, draw, generator,
         numbers, unseeded, branch, kept, exported, cached]

def outcome(case):
    class Model(Base):
        def forward(self, x):
            return case(self, self.l(x)).sum()
    model, x = Model(), torch.ones(2, 4)
    try:
        captured = capture(model, (x,))
    except InvalidInput as error:
        return error.rule, error.source
    assert type(model.eval()(x)) is torch.Tensor
    assert type(table(4)) is torch.Tensor
    return [str(node.target) for node in captured.operators], None

found = {case.__name__: outcome(case) for case in CASES}
"""
REFUSED = (
    "hook node_hook saved backward gradient seed draw generator numbers unseeded branch kept "
    "negated caught swallowed swallowed_by_a_function suppressed returned comprehension"
)


@cache
def in_file(path: Path) -> dict[str, Any]:
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("code_in_a_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.found
    return found


def by_exec(space: dict[str, Any]) -> dict[str, Any]:
    exec(SOURCE, space)
    found: dict[str, Any] = space["found"]
    return found


def on_standard_input() -> dict[str, Any]:
    program = f"{SOURCE}\nprint(json.dumps(found))"
    run = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("place", ["exec", "exec as a module", "input", "package"])
def test_places_mean_the_same(place: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = in_file(tmp_path_factory.getbasetemp() / "code_in_a_file.py")
    if place == "exec":
        found = by_exec({})
    elif place == "exec as a module":
        found = by_exec({"__name__": "generated"})
    elif place == "input":
        found = on_standard_input()
    else:
        folder = tmp_path_factory.mktemp("lib") / "site-packages"
        folder.mkdir()
        found = in_file(folder / "installed.py")
    for name, (rule, source) in expected.items():
        assert found[name][0] == rule, name
        assert (name in REFUSED.split()) == isinstance(rule, str), name
        if source is not None and place != "package":
            line = source.split(":")[1]
            file = "<stdin>" if place == "input" else "<string>"
            assert found[name][1] == f"{file}, line {line}", name
