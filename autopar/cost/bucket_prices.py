"""Buckets: which gradients of parameters are summed together, and the bytes that this takes.

Plan and runtime form the same buckets. A bucket holds parameters of one kind, from the last one to
the first, as backward makes their gradients. Gradients that are sharded on the way stay unsharded
until their bucket is full: such a bucket holds no more than the largest group of copies needs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeVar

from torch import fx

from autopar.capture.origins import state_bytes
from autopar.collectives.redistribution import local_elements
from autopar.cost.copy_groups import (
    CopiedParameter,
    copied_parameters,
    copy_groups,
    in_mesh_order,
    largest_group_bytes,
)
from autopar.cost.host_kernels import HostKernels
from autopar.layout import Layout, ParameterPlacement
from autopar.mesh import Mesh
from autopar.strategies.node_info import info

FIRST_BUCKET_BYTES = 4 * 2**20  # the first gradients wait for no more
MIN_SHARDED_BYTES = 2 * 2**20  # fewer bytes that are cut do not pay for a collective
SINGLE_BUCKET_BYTES = 2 * 2**20  # from here on, a copy costs more than a collective of its own
DIRECT_SEND_BYTES = 2**20  # of a piece: from here on, a copy costs more than a message of its own
SHORT_LIVED_BYTES = 2**15  # likewise, of copies that live a use: a buffer takes memory beside them


class SizedGradient(Protocol):
    """A gradient of a parameter, of known size."""

    @property
    def size(self) -> int:
        """Return the bytes of the largest piece, so that all ranks form the same buckets."""
        ...


SomeGradient = TypeVar("SomeGradient", bound=SizedGradient)
Key = TypeVar("Key", bound=Hashable)


def sharded_bucket_bytes(largest: int) -> int:
    """Return the bytes of a bucket of sharded gradients; `largest`: of a group of copies."""
    return max(MIN_SHARDED_BYTES, largest * 9 // 8)


def fill_buckets(
    gradients: Iterable[tuple[SomeGradient, Key]], cut: Mapping[Key, int], buffer_bytes: int
) -> list[list[tuple[SomeGradient, Key]]]:
    """Return gradients in buckets, in the order that backward fills them.

    Gradients of different keys are summed differently. A bucket whose key is in `cut` holds at most
    so many bytes, and none with several parameters holds more than `buffer_bytes`.
    """
    filling: dict[Key, list[tuple[SomeGradient, Key]]] = {}
    filled: dict[Key, int] = {}  # bytes of these
    first_bucket: dict[Key, list[tuple[SomeGradient, Key]]] = {}
    buckets: list[list[tuple[SomeGradient, Key]]] = []
    for gradient, key in reversed([*gradients]):
        is_single = gradient.size >= SINGLE_BUCKET_BYTES and key not in cut
        bucket = None if is_single else filling.get(key)
        limit = FIRST_BUCKET_BYTES if first_bucket.get(key) is bucket else buffer_bytes
        limit = min(buffer_bytes, cut.get(key, limit))
        if bucket is None or filled[key] + gradient.size > limit:
            bucket = []
            buckets.append(bucket)
            first_bucket.setdefault(key, bucket)
            if not is_single:
                filling[key], filled[key] = bucket, 0
        bucket.append((gradient, key))
        if not is_single:
            filled[key] += gradient.size
    return buckets


def is_sent_directly(
    shape: Sequence[int], dim: int, piece: int, most_copied: int = DIRECT_SEND_BYTES
) -> bool:
    """Return whether a rank's piece of a tensor goes in a message of its own, without a copy: it
    has many bytes, in one stretch of memory."""
    return math.prod(shape[:dim]) == 1 and piece > most_copied


@dataclass(frozen=True)
class BucketConfig:
    """The limits within which gradients and copies of parameters are grouped."""

    buffer_bytes: int  # no more together
    kernels: HostKernels | None = None  # of a host

    @property
    def on_host(self) -> bool:
        """Return whether messages go from host to host, large pieces without a copy."""
        return self.kernels is not None


@dataclass(frozen=True, eq=False)
class ParameterGradient:
    """The gradient of one parameter of a program."""

    parameter: fx.Node
    whole: float  # bytes, as backward makes it
    kept: float  # as it adds up, on the device
    part: float  # of its sum, as it is at the end
    packed: float  # bytes that are copied to a buffer
    copy: int = 0  # of a parameter that stands for several: which of them

    @property
    def size(self) -> int:
        return int(self.whole)


@dataclass(frozen=True)
class _BucketKey:
    """The facts that the gradients of one bucket share."""

    stages: tuple[int, ...]  # that read their parameters
    holders: tuple[int, ...]  # which are at these places of a pipeline: summed over all of them
    sum_axes: tuple[str, ...]  # over which the sum stays unsharded
    run_axes: tuple[str, ...]  # over which each micro-batch's gradient is sharded
    step_axes: tuple[str, ...]  # over which the accumulated gradient is sharded
    is_cast_sum: bool  # gradients add up in another dtype
    further: tuple[Hashable, ...]

    @property
    def is_summed(self) -> bool:
        axes = self.sum_axes or self.run_axes or self.step_axes
        return bool(axes or self.is_cast_sum or len(self.holders) > 1)


@dataclass(eq=False)
class PlannedBucket:
    """A bucket of a program, which is summed when it has all its gradients."""

    gradients: list[ParameterGradient]
    waits: bool  # gradients stay unsharded until the sum
    # Bytes of the sum: when it begins, besides the gradients; while it goes on, and after it, in
    # their place.
    begins: float
    goes_on: float
    part: float

    @property
    def whole(self) -> float:
        return sum(gradient.whole for gradient in self.gradients)


def program_buckets(graph: fx.Graph, mesh: Mesh, travel: BucketConfig) -> list[PlannedBucket]:
    """Return the buckets of a program's learning parameters."""
    copied = copied_parameters(graph.nodes, mesh)
    kinds = {n: _bucket_key(n, copied[n], mesh) for n in copied if info(n).learns}
    summed = {
        node: (_parameter_gradient(node, copied[node], kind, mesh, travel), kind)
        for node, kind in kinds.items()
        if kind.is_summed
    }
    gradients: list[tuple[ParameterGradient, _BucketKey]] = []
    for count, nodes in groupby(copied, lambda node: info(node).count):
        some_gradients = [summed[node] for node in nodes if node in summed]
        gradients += some_gradients
        for copy in range(1, count):
            gradients += [(replace(gradient, copy=copy), kind) for gradient, kind in some_gradients]
    groups = copy_groups(copied.values(), mesh, travel.buffer_bytes)
    cut = {
        kind: sharded_bucket_bytes(largest_group_bytes(groups, kind.stages, mesh))
        for kind in dict.fromkeys(kind for _, kind in gradients)
        if kind.run_axes or kind.step_axes
    }
    return [
        _planned_bucket([gradient for gradient, _ in bucket], bucket[0][1], mesh, travel)
        for bucket in fill_buckets(gradients, cut, travel.buffer_bytes)
    ]


def _bucket_key(node: fx.Node, copied: CopiedParameter, mesh: Mesh) -> _BucketKey:
    at, bytes_ = copied.places, state_bytes(node)
    run_axes = in_mesh_order({*copied.summed.axes} - {*copied.leaf.axes}, mesh)
    step_axes = in_mesh_order({*at.optimizer.axes} - {*copied.summed.axes}, mesh)
    sum_axes = in_mesh_order({*copied.pending} - {*at.optimizer.axes}, mesh)
    further = (copied.dtype, bytes_.gradient, at.goes_up, at.on_host)
    is_cast_sum = bytes_.copy != bytes_.gradient and not run_axes
    readers = copied.readers
    return _BucketKey(
        readers.stages, readers.holders, sum_axes, run_axes, step_axes, is_cast_sum, further
    )


def _parameter_gradient(
    node: fx.Node, copied: CopiedParameter, kind: _BucketKey, mesh: Mesh, travel: BucketConfig
) -> ParameterGradient:
    at, leaf, bytes_, shape = copied.places, copied.leaf, state_bytes(node), copied.shape

    def size(layout: Layout, itemsize: int) -> float:
        return float(local_elements(layout.dims, shape, mesh) * itemsize)

    is_host_gradient = "gradient" in at.on_host
    fine = copied.summed if kind.run_axes else at.optimizer
    whole, part = size(leaf, bytes_.copy), size(fine, bytes_.gradient)
    dim = next((d for d, cut in enumerate(leaf.dims) if cut != fine.dims[d]), 0)
    leads = is_sent_directly(leaf.largest_shape(shape, mesh), dim, int(part))
    is_direct = travel.on_host and leads and bytes_.copy == bytes_.gradient
    accumulated = 0.0 if is_host_gradient else size(copied.summed, bytes_.gradient)
    packed = 0.0 if is_direct else size(leaf, bytes_.gradient)
    return ParameterGradient(node, whole, accumulated, part, packed)


def _planned_bucket(
    gradients: list[ParameterGradient], kind: _BucketKey, mesh: Mesh, travel: BucketConfig
) -> PlannedBucket:
    packed = sum(gradient.packed for gradient in gradients)
    part = sum(gradient.part for gradient in gradients)
    waits = bool(kind.run_axes or kind.is_cast_sum)
    if kind.is_cast_sum:  # the buffer is what they add up in, and is cut as it is
        buffer = part if kind.step_axes else 0.0
        return PlannedBucket(
            gradients, True, sum(gradient.kept for gradient in gradients) + buffer, buffer, part
        )
    if not (kind.run_axes or kind.step_axes):
        whole = sum(gradient.whole for gradient in gradients)
        return PlannedBucket(gradients, waits, whole if len(gradients) > 1 else 0.0, whole, whole)
    members = math.prod(mesh[axis] for axis in kind.run_axes or kind.step_axes)
    arriving = part * (max(1, members - 1) if travel.on_host else 1)
    straight = sum(gradient.whole for gradient in gradients if not gradient.packed)
    return PlannedBucket(gradients, waits, packed + arriving, packed + arriving + straight, part)


def placement_of(node: fx.Node) -> ParameterPlacement:
    """Return the placement of a parameter."""
    places = info(node).places
    assert places is not None
    return places
