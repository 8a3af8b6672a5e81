"""References: a plain model and its captured program on one device, run and trained alike.

A few optimizer steps give a `TrainingResult`; `compare_training` puts two of them side by side.
`first_different_module` finds where a captured program first differs from the plain model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.captured import Captured
from autopar.capture.containers import in_own_containers
from autopar.capture.execute import run
from autopar.capture.fake import own_copy
from autopar.capture.loss import index_of_loss
from autopar.errors import InvalidInput
from autopar.strategies.node_info import info
from autopar.verification.captured_draws import DrawsByPlace
from autopar.verification.tolerance import (
    PROVING_LIMIT,
    ResultKey,
    Tolerance,
    Tolerances,
    to_double_precision,
)

EXACT_ERROR = 1e-9  # a relative error that is none, whatever rounding may do
_SHOWN = 3  # elements of a tensor that differs
Tensors = Mapping[str, Tensor]
CallArguments = tuple[tuple, Mapping[str, Any]]  # arguments, and those with names


class CapturedModule(nn.Module):
    """A captured program on one device, with the parameters and buffers of `model`."""

    def __init__(self, model: nn.Module, captured: Captured) -> None:
        super().__init__()
        self.model, self.captured = model, captured
        self.change: Callable[[fx.Node, Any], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        # Backward may still read what a buffer was before its new value is written.
        read = buffers | {name: buffers[name].clone() for name in self.captured.mutations}
        outputs, mutated = run(self.captured, parameters, read, args, kwargs, self.change)
        with torch.no_grad():
            for name, value in mutated.items():
                buffers[name].copy_(value)
        return outputs


@dataclass(frozen=True)
class TrainingResult:
    """Losses, outputs, gradients and state of a few steps of training."""

    losses: Sequence[Tensor]
    outputs: Tensors  # of the first step; empty where a step hands out its loss only
    gradients: Tensors  # of the first step: of the parameters that got one
    first_buffers: Tensors  # after the first step
    state: Tensors  # parameters and buffers at the end

    @property
    def results(self) -> dict[str, Tensors]:
        """Return all results, by kind and name."""
        return {
            "loss": {str(number): loss for number, loss in enumerate(self.losses, 1)},
            "output": self.outputs,
            "gradient": self.gradients,
            "buffer": self.first_buffers,
            "state at the end": self.state,
        }


@dataclass(frozen=True)
class Comparison:
    """One tensor of two programs."""

    kind: str  # "loss", "output", "gradient", "buffer" or "state at the end"
    name: str
    expected: float | None  # a number, or a tensor's norm; None where there is none
    found: float | None
    error: float  # relative to the largest element; inf for another shape or dtype, or on one side
    allowed: float
    ok: bool

    @property
    def differs(self) -> bool:
        return not self.error <= self.allowed

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else None}

    def __str__(self) -> str:
        sides = zip(("", "plain "), (self.found, self.expected))
        numbers = ", ".join(f"{side}{'none' if n is None else f'{n:.9g}'}" for side, n in sides)
        error = "" if math.isinf(self.error) else f"; relative error {self.error:.1e}"
        if not self.ok and not self.differs:
            error += f", which rounding alone may make (up to {self.allowed:.1e})"
        return f"{self.kind} {self.name}: {numbers}{error}"


@dataclass(frozen=True)
class Difference:
    """The first value in which two programs differ."""

    between: str  # "plain and captured", "captured and parallel"
    where: str  # a module, or a node of the graph
    values: tuple[str, str]
    source: str | None  # the user's line

    def __str__(self) -> str:
        expected_program, other_program = self.between.split(" and ")
        at = f"\n  at {self.source}" if self.source else ""
        pairs = zip((expected_program, other_program), self.values)
        shown = "".join(f"\n  {name + ':':<10} {value}" for name, value in pairs)
        return f"first value that differs between {self.between}: {self.where}{shown}{at}"


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model's first floating-point parameter; float32 without one."""
    dtypes = (parameter.dtype for parameter in model.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


class RunInputs(NamedTuple):
    """A model with the arguments of its call, and the dtype in which it runs."""

    model: nn.Module
    call: CallArguments
    dtype: torch.dtype


def to_double(model: nn.Module, call: CallArguments, *, keep_dtype: bool = False) -> RunInputs:
    """Return copies of model and inputs in float64 if it runs so, or else as they are."""

    def double(leaf: Any) -> Any:
        is_real = isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
        return leaf.detach().double().requires_grad_(leaf.requires_grad) if is_real else leaf

    dtype = model_dtype(model)
    if not keep_dtype and dtype is not torch.float64:
        precise, inputs = own_copy(model).double(), pytree.tree_map(double, call)
        with suppress(Exception), seeded(0):  # if it fails as it is too, that is told
            trial = own_copy(precise)
            loss_of(trial(*inputs[0], **inputs[1])).backward()
            return RunInputs(precise, inputs, torch.float64)
    return RunInputs(own_copy(model), call, dtype)


def loss_of(outputs: Any) -> Tensor:
    """Return the loss that a step differentiates, or else a weighted sum of all that can be."""
    leaves = pytree.tree_leaves(outputs)
    learned = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    with suppress(InvalidInput):
        return leaves[index_of_loss(outputs, learned)]
    return weighted_sum(leaf for leaf, learns in zip(leaves, learned) if learns)


def weighted_sum(values: Iterable[Tensor]) -> Tensor:
    """Return a number to differentiate where there is no loss, each element weighted."""
    terms = [torch.zeros((), dtype=torch.float64)]
    for value in values:
        weights = torch.linspace(0.5, 1.5, max(value.numel(), 1), dtype=torch.float64)
        weights = weights[: value.numel()].to(value.device, value.real.dtype)
        terms.append((value.flatten() * weights).sum().real.to("cpu", torch.float64))
    return torch.stack(terms).sum()


def train(
    module: nn.Module,
    step: Callable[[], tuple[Tensor, Tensors]],
    gradients: Callable[[], Tensors],
    collect: Callable[[Iterable[tuple[str, Tensor]]], Tensors],
    *,
    steps: int,
    rate: float | None,
) -> tuple[TrainingResult, float]:
    """Train by descent with momentum and decay; return the result and the learning rate.

    `module` holds parameters and buffers, `collect` makes whole copies of them. `step` runs forward
    and backward, and returns the loss and the outputs. A `rate` of None is chosen so that a step
    changes the parameters by about a hundredth.
    """
    parameters = list(module.parameters())
    losses: list[Tensor] = []
    outputs, first_gradients, buffers = {}, {}, {}
    optimizer: torch.optim.Optimizer | None = None
    for number in range(steps):
        with seeded(number):
            loss, step_outputs = step()
        losses.append(loss.detach().clone())
        if number == 0:
            outputs, first_gradients = dict(step_outputs), dict(gradients())
            buffers = dict(collect(module.named_buffers()))
            rate = rate or _learning_rate(parameters, first_gradients.values())
            if any(parameter.requires_grad for parameter in parameters):
                optimizer = torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=1e-2)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    state = {**collect(module.named_parameters()), **collect(module.named_buffers())}
    return TrainingResult(losses, outputs, first_gradients, buffers, state), rate or 0.0


def train_module(
    module: nn.Module, model: nn.Module, call: CallArguments, steps: int, rate: float | None = None
) -> tuple[TrainingResult, float]:
    """Train a module on one device; `model` is the one that holds its parameters and buffers."""

    def step() -> tuple[Tensor, Tensors]:
        with nullcontext() if isinstance(module, CapturedModule) else DrawsByPlace():
            loss, outputs = run_step(module, call)
        leaves = enumerate(pytree.tree_leaves(outputs))
        return loss, {f"{i}": v.detach() for i, v in leaves if isinstance(v, Tensor)}

    def gradients() -> Tensors:
        return copies((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)

    def copies(values: Iterable[tuple[str, Tensor]]) -> Tensors:
        return {name: value.detach().clone() for name, value in values}

    return train(model, step, gradients, copies, steps=steps, rate=rate)


def run_step(module: nn.Module, call: CallArguments) -> tuple[Tensor, Any]:
    """Run forward and backward, and return the loss and the outputs."""
    args, kwargs = in_own_containers(call)
    outputs = module(*args, **kwargs)
    loss = loss_of(outputs)
    if loss.requires_grad:
        loss.backward()
    return loss, outputs


def compare_training(
    found: TrainingResult, expected: TrainingResult, tolerances: Tolerances
) -> list[Comparison]:
    """Return a comparison of every tensor of two trainings."""
    largest = max((_largest_element(grad) for grad in expected.gradients.values()), default=1.0)
    sizes = {"loss": 0.0, "gradient": largest}  # by which floors are measured
    rows = []
    for (kind, ours), theirs in zip(found.results.items(), expected.results.values()):
        for name in dict.fromkeys([*theirs, *ours]):
            if kind == "output" and name not in ours:
                continue
            size, tolerance = sizes.get(kind, 1.0), tolerances.of(kind, name)
            rows.append(
                _comparison((kind, name), ours.get(name), theirs.get(name), size, tolerance)
            )
    return rows


def first_different_module(
    model: nn.Module, captured: Captured, call: CallArguments, tolerances: Tolerances
) -> Difference | None:
    """Return the first module whose result equals no value of the captured program; None if all do.

    A module inside one whose own result is right is skipped: normalisation may have left its result
    out.
    """
    made: list[tuple[str, Tensor]] = []
    program = CapturedModule(own_copy(model), captured)  # from the same buffers
    args, kwargs = in_own_containers(call)
    with seeded(0), DrawsByPlace(), _record_results(model, made):
        model(*args, **kwargs)
    known: dict[torch.Size, list[tuple[fx.Node, Tensor]]] = {}

    def note(node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor):
            known.setdefault(value.shape, []).append((node, value.detach()))
        return value

    program.change = note
    with seeded(0):
        program(*call[0], **call[1])
    nodes = {id(node): node for pairs in known.values() for node, _ in pairs}.values()
    of_value = tolerances.inside(captured.graph)
    right: set[str] = set()
    wrong: list[tuple[str, Tensor]] = []
    for path, value in made:
        near = known.get(value.shape, ())
        if any(_is_near(other, value, of_value[node.name]) for node, other in near):
            right.add(path)
        else:
            wrong.append((path, value))
    for path, value in wrong:
        parts = path.split(".") if path else []
        outer = {".".join(parts[:length]) for length in range(len(parts))}
        if outer & right:
            continue
        inside = [n for n in nodes if f"{info(n).module}.".startswith(f"{path}.")]
        close = [(n, v) for n, v in known.get(value.shape, ()) if n in inside]
        shown = _tensor_text(close[-1][1]) if close else "nothing of this shape"
        sources = (info(n).source for n in inside if n.op == "call_function")
        source = next((line for line in sources if line), None)
        where = f"result of {path or 'the model'}"
        return Difference("plain and captured", where, (_tensor_text(value), shown), source)
    return None


def value_difference(node: fx.Node, expected: Tensor, found: Tensor, tolerance: Tolerance) -> Any:
    """Return a `Difference` if a node's value differs from the captured one; else None."""
    if _is_near(found, expected, tolerance):
        return None
    module = info(node).module
    where = f"{node.name}, {info(node).type}" + (f", in {module}" if module else "")
    shown = _tensor_text(expected), _tensor_text(found)
    return Difference("captured and parallel", where, shown, info(node).source)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed random operators alike for every program, and restore the caller's generators."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@contextmanager
def _record_results(model: nn.Module, made: list[tuple[str, Tensor]]) -> Iterator[None]:
    """Append the tensors that modules return to `made`, in the order in which they finish."""

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor):
                    made.append((path, leaf.detach().clone()))

        return hook

    handles = [m.register_forward_hook(note(path)) for path, m in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _comparison(
    key: ResultKey, found: Tensor | None, expected: Tensor | None, size: float, tolerance: Tolerance
) -> Comparison:
    error = math.inf
    if found is not None and expected is not None:
        error = _relative_error(found, expected, tolerance.floor * size)
    allowed = tolerance.relative
    ok = error <= (allowed if allowed <= PROVING_LIMIT else EXACT_ERROR)
    return Comparison(*key, _norm(expected), _norm(found), error, allowed, ok)


def _is_near(found: Tensor, expected: Tensor, tolerance: Tolerance) -> bool:
    return _relative_error(found, expected, tolerance.floor) <= tolerance.relative


def _relative_error(found: Tensor, expected: Tensor, floor: float) -> float:
    """Return the largest difference over the largest element; NaN equals NaN."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    actual, wanted = to_double_precision(found), to_double_precision(expected)
    if expected.numel() == 0 or torch.equal(actual, wanted):
        return 0.0
    off = (actual - wanted).abs()
    off = off.where((actual != wanted) & ~(actual.isnan() & wanted.isnan()), 0.0)
    error = float(off.max()) / max(_largest_element(wanted), floor, torch.finfo(torch.float64).tiny)
    return math.inf if math.isnan(error) else error


def _largest_element(value: Tensor) -> float:
    wide = to_double_precision(value)
    finite = wide[wide.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _norm(value: Tensor | None) -> float | None:
    if value is None:
        return None
    return float(to_double_precision(value).norm()) if value.ndim else float(value.detach().real)


def _learning_rate(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> float:
    """Return the rate at which a step changes the parameters by about a hundredth."""
    size, slope = (_total_norm(values) for values in (parameters, gradients))
    return 1e-2 * (size or 1.0) / slope if slope and math.isfinite(slope) else 1e-2


def _total_norm(values: Iterable[Tensor]) -> float:
    return math.hypot(*(_norm(value.flatten()) or 0.0 for value in values))


def _tensor_text(value: Tensor) -> str:
    first = ", ".join(f"{x:.6g}" for x in value.detach().flatten()[:_SHOWN].tolist())
    more = ", ..." if value.numel() > _SHOWN else ""
    shape = "×".join(map(str, value.shape)) or "a number"
    return f"[{first}{more}] ({shape})"
