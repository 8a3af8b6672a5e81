"""What four processes check together, in one world; each function is one check."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import get_total_norm  # imported before a pipeline exists
from torch.utils.checkpoint import checkpoint as run_again

import autopar as ap
from autopar import Mesh
from autopar.errors import InvalidInput
from autopar.report.trace import ACTIONS, read
from autopar.report.trace_comparison import compare
from autopar.runtime.backends.world import world
from tests import dynamic, models, recipes, signatures
from tests.annotations import attention, megatron, sequence, stored, vocabulary
from tests.combined import assert_own_memory, combined
from tests.distributed.experts import routed, sends_tokens_to_their_experts
from tests.distributed.finding import (
    exchanges_calls_only_when_the_program_changes,
    finds_the_batch_of_which_it_has_a_slice,
    hears_of_parameters_that_others_hold,
    refuses_slices_of_what_is_whole,
    takes_what_is_no_tensor_as_it_is,
)
from tests.distributed.loading import loads_in_the_order_of_rank_0, loads_its_slices
from tests.distributed.saving import (
    dropping,
    optimizers_with_states_of_other_shapes_go_on,
    ranks_save_and_load_the_same,
    resumes_on_other_meshes,
    shared_folder,
    torch_reads_and_sets_its_state,
    what_is_cut_in_parts_goes_on,
)
from tests.held import held_by, kept_for_backward, local_bytes, pieces_of, storages
from tests.kept_tensors import (
    kept_tensors_are_those_of_the_model,
    stages_keep_what_one_device_keeps,
)
from tests.models import Case
from tests.outputs import (
    LAWS,
    OF_PIECES,
    PIPELINES,
    Body,
    Deep,
    batch_norm_in_stages_sees_the_whole_batch_in_a_call,
    made,
    parallel,
    random,
    stages_give_what_one_device_gives,
)
from tests.parity import Outcome, assert_equal, parallel_outcome, single_outcome
from tests.partly_learned import partly_learned, without_gradient
from tests.products import products
from tests.runtime.acts import (
    DONE,
    REFUSED,
    REFUSED_OF_PIECES,
    assert_done,
    assert_refused,
    shared_tree,
    weight_norm,
)
from tests.space import in_space
from tests.toy import EVEN, machines

DP2_TP2 = Mesh(dp=2, tp=2)
Pair = tuple[ap.ParallelModule, ap.ParallelModule]


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def pair(case: Case, mesh: Any, **options: Any) -> Pair:
    """The case on the processes and on virtual ranks."""
    plan = ap.plan(case.model, case.args, case.kwargs, mesh=mesh, mode="propagate", **options)
    one = ap.parallelize(case.model, plan=plan)
    other = ap.parallelize(case.model, plan=plan, backend="virtual")
    return one, other


@cache
def tensor_parallel_gpt(layers: int = 1) -> Case:
    return megatron(models.gpt(layers=layers))


def ring(case: Case) -> Case:
    """Heads cut by one axis, and keys with the queries by another one."""
    return attention(sequence(case, "sp"), heads="tp", rows="sp")


@cache
def trained() -> list[tuple[Case, Mesh]]:
    return [
        (vocabulary(sequence(megatron(models.gpt(layers=1)), batch="dp")), DP2_TP2),
        (vocabulary(megatron(models.gpt(layers=1), ("b", "a")), ("b", "a")), Mesh(a=2, b=2)),
        (ring(models.gpt(layers=1)), Mesh(tp=2, sp=2)),
        (models.resnet(batch=6), Mesh(dp=4)),
        (models.mlp(hidden=520, layers=3), Mesh(dp=4)),  # gradients with a sum of their own
        (stored(models.gpt(layers=1, fused=True)), Mesh(dp=4)),
        (models.shared("resnet"), Mesh(pp=2, dp=2)),
        (in_space("bilinear"), Mesh(sp=4)),
        (products(), Mesh(tp=4)),
    ]


def trains_like_one_device() -> None:
    """But for batch norm in micro-batches, which is that of virtual ranks."""
    for case, mesh in trained():
        options: dict[str, Any] = {"mesh": mesh, "mode": "propagate"}
        pipeline = {"microbatches": 2, "schedule": "zb-h1"} if "pp" in mesh else {}
        real = ap.parallelize(case.model, case.args, **options, **pipeline)
        expected = (
            parallel_outcome(ap.parallelize(case.model, plan=real.plan, backend="virtual"), case)
            if pipeline
            else single_outcome(case.fresh())
        )
        assert_equal(parallel_outcome(real, case), expected, 1e-10, 1e-1)
        assert all(isinstance(parameter, DTensor) for parameter in real.parameters())
        held = {name for name, _ in real.named_parameters()}
        assert held == {name for name, _ in case.model.named_parameters()} or pipeline


def recomputes_regions() -> None:
    options: dict[str, Any]
    for mesh, kind, options in (
        (DP2_TP2, "full", {}),
        (DP2_TP2, "selective", {}),
        (Mesh(pp=2, dp=2), "full", {"microbatches": 2, "schedule": "zb-h1"}),
        (Mesh(dp=4), "full", {"states": "zero3"}),
        (Mesh(dp=4), "selective", {"states": "zero3"}),
        (DP2_TP2, "full, cut", {}),
        (Mesh(pp=2, tp=2), "none, host", {"microbatches": 2, "schedule": "zb-h1"}),
    ):
        how = ap.Recompute.parse(kind)
        case = models.shared("gpt", layers=2)
        case = tensor_parallel_gpt(2) if mesh is DP2_TP2 else case
        options |= {"mode": "propagate", "recompute": how}
        module = ap.parallelize(case.model, case.args, mesh=mesh, **options)
        assert set(module.plan.decisions.recompute.values()) == {how}
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()), 1e-10, 1e-1)


def compiles_what_a_rank_runs() -> None:
    """With collectives inside, parameters that are gathered before each use, blocks in groups."""
    compile = {"backend": "aot_eager", "fullgraph": True}
    # Before the block, the block and after it; all of it.
    for layers, states, regions in ((1, "zero3", 3), (2, "whole", 1)):
        case, options = tensor_parallel_gpt(layers), {"mesh": DP2_TP2, "mode": "propagate"}
        real = ap.parallelize(case.model, case.args, states=states, compile=compile, **options)
        assert_equal(parallel_outcome(real, case), single_outcome(case.fresh()))
        compiler = real.backend.compiler
        assert compiler is not None
        assert len(compiler.functions) == regions
    model, x = made(Body), random(8, 4)
    how: dict[str, Any] = {"local_inputs": True, "outputs": "local", "compile": compile}
    module = parallel(model, x, mesh=DP2_TP2, **how)
    piece = x.chunk(2)[DP2_TP2.coordinate(dist.get_rank())["dp"]]
    for around in (module.no_sync, nullcontext):
        with around():
            module(piece).square().sum().backward()
        model(x).square().sum().backward()
    assert_close(module.full_grads(), {name: p.grad for name, p in model.named_parameters()})


def compares_batches_now_and_then() -> None:
    """Of steps and of calls: the first ones, and later one in ten; all when that is asked for."""
    case = models.shared("mlp")
    other = (case.args[0] + (dist.get_rank() == 2), case.args[1])
    module = ap.parallelize(case.model, case.args, mode="propagate", mesh=Mesh(dp=4))

    def refused(call: Callable[..., Any]) -> None:
        with pytest.raises(ap.InvalidInput, match="same global batch") as error:
            call(*other)
        assert "on rank 2" in str(error.value)

    for call in (module, module.step, module.step):
        refused(call)
    for early in (0, 4, 9):  # of ten calls the one for which a rank has another batch
        for number in range(9):
            module.step(*(other if number == early else case.args))
        with pytest.raises(ap.InvalidInput, match="on rank 2, now or in the 9 calls before"):
            module(*(other if early == 9 else case.args))


def compares_batches_when_asked() -> None:
    case = models.shared("mlp")
    for options in ({"mesh": Mesh(dp=4)}, {"mesh": Mesh(pp=2, dp=2), "microbatches": 2}):
        module = ap.parallelize(case.model, case.args, mode="propagate", check=True, **options)
        module.step(*case.args)
        other = (case.args[0] + (dist.get_rank() == 2), case.args[1])
        with pytest.raises(ap.InvalidInput, match="same global batch") as error:
            module.step(*other)
        assert "on rank 2" in str(error.value)
        parameters = dict(module.named_parameters())
        name = next(iter(parameters))
        parameters[name].requires_grad_(dist.get_rank() != 1)
        with pytest.raises(ap.InvalidInput, match="frozen on every rank") as error:
            module.step(*case.args)
        assert "is frozen on rank 1 and learns on rank 0" in str(error.value)


def goes_on_after_what_all_ranks_refuse() -> None:
    case = models.shared("resnet")
    module = ap.parallelize(case.model, case.args, mesh=Mesh(dp=4), mode="propagate", check=True)
    for refused in range(2):
        with pytest.raises(ap.InvalidInput, match="the model runs on the inputs of this call"):
            module.step(case.args[0][:, refused + 1 :], *case.args[1:])
    first = dist.get_rank() == 0
    with pytest.raises(ap.InvalidInput, match=r"all ranks make the same call(.|\n)*rank 0: step\("):
        module.step(*(value[: 4 if first else 5] for value in case.args))
    assert len(module.programs) == 1
    with pytest.raises(ap.InvalidInput, match="a positive order"):
        module.clip_grad_norm_(1.0, norm_type=-1)
    with pytest.raises(ap.InvalidInput, match="by a finite number"):
        module.step(*case.args, scale=float("nan"))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ap.InvalidInput, match="autocast is part of the program"),
    ):
        module.step(*case.args)
    too_early = torch.optim.SGD(case.model.parameters(), lr=0.1)
    too_early.zero_grad()
    with pytest.raises(ap.InvalidInput, match="made of the module's own parameters"):
        too_early.step()
    _refuses_calls_in_backward()
    losses = [module.step(*case.args)]
    losses.append(ap.parallelize(case.model, plan=module.plan).step(*case.args))
    assert_close(*losses)


def _refuses_calls_in_backward() -> None:
    """Those of a checkpoint around a call that runs again there; another pass is as ever."""
    case = models.shared("mlp")
    module, expected = pair(case, Mesh(dp=4))[0], case.fresh()
    with pytest.raises(ap.InvalidInput, match="in the middle of the backward pass"):
        run_again(module, *case.args, use_reentrant=False).backward()
    assert not module.full_grads()
    module(*case.args).backward()
    case.loss(expected.run()).backward()
    for name, parameter in expected.model.named_parameters():
        assert_close(module.full_grads()[name], parameter.grad)


def names_both_calls_where_ranks_make_others() -> None:
    """In the first calls of a module, and wherever something is gathered; the world goes on."""
    case = models.shared("mlp")
    module = ap.parallelize(case.model, case.args, mesh=Mesh(dp=4), mode="data", states="zero3")
    loss = module.step(*case.args)
    for other, said in (
        (lambda: module(*case.args), r"call\("),
        (module.full_state_dict, r"full_state_dict\(\)"),
    ):
        do = other if dist.get_rank() == 0 else partial(module.step, *case.args)
        with pytest.raises(ap.InvalidInput, match=rf"rank 0: {said}(.|\n)*rank 1: step\("):
            do()
    with pytest.raises(ap.InvalidInput, match="by a finite number"):
        module.step(*case.args, scale=float("nan"))
    assert_close(module.step(*case.args), loss)


class Pretrained(nn.Module):
    """In the manner of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.other.bias = self.one.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)).square().mean()

    def save_pretrained(self, path: str, state_dict: dict[str, Tensor] | None = None) -> None:
        found = self.state_dict() if state_dict is None else state_dict
        np.savez(path, **{name: value.numpy() for name, value in found.items()})

    def resize_token_embeddings(self, size: int | None = None) -> nn.Module:
        if size is not None:
            self.one.weight.data = torch.zeros(size, 4, dtype=torch.float64)
        return self.one


def writes_by_the_models_own_method() -> None:
    """All ranks call it, and the whole model is there; so it is on virtual ranks."""
    torch.manual_seed(0)
    model, path = Pretrained(), shared_folder() / "whole.npz"
    x = torch.ones(4, 4, dtype=torch.float64)
    module = ap.parallelize(model, (x,), mesh=Mesh(dp=4), mode="data", states="zero3")
    own = ap.parallelize(model, (x,), mesh=Mesh(dp=2), mode="data", backend="virtual")
    loss = module.step(x)
    for saving, where in ((module, path), (own, path.with_name(f"{dist.get_rank()}.npz"))):
        saving.save_pretrained(str(where))  # type: ignore[operator]
        found = np.load(where)
        assert sorted(found) == sorted(model.state_dict())
        for name, value in model.state_dict().items():
            assert (found[name] == value.numpy()).all()
    with pytest.raises((ap.InvalidInput, OSError), match="Not a directory"):
        module.save_pretrained(str(path / "not" / "there"))  # type: ignore[operator]
    with pytest.raises(ap.InvalidInput, match="change the model, then parallelize it"):
        module.resize_token_embeddings(8)  # type: ignore[operator]
    assert module.resize_token_embeddings().weight is module.one.weight  # type: ignore[operator]
    assert_close(module.step(x), loss)


def refuses_on_all_ranks_the_call_that_one_refuses() -> None:
    """Or that is another one on one rank; and the world goes on."""
    case, mesh = models.shared("mlp"), Mesh(dp=4)
    fitting = {"model": case.model, "args": case.args, "mesh": mesh, "mode": "propagate"}
    module = ap.parallelize(**fitting)
    loss = module.step(*case.args)
    for wrong_rank, wrong, own, others in (
        (2, {"args": case.args[:1]}, "fit the signature", "rank 2: the example inputs fit the"),
        (1, {"model": None}, "a model is a torch.nn", "rank 1: a model is a torch.nn.Module"),
        (3, {"backend": "nccl"}, "backend is one of", "rank 3: backend is one of"),
        (0, {"local_inputs": True, "check": True}, "what is checked is", "rank 0: what is checked"),
        (1, {"outputs": "cut"}, "outputs is one of", "rank 1: outputs is one of"),
        (2, {"outputs": "local"}, *["rank 2: outputs=local"] * 2),
        (0, {"local_inputs": True, "microbatches": 2}, *["same local_inputs"] * 2),
        (1, {"local_inputs": True}, *["rank 1: local_inputs=True"] * 2),
        (1, {"compile": {"backend": "eager"}}, *["rank 1: compile={'backend': 'eager'}"] * 2),
        (3, {"check": True}, *["rank 2: check=False\n +rank 3: check=True"] * 2),
    ):
        is_wrong = dist.get_rank() == wrong_rank
        with pytest.raises(ap.InvalidInput, match=own if is_wrong else others):
            ap.parallelize(**(fitting | wrong if is_wrong else fitting))
        assert_close(module.step(*case.args), loss)
    assert_close(ap.parallelize(**fitting).step(*case.args), loss)


def clips_and_accumulates() -> None:
    """Where backward hands several parameters one tensor, too, which is summed where it lies."""
    options: dict[str, Any]
    for case, options in (
        (tensor_parallel_gpt(), {"mesh": DP2_TP2}),
        (combined(520), {"mesh": Mesh(dp=4), "microbatches": 2}),
    ):
        norms: list[Any] = []
        for module in pair(case, **options):
            module.step(*case.args)
            module.step(*case.args, scale=1 / 4)
            assert_own_memory(module.parameters())
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            norms.append(module.clip_grad_norm_(0.05))  # the module's own sees what is left, 0.1
            norms.append(sum(grad.abs().sum() for grad in module.full_grads().values()))
        assert_close(norms[:3], norms[3:])
        assert float(norms[1]) == pytest.approx(0.1, rel=1e-4)


def norms_of_some_stages_are_refused() -> None:
    case = models.shared("mlp")
    mesh = Mesh(pp=2, dp=2)
    module = ap.parallelize(case.model, case.args, mesh=mesh, mode="data", microbatches=2)
    module.step(*case.args)
    gradients = module.full_grads().values()
    for norm in (
        lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
        lambda: nn.utils.clip_grad_norm_(list(module.parameters()), 0.1, foreach=False),
        lambda: get_total_norm(p.grad for p in module.parameters()),
    ):
        with pytest.raises(ap.InvalidInput, match="that of the whole model"):
            norm()
    assert_close(module.clip_grad_norm_(float("inf")), get_total_norm(gradients))


def gives_tensors_that_stay() -> None:
    """What was handed out does not change with later steps."""
    case = models.shared("gpt", layers=2)
    for options in ({"mesh": Mesh(dp=4)}, {"mesh": Mesh(pp=2, dp=2), "microbatches": 2}):
        module = ap.parallelize(case.model, case.args, mode="propagate", **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module.step(*case.args)
        given = [module.full_grads(), module.full_state_dict()]
        copies = [{name: value.clone() for name, value in one.items()} for one in given]
        optimizer.step()
        optimizer.zero_grad()
        module.step(*case.args)
        assert_close(given, copies)


def trains_by_the_recipes_of_one_device() -> None:
    recipes.assert_recipes_give_the_same()
    recipes.unsummed_gradients_outlive_a_step_that_breaks_off()
    recipes.optimizers_that_do_something_else_are_refused()
    recipes.hooks_that_come_before_backward_are_refused()


def is_called_and_differentiated() -> None:
    case = tensor_parallel_gpt()
    grads = []
    for module in pair(case, DP2_TP2):
        loss, logits = module(*case.args)
        assert type(loss) is type(logits) is Tensor
        (3 * loss).backward()
        grads.append(module.full_grads())
    assert_close(*grads)


def gives_what_the_model_gives() -> None:
    for law in LAWS:
        law(mesh=DP2_TP2)
    for law in OF_PIECES:
        law(mesh=Mesh(dp=4, tp=1), states="zero3")
    kept_tensors_are_those_of_the_model(mesh=DP2_TP2)


def gives_outputs_of_stages() -> None:
    for options in PIPELINES:
        stages_give_what_one_device_gives(**options)
    stages_keep_what_one_device_keeps(**PIPELINES[0])
    batch_norm_in_stages_sees_the_whole_batch_in_a_call(**PIPELINES[0])
    with pytest.raises(ap.InvalidInput, match="outputs of a pipeline are whole"):
        parallel(made(Deep), random(12, 6), torch.arange(12) % 5, outputs="local", **PIPELINES[0])


def gives_pieces_on_request() -> None:
    """Their gradients are pieces too: those of the whole, where losses of pieces add up to it."""
    model, x = made(Body), random(8, 4)
    expected = model(x)
    expected.square().sum().backward()
    for form in ("dtensor", "local"):
        module = parallel(model, x, mesh=DP2_TP2, outputs=form)
        y = module(x)
        assert isinstance(y, DTensor) == (form == "dtensor")
        if isinstance(y, DTensor):
            assert_close(y.full_tensor(), expected)
            y = y.to_local()
        at = DP2_TP2.coordinate(dist.get_rank())
        assert_close(y, expected.chunk(2)[at["dp"]].chunk(2, 1)[at["tp"]])
        y.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        assert_close(module.full_grads(), grads)


def is_called_with_the_batch_of_several_microbatches() -> None:
    case = tensor_parallel_gpt()
    grads = []
    for module in pair(case, DP2_TP2, microbatches=2):
        loss, logits = module(*case.args)
        assert logits.shape[0] == 8
        (3 * loss).backward()
        module.step(*case.args)
        grads.append(module.full_grads())
    assert_close(*grads)


def differentiates_in_any_order() -> None:
    """Two passes forward, then two backward; and one backward pass twice."""
    case = models.shared("mlp")
    grads = []
    for module in pair(case, Mesh(dp=4)):
        first, second = module(*case.args), module(*case.args)
        first.backward()
        (2 * second).backward(retain_graph=True)
        (3 * second).backward()
        (module(*case.args) + module(*case.args)).backward()
        grads.append(module.full_grads())
    assert_close(*grads)


some_learned = cache(partial(partly_learned, layers=2))


def gives_no_gradient_where_one_device_gives_none() -> None:
    case = some_learned()
    every = {name for name, _ in case.model.named_parameters()}
    mesh, expected = Mesh(pp=2, dp=2), single_outcome(case.fresh())
    for options in (
        {"mesh": mesh, "schedule": "zb-h1"},
        {"mesh": mesh, "schedule": "chimera"},
        {"mesh": DP2_TP2},
    ):
        module = ap.parallelize(case.model, case.args, mode="propagate", microbatches=2, **options)
        assert_equal(parallel_outcome(module, case), expected)
    for output in (0, 1, 0):
        module.zero_grad()
        module(*case.args)[output].sum().backward()
        assert module.full_grads().keys() == every - without_gradient(case, output)


class Numbers(torch.nn.Module):
    """Several numbers, of which the ranks of a cut batch have shares: one is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = torch.tanh(self.first(x))
        y = self.second(h)
        right = (y.argmax(1) == x.argmax(1)).double()
        return y.square().mean(), right.mean(), h.detach().abs().mean(), y.amax(1).mean()


def gives_the_loss_beside_other_numbers() -> None:
    torch.manual_seed(0)
    case = Case("numbers", Numbers().double(), (torch.randn(8, 8).double(),))
    for options in ({"mesh": Mesh(dp=4)}, {"mesh": Mesh(dp=4), "microbatches": 2}):
        module = ap.parallelize(case.model, case.args, mode="propagate", **options)
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))
        case.model.load_state_dict(module.full_state_dict())
        assert_close(module(*case.args), case.model(*case.args))


def gives_parameters_no_gradient_when_inputs_alone_are_asked_for() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8).double().requires_grad_()
    case = Case("numbers", Numbers().double(), (x,))
    module = ap.parallelize(case.model, case.args, mesh=Mesh(dp=4), mode="propagate")
    expected = torch.autograd.grad(case.model(x)[0], x)
    assert_close(torch.autograd.grad(module(x)[0], x), expected)
    module(x)[0].backward(inputs=[x])
    assert_close(x.grad, expected[0])
    assert not module.full_grads()
    module(x)[3].backward()
    assert module.full_grads().keys() == dict(case.model.named_parameters()).keys()


def takes_local_inputs() -> None:
    case = tensor_parallel_gpt()
    real, virtual = pair(case, DP2_TP2)
    local = ap.parallelize(case.model, case.args, mesh=DP2_TP2, mode="propagate", local_inputs=True)
    place = DP2_TP2.coordinate(dist.get_rank())["dp"]
    pieces = [value.chunk(2)[place] for value in case.args]
    assert_close(local.step(*pieces), virtual.step(*case.args))
    assert_close(local.full_grads(), virtual.full_grads())
    real.step(*case.args)
    assert_close(real.full_grads(), virtual.full_grads())


def cuts_local_inputs_into_micro_batches() -> None:
    """As one device does with the batch, whatever the order in which samples come. Some targets are
    not counted, and one rank has more of these than others."""
    x, y = random(12, 6), torch.arange(12) % 5
    y[:4] = -100
    alone = {"mesh": Mesh(dp=4), "microbatches": 3}
    for options in (alone, PIPELINES[0], PIPELINES[1] | {"microbatches": 2}, PIPELINES[2]):
        model, mesh = made(Deep), options["mesh"]
        axis = mesh.names[-1]
        parts = mesh[axis]
        single = parallel(model, x, y, mesh=Mesh(one=1), backend="virtual")
        local = parallel(model, x, y, local_inputs=True, **options)
        at = mesh.coordinate(dist.get_rank())[axis]
        slices = [value.chunk(parts)[at] for value in (x, y)]
        torch.manual_seed(3)
        loss, expected = single.step(x, y, outputs=True)
        for is_step in (True, False) if "pp" in mesh else (True,):
            torch.manual_seed(3)
            with torch.no_grad():
                found = local.step(*slices, outputs=True)[1] if is_step else local(*slices)
            for name, value in expected.items():
                assert_close(found[name], value)
        assert_close(found["loss"], loss)
        assert_close(local.full_grads(), single.full_grads())
    with pytest.raises(ap.InvalidInput, match="equal parts of every micro-batch"):
        parallel(made(Deep), x, y, mesh=Mesh(dp=4), microbatches=2, local_inputs=True)


SIZES, SIZES_OF_STAGES = ((8, 6), (1, 6)), ((8, 6), (5, 6))  # of batches, and their lengths


def runs_many_programs() -> None:
    signatures.trains_and_evaluates_in_turn(SIZES, states="zero2")
    signatures.differentiates_every_signature(states="zero3")
    signatures.unfreezes()
    _, module = signatures.start(states="zero1")
    module.eval()
    x, y = signatures.ids()
    for batches in ((8, 4, 8), (4, 8, 4)):
        found = []
        for around in (module.no_sync, nullcontext):
            module.zero_grad()
            with around():
                for batch in batches:
                    module(x[:batch], labels=y[:batch])["loss"].backward()
            found.append(module.full_grads())
        assert_close(*found)


def runs_many_programs_in_stages() -> None:
    mesh, options = Mesh(pp=2, dp=2), {"mode": "propagate", "microbatches": 4}
    for schedule, states in (("chimera", "whole"), ("zb-v", "zero3")):
        options |= {"schedule": schedule, "states": states}
        signatures.goes_through_stages(SIZES_OF_STAGES, mesh=mesh, **options)


SIZES_OF_GPT = ((9, 2), (3, 8), (9, 2))
SIZES_OF_MLP = ((8, 8), (7, 8), (8, 5), (7, 5), (4, 2), (7, 8))


def serves_a_range_of_sizes() -> None:
    """Slices of batches of two sizes are alike on some ranks; refused sizes end nothing."""
    dynamic.serves_every_size("gpt", SIZES_OF_GPT, mode="auto", states="zero2")
    options = {"local_inputs": True, "mesh": Mesh(dp=4), "mode": "data", "states": "zero3"}
    module = dynamic.serves_every_size("mlp", SIZES_OF_MLP, **options)
    inputs = dynamic.slices_of(module, dynamic.samples(8, 9))
    with pytest.raises(ap.InvalidInput, match="inputs have sizes in the range"):
        module.step(*inputs)
    module.step(*dynamic.slices_of(module, dynamic.samples(8, 8)))
    options |= {"mesh": Mesh(pp=2, dp=2), "microbatches": 2, "schedule": "1f1b"}
    dynamic.serves_every_size("mlp", ((8, 8), (4, 3), (6, 3)), **options)


def saves_and_loads_checkpoints() -> None:
    case = stored(models.mlp())
    module = ap.parallelize(case.model, case.args, mesh=Mesh(dp=4), mode="propagate")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.step(*case.args)
    optimizer.step()
    saved = module.full_state_dict()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    checkpoint.save(module.state_dict(), checkpoint_id=folder[0])
    for _ in range(2):
        module.step(*case.args)
        optimizer.step()
    state = module.state_dict()
    checkpoint.load(state, checkpoint_id=folder[0])
    module.load_state_dict(state)
    assert_close(module.full_state_dict(), saved)
    # The same file under another plan.
    other = megatron(models.mlp())
    elsewhere = ap.parallelize(other.model, other.args, mesh=DP2_TP2, mode="propagate")
    state = elsewhere.state_dict()
    checkpoint.load(state, checkpoint_id=folder[0])
    elsewhere.load_state_dict(state)
    assert_close(elsewhere.full_state_dict(), saved)
    # And in stages, whose ranks have other names.
    options: dict[str, Any] = {"mesh": Mesh(pp=2, dp=2), "mode": "data", "microbatches": 2}
    staged = ap.parallelize(models.mlp().model, case.args, **options)
    state = staged.state_dict()
    checkpoint.load(state, checkpoint_id=folder[0])
    staged.load_state_dict(state)
    assert_close(staged.full_state_dict(), saved)
    checkpoint.save(staged.state_dict(), checkpoint_id=f"{folder[0]}/staged")
    module.step(*case.args)
    optimizer.step()
    state = module.state_dict()
    checkpoint.load(state, checkpoint_id=f"{folder[0]}/staged")
    module.load_state_dict(state)
    assert_close(module.full_state_dict(), saved)


FOUR = {"mesh": Mesh(a=2, b=2), "cluster": machines(4, *EVEN)}


HOSTED = ap.States("all", "all", "all", parameters_device="host", optimizer_device="host")


@cache
def limited() -> list[tuple[Case, ap.States, float]]:
    """Cases with cut states, each with less memory than its fastest plan takes."""
    every = (
        (models.shared("gpt2", layers=1), ap.States.of("zero3")),
        (models.shared("resnet"), HOSTED),
    )
    return [
        (case, states, 0.75 * ap.plan(case.model, case.args, case.kwargs, **FOUR).memory.peak)
        for case, states in every
    ]


def holds_what_was_predicted() -> None:
    """Automatic plans with states that are cut, in little memory: each part on the fullest rank.

    The last of them keeps its masters, their gradients and its states on the host.
    """
    for case, states, limit in limited():
        options = {"states": states, "memory": limit, **FOUR}
        module = ap.parallelize(case.model, case.args, case.kwargs, **options)
        cut = [name for name, _ in module.named_parameters() if module.plan.layouts[name].axes]
        assert cut
        optimizer = torch.optim.AdamW(module.parameters())
        kept = kept_for_backward(module, case)
        module.step(*case.args, **case.kwargs)
        optimizer.step()
        parameters = list(module.parameters())
        moments = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        held = [local_bytes(p) for p in (parameters, [p.grad for p in parameters], moments)]
        most = torch.tensor([*held, kept])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        said = module.plan.memory
        planned = [getattr(said, kind) for kind in ("parameters", "gradients", "optimizer")]
        if module.plan.states.on_host():
            planned = [said.host_parameters, said.host_gradients, said.host_optimizer]
        assert most[:3].tolist() == planned
        assert float(most[3]) == pytest.approx(said.activations, rel=0.01)


@cache
def records_what_each_rank_did() -> None:
    """In the order of the schedule, and on one clock: nothing is read before it is made."""
    case, mesh = models.shared("gpt", layers=2), Mesh(pp=2, dp=2)
    about: dict[str, Any] = {"mesh": mesh, "schedule": "chimera", "microbatches": 2}
    with ap.parallelize(case.model, case.args, case.kwargs, **about) as module:
        recording, folder = module.record(steps=2), shared_folder()
        for _ in range(2):
            module.step(*case.args, **case.kwargs)
        recording.save(folder / "measured.json")
        dist.barrier()
        measured = read(folder / "measured.json", "measured")
        if dist.get_rank() == 0:
            module.plan.trace(folder / "simulated.json")
            assert compare(read(folder / "simulated.json", "simulated"), measured).step.count == 2
        events = measured.events
        assert {event.rank for event in events} == {*range(mesh.size)}
        again = module.record(steps=2 - dist.get_rank() % 2)
        module.step(*case.args, **case.kwargs)
        with pytest.raises(InvalidInput, match="on all ranks as many"):  # and none waits
            again.events()
    starts = {
        (event.rank, event.args["step"], event.name): event.start
        for event in events
        if event.track == ACTIONS
    }
    for (rank, step, name), start in starts.items():
        if name.startswith("1F"):
            here = mesh.coordinate(rank)
            giver = mesh.rank({**here, "pp": 1 - here["pp"]})
            assert starts[giver, step, name.replace("1F", "0F")] < start


def is_profiled_by_name() -> None:
    """Under a profiler: modules and movements, actions of a pipeline; the numbers stay."""
    case = models.shared("gpt", layers=2)
    moved = {
        "whole": ({"mesh": Mesh(dp=2, tp=2), "mode": "auto"}, {"layers.0.up", "layers.1.up"}),
        "stages": (
            {"mesh": Mesh(pp=2, dp=2), "schedule": "chimera", "microbatches": 2},
            {f"forward: stage {dist.get_rank() // 2}, micro-batch 0, pipe 0"},
        ),
        "again": ({"mesh": Mesh(dp=4), "recompute": "full"}, {"layers.0.up", "layers.1.up"}),
    }
    for about, wanted in moved.values():
        with ap.parallelize(case.model, case.args, case.kwargs, **about) as module:
            plain = module.step(*case.args, **case.kwargs)
            grads = module.full_grads()
            module.zero_grad()
            with torch.profiler.profile() as profiled:
                told = module.step(*case.args, **case.kwargs)
            assert_close(told, plain)
            assert_close(module.full_grads(), grads)
            found = {event.key for event in profiled.key_averages()}
            assert wanted <= found, sorted(found)
            movements = {record.forward for record in module.plan.movements()}
            for kind in movements & {"all_gather", "all_to_all"}:
                assert any(name.startswith(f"{kind} over ") for name in found), kind


@cache
def of_tree() -> list[ap.Plan]:
    case = shared_tree()
    ways: list[dict[str, Any]] = [
        {"mesh": Mesh(d=4), "microbatches": 2},
        {"mesh": Mesh(pp=2, d=2), "microbatches": 2, "schedule": "zb-h1"},
        {"mesh": Mesh(pp=4, d=1), "microbatches": 4, "schedule": "chimera"},
        {"mesh": Mesh(d=4)},
        {"mesh": Mesh(d=2, e=2)},
    ]
    return [ap.plan(case.model, case.args, mode="propagate", **options) for options in ways]


def follows_its_tree() -> None:
    """Freezing, replaced and loaded tensors, as on the model; where that cannot be, refused.

    Of six rows, a rank of four has none. torch's weight norm ends a process that has none.
    """
    case = shared_tree()
    for acts, plan in zip((DONE, DONE[::2], DONE[1::2]), of_tree()):
        module = ap.parallelize(case.model, case.args, plan=plan)
        for act in acts:
            module.requires_grad_(True)
            for parameter in module.frozen.parameters() if hasattr(module, "frozen") else ():
                parameter.requires_grad_(False)
            module.zero_grad()
            assert_done(module, act)
    plans = of_tree()[3:]
    for act, rule in (*REFUSED, *REFUSED_OF_PIECES):
        plan = plans[act is weight_norm]
        assert_refused(ap.parallelize(case.model, case.args, plan=plan), act, rule)


@cache
def held() -> list[tuple[Case, ap.Plan, Any]]:
    """Cases, their plans, and the programs of these, which hold constants."""
    ways: list[tuple[Case, Mesh, dict[str, Any]]] = [
        (stored(models.mlp(hidden=10)), Mesh(dp=4), {"microbatches": 2}),  # uneven
        (buffers_cut(), Mesh(d=4), {}),
        (stored(models.resnet()), Mesh(pp=2, dp=2), {"microbatches": 2, "schedule": "zb-h1"}),
        (models.gpt(layers=4), Mesh(pp=4), {"microbatches": 4, "schedule": "chimera"}),  # tied
    ]
    found = []
    for case, mesh, options in ways:
        options |= {"mesh": mesh, "mode": "propagate"}
        plan = ap.plan(case.model, case.args, case.kwargs, **options)
        found.append((case, plan, (plan.program, plan.whole_program)))
    return found


def holds_pieces_alone() -> None:
    """Memory is that of the pieces: of parameters, buffers and constants always, of gradients as
    long as they live. One of their buckets may have carried the loss."""
    gc.collect()
    gc.freeze()  # what other checks have left is not looked through at every storage
    for case, plan, _ in held():
        world().mesh_of(plan.whole_mesh, "cpu")  # has a table of its ranks
        before = storages()
        module = ap.parallelize(case.model, case.args, case.kwargs, plan=plan)
        said = sum(pieces_of(module, dist.get_rank() % plan.mesh.size).values())
        assert held_since(before) == said, case.name
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(2):
            module.step(*case.args, **case.kwargs)
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            assert held_by(grads) - local_bytes(grads) in (0, 8), case.name
            parts = held_by(module.parameters()), local_bytes(grads), held_by(module.buffers())
            del grads
            optimizer.step()
            optimizer.zero_grad()
            assert held_since(before) == said, case.name
        pipelining, most = plan.pipelining, plan.memory
        if dist.get_rank() % plan.mesh.size == 0:  # its pieces are the largest
            if pipelining is not None:
                place = plan.whole_mesh.coordinate(dist.get_rank())[pipelining.axis]
                assert most == max(plan.memories, key=lambda one: one.peak)
                most = plan.memories[place]
            assert parts == (most.parameters, most.gradients, most.buffers), case.name


def held_since(before: dict[int, int]) -> int:
    return sum(size for address, size in storages().items() if address not in before)


def draws_as_one_device_does() -> None:
    """Whatever a rank has seeded its own generator with: rank 0's counts."""
    case = dropping()
    meshes: list[dict[str, Any]] = [
        {"mesh": Mesh(dp=4), "mode": "data", "states": "zero3", "recompute": "full"},
        {"mesh": Mesh(dp=2, pp=2), "mode": "data", "microbatches": 2, "schedule": "chimera"},
    ]
    expected: list[Outcome] = []
    for options in ({"mesh": Mesh(one=1), "backend": "virtual"}, *meshes):
        module = ap.parallelize(case.model, case.args, **options)
        torch.manual_seed(4 + dist.get_rank() * len(expected))
        found = parallel_outcome(module, case)
        expected = expected or [found]
        assert_equal(found, expected[0])


def buffers_cut() -> Case:
    """A buffer that is changed, one that is not, and a constant, all cut."""

    class Cut(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 10)
            self.register_buffer("seen", torch.zeros(10))
            self.register_buffer("gain", torch.linspace(1, 2, 10))

        def forward(self, x: Tensor) -> Tensor:
            y = ap.shard(self.linear(x), (None, "d"))
            self.seen += ap.shard(y.detach().sum(0), ("d",))
            gain = ap.shard(self.gain * torch.arange(10.0, dtype=torch.float64), ("d",))
            return (y * gain + ap.shard(self.seen * 1.0, ("d",))).square().mean()

    return Case("buffers", Cut().double(), (torch.randn(8, 6).double(),))


def runs_eager_regions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    random = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(shape, dtype=torch.float64, generator=random, requires_grad=True)
        for shape in ((8, 6), (6, 5))
    ]
    region = ap.shard(lambda x, w: torch.relu(x @ w).sum(1), (("dp", None), (None, "tp")))
    placements = [[Shard(0), Replicate()], [Replicate(), Shard(1)]]
    parts = [
        distribute_tensor(value.detach(), mesh, where).requires_grad_()
        for value, where in zip(whole, placements)
    ]
    for _ in range(2):  # the second call finds the region compiled
        y = region(*parts)
        expected = region(*whole)
        assert isinstance(y, DTensor)
        assert_close(y.full_tensor(), expected)
        y.full_tensor().square().sum().backward()
        expected.square().sum().backward()
    for part, value in zip(parts, whole):
        assert isinstance(part.grad, DTensor)
        assert isinstance(value.grad, Tensor)
        assert_close(part.grad.full_tensor(), value.grad)


def runs_regions_that_plan_themselves() -> None:
    """Each rank knows other machines; the layouts are those that the first one has chosen."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    random = torch.Generator().manual_seed(0)
    shapes = (8, 16), (16, 64), (64, 16)
    whole = [torch.randn(s, dtype=torch.float64, generator=random).requires_grad_() for s in shapes]
    node = ap.Cluster.local(4, measure=False).nodes[0]
    link = replace(node.link, bandwidth=node.link.bandwidth * 1000 ** -dist.get_rank())
    slower = ap.Cluster((replace(node, link=link),), link)

    @ap.region(mode="auto", cluster=slower)
    def feed_forward(x: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
        return {"y": torch.relu(x @ up) @ down, "mean": x.mean()}

    for up, down in ((Shard(1), Shard(0)), (Replicate(), Shard(1))):
        placed = [[Shard(0), Replicate()], [Replicate(), up], [Replicate(), down]]
        parts = [
            distribute_tensor(value.detach(), mesh, where).requires_grad_()
            for value, where in zip(whole, placed)
        ]
        found, expected = feed_forward(*parts), feed_forward(*whole)
        assert isinstance(found["y"], DTensor)
        assert_close(found["y"].full_tensor(), expected["y"])
        assert_close(found["mean"].full_tensor(), expected["mean"])
        (found["y"].full_tensor().square().sum() + found["mean"].full_tensor()).backward()
        gradients = torch.autograd.grad(expected["y"].square().sum() + expected["mean"], whole)
        for part, where, gradient in zip(parts, placed, gradients):
            assert isinstance(part.grad, DTensor)
            assert part.grad.placements == tuple(where)
            assert_close(part.grad.full_tensor(), gradient)


def runs_regions_on_parts_of_the_world() -> None:
    """On each row of a mesh, though its ranks have seen different numbers of groups before."""
    if dist.get_rank() in (1, 2):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    whole = torch.arange(8.0, dtype=torch.float64).view(2, 4) + dist.get_rank() // 2
    region = ap.shard(lambda x: x.sum(1) ** 2, ((None, "tp"),))
    y = region(distribute_tensor(whole, mesh, [Shard(1)]))
    assert_close(y.full_tensor(), whole.sum(1) ** 2)


def refuses_a_mesh_of_another_size() -> None:
    case = models.shared("mlp")
    for mesh in (Mesh(dp=8), Mesh(dp=2)):
        with pytest.raises(ap.AutoparError, match="as many ranks as the world") as caught:
            ap.parallelize(case.model, case.args, mesh=mesh, mode="propagate")
        assert "torchrun" in (caught.value.remedy or "")


def takes_a_device_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    real, virtual = pair(megatron(models.mlp()), mesh)
    case = models.shared("mlp")
    assert_close(real.step(*case.args), virtual.step(*case.args))


def rehearsed() -> None:
    """Captures that laws make as they go, which depend on no mesh, plans that they share, and what
    a compiler loads when it is used first."""
    warnings.simplefilter("ignore")
    x = torch.ones(2, requires_grad=True)
    torch.compile(torch.sin, backend="aot_eager")(x).sum().backward()
    options: dict[str, Any] = {"mesh": Mesh(tp=1), "mode": "propagate", "backend": "virtual"}
    for law in LAWS:
        law(**options)
    stages_give_what_one_device_gives(**options)
    batch_norm_in_stages_sees_the_whole_batch_in_a_call(**options)
    signatures.trains_and_evaluates_in_turn(SIZES, **options)
    signatures.differentiates_every_signature(**options)
    signatures.unfreezes(**options)
    signatures.goes_through_stages(SIZES_OF_STAGES, **options, microbatches=4)
    dynamic.serves_every_size("gpt", SIZES_OF_GPT, **options)
    dynamic.serves_every_size("mlp", SIZES_OF_MLP, **options)
    parallel(made(Deep), random(8, 6), torch.arange(8) % 5, **options)
    for setting in recipes.SETTINGS:
        recipes.planned(setting)


def cases() -> list[tuple[Case, None]]:
    """What is captured before the ranks are there."""
    limited()
    of_tree()
    rehearsed()
    gpts = [tensor_parallel_gpt(), tensor_parallel_gpt(2), models.shared("gpt", layers=2)]
    others = [models.shared("mlp"), models.shared("gpt2", layers=1), some_learned(), shared_tree()]
    others += [dropping(), *map(recipes.case, (True, False)), combined(520)]
    every = [*gpts, *others, *(case for case, *_ in (*trained(), *held(), *routed()))]
    return [(case, None) for case in every]


def recorded() -> list[tuple[Case, None]]:
    """What is captured before the ranks of a recording are there."""
    return [(models.shared("gpt", layers=2), None)]


CHECKS = [
    resumes_on_other_meshes,
    what_is_cut_in_parts_goes_on,
    optimizers_with_states_of_other_shapes_go_on,
    ranks_save_and_load_the_same,
    torch_reads_and_sets_its_state,
    draws_as_one_device_does,
    trains_like_one_device,
    sends_tokens_to_their_experts,
    recomputes_regions,
    compiles_what_a_rank_runs,
    compares_batches_now_and_then,
    compares_batches_when_asked,
    goes_on_after_what_all_ranks_refuse,
    names_both_calls_where_ranks_make_others,
    writes_by_the_models_own_method,
    refuses_on_all_ranks_the_call_that_one_refuses,
    clips_and_accumulates,
    norms_of_some_stages_are_refused,
    gives_tensors_that_stay,
    trains_by_the_recipes_of_one_device,
    is_called_and_differentiated,
    gives_what_the_model_gives,
    gives_outputs_of_stages,
    gives_pieces_on_request,
    is_called_with_the_batch_of_several_microbatches,
    differentiates_in_any_order,
    gives_no_gradient_where_one_device_gives_none,
    gives_the_loss_beside_other_numbers,
    gives_parameters_no_gradient_when_inputs_alone_are_asked_for,
    takes_local_inputs,
    finds_the_batch_of_which_it_has_a_slice,
    exchanges_calls_only_when_the_program_changes,
    hears_of_parameters_that_others_hold,
    refuses_slices_of_what_is_whole,
    takes_what_is_no_tensor_as_it_is,
    cuts_local_inputs_into_micro_batches,
    loads_its_slices,
    loads_in_the_order_of_rank_0,
    runs_many_programs,
    runs_many_programs_in_stages,
    serves_a_range_of_sizes,
    saves_and_loads_checkpoints,
    holds_what_was_predicted,
    follows_its_tree,
    holds_pieces_alone,
    runs_eager_regions,
    runs_regions_that_plan_themselves,
    runs_regions_on_parts_of_the_world,
    refuses_a_mesh_of_another_size,
    takes_a_device_mesh,
]
