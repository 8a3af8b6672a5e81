"""Name ranges of torch's profiler after the modules and movements of a program.

    with torch.profiler.profile() as profiled:
        pm.step(ids, labels)
    profiled.export_chrome_trace("step.json")   # ranges "layers.0.up", "all_reduce over tp", ...

The ranges of a schedule's actions come from its executor. Without a profiler nothing here runs.
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
    """Return a graph as a function, which names its calls while a profiler records."""
    module = fx.GraphModule({}, graph)
    plain = module.forward

    def function(*inputs: Any) -> Any:
        return ProfiledInterpreter(module).run(*inputs) if is_profiling() else plain(*inputs)

    return function


class ProfiledInterpreter(fx.Interpreter):
    """Runs a graph call by call, with neighbouring calls of one module in one range."""

    def run(self, *inputs: Any, **options: Any) -> Any:
        self._module: str | None = None
        with ExitStack() as self._range:
            return super().run(*inputs, **options)

    def run_node(self, n: fx.Node) -> Any:
        """Run a call in the range of its module, and in one of its movement."""
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
