"""Parity of what nobody would write: random cuts of random tensors, random programs as a whole.

Any layout of any parameter, input or result of a module is legal as long as the annotations do not
contradict each other, and these cannot: each tensor gets one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopar as ap
from tests import models
from tests.annotations import outputs
from tests.models import Case
from tests.parity import Outcome, assert_equal, parallel_outcome, single_outcome
from tests.random_runs import run

Dims = tuple[tuple[str, ...], ...]

SMALL: dict[str, Callable[[], Case]] = {
    "mlp": lambda: models.mlp(batch=9, inputs=6, hidden=7, outputs=4, layers=2),
    "resnet": lambda: models.resnet(batch=8, width=4, size=6, classes=5),
    "gpt": lambda: models.gpt(
        batch=8, sequence=6, vocabulary=11, hidden=12, heads=3, layers=1, fused=True
    ),
    "llama": lambda: models.llama(batch=8, sequence=5, vocabulary=11, hidden=16, layers=1),
}
MESHES = [ap.Mesh(a=3), ap.Mesh(a=2, b=2), ap.Mesh(a=2, b=3), ap.Mesh(a=2, b=2, c=2)]


@pytest.mark.parametrize("name", SMALL)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_annotations_are_exact(name: str, data: st.DataObject) -> None:
    mesh, case = data.draw(st.sampled_from(MESHES)), SMALL[name]()
    density = data.draw(st.sampled_from([0, 1, 3, 6]))
    for path, parameter in case.model.named_parameters():
        if _chosen(data, density):
            owner, _, leaf = path.rpartition(".")
            dims = _dims(data, parameter.shape, mesh)
            ap.shard(case.model.get_submodule(owner), params={leaf: dims})
    for path, shape in outputs(case).items():
        if _chosen(data, density):
            dims = _dims(data, shape, mesh)
            ap.shard(case.model.get_submodule(path), out_strategy=(dims,))
    inputs = [*case.args, *case.kwargs.values()]
    ap.shard(case.model, tuple(_dims(data, value.shape, mesh) for value in inputs))
    module = ap.parallelize(
        case.model,
        case.args,
        case.kwargs,
        mesh=mesh,
        backend="virtual",
        check=True,
        mode="propagate",
    )
    assert_equal(parallel_outcome(module, case, steps=1), _expected(name))


@functools.cache
def _expected(name: str) -> Outcome:
    return single_outcome(SMALL[name](), steps=1)


def _chosen(data: st.DataObject, tenths: int) -> bool:
    return tenths > 0 and data.draw(st.integers(0, 9)) < tenths


def _dims(data: st.DataObject, shape: Sequence[int], mesh: ap.Mesh) -> Dims:
    """A random layout; no dim is cut into more pieces than it has elements."""
    dims: list[tuple[str, ...]] = [() for _ in shape]
    for axis in data.draw(st.permutations(mesh.names)):
        dim = data.draw(st.integers(-1, len(shape) - 1))
        if dim >= 0 and shape[dim] >= mesh.degree([*dims[dim], axis]):
            dims[dim] += (axis,)
    return tuple(dims)


def test_random_programs_are_exact_or_refused():
    """At length: `python -m benchmarks.fuzz`."""
    results = {(seed, seed % 2): run(seed, seed % 2) for seed in range(16)}
    bad = {key: r for key, r in results.items() if r.verdict in ("wrong", "raw")}
    assert not bad, "\n".join(f"run{key}: {r.verdict} {r.reason}" for key, r in bad.items())
    assert sum(r.verdict == "compared" for r in results.values()) > len(results) / 2
