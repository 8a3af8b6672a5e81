"""One of four processes: every operator over gloo against the movement on virtual ranks."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.collectives import Movement, move, operator_call, redistribute
from autopar.collectives.deferred_linears import linears
from autopar.collectives.redistribution import LinkPrice, possible_movements
from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from tests.collectives.spaces import all_states, random_gradient, random_value

TWO, FOUR = Mesh(a=2, b=2), Mesh(w=4)
EXACT = {"rtol": 0, "atol": 1e-12}
# Even, uneven, with empty pieces, and with nothing in them.
SHAPES = {
    FOUR: [(8,), (5,), (2,), (0,), (4, 8), (5, 7), (2, 3), (8, 4, 4), (3, 6, 5), (1, 2, 9)],
    TWO: [(8,), (5,), (4, 8), (3, 5), (12, 8)],
}
IN_PARTS = {(TWO, (12, 8)): ((0, 3), (1, 2))}


def check_all(say: Callable[[int], None]) -> None:
    """Says how many movements it has checked."""
    rank = dist.get_rank()
    names = {(mesh, axes): group_name(mesh, axes, rank) for mesh, axes in all_groups()}
    count = 0
    for mesh, shapes in SHAPES.items():
        for shape in shapes:
            count += check_movements(mesh, shape, rank, names)
    check_dtypes(rank, names)
    check_strides(rank, names)
    check_path(rank, names)
    check_linears(rank, names)
    say(count)


def all_groups() -> list[tuple[Mesh, tuple[str, ...]]]:
    return [(FOUR, ("w",)), (TWO, ("a",)), (TWO, ("b",)), (TWO, ("a", "b"))]


def group_name(mesh: Mesh, axes: tuple[str, ...], rank: int) -> str:
    """The name of the group of `rank` over `axes`; every process makes every group."""
    found = ""
    for members in mesh.groups(axes):
        group = dist.new_group(list(members))
        if rank in members:
            found = group.group_name
    return found


def check_movements(mesh: Mesh, shape: tuple[int, ...], rank: int, names: dict) -> int:
    """Every movement out of every state of `shape`, forward and backward."""
    random = torch.Generator().manual_seed(0)
    count = 0
    parts = IN_PARTS.get((mesh, shape), ())
    for layout, pending in all_states(mesh, len(shape), parts):
        for movement, placed, cuts in possible_movements(Placement(layout, pending), mesh, parts):
            if any(shape[dim] % degree for dim, degree in cuts):
                continue
            count += 1
            after, pending_after = placed.layout, placed.pending
            x = random_value(layout, shape, mesh, random)
            y = random_gradient(after, pending_after, shape, mesh, random)
            for value in x:
                value.requires_grad_()
            expected = move(movement, x, mesh)
            expected_back = torch.autograd.grad(expected, x, y)
            name = names[mesh, movement.axes]
            operator, arguments = operator_call(movement, layout, shape, mesh, rank, name)
            found = operator(x[rank], *arguments)
            (found_back,) = torch.autograd.grad(found, x[rank], y[rank])
            torch.testing.assert_close(found, expected[rank], **EXACT)
            torch.testing.assert_close(found_back, expected_back[rank], **EXACT)
            assert found.is_contiguous()
            meta = operator(x[rank].to("meta"), *arguments)
            assert meta.shape == found.shape
            assert meta.is_contiguous()
    return count


def check_dtypes(rank: int, names: dict) -> None:
    """Tensors of every dtype move, and those that can be added are summed."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool,
              torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
              torch.float8_e4m3fn)  # fmt: skip
    movements = [
        (Layout("w", None), Movement("all_gather", ("w",), 0)),
        (Layout("w", None), Movement("all_to_all", ("w",), 0, 1)),
        (Layout(None, None), Movement("slice", ("w",), 0)),
        (Layout(None, None), Movement("identity", ("w",), pending=True)),
        (Layout(None, None, partial="w"), Movement("all_reduce", ("w",))),
        (Layout(None, None, partial="w"), Movement("reduce_scatter", ("w",), 0)),
    ]
    random = torch.Generator().manual_seed(0)
    for dtype, (layout, movement) in itertools.product(dtypes, movements):
        if layout.partial and dtype == torch.float8_e4m3fn:
            continue
        for shape in ((4, 8), (5, 3)):
            x = [(value * 4).to(dtype) for value in random_value(layout, shape, FOUR, random)]
            operator, arguments = operator_call(
                movement, layout, shape, FOUR, rank, names[FOUR, ("w",)]
            )
            found = operator(x[rank], *arguments)
            assert found.dtype == dtype
            if dtype == torch.float8_e4m3fn:
                x = [value.float() for value in x]
                found = found.float()
            expected = move(movement, x, FOUR)[rank]
            if layout.partial and dtype.is_floating_point:
                torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
            else:
                torch.testing.assert_close(found, expected)


def check_strides(rank: int, names: dict) -> None:
    """Values and gradients need not be contiguous."""
    random = torch.Generator().manual_seed(0)
    for layout, movement in (
        (Layout(None, "w"), Movement("all_gather", ("w",), 1, pending=True)),
        (Layout("w", None), Movement("all_to_all", ("w",), 0, 1)),
        (Layout(None, None, partial="w"), Movement("reduce_scatter", ("w",), 1)),
        (Layout(None, None, partial="w"), Movement("all_reduce", ("w",), pending=True)),
        (Layout(None, None), Movement("slice", ("w",), 1)),
        (Layout(None, None), Movement("identity", ("w",), pending=True)),
    ):
        x = random_value(layout, (8, 4), FOUR, random)
        x = [value.t().contiguous().t().requires_grad_() for value in x]
        moved = move(movement, x, FOUR)
        y = [torch.ones((), dtype=torch.float64).expand_as(value) * 1 for value in moved]
        operator, arguments = operator_call(
            movement, layout, (8, 4), FOUR, rank, names[FOUR, ("w",)]
        )
        found = operator(x[rank], *arguments)
        torch.testing.assert_close(found, moved[rank], **EXACT)
        (back,) = torch.autograd.grad(found.sum(), x[rank])
        torch.testing.assert_close(back, torch.autograd.grad(moved, x, y)[rank], **EXACT)


def check_path(rank: int, names: dict) -> None:
    """A whole redistribution."""
    source, target, shape = Layout(("a", "b"), None), Layout(None, ("b", "a")), (6, 5)
    random = torch.Generator().manual_seed(0)
    values = random_value(source, shape, TWO, random)
    mine, layout = values[rank], source
    path = redistribute(source, Placement(target), shape, 8, TWO, LinkPrice.uniform(TWO))
    for movement in path:
        operator, arguments = operator_call(
            movement, layout, shape, TWO, rank, names[TWO, movement.axes]
        )
        mine = operator(mine, *arguments)
        values = move(movement, values, TWO, shape=shape, layout=layout)
        layout = movement.apply(layout)
    assert layout == target
    torch.testing.assert_close(mine, values[rank], **EXACT)


def check_linears(rank: int, names: dict) -> None:
    """A movement and its readers in one function give what they give by themselves."""
    random = torch.Generator().manual_seed(0)
    movements = [
        (Layout(None, None, None), Movement("identity", ("w",), pending=True)),
        (Layout(None, None, None, partial="w"), Movement("all_reduce", ("w",), pending=True)),
        (Layout(None, "w", None), Movement("all_gather", ("w",), 1, pending=True)),
    ]
    for (layout, movement), rows in itertools.product(movements, (8, 5)):
        shape = (2, rows, 6)
        operator, arguments = operator_call(
            movement, layout, shape, FOUR, rank, names[FOUR, ("w",)]
        )
        x = random_value(layout, shape, FOUR, random)[rank].requires_grad_()
        one, two = torch.randn(3, 6, dtype=x.dtype), torch.randn(7, 6, dtype=x.dtype)
        bias = torch.randn(3, dtype=x.dtype, requires_grad=True)
        for learned, read in itertools.product(itertools.product((True, False), repeat=2), (1, 2)):
            for weight, learns in zip((one, two), learned):
                weight.requires_grad_(learns)
            given = linears(x, operator, arguments, one, bias, two, None)
            moved = operator(x, *arguments)
            expected = (F.linear(moved, one, bias), F.linear(moved, two))
            torch.testing.assert_close(given, expected, **EXACT)
            inputs = [value for value in (x, one, two, bias) if value.requires_grad]
            losses = [sum(y.square().sum() for y in ys[:read]) for ys in (given, expected)]
            found, wanted = (torch.autograd.grad(y, inputs, allow_unused=True) for y in losses)  # type: ignore[arg-type]
            for gradient, other in zip(found, wanted):
                assert (gradient is None) == (other is None)
                if gradient is not None:
                    torch.testing.assert_close(gradient, other, rtol=0, atol=1e-11)
