"""Ranges: under torch's profiler, a program says in which module each call stands, and what moves.

    with torch.profiler.profile() as profiled:
        pm.step(ids, labels)
    profiled.export_chrome_trace("step.json")   # ranges "layers.0.up", "all_reduce over tp", ...

Actions of a schedule are told by its executor. Without a profiler nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import fx
from torch.profiler import record_function

from autopar._torch.autograd import is_profiling
from autopar.strategies.node_info import info


def profiled_function(graph: fx.Graph) -> Callable[..., Any]:
    """A graph as a function, which tells of its calls while a profiler listens."""
    made = fx.GraphModule({}, graph)
    plain = made.forward

    def function(*inputs: Any) -> Any:
        return ProfiledInterpreter(made).run(*inputs) if is_profiling() else plain(*inputs)

    return function


class ProfiledInterpreter(fx.Interpreter):
    """Runs a graph call by call, those of one module that follow one another in one range."""

    def run(self, *inputs: Any, **options: Any) -> Any:
        self._module: str | None = None
        with ExitStack() as self._range:
            return super().run(*inputs, **options)

    def run_node(self, n: fx.Node) -> Any:
        """In the range of its module, and of a movement."""
        if n.op != "call_function":
            return super().run_node(n)
        if (module := info(n).module) != self._module:
            self._range.close()
            self._range.enter_context(record_function(module or "the model"))
            self._module = module
        movement = info(n).movement
        if movement is None:
            return super().run_node(n)
        with record_function(f"{movement.kind} over {','.join(movement.axes)}"):
            return super().run_node(n)
