"""Symbolic sizes: what code and torch decide by a size, while a function runs on fake tensors.

    run = SymbolicRun(size=10)
    with run:                                   # operators and their sizes are looked at
        model(run.tensor(like, [4, run.of(1, 0), 8]))
    if run.is_proven:
        run.holds(12)                           # whether a run with 12 decides everything alike

Private facts of torch: its environment of symbolic shapes, and the guards that it notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.printers import PythonPrinter

LEAST = 2  # torch takes sizes of 0 and 1 to be special


class SymbolicRun:
    """A run of a function on fake tensors of which one size is a symbol."""

    def __init__(self, size: int) -> None:
        """`size`: what it is in this run, which decides branches. At least `LEAST`."""
        # Loaded here: it brings torch's compiler.
        from torch._dynamo.source import ConstantSource

        self._environment = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        source = ConstantSource("size")
        self._symbol: Any = self._environment.create_symbol(
            size, source, dynamic_dim=DimDynamic.DYNAMIC
        )
        node = self._environment.create_symintnode(self._symbol, hint=size, source=source)
        self._size: Any = node
        self._stack = ExitStack()
        self._sizes = _Sizes()

    def of(self, times: int, plus: int) -> Any:
        """Return a size that follows the symbol."""
        return times * self._size + plus

    def tensor(self, like: Tensor, shape: Sequence[Any], device: torch.device) -> Tensor:
        """Return a fake tensor of some shape, otherwise like another."""
        with self.mode, torch.no_grad():
            fake = torch.empty(tuple(shape), dtype=like.dtype, device=device)
        return fake.requires_grad_(like.requires_grad)

    def __enter__(self) -> SymbolicRun:
        self._stack.enter_context(self.mode)
        # Kernels in C++ read sizes as numbers; their decompositions in Python do not.
        self._stack.enter_context(enable_python_dispatcher())
        self._stack.enter_context(self._sizes)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def is_proven(self) -> bool:
        """Return whether all sizes and numbers in the run are polynomials of the symbol."""
        return all(size.is_polynomial(self._symbol) for size in self._sizes.seen)

    def guards(self) -> Callable[[int], bool]:
        """Return whether a run with another size decides everything as this one did, by size."""
        printer = PythonPrinter()
        texts = [f"({printer.doprint(guard.expr)})" for guard in self._environment.guards]
        name = printer.doprint(self._symbol)
        code = compile(" and ".join([f"{name} >= {LEAST}", *texts]), "<guards>", "eval")

        def holds(size: int) -> bool:
            return bool(eval(code, {"math": __import__("math"), name: size}))

        return holds


class _Sizes(TorchDispatchMode):
    """Notes every symbolic number that operators take or give."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note((args, kwargs))
        self._note(result)
        return result

    def _note(self, values: Any) -> None:
        for leaf in pytree.tree_leaves(values):
            numbers = (*leaf.shape, *leaf.stride()) if isinstance(leaf, Tensor) else (leaf,)
            for number in numbers:
                if isinstance(number, SymInt | SymFloat | SymBool):
                    self.seen.add(number.node.expr)
