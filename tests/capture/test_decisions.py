"""What forward asks of the values of its inputs is answered once, and asked again of each batch."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from autopar.capture import capture
from autopar.errors import InvalidInput
from tests.capture.support import both_ways

CLASSES = torch.tensor([0, 1, 2, 3])
KEPT = torch.zeros(4, dtype=torch.bool)
RULE = "forward goes the way on which it was captured"


class Asks(nn.Module):
    """A model that looks at what it is given before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, classes: Tensor, mask: Tensor) -> Tensor:
        if classes.max() >= 5:
            raise ValueError("there are five classes")
        with torch.no_grad():
            lengths = (classes > 0).long()
        assert lengths.max().item() <= len(classes)
        assert int(lengths.min()) == 0
        y = self.linear(x)
        assert not torch.isnan(y).any()  # of what is computed: it holds
        if mask.any():
            y = y.masked_fill(mask[:, None], 0.0)
        shifted = torch.zeros_like(classes)
        shifted[1:] = classes[:-1]
        if shifted.view(2, -1).sum() == 0:
            y = y * 2
        hot = F.one_hot(classes).to(y)
        return F.gaussian_nll_loss(y, hot, y.square() + 0.1)  # which asks of its variance


def example() -> tuple[Asks, Tensor]:
    torch.manual_seed(0)
    return Asks().double(), torch.randn(4, 4, dtype=torch.float64)


def test_programs_are_the_model() -> None:
    model, x = example()
    assert ap.verify(model, (x, CLASSES, KEPT), mesh=ap.Mesh(dp=2, tp=2)).ok
    assert ap.verify(model, (x, CLASSES, CLASSES > 2), mesh=ap.Mesh(dp=2, tp=2)).ok


def test_other_answers_are_refused() -> None:
    model, x = example()
    module = ap.parallelize(model, (x, CLASSES, KEPT), mesh=ap.Mesh(dp=2), backend="virtual")
    module.step(x, CLASSES, KEPT)
    module.step(x, torch.tensor([3, 0, 3, 0]), KEPT)  # another batch, of the same answers
    for classes, mask, line in (
        (CLASSES, ~KEPT, "if mask.any():"),
        (torch.tensor([0, 1, 2, 2]), KEPT, "F.one_hot(classes)"),
        (torch.tensor([0, 1, 2, 9]), KEPT, "if classes.max() >= 5:"),
        (CLASSES + 1, KEPT, "int(lengths.min()) == 0"),
        (CLASSES // 3 * 3, KEPT, "if shifted.view(2, -1).sum() == 0:"),
    ):
        with pytest.raises(InvalidInput, match=RULE) as error:
            module.step(x, classes, mask)
        assert line in str(error.value.source)


def test_programs_beside_decide_by_their_own_inputs() -> None:
    model, x = example()
    module = ap.parallelize(model, (x, CLASSES, KEPT), mesh=ap.Mesh(dp=2), backend="virtual")
    module.eval()
    short = x[:2], torch.tensor([0, 3]), ~KEPT[:2]
    torch.testing.assert_close(module(*short), model(*short))


def _numbers(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    y, most, least = self.linear(x), classes.max().item(), classes.min().item()
    y = y * 2 if most in {3, 4} else y  # a key by its hash
    y = y * {3: 5.0}.get(most, 7.0) * {"3": 5.0}.get(f"{most}", 7.0)
    y = y / most if isinstance(most, int) else y
    y = y * (classes == most)[:, None] + (most - classes)[:, None]
    return y[:, : most - least].square().sum() * (most // 2) ** 2


def test_numbers_are_keys_and_meet_tensors() -> None:
    _, x = example()
    asks = type("Model", (Asks,), {"forward": _numbers})().double()
    assert ap.verify(asks, (x, CLASSES), mesh=ap.Mesh(dp=2)).ok
    module = ap.parallelize(asks, (x, CLASSES), mesh=ap.Mesh(dp=2), backend="virtual")
    with pytest.raises(InvalidInput, match=RULE):
        module.step(x, CLASSES + 1)


def _factories(y: Tensor, n: Any) -> Tensor:
    made = torch.full((4, 1), n) + torch.full_like(y[:, :1], n) + y.new_full((4, 1), n)
    made = made + torch.arange(n + 1)[:, None] + torch.linspace(0, n, n + 1)[:, None]
    return y * (made + torch.tensor([[n], [n], [1], [2]]) + torch.zeros(n + 1, 1))


def _scalars(y: Tensor, n: Any) -> Tensor:
    y = torch.where(y > n, y.clamp(max=n), n) + torch.pow(n, y) + y.roll(n - 1, 0)
    y = torch.add(y, n).masked_fill(n < y, n) + torch.clamp(y, -n, n)
    y[n] = 0
    y[:, n - 2] = n
    return y + F.dropout(y, n - 3) + F.leaky_relu(y, n / 10) + y.sum(n - 2, keepdim=True)


def _arithmetic(y: Tensor, n: Any) -> Tensor:
    count, rest = divmod(n, 2)
    other, more = divmod(7, n)
    whole = (n & 1) + (n | 4) + (n ^ 1) + (n << 1) + (8 >> n) + ~n + (+n) + pow(n, 3, 5) + 2**n
    parts = n * 1.5 + 2.5 / n + round(n / 2) + round(n, 0) + n**0.5 + (n < 2.5) + (n < 2.5)
    return y * (count + rest + other + more + whole + parts)


def _of_python(y: Tensor, n: Any) -> Tensor:
    texts = len("ab" * n) + len([0] * n) + n.bit_length() + (n == "3") + [1, 2, 3, 4][n]
    return y * (texts + math.trunc(n) + math.floor(n) + math.comb(5, n) + float(np.sqrt(n)))


@pytest.mark.parametrize("use", [_factories, _scalars, _arithmetic, _of_python])
def test_numbers_are_what_python_and_torch_take(use: Callable[[Tensor, Any], Tensor]) -> None:
    def forward(self: Any, x: Tensor, classes: Tensor) -> Tensor:
        return use(self.linear(x), classes.max().item()).square().mean()

    _, x = example()
    asks = type("Model", (Asks,), {"forward": forward})().double()
    module = ap.parallelize(asks, (x, CLASSES), mesh=ap.Mesh(dp=2), backend="virtual")
    torch.testing.assert_close(module(x, CLASSES), asks(x, CLASSES))
    with pytest.raises(InvalidInput, match=RULE) as error:
        module(x, CLASSES - 1)
    assert "test_decisions.py" in str(error.value.source)


def _by_input(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x  # the line


def _by_parameter(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    if self.linear.weight.sum() > 0:  # the line
        return self.linear(x)
    return x


def _by_chance(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    if torch.randint(0, 2, ()) > 0:  # the line
        return self.linear(x)
    return x


def _after_a_write(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    found = torch.zeros_like(classes)
    found.view(2, 2)[0] = (x[0, :2] > 0).long()
    if found.sum() > 0:  # the line
        return self.linear(x)
    return x


def _refused_here(x: Tensor) -> None:
    if x.max() > 1:  # the line
        raise ValueError("too large")


def _where_it_is_caught(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    try:
        _refused_here(x)
        return self.linear(x)
    except (KeyError, ValueError):
        return x


def _where_it_is_suppressed(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        _refused_here(x)
        x = self.linear(x)
    return x


@contextlib.contextmanager
def _carefully() -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError):
        return


class _Swallowing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is not None and issubclass(kind, ValueError)


def _where_a_function_swallows(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    with _carefully():
        _refused_here(x)
        x = self.linear(x)
    return x


def _where_a_class_swallows(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    manager = _Swallowing()
    with torch.no_grad(), manager:
        _refused_here(x)
        x = self.linear(x)
    return x


def _where_a_stack_may_swallow(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_Swallowing())
        _refused_here(x)
        x = self.linear(x)
    return x


@_carefully()
def _checked(x: Tensor) -> Tensor:
    _refused_here(x)
    return x


def _where_a_decorator_swallows(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    return x if _checked(x) is None else self.linear(x)


def _where_finally_returns(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    try:
        _refused_here(x)
        x = self.linear(x)
    finally:
        return x  # noqa: B012


def _asked_where_a_class_swallows(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    with contextlib.ExitStack() as stack:
        stack.push(lambda *error: True)
        x = self.linear(x) * float(x.max())  # the line
    return x


def _asked_in_vain(self: Any, x: Tensor, classes: Tensor) -> Tensor:
    try:
        scale = float(x.max())  # the line
    except Exception:
        scale = 1.0
    return self.linear(x) * scale


CHOICES = [
    _by_input,
    _by_parameter,
    _by_chance,
    _after_a_write,
    _where_it_is_caught,
    _where_it_is_suppressed,
    _where_a_function_swallows,
    _where_a_class_swallows,
    _where_a_stack_may_swallow,
    _where_a_decorator_swallows,
    _where_finally_returns,
    _asked_where_a_class_swallows,
    _asked_in_vain,
]


@pytest.mark.parametrize("forward", CHOICES)
def test_what_changes_decides_nothing(forward: Callable[..., Tensor]) -> None:
    _, x = example()
    model = type("Model", (Asks,), {"forward": forward})().double()
    with pytest.raises(InvalidInput, match="must not depend on the values") as error:
        capture(model, (x, CLASSES))
    assert "# the line" in str(error.value.source)


def test_shapes_alone_answer_guards_only() -> None:
    model, x = example()
    shapes = tuple(one.to("meta") for one in (x, CLASSES, KEPT))
    with pytest.raises(InvalidInput, match="must not depend on the values") as error:
        capture(model, shapes)
    assert "lengths.max().item()" in str(error.value.source)


def in_a_row(y: Tensor) -> Tensor:
    if (
        torch.isnan(y).any()
        or not torch.isfinite(y).all()
    ):  # fmt: skip
        raise ValueError("too much")
    elif not bool((y < 1e9).all()) or any((row > 1e9).any() for row in y):
        raise ValueError("larger still")
    else:
        return y


@pytest.mark.parametrize("guards", [both_ways, in_a_row])
def test_each_question_of_a_guard_lets_it_pass(guards: Callable[[Tensor], Tensor]) -> None:
    class Guarded(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return guards(super().forward(x)).square().mean()

    captured = capture(Guarded(4, 4), (torch.randn(2, 4),))
    assert not captured.decisions


def test_what_a_guard_compares_is_not_known() -> None:
    class Compares(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            assert bool(torch.isnan(y).any()) == False  # noqa: E712
            return y.mean()

    with pytest.raises(InvalidInput, match="must not depend on the values"):
        capture(Compares(4, 4), (torch.randn(2, 4),))


@contextlib.contextmanager
def _timed(label: str) -> Iterator[None]:
    try:
        yield
    finally:
        len(label)


class _Named(contextlib.ContextDecorator):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        return None


def test_guards_hold_in_managers_that_let_pass() -> None:
    lock = threading.Lock()

    @_Named()
    def forward(self: Any, x: Tensor, classes: Tensor) -> Tensor:
        with lock, _timed("forward"), torch.autocast("cpu", enabled=False):
            with _Named() if self.training else contextlib.nullcontext():
                _refused_here(x)
            try:
                _refused_here(x)
            finally:
                x = self.linear(x)
        return x

    model, x = type("Model", (Asks,), {"forward": forward})(), torch.zeros(4, 4)
    captured = capture(model, (x, CLASSES))
    assert not captured.decisions


def test_guards_hold_where_they_are_not_caught() -> None:
    def forward(self: Any, x: Tensor, classes: Tensor) -> Tensor:
        try:
            _refused_here(x)
        except KeyError:  # another one
            return x
        except ValueError as error:
            raise RuntimeError("which leaves forward") from error
        return self.linear(x)

    model, x = type("Model", (Asks,), {"forward": forward})(), torch.zeros(4, 4)
    module = ap.parallelize(model, (x, CLASSES), mesh=ap.Mesh(dp=2), backend="virtual")
    torch.testing.assert_close(module(x, CLASSES), model(x, CLASSES))
