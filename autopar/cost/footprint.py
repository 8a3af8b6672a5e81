"""Footprint: the predicted bytes of one device, part by part, from the finished program.

Activations are counted as autograd saves them: a tensor that several operators save counts once,
and a view counts as the tensor that it looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch import fx

from autopar.capture.captured import Captured
from autopar.capture.origins import state_bytes
from autopar.collectives.redistribution import local_elements
from autopar.cost.copy_groups import copy_groups_of_nodes, live_copy_bytes
from autopar.cost.saved_tensors import SavedBytes, SavedBytesCache, Storage, peak_recomputed_bytes
from autopar.cost.state_price import ParameterFacts
from autopar.layout import Layout, ParameterPlacement, Place
from autopar.mesh import Mesh
from autopar.states import StateBytes
from autopar.strategies.node_info import info

# What parameters and buffers take all through a step.
HELD_KINDS = ("parameters", "gradients", "optimizer", "buffers", "gathered")
HeldBytes = tuple[int, int, int, int, int]  # bytes of these
CONSTANT_KINDS = ("parameters", "optimizer", "buffers", "inputs")  # of the same size at any time
HOST_PREFIX = "host_"  # before the names of those kinds that are on the host


@dataclass(frozen=True)
class AtPeak:
    """The bytes of one device when it holds most, by kind: together they are its peak."""

    parameters: float = 0.0
    optimizer: float = 0.0
    buffers: float = 0.0
    inputs: float = 0.0
    gradients: float = 0.0  # of parameters, as far as they are there then
    activations: float = 0.0  # kept for backward, or read by later calls
    gathered: float = 0.0  # copies of parameters, those of a use as far as they are there then
    messages: float = 0.0  # between stages, coming and going
    # Gradients on their way, of values and to their sums, and what calls take while they run.
    working: float = 0.0


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on the fullest device: of each kind when that takes most, and of all kinds at
    the peak.

    The step begins without gradients. A step that adds to earlier ones also holds their gradients,
    where parameters are from step to step.
    """

    parameters: float  # from step to step
    gradients: float
    optimizer: float  # what it keeps of all that learns
    buffers: float
    gathered: float  # copies of parameters that live a step, or a use
    activations: float  # what forward keeps for backward
    inputs: float
    at_peak: AtPeak
    # On the host, of one device's ranks.
    host_parameters: float = 0.0
    host_gradients: float = 0.0
    host_optimizer: float = 0.0
    host_buffers: float = 0.0
    host_gathered: float = 0.0
    host_activations: float = 0.0

    @property
    def peak(self) -> float:
        """Return the most bytes that the device holds at one time."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Return the bytes of the peak by kind."""
        return asdict(self.at_peak)

    @property
    def on_host(self) -> dict[str, float]:
        """Return the bytes on the host by kind."""
        return {
            kind: getattr(self, f"{HOST_PREFIX}{kind}") for kind in (*HELD_KINDS, "activations")
        }

    @property
    def kinds(self) -> dict[str, float]:
        """Return the bytes by kind, those on the host with a prefix."""
        return self.parts | {f"{HOST_PREFIX}{kind}": size for kind, size in self.on_host.items()}

    @property
    def host(self) -> float:
        """Return all bytes on the host."""
        return sum(self.on_host.values())

    @classmethod
    def fullest(cls, places: Sequence[Memory]) -> Memory:
        """Return the memory of the fullest device, with that of the fullest host."""
        device = max(places, key=lambda memory: memory.peak)
        host = max(places, key=lambda memory: memory.host)
        host_bytes: dict[str, Any] = {
            f"{HOST_PREFIX}{kind}": size for kind, size in host.on_host.items()
        }
        return replace(device, **host_bytes)

    @classmethod
    def of(
        cls,
        nodes: Mapping[fx.Node, int],
        mesh: Mesh,
        activations: float,
        *,
        inputs: float = 0.0,
        used: float = 0.0,
        working: float = 0.0,
    ) -> Memory:
        """Return memory with the parameters and buffers among `nodes` (each counted so often), all
        at one time; `used`: bytes of copies that live a use."""

        def kinds_of(*, of_host: bool) -> dict[str, float]:
            held = [
                np.multiply(held_bytes(node, mesh, of_host=of_host), n) for node, n in nodes.items()
            ]
            total = np.sum([np.zeros(len(HELD_KINDS)), *held], axis=0)
            return dict(zip(HELD_KINDS, total.astype(float).tolist()))

        kinds = kinds_of(of_host=False) | {"activations": activations, "inputs": inputs}
        kinds["gathered"] += used
        host_bytes = {f"{HOST_PREFIX}{kind}": size for kind, size in kinds_of(of_host=True).items()}
        return cls(**kinds, at_peak=AtPeak(**kinds, working=working), **host_bytes)

    def at_once(self, peak_bytes: Mapping[str, float], used: float) -> Memory:
        """Return this memory for a step whose bytes at one time are at most `made`, gradients
        included; `used`: the bytes of short-lived copies that are already counted."""
        peak_bytes = (
            peak_bytes
            if sum(peak_bytes.values()) >= self.gradients
            else {"gradients": self.gradients}
        )
        stays = {kind: getattr(self, kind) for kind in CONSTANT_KINDS}
        copies = peak_bytes.get("gathered", 0.0) + self.gathered - used
        return replace(self, at_peak=AtPeak(**{**stays, **peak_bytes, "gathered": copies}))

    def keeping(self, size: int) -> Memory:
        """Return this memory with `size` bytes kept in Python, counted as buffers."""
        peak = replace(self.at_peak, buffers=self.at_peak.buffers + size)
        return replace(self, buffers=self.buffers + size, at_peak=peak) if size else self

    def with_stale(self, versions: Memory) -> Memory:
        """Return this memory with older versions of parameters, those of `versions`."""
        peak = replace(
            self.at_peak, parameters=self.at_peak.parameters + versions.at_peak.parameters
        )
        return replace(
            self,
            parameters=self.parameters + versions.parameters,
            host_parameters=self.host_parameters + versions.host_parameters,
            at_peak=peak,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"peak": self.peak, "host": self.host}


def program_memory(
    graph: fx.Graph,
    mesh: Mesh,
    buffer_bytes: int,
    known: SavedBytesCache | None = None,
) -> Memory:
    """Return the memory of one rank of the rewritten `graph`."""
    known = known or SavedBytesCache(mesh)
    inputs = 0.0
    for node in graph.nodes:
        if node.op == "placeholder" and info(node).origin[0] not in ("parameter", "buffer"):
            inputs += info(node).type.local_bytes(mesh)
    nodes = list(graph.nodes)
    used = live_copy_bytes(copy_groups_of_nodes(nodes, mesh, buffer_bytes), mesh)
    activations = distinct_saved_bytes(nodes, known.through)
    counts = {n: info(n).count for n in nodes}
    working = peak_recomputed_bytes(nodes, mesh, known)
    memory = Memory.of(counts, mesh, activations, inputs=inputs, used=used, working=working)
    on_host = distinct_saved_bytes(nodes, known.on_host)
    return replace(memory, host_activations=memory.host_activations + on_host)


def distinct_saved_bytes(nodes: Iterable[fx.Node], keeps: Callable[[fx.Node], SavedBytes]) -> float:
    """Return the bytes that calls save, each storage once, times the number of blocks that the
    first saving call stands for."""
    seen, total = set[Storage](), 0.0
    for node in nodes:
        for key, size in keeps(node).items():
            if key not in seen:
                seen.add(key)
                total += size * info(node).count
    return total


def held_bytes(node: fx.Node, mesh: Mesh, *, of_host: bool = False) -> HeldBytes:
    """Return the bytes of a parameter or buffer on one rank; zeros for other nodes."""
    if node.op == "placeholder" and info(node).origin[0] == "buffer":
        is_here = info(node).on_host == of_host
        return 0, 0, 0, info(node).type.local_bytes(mesh) if is_here else 0, 0
    places = info(node).places
    return (0,) * 5 if places is None else parameter_bytes(node, places, mesh, of_host=of_host)


def parameter_bytes(
    node: fx.Node,
    places: ParameterPlacement,
    mesh: Mesh,
    kept: StateBytes | None = None,
    *,
    of_host: bool = False,
) -> HeldBytes:
    """Return the bytes of a parameter in these places, its gradient, its optimizer states and its
    copies, on the device or on the host."""
    shape, learns = tuple(info(node).val.shape), info(node).learns
    facts = ParameterFacts(shape, kept or state_bytes(node), learns)
    return _parameter_bytes(facts, places, mesh, of_host=of_host)


def unsharded_bytes(captured: Captured) -> dict[str, float]:
    """Return the bytes of all parameters on devices, unsharded, by kind."""
    sizes = dict.fromkeys(HELD_KINDS, 0.0)
    for node in captured.graph.find_nodes(op="placeholder"):
        if node.name in captured.parameters and not info(node).on_host:
            whole = ParameterPlacement.tied(Layout.replicated(info(node).val.ndim))
            for kind, size in zip(HELD_KINDS, parameter_bytes(node, whole, Mesh(x=1))):
                sizes[kind] += size * info(node).count
    return sizes


def summed_gradient_bytes(node: fx.Node, places: ParameterPlacement | None, mesh: Mesh) -> int:
    """Return the bytes that a rank has of a parameter's gradient, once summed over the mesh; 0 for
    a node that does not learn."""
    if places is None or not info(node).learns:
        return 0
    elements = local_elements(places.optimizer.dims, tuple(info(node).val.shape), mesh)
    return elements * state_bytes(node).gradient


@lru_cache(maxsize=1 << 12)
def _parameter_bytes(
    facts: ParameterFacts, places: ParameterPlacement, mesh: Mesh, *, of_host: bool
) -> HeldBytes:
    shape, element, learns = facts

    def elements(layout: Layout) -> int:
        return local_elements(layout.dims, shape, mesh)

    def is_here(place: Place) -> bool:
        return (place in places.on_host) == of_host

    moves = places.goes_up == ("optimizer", "storage")
    is_copied = places.storage != places.optimizer or element.copy != element.master or moves
    copy = elements(places.storage) * element.copy if is_copied and is_here("storage") else 0
    stored = elements(places.optimizer) if is_here("optimizer") else 0
    if not learns:
        return stored * element.master, 0, 0, 0, copy
    gradient = elements(places.gradient) * element.gradient if is_here("gradient") else 0
    if is_here("optimizer") and not is_here("gradient"):
        gradient = stored * element.master  # as the optimizer is given it
    return stored * element.master, gradient, stored * element.optimizer, 0, copy
