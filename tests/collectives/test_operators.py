"""The operators between processes: equal to the virtual ranks, forward and backward."""

import doctest

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.collectives import Movement, operator_call, torch_operators
from autopar.collectives.joint_kernels import (
    KernelGroup,
    RingShift,
    Steps,
    in_lock_step,
)
from autopar.collectives.joint_messages import drive_on_process
from autopar.errors import VerifierError
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.runtime.launching.launch import launch
from tests.collectives import processes


def test_four_processes_do_as_four_virtual_ranks(warm_ranks: None) -> None:
    """One launch for everything that only processes can show; see `processes`."""
    counts: list[int] = []
    launch(processes.check_all, 4, heard=lambda rank, count: counts.append(count))
    assert len(counts) == 4
    assert min(counts) > 0


@pytest.fixture(scope="module")
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_a_piece_sent_to_itself_is_a_copy(group: str) -> None:
    """As a message would: what is written to it is not written to what was sent."""
    sent = torch.arange(3.0)

    def kernel() -> Steps:
        coming = yield RingShift((sent,), 1, (sent.shape,))
        (came,) = yield coming
        came += 1
        return came

    for drive in (drive_on_process(group, KernelGroup(1, 0)), in_lock_step):
        (came,) = drive([kernel()])
        assert came.tolist() == [1.0, 2.0, 3.0]
        assert sent.tolist() == [0.0, 1.0, 2.0]


def calls(group: str) -> dict[str, tuple]:
    place = (group, 1, 0)
    return {
        "identity": (group,),
        "all_reduce": (group, True),
        "all_gather": (0, 4, *place, True),
        "reduce_scatter": (1, *place),
        "slice": (0, *place),
        "all_to_all": (0, 4, 1, *place),
    }


@pytest.mark.parametrize("name", ["identity", "all_reduce", "all_gather", "reduce_scatter",
                                  "slice", "all_to_all"])  # fmt: skip
def test_torch_accepts_the_operator(name: str, group: str) -> None:
    """Torch's own checks: schema, fake tensors, registration of autograd, traced with both."""
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    operator = getattr(torch.ops.autopar, name).default
    torch.library.opcheck(operator, (x, *calls(group)[name]))
    torch.library.opcheck(operator, (x.detach().int(), *calls(group)[name]))


@pytest.mark.parametrize("name", ["identity", "all_reduce", "all_gather", "reduce_scatter",
                                  "slice", "all_to_all"])  # fmt: skip
def test_operators_show_by_name_in_graphs(name: str, group: str) -> None:
    operator = getattr(torch.ops.autopar, name).default

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(operator(x, *calls(group)[name]).sum(), x)[0]

    x = torch.randn(4, 6, requires_grad=True)
    graph = make_fx(step, tracing_mode="fake")(x).graph
    found = [str(node.target).split(".")[1] for node in graph.nodes if "autopar" in str(node)
             or "autopar" in str(node.target)]  # fmt: skip
    back = {
        "identity": "all_reduce",
        "all_reduce": "all_reduce",
        "all_gather": "reduce_scatter",
        "reduce_scatter": "all_gather",
        "slice": "all_gather",
        "all_to_all": "all_to_all",
    }
    assert found == [name, back[name]]


def test_operators_compile_as_one_graph(group: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.autopar.identity(x * 2, group)
        y = torch.ops.autopar.all_gather(y.sin(), 0, 4, group, 1, 0, True)
        return torch.ops.autopar.all_reduce(y * y, group, False)

    x = torch.randn(4, 6, requires_grad=True)
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    expected, found = program(x), compiled(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
    )


def test_shapes_without_processes() -> None:
    """Meta tensors know the shape of every piece, the short and the empty ones too."""
    x = torch.empty(5, 2, device="meta")
    lengths = [torch.ops.autopar.slice(x, 0, "none", 4, i).shape[0] for i in range(4)]
    assert lengths == [2, 2, 1, 0]
    y = torch.ops.autopar.all_to_all(x[:2], 0, 5, 1, "none", 4, 3)
    assert y.shape == (5, 0)


def test_the_call_for_a_movement() -> None:
    mesh = Mesh(a=2, b=2)
    operator, arguments = operator_call(
        Movement("all_gather", ("b",), 0, pending=True), Layout(("a", "b")), (5,), mesh, 3, "g"
    )
    assert operator is torch.ops.autopar.all_gather.default
    assert arguments == (0, 2, "g", 2, 1, True)  # 5 in halves of 3 and 2; rank 3 is in the second
    with pytest.raises(VerifierError, match="in the order of the mesh"):
        operator_call(Movement("slice", ("b", "a"), 0), Layout(None), (4,), mesh, 0, "g")


def test_tour() -> None:
    assert doctest.testmod(torch_operators).failed == 0
