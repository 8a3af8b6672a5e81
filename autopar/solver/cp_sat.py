"""Run CP-SAT deterministically, and stop it on Ctrl-C.

>>> model = new_model()
>>> bits = [model.new_bool_var(name) for name in "ab"]
>>> _ = model.add_exactly_one(bits)
>>> model.minimize(weighted_sum(bits, [2, 1]))
>>> solver = new_solver(work=1.0)
>>> outcome(solver, model), [solver.boolean_value(bit) for bit in bits]
('OPTIMAL', [False, True])

OR-tools loads on first use: with pandas it takes a good part of a second.
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
    """Return an empty model."""
    from ortools.sat.python.cp_model import CpModel

    return CpModel()


def new_solver(work: float) -> CpSolver:
    """Return a solver with the same answer on every machine; a unit of `work` is a second."""
    from ortools.sat.python.cp_model import CpSolver

    solver = CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    solver.parameters.catch_sigint_signal = False
    return solver


def weighted_sum(variables: Sequence[IntVar], weights: Sequence[int]) -> LinearExprT:
    """Return the sum of weight · variable."""
    from ortools.sat.python.cp_model import LinearExpr

    return LinearExpr.weighted_sum(variables, weights)


def outcome(solver: CpSolver, model: CpModel, deadline: float = math.inf) -> str:
    """Solve; return OPTIMAL, FEASIBLE, INFEASIBLE or UNKNOWN.
    `deadline` is in this process's seconds, which `work` alone does not keep to. A thread runs the
    solver, since Python notices Ctrl-C only outside of it."""
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
