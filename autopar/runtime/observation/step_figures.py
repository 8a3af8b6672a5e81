"""Step figures: loss, time next to the predicted one, rates and memory, handed to callbacks.

    pm.on_step(ap.ProgressLine())              # a line each second, on a terminal one that stays
    pm.on_step(ap.JsonLines("run.jsonl"))
    pm.on_step(ap.TensorBoard(SummaryWriter()))
    pm.on_step(lambda figures: print(figures.loss))

Without a callback a step asks nothing of the device; with one it waits for the loss and reads it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.base.files import append_line
from autopar.base.schema import json_text
from autopar.errors import InvalidInput
from autopar.plans.plan import Plan
from autopar.strategies.node_info import info
from autopar.text.units import bytes_text, scaled, seconds_text


@dataclass(frozen=True)
class StepFigures:
    """The figures of a step that has ended."""

    step: int  # counted from 1 since the first callback
    rank: int
    loss: float
    # Since the end of the step before; of the first, and after a broken one, since its start.
    seconds: float
    predicted: float  # by the plan, without the optimizer's time
    samples: int  # of the global batch
    tokens: int | None  # None: the batch has no rows of whole numbers
    memory: int | None  # peak bytes of the allocator of a GPU; None on a CPU

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        rates = {"samples_per_second": self.samples_per_second}
        return {**asdict(self), **rates, "tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        rate = scaled(self.samples_per_second, "samples/s", 3)
        if self.tokens_per_second is not None:
            rate = scaled(self.tokens_per_second, "tokens/s", 3)
        memory = "" if self.memory is None else f", {bytes_text(self.memory)}"
        return (
            f"step {self.step}: loss {self.loss:.4g}, {seconds_text(self.seconds)} "
            f"(predicted {seconds_text(self.predicted)}), {rate}{memory}"
        )


_IDS = (torch.int64, torch.int32, torch.int16)  # dtypes of token ids; images have bytes
Callback = Callable[[StepFigures], object]


@dataclass
class StepListeners:
    """The callbacks that get the figures of each step of a module."""

    rank: int
    device: torch.device
    _all: dict[object, Callback] = field(default_factory=dict)
    _count: int = 0
    _last: float | None = None  # when the step before ended

    def add(self, callback: Callback) -> Callable[[], None]:
        """Add a callback; return a function that removes it."""
        if not callable(callback):
            raise InvalidInput(
                "what listens to steps is called with their figures",
                got=f"a {type(callback).__name__}",
                remedy="pm.on_step(lambda figures: print(figures))",
            )
        key = object()  # the same callback may listen twice
        self._all[key] = callback

        def remove() -> None:
            self._all.pop(key, None)

        return remove

    def begin(self) -> float:
        """Note that a step begins; return the time from which it is measured."""
        since, self._last = (
            self._last,
            None,
        )  # if this step breaks off, the next one starts by itself
        if not self._all:
            return 0.0
        return time.perf_counter() if since is None else since

    def notify(self, begun: float, loss: Tensor, plan: Plan) -> None:
        """Hand the figures of a step that has ended to all callbacks, also after one raises."""
        if not self._all:
            return
        value = float(loss)  # once the device is done
        now = time.perf_counter()
        self._count += 1
        samples, tokens = batch_size(plan)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        figures = StepFigures(
            step=self._count,
            rank=self.rank,
            loss=value,
            seconds=now - begun,
            predicted=plan.seconds,
            samples=samples,
            tokens=tokens,
            memory=peak,
        )
        errors = []
        for callback in [*self._all.values()]:
            try:
                callback(figures)
            except Exception as error:
                errors.append(error)
        self._last = time.perf_counter()
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("of on_step", errors)


def batch_size(plan: Plan) -> tuple[int, int | None]:
    """Return the samples of a global batch, and its tokens if it is text.

    Inputs that the plan cuts along their first dim have the batch there. If it cuts none, the most
    common size of a first dim is the batch's.
    """
    original, placed = plan.original, plan.decisions.placeholders
    nodes = original.graph.find_nodes(op="placeholder")
    inputs = {n.name: info(n).val for n in nodes if n.name in original.inputs and info(n).val.ndim}
    by_step = frozenset() if plan.batches is None else plan.batches.cut
    cut = [name for name in inputs if name in by_step or placed[name].dims[0]]
    sizes = Counter(int(inputs[name].shape[0]) for name in cut or inputs)
    if not sizes:
        return 1, None
    ((samples, _),) = sizes.most_common(1)
    rows = [v for v in inputs.values() if v.shape[0] == samples and v.dtype != torch.bool]
    is_text = bool(rows) and rows[0].ndim == 2 and rows[0].dtype in _IDS
    return samples, rows[0].numel() if is_text else None


class JsonLines:
    """Appends the figures of each step to a file as a line of JSON, on rank 0.

    A number that is not finite, such as a loss that is NaN, is null.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._add("")

    def __call__(self, figures: StepFigures) -> None:
        if figures.rank == 0:
            self._add(json_text(figures.to_json()) + "\n")

    def _add(self, line: str) -> None:
        append_line(self.path, line, "the file of figures")


class TensorBoard:
    """Hands the figures to a `SummaryWriter`, or an object with its `add_scalar`, on rank 0."""

    def __init__(self, writer: Any, prefix: str = "train") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise InvalidInput(
                "figures go to what has add_scalar(name, value, step)",
                got=f"a {type(writer).__name__}",
                remedy="ap.TensorBoard(torch.utils.tensorboard.SummaryWriter())",
            )
        self._writer, self._prefix = writer, prefix

    def __call__(self, figures: StepFigures) -> None:
        if figures.rank:
            return
        for name, value in figures.to_json().items():
            if value is not None and name not in ("step", "rank"):
                self._writer.add_scalar(f"{self._prefix}/{name}", value, figures.step)


class ProgressLine:
    """Writes a line about every `every` seconds, on a terminal over the last line, on rank 0."""

    def __init__(self, every: float = 1.0, file: Any = None) -> None:
        self._every, self._file, self._next = every, file, 0.0

    def __call__(self, figures: StepFigures) -> None:
        now = time.perf_counter()
        if figures.rank or now < self._next:
            return
        self._next = now + self._every
        file = sys.stderr if self._file is None else self._file
        if file is None:  # of a process without a terminal
            return
        print(
            f"\r{figures}\033[K" if file.isatty() else figures,
            file=file,
            flush=True,
            end=("" if file.isatty() else "\n"),
        )
