"""The movements on virtual ranks: values, the adjoint law, and whose memory is whose."""

import doctest
import itertools

import pytest
import torch

from autopar.collectives import Movement, from_ranks, move, to_ranks, virtual_movements
from autopar.collectives.redistribution import possible_movements
from autopar.errors import ExecutionError
from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from tests.collectives.spaces import (
    all_layouts,
    all_states,
    are_replicas,
    gradient_layout,
    inner,
    random_gradient,
    random_value,
)

TWO, THREE = Mesh(a=2, b=2), Mesh(a=2, b=2, c=2)
ALL = [
    (TWO, (8,)),
    (TWO, (5,)),
    (TWO, (2, 3)),
    (TWO, (4, 8)),
    (TWO, (3, 1, 4)),
    (Mesh(a=3, b=2), (7, 2)),
    (Mesh(a=2, b=1), (3, 2)),
    (THREE, (3,)),
    (THREE, (8, 8)),
    (THREE, (1, 5)),
]


@pytest.mark.parametrize(("mesh", "shape"), ALL, ids=str)
def test_every_movement_keeps_the_value_and_is_adjoint(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """For every movement C out of every state (a layout and its pending axes):

    - the whole value stays: what `from_ranks` assembles before and after is the same, and every
      rank holds what the layout after it says;
    - <C x, y> = <x, C^T y> for random x in the layout before and random y among the gradients of
      the layout after. The gradient of a cut is cut, of a replica a replica, of a partial sum a
      replica, and of a pending replica a partial sum; see `inner` for who counts how often;
    - C^T y is again a gradient of the layout before: equal on ranks that hold replicas of it.
    """
    random = torch.Generator().manual_seed(0)
    count = 0
    for layout, pending in all_states(mesh, len(shape)):
        for movement, placed, cuts in possible_movements(Placement(layout, pending), mesh):
            if any(shape[dim] % degree for dim, degree in cuts):
                continue
            count += 1
            after, pending_after = placed.layout, placed.pending
            x = random_value(layout, shape, mesh, random)
            y = random_gradient(after, pending_after, shape, mesh, random)
            for value in x:
                value.requires_grad_()
            moved = move(movement, x, mesh, shape=shape, layout=layout)
            whole = from_ranks(x, layout, mesh, shape)
            torch.testing.assert_close(from_ranks(moved, after, mesh, shape), whole)
            assert are_replicas(moved, after, mesh)
            back = torch.autograd.grad(moved, x, y)
            assert inner(moved, y, after, pending_after, mesh) == pytest.approx(
                inner(x, back, layout, pending, mesh), rel=1e-12, abs=1e-12
            ), movement
            # One form says all of it: the whole gradient stays too, and each rank has its piece.
            total = from_ranks(y, gradient_layout(after, pending_after), mesh, shape)
            before = gradient_layout(layout, pending)
            torch.testing.assert_close(from_ranks(back, before, mesh, shape), total)
            assert are_replicas(back, before, mesh)
    assert count


@pytest.mark.parametrize(
    ("mesh", "shape"), [(TWO, (5, 3)), (THREE, (4, 8)), (Mesh(a=3, b=2), (7,))], ids=str
)
def test_pieces_and_wholes(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """`to_ranks` and `from_ranks` are inverse, and each is the other's backward.

    Gradients: a whole that is cut receives the assembly of the pieces' gradients, replicas once;
    the pieces of an assembled whole receive its gradient, cut likewise.
    """
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
    for layout in all_layouts(mesh, len(shape)):
        pieces = to_ranks(whole, layout, mesh)
        for rank, piece in enumerate(pieces):
            assert piece.shape == layout.local_shape(shape, mesh, rank)
        assert torch.equal(from_ranks(pieces, layout, mesh, shape), whole)
        y = random_value(layout.gradient, shape, mesh, random)
        (back,) = torch.autograd.grad(pieces, whole, y)
        assert torch.equal(back, from_ranks(y, layout.gradient, mesh, shape))

        values = random_value(layout, shape, mesh, random)
        for value in values:
            value.requires_grad_()
        grad = torch.randn(shape, generator=random, dtype=torch.float64)
        back = torch.autograd.grad(from_ranks(values, layout, mesh, shape), values, grad)
        for piece, expected in zip(back, to_ranks(grad, layout.gradient, mesh)):
            assert torch.equal(piece, expected)


def test_scalars() -> None:
    one = torch.tensor(2.0, requires_grad=True)
    pieces = to_ranks(one, Layout(partial="a"), TWO)
    assert [piece.item() for piece in pieces] == [2.0, 2.0, 0.0, 0.0]
    total = move(Movement("all_reduce", ("a",)), pieces, TWO)
    from_ranks(total, Layout(), TWO, ()).backward()
    assert one.grad == 1.0


def test_a_leaf_owns_its_gradient() -> None:
    """Replicas share memory on the way forward only: a gradient may be added to in place."""
    for kind, dim in (("identity", None), ("slice", 0), ("reduce_scatter", 0)):
        leaves = [torch.ones(4, requires_grad=True) for _ in range(4)]
        movement = Movement(kind, ("a", "b"), dim, pending=kind == "identity")
        moved = move(movement, leaves, TWO)
        torch.autograd.backward(moved, [torch.ones_like(value) for value in moved])
        grads = [leaf.grad for leaf in leaves]
        for one, other in itertools.combinations(grads, 2):
            assert one is not None
            assert other is not None
            assert one.data_ptr() != other.data_ptr()
    leaves = [torch.ones(4, requires_grad=True) for _ in range(4)]
    whole = from_ranks(leaves, Layout(None), TWO, (4,))
    whole.sum().backward()
    assert len({leaf.grad.data_ptr() for leaf in leaves if leaf.grad is not None}) == 4


def test_the_gradient_of_an_identity_backward_is_not_stolen() -> None:
    """An all-reduce whose backward is the identity hands on a gradient that others also hold."""
    leaves = [torch.ones(4, requires_grad=True) for _ in range(2)]
    mesh = Mesh(a=2)
    left = move(Movement("all_reduce", ("a",)), leaves, mesh)
    right = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    total = [x + y for x, y in zip(left, right)]
    torch.autograd.backward(total, [torch.ones(4), torch.ones(4)])
    for one, other in zip(leaves, right):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.data_ptr() != other.grad.data_ptr()


def test_forward_shares_what_a_group_receives_alike() -> None:
    pieces = to_ranks(torch.arange(8.0), Layout("a"), TWO)
    gathered = move(Movement("all_gather", ("a",), 0), pieces, TWO)
    assert gathered[0].data_ptr() == gathered[2].data_ptr() != gathered[1].data_ptr()


def test_integers_and_truth_move_too() -> None:
    for dtype in (torch.int64, torch.bool):
        whole = torch.arange(6).to(dtype)
        pieces = to_ranks(whole, Layout("a"), TWO)
        gathered = move(Movement("all_gather", ("a",), 0), pieces, TWO)
        assert torch.equal(gathered[3], whole)


def test_a_value_that_is_not_where_its_layout_says() -> None:
    with pytest.raises(ExecutionError, match=r"shape \(8,\) on rank 0"):
        move(
            Movement("all_gather", ("a",), 0),
            [torch.ones(8)] * 4,
            TWO,
            shape=(8,),
            layout=Layout("a"),
        )


def test_tour() -> None:
    assert doctest.testmod(virtual_movements).failed == 0
