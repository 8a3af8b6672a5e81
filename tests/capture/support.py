"""Comparing a captured program with the model it came from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.capture import Captured, capture, listing, run
from autopar.capture.listing import operator_name
from autopar.verification.captured_draws import DrawsByPlace

DTYPE = torch.float64


class Function(nn.Module):
    """A module whose forward is a function of itself and the inputs, with one linear layer."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, nn.Module):
                self.add_module(name, member)
            else:
                self.register_buffer(name, member)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def both_ways(y: Tensor) -> Tensor:
    """Asserts something, compiled as it stands: pytest compiles files of tests differently."""
    assert torch.isfinite(y).all() and not torch.isnan(y).any()  # noqa: PT018
    assert not (torch.isnan(y).any() or not (y < 1e9).all())  # noqa: PT018
    return y


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def program(function: Callable[..., Any], *args: Any, **members: Any) -> Captured:
    """Capture a function, after checking that the program computes what it does."""
    model = Function(function, **members).to(DTYPE)
    return check(model, args)


def text(function: Callable[..., Any], *args: Any, **members: Any) -> str:
    """The calls of the captured function, one line each, without placeholders and origins."""
    lines = listing(program(function, *args, **members).graph, origins=False).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if " = placeholder" not in line)


def targets(captured: Captured) -> list[str]:
    """The names of all operators, in order."""
    nodes = captured.graph.nodes
    return [operator_name(node.target) for node in nodes if node.op == "call_function"]


def check(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    tolerance: float = 1e-12,
) -> Captured:
    """Outputs, gradients and buffers of the program are those of the model."""
    kwargs = kwargs or {}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    captured = capture(model, args, kwargs)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())

    eager, other = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(0)
    with DrawsByPlace():
        expected = eager(*args, **kwargs)
    parameters, buffers = dict(other.named_parameters()), dict(other.named_buffers())
    torch.manual_seed(0)
    outputs, mutated = run(captured, parameters, buffers, args, kwargs)

    (loss or weighed)(expected).backward()
    (loss or weighed)(outputs).backward()
    pairs = list(zip(pytree.tree_leaves(expected), pytree.tree_leaves(outputs), strict=True))
    for name, parameter in eager.named_parameters():
        assert (parameter.grad is None) == (parameters[name].grad is None), name
        pairs.append((parameter.grad, parameters[name].grad))
    buffers |= mutated
    pairs += [(value, buffers[name]) for name, value in eager.named_buffers()]
    largest = max((a.abs().max().item() for a, _ in pairs if _is_float(a) and a.numel()), default=0)
    for left, right in pairs:
        same(left, right, tolerance, 0.05 * largest)
    return captured


def weighed(outputs: Any) -> Tensor:
    """A scalar in which every element of every differentiable output counts differently."""
    total = torch.zeros((), dtype=DTYPE)
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=DTYPE).view(leaf.shape)
            total = total + (leaf * weights).sum()
    return total


def same(left: Any, right: Any, tolerance: float, floor: float) -> None:
    if not isinstance(left, Tensor):
        assert left == right
        return
    assert (left.shape, left.dtype) == (right.shape, right.dtype)
    if not left.numel():
        return
    if not _is_float(left):
        assert torch.equal(left, right)
        return
    assert torch.equal(left.isnan(), right.isnan())
    error = (left - right).nan_to_num().abs().max().item()
    scale = max(left.nan_to_num().abs().max().item(), floor)
    assert error <= tolerance * scale, f"off by {error}, the largest value is {scale}"


def placeholder(captured: Captured, name: str) -> fx.Node:
    return next(node for node in captured.graph.nodes if node.name == name)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
