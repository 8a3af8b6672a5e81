"""The command `autopar doctor`: see whether this machine can run parallel programs.

Each check prints its finding and, if it fails, a remedy. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from autopar.commands.arguments import at_least_one
from autopar.commands.printing import show_json, show_table
from autopar.errors import AutoparError
from autopar.runtime.launching.launch import Say, launch

PYTHON = (3, 11)
TORCH = ((2, 11), (2, 14))  # from, and below
MOST = 256  # processes that are started to see whether they may be
PACKAGES = ("networkx", "ortools", "sympy", "numpy", "rich", "jinja2")


@dataclass(frozen=True)
class Check:
    """The result of one check of this machine."""

    name: str  # "torch"
    ok: bool
    found: str  # "2.13.0+cpu"
    remedy: str = ""


def run(arguments: argparse.Namespace) -> int:
    """Print all checks."""
    ranks = at_least_one("--ranks", arguments.ranks, MOST)
    checks = [check() for check in CHECKS] + [check_processes(ranks)]
    healthy = all(check.ok for check in checks)
    if arguments.json:
        show_json({"ok": healthy, "checks": [asdict(check) for check in checks]})
    else:
        rows = [("", "", "found")]
        for check in checks:
            rows.append(("ok" if check.ok else "WRONG", check.name, check.found))
            rows += [] if check.ok else [("", "", f"remedy: {check.remedy}")]
        show_table(rows)
    return 0 if healthy else 1


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    remedy = f"install Python {'.'.join(map(str, PYTHON))} or later"
    return Check("python", sys.version_info[:2] >= PYTHON, version, remedy)


def check_torch() -> Check:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    low, high = (".".join(map(str, bound)) for bound in TORCH)
    remedy = f"pip install 'torch>={low},<{high}'"
    return Check("torch", TORCH[0] <= version < TORCH[1], torch.__version__, remedy)


def check_packages() -> Check:
    installed, missing = [], []
    for name in PACKAGES:
        try:
            installed.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    text = ", ".join([*installed, *(f"{name} missing" for name in missing)])
    return Check("packages", not missing, text, f"pip install {' '.join(missing)}")


def check_devices() -> Check:
    """Name the devices; any will do for planning and for the virtual mesh."""
    cores = f"{os.cpu_count()} CPU cores, torch uses {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        return Check("devices", True, f"{cores}; no GPU")
    names = ", ".join(
        f"{torch.cuda.get_device_name(index)}"
        f" ({torch.cuda.get_device_properties(index).total_memory / 2**30:.0f} GiB)"
        for index in range(torch.cuda.device_count())
    )
    ok = dist.is_nccl_available()
    return Check("devices", ok, f"{cores}; {names}", "install a torch that is built with NCCL")


def check_gloo() -> Check:
    ok = dist.is_available() and dist.is_gloo_available()
    state = "available" if ok else "not in this torch"
    return Check("gloo", ok, state, "install a torch that is built with distributed and gloo")


def check_processes(ranks: int) -> Check:
    """Start processes on this machine and let them sum a number."""
    name = "processes"
    try:
        sums = launch(_sum_of_ranks, ranks, timeout=60.0)
    except (AutoparError, OSError) as error:
        remedy = "see that local processes may start and connect to 127.0.0.1"
        return Check(name, False, " ".join(str(error).split()), remedy)
    ok = sums == [ranks * (ranks - 1) / 2] * ranks
    outcome = f"{ranks} started, all-reduce {'is right' if ok else f'gave {sums}'}"
    return Check(name, ok, outcome, "another torch: its gloo computes wrong sums")


def _sum_of_ranks(say: Say) -> float:
    value: Any = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return float(value)


CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_packages,
    check_devices,
    check_gloo,
)
