"""Parameters that are kept in pieces: what processes compute, hold and send with them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar as ap
from autopar._torch.tensors import local_of, memory_of
from autopar.collectives import point_to_point
from autopar.cost.gather_groups import LIVE_GROUPS
from autopar.cost.state_price import GATHERS, SUMS
from autopar.pipeline.memory.copy_lifetimes import CopyLifetimes
from autopar.plans.runtime_program import RuntimeProgram
from autopar.report.traffic import link_traffic
from autopar.runtime.parameters.gathered_copies import GatherWindow
from autopar.runtime.parameters.piece_exchange import PieceExchange
from autopar.strategies.node_info import info
from tests import models
from tests.distributed.checks import assert_close, tensor_parallel_gpt
from tests.held import alive, copies_of, held_by, local_bytes, pieces_of
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome
from tests.penalties import penalised
from tests.runtime.acts import DONE, assert_done, shared_tree
from tests.training import assert_broken_steps_leave_no_trace, assert_trains_alike
from tests.unlearned import NAMES as UNLEARNED
from tests.unlearned import assert_called_alike, pair


def cases() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    gpts = [models.shared("gpt", layers=layers) for layers in (1, 2, 4)]
    others = [models.shared("mlp", hidden=10, layers=4), shared_tree(), tensor_parallel_gpt()]
    others.append(penalised())
    unlearned = [pair(name)[0] for name in UNLEARNED]
    return [(case, None) for case in (*gpts, *others, *unlearned)]


NAMED = ("zero1", "zero2", "zero3")
STEP = ap.States("all", "all", "all", lifetime="step")


def parity(case: Case, states: Any, **options: Any) -> ap.ParallelModule:
    """On the processes, as on one device."""
    options = {"mode": "propagate", "states": states, **options}
    module = ap.parallelize(case.model, case.args, case.kwargs, **options)
    assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    return module


def trains_like_one_device(ranks: int) -> None:
    """Uneven pieces, small and large parts, with and without micro-batches."""
    mesh = ap.Mesh(dp=ranks)
    for states in (*NAMED, STEP):
        parity(models.shared("mlp", hidden=10, layers=4), states, mesh=mesh)
        parity(models.shared("gpt", layers=2), states, mesh=mesh, microbatches=2)
    parity(penalised(), "zero2", mesh=mesh, microbatches=2)


def trains_in_parts(ranks: int) -> None:
    """Over some of the data axes, and beside tensor parallelism."""
    case = models.shared("gpt", layers=1)
    for mesh, factors in (
        (ap.Mesh(dp=4), (1, 1, 2)),
        (ap.Mesh(dp=4), (2, 4, 4)),
        (ap.Mesh(a=2, b=2), (2, 2, 4)),
        (ap.Mesh(dp=4), (4, 2, 2)),
        (ap.Mesh(a=2, b=2), (4, 1, 2)),
    ):
        parity(case, ap.States(*factors), mesh=mesh, microbatches=2)
    for states in ("zero1", "zero3"):
        parity(tensor_parallel_gpt(), states, mesh=ap.Mesh(dp=2, tp=2))


def trains_in_pipelines(ranks: int) -> None:
    for schedule, microbatches, settings in (
        ("1f1b", 2, ("zero3",)),
        ("zb-h1", 2, ("zero2",)),
        ("zb-v", 4, ("zero1", "zero3")),
        ("chimera", 2, ("zero1", "zero3")),
    ):
        for states in settings:
            case = models.shared("gpt", layers=4 if schedule == "zb-v" else 2)
            options = {"schedule": schedule, "microbatches": microbatches}
            parity(case, states, mesh=ap.Mesh(pp=2, dp=2), **options)


def trains_as_users_do(ranks: int) -> None:
    """With momentum, groups, frozen parameters, several backwards a step, and clipping."""
    case = models.shared("gpt", layers=2)
    ways: list[tuple[Any, dict[str, Any]]] = [
        (states, {"mesh": ap.Mesh(dp=ranks), "microbatches": count})
        for states, count in (("zero1", 1), ("zero2", 2), ("zero3", 1))
    ]
    if ranks == 4:
        pipeline = {"mesh": ap.Mesh(pp=2, dp=2), "schedule": "1f1b", "microbatches": 2}
        ways = [(ap.States(2, 4, 4), {"mesh": ap.Mesh(dp=4)}), ("zero3", pipeline)]
        ways.append((ap.States(4, 2, 2), {"mesh": ap.Mesh(dp=4), "microbatches": 2}))
    for states, options in ways:
        module = ap.parallelize(case.model, case.args, mode="data", states=states, **options)
        assert_trains_alike(module, case)


@dataclass
class Exchanged:
    """What this rank's parameters and gradients move, by kind of collective."""

    gathered: list[list[Tensor]] = field(default_factory=list)  # whole tensors
    cut: list[list[Tensor]] = field(default_factory=list)  # whole terms, or all of them packed
    parts: list[Tensor] = field(default_factory=list)  # of their sums
    summed: list[Tensor] = field(default_factory=list)


@contextmanager
def exchanged() -> Iterator[Exchanged]:
    """What is moved meanwhile."""
    found = Exchanged()
    gather, scatter, reduce = PieceExchange.gather, PieceExchange.scatter, dist.all_reduce

    def seen_gather(
        self: PieceExchange, targets: list[Tensor], sources: list[Tensor], link: Any
    ) -> Any:
        found.gathered.append([*targets])
        return gather(self, targets, sources, link)

    def seen_scatter(self: PieceExchange, terms: list[Tensor], flat: Tensor | None = None) -> Any:
        found.cut.append([*terms] if flat is None else [flat])
        part, work = scatter(self, terms, flat)
        found.parts.append(part)
        return part, work

    def seen_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.summed.append(tensor)
        return reduce(tensor, *args, **kwargs)

    with (
        patch.multiple(PieceExchange, gather=seen_gather, scatter=seen_scatter),
        patch.object(dist, "all_reduce", seen_reduce),
    ):
        yield found


def elements(moved: list[list[Tensor]]) -> int:
    return sum(tensor.numel() for tensors in moved for tensor in tensors)


def moves_no_more_than_it_must(ranks: int) -> None:
    """Of Ψ elements at most 2Ψ, 2Ψ, 3Ψ, in no more collectives than other frameworks make."""
    case = models.shared("gpt", layers=4)
    size = sum(p.numel() for p in case.model.parameters())
    for states in (*NAMED, STEP):
        for count in (1, 2):
            options = {"mesh": ap.Mesh(dp=ranks), "mode": "propagate", "microbatches": count}
            module = ap.parallelize(case.model, case.args, states=states, **options)
            with exchanged() as found:
                module.step(*case.args)
            passes = count if states == "zero3" else 1
            gathered, cut = elements(found.gathered), elements(found.cut)
            assert len(found.gathered) <= (9 * passes if states == "zero3" else 1)
            assert size <= gathered <= (2 * passes if states == "zero3" else 1) * size
            backwards = 1 if states == "zero1" else count
            assert len(found.cut) == backwards
            assert cut == backwards * size
            assert all(tensor.numel() == 1 for tensor in found.summed), "losses alone"
            assert_page_says(module, found, ranks)
    for count in (1, 2):
        options = {"mesh": ap.Mesh(dp=ranks), "mode": "data", "microbatches": count}
        module = ap.parallelize(case.model, case.args, **options)
        with exchanged() as found:
            module.step(*case.args)
        # Gradients in one sum, which takes the loss of the last micro-batch along.
        assert [tensor.numel() for tensor in found.summed] == [1] * (count - 1) + [size + 1]
        assert_page_says(module, found, ranks)


def sends_one_message_each_way(ranks: int) -> None:
    """Gradients to each other rank, and what it has updated, however many tensors there are."""
    case = models.shared("gpt", layers=4)
    options = {"mesh": ap.Mesh(dp=ranks), "mode": "data", "states": "zero1"}
    module = ap.parallelize(case.model, case.args, **options)
    with patch.object(point_to_point, "send_to", wraps=point_to_point.send_to) as sent:
        module.step(*case.args)
    assert sent.call_count == 2 * (ranks - 1)


def assert_page_says(module: ap.ParallelModule, found: Exchanged, ranks: int) -> None:
    """The page of its plan says what ranks sent of parameters and gradients."""
    said = dict.fromkeys((GATHERS, SUMS), 0.0)
    said |= {one.what: one.bytes for one in link_traffic(module.plan)}
    share = (ranks - 1) / ranks
    gathered = share * sum(t.nbytes for tensors in found.gathered for t in tensors)
    summed = share * sum(t.nbytes for tensors in found.cut for t in tensors)
    summed += 2 * share * sum(t.nbytes for t in found.summed if t.numel() > 1)
    # The loss may travel with them.
    loss = 2 * share * torch.float64.itemsize
    assert -1e-6 <= summed - said[SUMS] <= loss + 1e-6, (said, summed)
    # Backward finds the groups that forward has read last, and the next forward those of backward.
    states = module.plan.states
    passing = CopyLifetimes(module.plan.rewritten, module.plan.mesh, states.buffer_bytes)
    largest = max((passing.size(at) for at in range(len(passing.groups))), default=0.0)
    spared = LIVE_GROUPS * largest * (2 * module.plan.microbatches - 1) * share
    assert gathered <= said[GATHERS] * (1 + 1e-9)
    assert said[GATHERS] <= (gathered + spared) * (1 + 1e-9)


def sums_what_stages_share_once(ranks: int) -> None:
    """Of a tied embedding, over all places that hold a stage that reads it, as is predicted."""
    case = models.shared("gpt", layers=2)
    tied, size = (
        sum(p.nbytes for p in own)
        for own in ([case.model.tokens.weight], [*case.model.parameters()])
    )
    for schedule, expected in (("1f1b", tied), ("chimera", size)):
        options = {"mesh": ap.Mesh(pp=ranks), "schedule": schedule, "microbatches": 2}
        module = ap.parallelize(case.model, case.args, mode="propagate", **options)
        with exchanged() as found:
            module.step(*case.args)
        said = {one.what: one.bytes for one in link_traffic(module.plan)}
        moved = sum(tensor.nbytes for tensor in found.summed if tensor.numel() > 2)  # no losses
        share = 2 * (ranks - 1) / ranks
        assert share * moved == share * expected == said[SUMS]


def sums_what_is_left_of_pieces(ranks: int) -> None:
    """Along a pipeline, where gradients are cut inside of a stage: of all ranks as is predicted."""
    case = models.shared("gpt", layers=2)
    for schedule, states in (("1f1b", "zero1"), ("chimera", "zero1"), ("chimera", "zero3")):
        options = {"mesh": ap.Mesh(pp=2, dp=2), "schedule": schedule, "microbatches": 2}
        module = ap.parallelize(case.model, case.args, mode="propagate", states=states, **options)
        with exchanged() as found:
            module.step(*case.args)
        own = torch.tensor(
            [
                sum(tensor.nbytes for tensors in found.cut for tensor in tensors) / 2,
                float(sum(tensor.nbytes for tensor in found.summed if tensor.numel() > 4)),
            ]
        )
        dist.all_reduce(own)
        of_stage, along = (own / ranks).tolist()
        said = {(one.axes, one.what): one.bytes for one in link_traffic(module.plan)}
        assert said[("dp",), SUMS] == of_stage
        assert said[("pp",), SUMS] == along


def moves_for_what_learns_alone(ranks: int) -> None:
    """Gradients that the loss gives none are not summed in a step, nor their parameters gathered
    for its backward; direct calls give them."""
    ways = (("whole", 1), ("zero1", 1), ("zero3", 1), ("zero3", 2))
    for name, (states, count) in product(UNLEARNED, ways):
        case, _ = pair(name)
        options = {"mesh": ap.Mesh(dp=ranks), "mode": "data", "microbatches": count}
        module = ap.parallelize(case.model, case.args, states=states, **options)
        with exchanged() as found:
            module.step(*case.args)
        module.zero_grad()
        nodes = [n for n in module.program.placeholders.values() if info(n).places and n.users]
        size = sum(info(node).val.numel() for node in nodes if info(node).learns)
        rest = sum(info(node).val.numel() for node in nodes) - size
        if states == "whole":
            assert sum(tensor.numel() for tensor in found.summed) == size + 1  # the loss
        else:
            assert elements(found.cut) == count * size
            passes = count if states == "zero3" else 1
            uses = 2 if states == "zero3" else 1
            assert size + rest * (uses - 1) <= elements(found.gathered) / passes
            assert elements(found.gathered) / passes <= uses * size + rest * (uses - 1)
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
        assert_called_alike(module, case)


def moves_in_buffers_of_a_size(ranks: int) -> None:
    """What travels together takes no more than is said, or is one parameter."""
    case, most = models.shared("gpt", layers=2), 2**13
    for name in ("zero1", "zero3"):
        states = replace(ap.States.of(name), buffer_bytes=most)
        module = parity(case, states, mesh=ap.Mesh(dp=ranks))
        with exchanged() as found:
            module.step(*case.args)
        for tensors in (*found.gathered, *found.cut):
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= most
        assert len(found.cut) > 5
        assert any(len(tensors) > 1 for tensors in found.cut)


def follows_its_tree(ranks: int) -> None:
    """What a user does to parameters that are kept in pieces, as on the model."""
    case = shared_tree()
    for states, acts in (("zero1", DONE[::2]), ("zero3", DONE)):
        options = {"mesh": ap.Mesh(d=1, e=ranks), "microbatches": 2, "states": states}
        plan = ap.plan(case.model, case.args, mode="propagate", **options)
        for act in acts:
            assert_done(ap.parallelize(case.model, case.args, plan=plan), act)


def is_called(ranks: int) -> None:
    """Directly: in any order of forward and backward, for inputs alone, without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
    x = torch.randn(8, 8).double().requires_grad_()
    single = copy.deepcopy(model)
    outputs = [single(x).square().mean() for _ in range(2)]
    (of_x,) = torch.autograd.grad(outputs[0], x, retain_graph=True)
    (outputs[0] + 5 * outputs[1]).backward(inputs=list(single.parameters()))
    expected = {name: p.grad for name, p in single.named_parameters()}

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).square().mean()

    for states in (*NAMED, STEP):
        module = ap.parallelize(
            Loss(), (x,), mesh=ap.Mesh(dp=ranks), mode="propagate", states=states
        )
        with torch.no_grad():
            assert_close(module(x), outputs[0].detach())
        assert not any(leaf.untyped_storage().nbytes() for leaf in copies_of(module))
        first, second = module(x), module(x)
        assert_close(torch.autograd.grad(first, x, retain_graph=True)[0], of_x)
        first.backward(retain_graph=True)
        (2 * second).backward(retain_graph=True)
        (3 * second).backward()
        assert not any(leaf.untyped_storage().nbytes() for leaf in copies_of(module))
        found = module.full_grads()
        assert_close({name.removeprefix("model."): g for name, g in found.items()}, expected)
        loss = module(x)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        if states == "zero3":
            with pytest.raises(ap.InvalidInput, match="from forward to the end of its backward"):
                loss.backward()
        module.zero_grad()
        module(x).backward()


def goes_on_after_an_error(ranks: int) -> None:
    """Of a backward, or a step, that breaks off on all ranks nothing stays."""
    case = models.shared("mlp", hidden=10, layers=4)
    x, target = case.args
    x = x.clone().requires_grad_()
    for states in ("zero1", "zero3"):
        options = {"mesh": ap.Mesh(dp=ranks), "mode": "propagate", "states": states}
        module = ap.parallelize(case.model, (x, target), **options)

        def breaks(grad: Tensor) -> None:
            raise ZeroDivisionError("deliberate")

        hook = x.register_hook(breaks)
        with pytest.raises(ZeroDivisionError, match="deliberate"):
            module(x, target).backward()
        hook.remove()
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
    for states in ("whole", "zero1", "zero3"):
        options = {"mesh": ap.Mesh(dp=ranks), "mode": "data", "microbatches": 2}
        module = ap.parallelize(case.model, case.args, states=states, **options)
        assert_broken_steps_leave_no_trace(module, case)
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


def refuses_a_backward_from_before(ranks: int) -> None:
    """Of a forward on parameters that have changed since, another forward, with its backward or
    without, in between or not."""
    case = models.shared("mlp", hidden=10, layers=4)
    on_host = replace(ap.States.of("zero2"), optimizer_device="host")
    ways: list[dict[str, Any]] = [{"states": states} for states in ("whole", *NAMED, on_host)]
    for options in (*ways, {"states": "zero3", "recompute": "full"}):
        options |= {"mesh": ap.Mesh(dp=ranks), "mode": "data"}
        for calls_again, of_piece in ((False, False), (True, False), (True, True)):
            module = ap.parallelize(case.model, case.args, **options)
            loss = case.loss(module(*case.args))
            if "recompute" in options and calls_again:
                case.loss(module(*case.args)).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    (local_of(parameter) if of_piece else parameter).add_(1.0)
            if "recompute" not in options and calls_again:
                module(*case.args)
            with pytest.raises(ap.InvalidInput, match="parameters and inputs stay as they are"):
                loss.backward()


def most_gathered(module: ap.ParallelModule, case: Case) -> int:
    """Bytes of copies that are in memory at a time in a step."""
    seen, gather = [], GatherWindow._gather

    def look(self: GatherWindow, group: Any) -> None:
        gather(self, group)
        seen.append(sum(one.untyped_storage().nbytes() for one in copies_of(module)))

    with patch.object(GatherWindow, "_gather", look):
        module.step(*case.args)
    return max(seen)


def holds_pieces_alone(ranks: int) -> None:
    """Between steps nothing but pieces; in a step two groups of gathered parameters at most."""
    case = models.shared("gpt", layers=4)
    for states in NAMED:
        module = parity(case, states, mesh=ap.Mesh(dp=ranks), microbatches=2)
        optimizer = torch.optim.AdamW(module.parameters())
        module.zero_grad()
        most = most_gathered(module, case)
        optimizer.step()
        assert not any(one.untyped_storage().nbytes() for one in copies_of(module))
        size = sum(parameter.nbytes for parameter in case.model.parameters())
        pieces = sum(pieces_of(module, dist.get_rank()).values())
        assert local_bytes(module.parameters()) == held_by(module.parameters()) == pieces
        assert size <= ranks * pieces < 1.1 * size
        grads = [parameter.grad for parameter in module.parameters()]
        assert local_bytes(grads) == pieces
        assert held_by(grads) == pieces
        if states == "zero3":
            assert most <= 2 * module.backend.leaves.window.largest_bytes < size
        else:
            assert most == size


Asked = list[tuple[set[str], set[str]]]  # parameters, and those whose copies are here then


def asked_in_backward(module: ap.ParallelModule, case: Case) -> Asked:
    """The copies that a step asks for in backward."""
    seen, want, plans = Asked(), GatherWindow._request_in_backward, module.backend.leaves._plans

    def named(groups: Any) -> set[str]:
        return {name for group in groups for name in plans[group.number].names}

    def look(self: GatherWindow, groups: Any, following: Any, grads: Any) -> None:
        want(self, groups, following, grads)
        seen.append((named(groups), named(self._short_lived)))

    with patch.object(GatherWindow, "_request_in_backward", look):
        module.step(*case.args)
    return seen


def assert_counted(asked: Asked, program: RuntimeProgram) -> None:
    """They are those that a plan counts, beside what forward has left until others come."""
    passing = CopyLifetimes(program.graph, program.mesh, program.buffer_bytes)

    def named(groups: Any) -> set[str]:
        return {name for group in groups for name in passing.groups[group].names}

    left = named(passing.after_forward)
    for (groups, here), counted in zip(asked, passing.requests, strict=True):
        assert groups == named(counted.groups)
        left &= here
        assert here == named(counted.alive) | left


class Blocks(nn.Module):
    """Of several groups of copies each; the user may checkpoint them."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(8)]
        self.blocks = nn.ModuleList(nn.Sequential(*blocks[at : at + 4]) for at in (0, 4))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return x.square().mean()


def of_blocks(checkpoints: bool) -> Case:
    torch.manual_seed(0)
    return Case("blocks", Blocks(checkpoints).double(), (torch.randn(4, 8).double(),))


def recomputes_what_reads_many_groups(ranks: int) -> None:
    """A region asks for its groups again, and no more of them are there at a time."""
    pieces = ap.States("all", "all", "all", buffer_bytes=600)
    on_host = replace(pieces, parameters_device="host", optimizer_device="host")
    for recompute, settings in (
        ("full", (pieces, on_host)),
        ("selective", (on_host,)),
        (None, (pieces,)),
    ):
        case = of_blocks(checkpoints=recompute is None)
        for states in settings:
            module = parity(case, states, mesh=ap.Mesh(dp=ranks), recompute=recompute)
            window = module.backend.leaves.window
            assert len(window.groups) >= 6
            assert most_gathered(module, case) <= 2 * window.largest_bytes
            assert_counted(asked_in_backward(module, case), module.program)


def leaves_nothing(ranks: int) -> None:
    """Closing a module frees what it held, with the garbage collector off; one that is not closed
    goes with it. Buckets are small: hooks of leaves count them."""
    case = models.shared("mlp", hidden=10, layers=4)
    for states in (ap.States(buffer_bytes=512), ap.States("all", "all", "all", buffer_bytes=512)):
        for is_closed in (True, False):
            gc.collect()
            gc.disable()
            before = {*alive()}
            module = ap.parallelize(
                case.model, case.args, mesh=ap.Mesh(dp=ranks), mode="data", states=states
            )
            for _ in range(2):
                module.step(*case.args)
            module(*case.args).backward()
            owned = {memory_of(local_of(one)) for one in module.parameters()}
            if is_closed:
                module.close()
            gc.enable()
            del module
            if not is_closed:
                gc.collect()
            assert not alive().keys() & owned - before


CHECKS = {
    2: (
        leaves_nothing,
        recomputes_what_reads_many_groups,
        trains_like_one_device,
        trains_as_users_do,
        moves_no_more_than_it_must,
        sends_one_message_each_way,
        sums_what_stages_share_once,
        moves_for_what_learns_alone,
        moves_in_buffers_of_a_size,
        follows_its_tree,
        is_called,
        goes_on_after_an_error,
        refuses_a_backward_from_before,
        holds_pieces_alone,
    ),
    4: (trains_in_parts, trains_as_users_do, trains_in_pipelines, sums_what_is_left_of_pieces),
}
