"""CP-SAT as it is used here: deterministic, and it listens to Ctrl-C.

>>> model = new_model()
>>> bits = [model.new_bool_var(name) for name in "ab"]
>>> _ = model.add_exactly_one(bits)
>>> model.minimize(weighted_sum(bits, [2, 1]))
>>> solver = new_solver(work=1.0)
>>> outcome(solver, model), [solver.boolean_value(bit) for bit in bits]
('OPTIMAL', [False, True])

OR-tools loads here, and only once it is asked for: it takes a good part of a second, with pandas.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar, LinearExprT


def new_model() -> CpModel:
    """A model without anything."""
    from ortools.sat.python.cp_model import CpModel

    return CpModel()


def new_solver(work: float) -> CpSolver:
    """A solver whose answer is the same on every machine; a unit of `work` takes about a second."""
    from ortools.sat.python.cp_model import CpSolver

    solver = CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    solver.parameters.catch_sigint_signal = False
    return solver


def weighted_sum(variables: Sequence[IntVar], weights: Sequence[int]) -> LinearExprT:
    """The sum of weight · variable."""
    from ortools.sat.python.cp_model import LinearExpr

    return LinearExpr.weighted_sum(variables, weights)


def outcome(solver: CpSolver, model: CpModel, deadline: float = math.inf) -> str:
    """OPTIMAL, FEASIBLE, INFEASIBLE or UNKNOWN; what there is when this process's time reaches
    the deadline, which work alone does not keep to.

    In a thread of its own: Python sees Ctrl-C only while it is not inside the solver.
    """
    statuses: list[str] = []
    thread = threading.Thread(
        target=lambda: statuses.append(solver.status_name(solver.solve(model)))
    )
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
            if time.process_time() > deadline:
                solver.stop_search()
    except KeyboardInterrupt:
        solver.stop_search()
        thread.join()
        raise
    return statuses[0]
