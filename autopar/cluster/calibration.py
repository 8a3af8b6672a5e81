"""The constants of this machine: measured once in a process of its own, then kept in a file.

>>> local_node(4, measure=False).devices
4
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from autopar.base import schema
from autopar.base.files import locked, write_file
from autopar.cluster.collective_counts import latency_count, volume_count
from autopar.cluster.machines import REACHED, Device, Host, Link, Node
from autopar.errors import ExecutionError

T = TypeVar("T")
Fitted = dict[tuple[str, int], tuple[float, float]]  # (kind, ranks) -> alpha and bandwidth
VERSION = 4
MOST_PROCESSES = 8  # more are not started to measure; what they share is shared further

# A plain guess at such a machine, the same everywhere.
_GUESS: dict[str, Any] = {
    "flops": {"f64": 20e9, "f32": 40e9, "f16": 40e9, "bf16": 40e9},
    "bandwidth": 8e9,
    "overhead": 5e-6,
    "half_flops": 0.0,
    "copy": (5e-6, 4e9),
    "overlap": 0.0,  # messages are carried by the cores that compute
    "collectives": [],
}
_REPEATS = 5  # times that a machine is measured when that is asked for
_TIME_LIMIT = 120.0  # seconds that one time may take
_GUESSED_LINK = (200e-6, 2e9)


def local_node(devices: int, *, measure: bool = True, again: bool = False) -> Node:
    """Return this machine as a node of `devices` processes that share it; `again` measures anew."""
    if not measure:
        return measured_node(devices, devices, _GUESS)
    processes = min(devices, MOST_PROCESSES)
    return read_cached(
        f"local-{processes}-{machine_id()}.json",
        partial(measured_node, devices, processes),
        lambda: _run_measurement(processes, _REPEATS if again else 1),
        again=again,
    )


def measured_node(devices: int, processes: int, figures: dict[str, Any]) -> Node:
    """Return the node of the figures that `measure.py` printed. Raise for false ones."""
    sharing = devices / processes
    memory, flops = host_memory() / devices, figures["flops"]["f32"] / sharing
    alpha, copying = figures["copy"]
    bandwidth, overhead = figures["bandwidth"] / sharing, figures["overhead"] * sharing
    near_bytes, far_seconds = far_memory_cost(figures.get("far_points", []))
    host = Host(memory, alpha, copying / sharing, bandwidth, flops, overhead, is_device=True)
    device = Device(
        "CPU process",
        {dtype: rate / sharing for dtype, rate in figures["flops"].items()},
        memory=memory,
        bandwidth=bandwidth,
        overhead=overhead,
        **REACHED,
        overlap=figures["overlap"],
        near_bytes=near_bytes,
        far_seconds=far_seconds * sharing,
        half_flops=figures["half_flops"],
        host=host,
    )
    fitted = fit_links(figures["collectives"])
    alpha, rate = message_link(fitted)
    measured = {key: (a, b / sharing) for key, (a, b) in fitted.items()}
    node = Node(device, devices, Link(alpha, rate / sharing, measured))
    return schema.read(Node, schema.write(node))


def message_link(fitted: Fitted) -> tuple[float, float]:
    """Return latency and bandwidth of a message: of a ring shift in the smallest measured group."""
    for kind in ("shift", "all_reduce"):
        if sizes := [ranks for name, ranks in fitted if name == kind]:
            return fitted[kind, min(sizes)]
    return _GUESSED_LINK


def far_memory_cost(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the bytes of a product's matrices that caches hold for nothing, and the seconds of
    each byte beyond, from two measured sizes."""
    if not points or not 0 < points[0][1] < points[1][1]:
        return 0.0, 0.0
    (small, fast), (large, slow) = points
    seconds_per_byte = (slow - fast) / (large - small)
    return max(0.0, large - slow / seconds_per_byte), seconds_per_byte


def fit_links(timings: list[tuple[str, int, int, float]]) -> Fitted:
    """Fit latency to the smallest and bandwidth to the largest size of each collective that was
    measured with two sizes."""
    links: Fitted = {}
    for kind, ranks in {(kind, ranks): None for kind, ranks, _, _ in timings}:
        points = sorted((size, t) for k, n, size, t in timings if (k, n) == (kind, ranks))
        (small, fast), (large, slow) = points[0], points[-1]
        if small == large:
            continue
        volume = volume_count(kind, ranks)
        # Noise can make the large one as fast as the small one; it is never more than 50 times so.
        bandwidth = volume * (large - small) / max(slow - fast, slow / 50)
        links[kind, ranks] = (fast / latency_count(kind, ranks), bandwidth)
    return links


def _run_measurement(processes: int, times: int = 1) -> dict[str, Any]:
    """Return the figures of single operators and collectives: medians over `times` measurements."""
    script = Path(__file__).with_name("measure.py")
    command = [sys.executable, "-P", str(script), str(processes), str(times)]
    return json.loads(output_of(command, _TIME_LIMIT * times))


def output_of(command: Sequence[str], seconds: float) -> str:
    """Return what a program prints. After `seconds`, kill it and its children, and raise."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as program:
        try:
            output, errors = program.communicate(timeout=seconds)
            if not program.returncode:
                return output
            got = f"it failed: {errors.strip()[-500:]}"
        except BaseException as error:  # of Ctrl-C, too, a session of its own hears nothing
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            got = f"it took more than {seconds:g} seconds"
    raise ExecutionError(
        "the constants of this machine are measured by a process of its own",
        got=got,
        remedy="Cluster.local(n, measure=False) uses default constants",
    )


def read_cached(
    name: str, read: Callable[[Any], T], make: Callable[[], Any], *, again: bool = False
) -> T:
    """Return `read(data)` of a JSON file in the cache folder. Write `make()` there first where the
    file is missing, unreadable, or to be made `again`."""
    with _locked(name) as path:
        if not again:
            with contextlib.suppress(Exception):  # whatever is wrong with it
                return read(json.loads(path.read_text()))
        data = make()
        result = read(data)
        write_file(path, json.dumps(data), "the cache of this machine's constants")
        return result


@contextlib.contextmanager
def _locked(name: str) -> Iterator[Path]:
    """Lock a cached file, which ranks read at the same time, and yield its path."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "autopar"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / f"{name}.lock"))
        except OSError:
            folder = Path(tempfile.gettempdir()) / f"autopar-{os.getuid()}"
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / f"{name}.lock"))
        yield folder / name


def machine_id() -> str:
    """Return a short hash of this machine and its version of torch."""
    parts = (platform.node(), platform.machine(), os.cpu_count(), torch.__version__, VERSION)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def host_memory() -> float:
    """Return the bytes of this machine's memory."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
