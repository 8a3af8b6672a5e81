"""Gradient buckets: every rank forms equal ones, whatever its pieces are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import Mesh
from autopar.layout import Layout
from autopar.runtime.parameters import gradient_buckets
from autopar.runtime.parameters.gradient_buckets import (
    BucketEntry,
    GradientBucket,
    GradientSync,
    make_buckets,
)
from autopar.runtime.parameters.reduction_spec import ReductionSpec
from autopar.tensor_type import TensorType

MESH = Mesh(a=2, b=2)
# Rows of 1 MB: three of them are cut in two and one, and two are a gradient of its own.
PARAMETERS = [
    *((f"rows{i}", (3, 2**18), (("b",), ()), ("a",)) for i in range(3)),
    *((f"columns{i}", (5, 2**17), (("a",), ()), ("b",)) for i in range(8)),
    *((f"whole{i}", (3, 2**17), ((), ()), ("a", "b")) for i in range(8)),
    *((f"thin{i}", (1, 2**18), (("b",), ()), ("a",)) for i in range(8)),
]


def entries_of(rank: int) -> list[tuple[BucketEntry, tuple[str, ...]]]:
    entries = []
    for name, shape, dims, axes in PARAMETERS:
        type_ = TensorType(shape, torch.float32, Layout(*dims))
        local: Tensor = torch.empty(type_.layout.local_shape(shape, MESH, rank), device="meta")
        entries.append((BucketEntry(name, local, local, type_.local_bytes(MESH)), axes))
    return entries


def test_all_ranks_form_the_same_buckets() -> None:
    formed = [
        [
            (bucket.key, bucket.is_alone, [entry.name for entry in bucket.entries])
            for bucket in buckets
        ]
        for buckets in (make_buckets(entries_of(rank)) for rank in range(MESH.size))
    ]
    assert formed == [formed[0]] * MESH.size
    assert len(formed[0]) > 4
    assert {alone for _, alone, _ in formed[0]} == {True, False}


def test_only_buckets_that_are_reached_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their parameters those that are not reached have no gradient."""
    summed, reduce = [], GradientBucket.reduce

    def noted(bucket: GradientBucket, *args: Any, **options: Any) -> Any:
        summed.append(bucket.key)
        return reduce(bucket, *args, **options)

    monkeypatch.setattr(GradientBucket, "reduce", noted)
    monkeypatch.setattr(gradient_buckets, "dtensors_like", lambda parameters, values: values)
    leaves = {name: torch.zeros(2, requires_grad=True) for name in ("a1", "a2", "b1")}
    entries = [(BucketEntry(n, leaf, leaf, leaf.nbytes), n[0]) for n, leaf in leaves.items()]
    spec = ReductionSpec(completing_actions={0: True}, last_action=0)
    sync = GradientSync(entries, dict.fromkeys("ab", spec))
    sync.start({"a1"})
    leaves["a1"].grad = torch.ones(2)
    gradients = sync.finish({"a1"})
    assert (summed, list(gradients)) == (["a"], ["a1"])
    assert torch.equal(gradients["a1"], torch.ones(2))


def test_gradients_add_up_in_the_dtype_of_sums() -> None:
    """In bfloat16, 256 + 1 + 1 is 256."""
    leaves = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.bfloat16)]
    entries = [BucketEntry("", leaf, leaf, leaf.nbytes, reduce=torch.float32) for leaf in leaves]
    bucket = GradientBucket("", entries)
    actions = {1: True, 3: True, 5: True}
    spec = ReductionSpec(completing_actions=actions, last_action=7, is_accumulated=True)
    assert spec.reduce_actions == {**actions, 7: False}
    for at, value in ((1, 256.0), (3, 1.0), (5, 1.0), (7, None)):
        for leaf in leaves:
            leaf.grad = None if value is None else torch.full_like(leaf, value)
        assert not list(bucket.reduce(spec, at))
        assert not any(leaf.grad is not None for leaf in leaves)
    assert bucket.buffer is not None
    assert torch.equal(bucket.buffer, torch.full((5,), 258.0))
