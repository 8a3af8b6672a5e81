"""What ranks check of the values that they are given, make or read: their pieces and no more."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh
from autopar._torch.tensors import local_of
from autopar.layout import Layout
from autopar.runtime.backends.distributed_backend import TorchBackend
from autopar.runtime.backends.world import world
from autopar.runtime.parameters.initial_values import InitialValues
from autopar.tensor_type import TensorType
from tests import models
from tests.annotations import stored
from tests.held import pieces_of, storages
from tests.models import Case
from tests.runtime.test_safetensors import save

WIDTH = 96
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64)


class Many(nn.Module):
    """Parameters and buffers of many dtypes and sizes, uneven, empty and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(5, 7)
        self.second.weight = self.first.weight
        self.one, self.none = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(0, 3))
        for dtype in DTYPES:
            values = torch.randint(-40, 40, (6, 3, 2)).to(dtype)
            self.register_buffer(f"of_{str(dtype)[6:]}", values)


def run_all(say: Callable[[str], None], folder: str) -> None:
    """Every check below; each says its name when it has passed."""
    warnings.simplefilter("ignore")
    for check in (gives_the_pieces_of_rank_0, makes_pieces_alone, reads_pieces_alone):
        check(Path(folder))
        say(check.__name__)


def gives_the_pieces_of_rank_0(folder: Path) -> None:
    """Under any layout, whatever other ranks have: another model, or one without values."""
    rank, plain = dist.get_rank(), models.mlp(layers=4)
    torch.manual_seed(rank)
    with torch.device("meta" if rank == 2 else "cpu"):
        model = Many()
    torch.manual_seed(0)
    expected = Many().state_dict()
    for options in (
        {"mesh": Mesh(a=4)},
        {"mesh": Mesh(a=2, b=2)},
        {"mesh": Mesh(pp=2, a=2), "microbatches": 2, "schedule": "1f1b"},
        {"mesh": Mesh(pp=2, a=2), "microbatches": 2, "schedule": "chimera"},
    ):
        plan = ap.plan(plain.model, plain.args, mode="propagate", **options)
        backend = TorchBackend(plan.program, torch.device("cpu"))
        axes: tuple[Any, ...] = (None, "a", ("a", "b"), ("b", "a"), "b")
        for dim, cut in ((dim, cut) for dim in range(2) for cut in axes):
            if not set(cut or ()) <= set(plan.mesh):
                continue
            layouts = {
                name: Layout.replicated(value.ndim).with_dim(dim % value.ndim, cut)
                if value.ndim
                else Layout()
                for name, value in InitialValues(model).tensors.items()
            }
            values = InitialValues(model)
            types = {n: TensorType.of(v, layouts[n]) for n, v in values.tensors.items()}
            placed = values.place(backend, types)
            assert placed.keys() == layouts.keys()
            is_first = backend.ranks.place in backend.ranks.places_of((0,))
            for name, value in placed.items():
                assert (value is not None) == is_first, name
                if value is not None:
                    whole = expected[name]
                    assert torch.equal(
                        local_of(value), backend.placing.view_piece(whole, layouts[name])
                    )


def wide(device: str = "cpu") -> Case:
    """Parameters cut as by ZeRO-3."""
    with torch.device(device):
        model = models.MLP(WIDTH, WIDTH, WIDTH, layers=6)
    return stored(Case("wide", model, (torch.ones(4, WIDTH), torch.ones(4, WIDTH))))


def parallel(case: Case, **options: Any) -> tuple[ap.ParallelModule, list[int]]:
    """The module, and what is held while its tensors are placed."""
    plan = ap.plan(case.model, case.args, mesh=Mesh(dp=4), mode="propagate")
    plan.program, world().mesh_of(plan.whole_mesh, "cpu")
    with most_held() as held:
        return ap.parallelize(case.model, case.args, plan=plan, **options), held


@contextmanager
def most_held() -> Iterator[list[int]]:
    """Bytes of storage that this process holds beside what it held before, at each tensor that it
    places."""
    before, seen, original = storages(), [], TorchBackend.place_part

    def place(backend: TorchBackend, *args: Any) -> Tensor | None:
        placed = original(backend, *args)
        seen.append(sum(size for where, size in storages().items() if where not in before))
        return placed

    with patch.object(TorchBackend, "place_part", place):
        yield seen


def makes_pieces_alone(folder: Path) -> None:
    """From the random numbers of rank 0, with no more than one layer beside its pieces."""
    case = wide("meta")
    torch.manual_seed(7)
    expected, after = wide().model.state_dict(), torch.rand(2)
    torch.manual_seed(7 if dist.get_rank() < 2 else 8)
    module, held = parallel(case)
    assert torch.equal(after, torch.rand(2)) == (dist.get_rank() < 2)
    assert_values(module, expected)
    pieces = sum(pieces_of(module, dist.get_rank()).values())
    most = pieces + 4 * (WIDTH * WIDTH + WIDTH) + 2 * torch.get_rng_state().nbytes
    assert pieces < max(held) <= most, (held, pieces, most)


def reads_pieces_alone(folder: Path) -> None:
    torch.manual_seed(7)
    expected = wide().model.state_dict()
    if dist.get_rank() == 0:
        save(folder / "wide.safetensors", expected)
    dist.barrier()
    original, counts = os.preadv, []

    def counted(*args: Any) -> int:
        counts.append(original(*args))
        return counts[-1]

    with patch.object(os, "preadv", counted):
        module, held = parallel(wide("meta"), weights=folder)
    assert_values(module, expected)
    assert sum(counts) == sum(pieces_of(module, dist.get_rank()).values()) == max(held)


def assert_values(module: ap.ParallelModule, expected: Mapping[str, Tensor]) -> None:
    found = module.full_state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
