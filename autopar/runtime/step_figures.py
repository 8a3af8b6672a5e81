"""Figures of a step, told to who asks: loss, time beside what was predicted, rates, memory.

    pm.on_step(ap.ProgressLine())              # a line each second, on a terminal one that stays
    pm.on_step(ap.JsonLines("run.jsonl"))
    pm.on_step(ap.TensorBoard(SummaryWriter()))
    pm.on_step(lambda figures: print(figures.loss))

Nothing is asked of the device unless somebody listens: the loss is read then, and waited for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InvalidInput
from autopar.plan.plan import Plan
from autopar.strategies.node_info import info
from autopar.units import bytes_text, scaled, seconds_text


@dataclass(frozen=True)
class StepFigures:
    """What is known of a step when it has ended."""

    step: int  # from 1, since somebody listens
    rank: int
    loss: float
    seconds: float  # since the end of the one before; of the first its own
    predicted: float  # by the plan, without what an optimizer takes
    samples: int  # of the global batch
    tokens: int | None  # where the first input is a batch of rows of whole numbers
    memory: int | None  # the most bytes that the allocator of a GPU has held

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


Callback = Callable[[StepFigures], object]


@dataclass
class Listeners:
    """Those who are told of each step of a module."""

    rank: int
    device: torch.device
    _all: list[Callback] = field(default_factory=list)
    _count: int = 0
    _last: float | None = None  # when the step before ended

    def add(self, callback: Callback) -> Callable[[], None]:
        """Tell one more; what is given takes it away again."""
        if not callable(callback):
            raise InvalidInput(
                "what listens to steps is called with their figures",
                got=f"a {type(callback).__name__}",
                remedy="pm.on_step(lambda figures: print(figures))",
            )
        self._all.append(callback)

        def remove() -> None:
            if callback in self._all:
                self._all.remove(callback)

        return remove

    def begin(self) -> float:
        """A step begins."""
        return time.perf_counter() if self._all else 0.0

    def tell(self, begun: float, loss: Tensor, plan: Plan) -> None:
        """A step has ended."""
        if not self._all:
            self._last = None
            return
        value = float(loss)  # once the device is done
        now = time.perf_counter()
        self._count += 1
        placeholders = plan.original.graph.find_nodes(op="placeholder")
        inputs = [info(node).val for node in placeholders if node.name in plan.original.inputs]
        first = next((value for value in inputs if value.ndim), None)
        is_text = first is not None and first.ndim == 2 and not first.dtype.is_floating_point
        most = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        figures = StepFigures(
            step=self._count,
            rank=self.rank,
            loss=value,
            seconds=now - (begun if self._last is None else self._last),
            predicted=plan.seconds,
            samples=1 if first is None else first.shape[0],
            tokens=first.numel() if first is not None and is_text else None,
            memory=most,
        )
        for callback in [*self._all]:
            callback(figures)
        self._last = time.perf_counter()


class JsonLines:
    """Appends the figures of each step to a file, a line of JSON each; on rank 0."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("a"):
                pass
        except OSError as error:
            raise InvalidInput(
                "the file of figures can be written",
                got=f"{path}: {error.strerror}",
                remedy="give another path",
            ) from None

    def __call__(self, figures: StepFigures) -> None:
        if figures.rank == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(figures.to_json()) + "\n")


class TensorBoard:
    """Hands the figures to a `SummaryWriter`, or what has its `add_scalar`; on rank 0."""

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
    """Writes a line about once in so many seconds: on a terminal over the last one; on rank 0."""

    def __init__(self, every: float = 1.0, file: Any = None) -> None:
        self._every, self._file, self._next = every, file, 0.0

    def __call__(self, figures: StepFigures) -> None:
        now = time.perf_counter()
        if figures.rank or now < self._next:
            return
        self._next = now + self._every
        file = sys.stderr if self._file is None else self._file
        print(
            f"\r{figures}\033[K" if file.isatty() else figures,
            file=file,
            flush=True,
            end=("" if file.isatty() else "\n"),
        )
