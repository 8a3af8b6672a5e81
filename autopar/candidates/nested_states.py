"""Nested states: settings of states over some of the ranks with replicas, which may be faster.

    for states in faster_states(candidate, memory, least_gain=0.01): ...
    for states in larger_buffers(candidate): ...

States that are cut over the neighbours in a node are gathered over fast links, and hold less than
whole ones. What a setting holds and moves is known from the sizes of parameters, without layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.candidates.axis_roles import axis_roles
from autopar.candidates.candidate import Candidate
from autopar.cluster.nested_groups import nested_group_sizes
from autopar.cost.cluster_price import ClusterPrice
from autopar.cost.state_figures import ParameterSizes, state_memory, state_traffic
from autopar.states import States, buffer_sizes, nested_settings, split_mesh

_FORWARD = 1 / 3  # of the work of a step


def faster_states(candidate: Candidate, memory: float, least_gain: float) -> list[States]:
    """Return the settings that are likely to fit into `memory` and to gain so much of the step, the
    fastest first."""
    roles = axis_roles(candidate)
    axes = _replica_axes(candidate, roles)
    replicas, now = candidate.mesh.degree(axes), candidate.states
    whole = candidate.whole_mesh.renamed(roles)
    levels = nested_group_sizes(candidate.cluster, whole, [roles[axis] for axis in axes])
    sizes = _sizes(candidate, replicas)
    count, machines = candidate.microbatches, candidate.step.program.machine_prices.machines
    forward = candidate.seconds * _FORWARD / count
    computed = {"forward": forward, "backward": candidate.seconds / count - forward}

    def shown(states: States) -> float:
        mesh, cutting = split_mesh(states, axes, candidate.mesh)
        price = ClusterPrice(machines, mesh, states.buffer_bytes)
        traffic = state_traffic(sizes, states, price, cutting)
        return traffic.least_shown(count, overlap=machines.device.overlap, **computed)

    left = memory - candidate.needed(memory) + state_memory(sizes, now, replicas).total
    before, gains = shown(now), dict[States, float]()
    for states in nested_settings(replicas, levels, microbatches=count):
        if states.numbers and state_memory(sizes, states, replicas).total <= left:
            gains[states] = before - shown(states)
    least = least_gain * candidate.seconds
    return sorted((s for s in gains if gains[s] >= least), key=lambda s: -gains[s])


def larger_buffers(candidate: Candidate) -> list[States]:
    """Return the same states with larger buffers, as far as a rank has parameters to fill them."""
    replicas = candidate.mesh.degree(_replica_axes(candidate, axis_roles(candidate)))
    kinds = _sizes(candidate, replicas).kinds.items()
    held = sum(
        kind.element.copy * elements * count
        for kind, counts in kinds
        for elements, count in counts.items()
    )
    states = candidate.states
    return [replace(states, buffer_bytes=size) for size in buffer_sizes(held)[1:]]


def _replica_axes(candidate: Candidate, roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the axes along which most parameters have replicas."""
    return tuple(axis for axis in candidate.mesh if roles[axis].startswith(("dp", "sp")))


def _sizes(candidate: Candidate, replicas: int) -> ParameterSizes:
    """Return the sizes of the parameters of a rank that are replicas on so many others."""
    stages = 1 if candidate.pipelining is None else candidate.pipelining.schedule.stages
    tensor = candidate.mesh.size // replicas
    return ParameterSizes.of(candidate.captured).on_each_rank(tensor=tensor, stages=stages)
