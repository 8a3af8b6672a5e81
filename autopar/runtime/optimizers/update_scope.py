"""Find out what an optimizer's update of an element depends on, by running it on small tensors.

    the element alone     two halves of a tensor are updated as the whole is (AdamW, SGD)
    its parameter         each parameter is updated as it is beside others (Adafactor, Muon)
    more than that        refused (norms over all parameters, LBFGS)

Tensors of an optimizer's states are compared as well: a preconditioner that is used later on is
seen at once. The trial runs in float64, with gradients of several magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar._torch.optimizers import step_without_hooks
from autopar.errors import InvalidInput, error_text

Shapes = tuple[tuple[int, ...], ...]

# The most elements of a dim: a few show most optimizers, and some treat large matrices otherwise.
_SIZES = 8, 256
_RATE = 1e-2  # a schedule may begin with 0, which would hide what an update does
_GRADIENTS = 1.0, 1e-4, 1e4  # magnitudes, step by step: norms are clipped at some


class UpdateScope(Enum):
    """Names what the update of an element depends on."""

    ELEMENT = "the gradients of the element"
    PARAMETER = "the gradients of its parameter"


@dataclass(frozen=True)
class UpdateKind:
    """Says what updates depend on, and whether torch has a fused kernel for them."""

    scope: UpdateScope
    has_fused: bool


def update_kind(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> UpdateKind:
    """Return what updates of parameters of these shapes depend on; refuse what is more than that.

    `options`: those of the constructor and the group. The answer is kept for equal arguments.
    """
    small, large = ({_limited(shape, size) for shape in shapes} for size in _SIZES)
    setup = _TrialSetup(
        kind, tuple(options.items()), tuple(sorted(small)), tuple(sorted(large)), device
    )
    try:
        hash(setup)
    except TypeError:  # a list or a dict among the options
        return _find_kind.__wrapped__(setup)
    return _find_kind(setup)


def require_one_call(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> None:
    """Refuse a class whose step does more with a closure than to call it once at the beginning."""
    small = tuple(sorted({_limited(shape, _SIZES[0]) for shape in shapes}))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        calls = _Trial(kind, dict(options), device).closure_calls(small)
    if calls != 1:
        times = f"{calls} times in each" if calls else "with another result than without it"
        raise InvalidInput(
            "ap.optimizer calls the closure of a step once, before the update",
            got=f"{kind.__name__}, whose step calls it {times}",
            remedy=f"call step() without a closure, or {kind.__name__}(pm.parameters(), ...), if "
            "it handles DTensors",
        )


@dataclass(frozen=True)
class _TrialSetup:
    """Holds all that the result of a trial follows from."""

    kind: type[Optimizer]
    options: tuple[tuple[str, Any], ...]
    small: Shapes
    large: Shapes
    device: torch.device


@lru_cache(maxsize=256)
def _find_kind(setup: _TrialSetup) -> UpdateKind:
    kind, small, large = setup.kind, setup.small, setup.large
    trial = _Trial(kind, dict(setup.options), setup.device)
    with torch.random.fork_rng([setup.device] if setup.device.type == "cuda" else []):
        has_fused = trial.has_fused(small)
        if trial.is_elementwise(small) and trial.is_elementwise(large):
            return UpdateKind(UpdateScope.ELEMENT, has_fused)
        if trial.is_by_parameter(small):
            return UpdateKind(UpdateScope.PARAMETER, has_fused)
    raise InvalidInput(
        "ap.optimizer runs optimizers whose update of a parameter follows from the gradients of "
        "this parameter alone",
        got=f"{kind.__name__}, which updates a parameter differently beside others, or at random",
        remedy=f"{kind.__name__}(pm.parameters(), ...), if it handles DTensors; for a limit on the "
        "norm of all gradients, pm.clip_grad_norm_(max_norm)",
    )


@dataclass(frozen=True)
class _Run:
    """Holds what some steps left: tensors and other values of each parameter."""

    tensors: list[dict[str, Tensor]]  # the values after each step, and states
    others: list[dict[str, Any]]  # numbers of states
    group: dict[str, Any]  # numbers of the group
    calls: int  # those of a closure


class _Trial:
    """Runs of one class of optimizers with its options."""

    def __init__(
        self, kind: type[Optimizer], options: dict[str, Any], device: torch.device
    ) -> None:
        self._kind, self._device = kind, device
        if (rate := options.get("lr")) is not None:
            options["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
        self._options = options

    def has_fused(self, shapes: Shapes) -> bool:
        """Return whether `fused=True` works, where the caller chose no implementation."""
        optimizer = self._make([nn.Parameter(value) for value in self._values(shapes)])
        (group,) = optimizer.param_groups
        is_chosen = group.get("fused", False) is not None or group.get("foreach") is not None
        if is_chosen or group.get("differentiable") or group.get("capturable"):
            return False
        group["fused"] = True
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
        try:
            step_without_hooks(self._kind)(optimizer)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return False
        return True

    def is_elementwise(self, shapes: Shapes) -> bool:
        """Return whether halves of all tensors are updated as the tensors are, along any dim."""
        values = self._values(shapes)
        whole = self._run(values, lambda tensor: tensor)
        if not _has_moved(values, whole) or not _has_like_states(whole):
            return False
        for dim in range(max(map(len, shapes), default=0)):
            halves = [self._run(values, partial(_take_half, dim=dim, number=n)) for n in (0, 1)]
            for at, shape in enumerate(shapes):
                if not _are_joined(whole, halves[: 2 if _is_cut(shape, dim) else 1], at, dim):
                    return False
        return True

    def is_by_parameter(self, shapes: Shapes) -> bool:
        """Return whether each tensor is updated alone as it is beside others."""
        values = self._values((*shapes, *shapes))
        together = self._run(values, lambda tensor: tensor)
        for at, value in enumerate(values):
            alone = self._run([value], lambda tensor: tensor, first=at)
            if alone.group != together.group or not _is_same(alone, 0, together, at):
                return False
        return _has_moved(values, together)

    def closure_calls(self, shapes: Shapes) -> int:
        """Return how often a step calls its closure; 0 where the step is not as without one."""
        values = self._values(shapes)
        plain = self._run(values, lambda tensor: tensor)
        run = self._run(values, lambda tensor: tensor, by_closure=True)
        is_same = run.group == plain.group
        is_same = is_same and all(_is_same(run, at, plain, at) for at in range(len(values)))
        calls, steps = run.calls, len(_GRADIENTS)
        return calls // steps if calls != steps or is_same else 0

    def _make(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return an optimizer; what its class refuses, the caller hears from the class."""
        kind: Any = self._kind
        return kind([{"params": parameters}], **self._options)

    def _values(self, shapes: Shapes) -> list[Tensor]:
        return [_random(shape, number, self._device) for number, shape in enumerate(shapes)]

    def _run(
        self,
        values: Sequence[Tensor],
        part: Callable[[Tensor], Tensor],
        first: int = 0,
        *,
        by_closure: bool = False,
    ) -> _Run:
        """Run steps on a part of each tensor; `first`: the number of the first one's gradients.

        `by_closure`: the steps call a function that sets the gradients."""
        parameters = [nn.Parameter(part(value).clone()) for value in values]
        optimizer, step = self._make(parameters), step_without_hooks(self._kind)
        tensors: list[dict[str, Tensor]] = [{} for _ in values]
        calls = 0

        def set_gradients(number: int) -> Tensor:
            nonlocal calls
            calls += 1
            for at, (parameter, value) in enumerate(zip(parameters, values)):
                seed = 1000 * (number + 1) + first + at
                gradient = _random(tuple(value.shape), seed, self._device) * _GRADIENTS[number]
                parameter.grad = part(gradient).clone()
            return torch.ones((), device=self._device)

        for number in range(len(_GRADIENTS)):
            closure = partial(set_gradients, number)
            try:
                if by_closure:
                    step(optimizer, closure)
                else:
                    closure()
                    step(optimizer)
            except Exception as error:
                raise InvalidInput(
                    "ap.optimizer runs optimizers whose step needs nothing but gradients",
                    got=f"{self._kind.__name__}.step() in a trial on small float64 tensors: "
                    f"{error_text(error)}",
                    remedy=f"{self._kind.__name__}(pm.parameters(), ...), if it handles DTensors",
                ) from error
            for at, parameter in enumerate(parameters):
                tensors[at][f"value {number}"] = parameter.detach().clone()
        others: list[dict[str, Any]] = [{} for _ in values]
        for at, parameter in enumerate(parameters):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    tensors[at][f"state {key}"] = value
                else:
                    others[at][key] = value.item() if isinstance(value, Tensor) else value
        group = optimizer.param_groups[0].items()
        numbers = {key: value for key, value in group if isinstance(value, int | float)}
        return _Run(tensors, others, numbers, calls)


def _limited(shape: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(min(length, size) for length in shape)


def _random(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Return random numbers whose magnitude grows along the tensor, so that halves differ."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    ramp = torch.linspace(0.5, 4, max(drawn.numel(), 1), dtype=torch.float64, device="cpu")
    return (drawn * ramp[: drawn.numel()].view(shape)).to(device)


def _is_cut(shape: tuple[int, ...], dim: int) -> bool:
    return dim < len(shape) and shape[dim] > 1


def _take_half(tensor: Tensor, *, dim: int, number: int) -> Tensor:
    """Return one of two unequal halves of a tensor; the tensor, if it lacks the dim."""
    if not _is_cut(tuple(tensor.shape), dim):
        return tensor
    length = tensor.shape[dim]
    return tensor.split([(length + 2) // 3, length - (length + 2) // 3], dim)[number]


def _has_moved(values: Sequence[Tensor], run: _Run) -> bool:
    """Return whether an update has changed every tensor that has elements."""
    last = f"value {len(_GRADIENTS) - 1}"
    pairs = [(value, tensors[last]) for value, tensors in zip(values, run.tensors)]
    return all(not torch.equal(before, after) for before, after in pairs if before.numel())


def _has_like_states(run: _Run) -> bool:
    """Return whether all states are numbers, or tensors shaped like their parameter."""
    shapes = [tensors["value 0"].shape for tensors in run.tensors]
    pairs = zip(run.tensors, shapes)
    are_like = all(v.shape == shape for tensors, shape in pairs for v in tensors.values())
    numbers = (value for others in run.others for value in others.values())
    return are_like and all(value is None or isinstance(value, int | float) for value in numbers)


def _are_joined(whole: _Run, parts: Sequence[_Run], at: int, dim: int) -> bool:
    """Return whether what is left of the parts of tensor `at` joins to what is left of it."""
    expected = whole.tensors[at]
    if any(part.others[at] != whole.others[at] or part.group != whole.group for part in parts):
        return False
    if any(part.tensors[at].keys() != expected.keys() for part in parts):
        return False
    joined = {
        key: torch.cat([part.tensors[at][key] for part in parts], dim) if len(parts) > 1 else value
        for key, value in parts[0].tensors[at].items()
    }
    return all(_is_close(joined[key], value) for key, value in expected.items())


def _is_same(run: _Run, at: int, other: _Run, other_at: int) -> bool:
    """Return whether two runs left the same of one tensor."""
    tensors, expected = run.tensors[at], other.tensors[other_at]
    if tensors.keys() != expected.keys() or run.others[at] != other.others[other_at]:
        return False
    return all(_is_close(tensors[key], value) for key, value in expected.items())


def _is_close(tensor: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors agree but for rounding; numbers that are not finite do not."""
    if tensor.shape != expected.shape:
        return False
    return torch.allclose(tensor.double(), expected.double(), rtol=1e-9, atol=1e-12)
