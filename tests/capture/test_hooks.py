"""Hooks on forward are captured; hooks on gradients are refused, each where it stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as modules
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.hooks import RemovableHandle

import autopar as ap
from autopar.capture import capture
from tests.models import Case
from tests.parity import assert_equal, parallel_outcome, single_outcome

X = torch.arange(32.0, dtype=torch.float64).reshape(4, 8) / 32
MESH = ap.Mesh(dp=2)
Inside = Callable[["Two", Tensor], Any]


class Two(nn.Module):
    """Two layers; `inside` is what forward does between them."""

    def __init__(self, inside: Inside | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.inside is not None:
            found = self.inside(self, hidden)
            hidden = found if isinstance(found, Tensor) else hidden
        return self.b(hidden).square().mean()


def packed(model: Two, hidden: Tensor) -> Tensor:
    with graph.saved_tensors_hooks(lambda kept: kept * 2, lambda kept: kept):
        return hidden.tanh()


INSIDE: dict[str, Inside] = {
    "register_hook": lambda model, hidden: hidden.register_hook(lambda grad: grad * 3),
    "retain_grad": lambda model, hidden: hidden.retain_grad(),
    "register_post_accumulate_grad_hook": lambda model, hidden: (
        model.b.weight.register_post_accumulate_grad_hook(print)
    ),
    "register_prehook": lambda model, hidden: hidden.grad_fn.register_prehook(print),
    "register_multi_grad_hook": lambda model, hidden: graph.register_multi_grad_hook(
        [hidden], print
    ),
    "saved_tensors_hooks": packed,
}


@pytest.mark.parametrize("name", INSIDE)
def test_hooks_made_in_forward_are_refused(name: str) -> None:
    plain = {key: vars(Tensor).get(key) for key in ("register_hook", "grad_fn", "retain_grad")}
    with pytest.raises(ap.InvalidInput, match="gradients are those of the operators") as caught:
        capture(Two(INSIDE[name]), (X,))
    assert name in str(caught.value.got)
    assert "test_hooks.py" in str(caught.value.source)
    assert plain == {key: vars(Tensor).get(key) for key in plain}


AT_ONCE: dict[str, tuple[Inside, str]] = {
    "backward": (lambda model, hidden: hidden.sum().backward(retain_graph=True), "after forward"),
    "torch.autograd.backward": (
        lambda model, hidden: torch.autograd.backward(hidden.sum(), retain_graph=True),
        "after forward",
    ),
    "torch.seed": (lambda model, hidden: hidden * torch.seed(), "follow from one key"),
    "torch.initial_seed": (
        lambda model, hidden: hidden * torch.initial_seed(),
        "follow from one key",
    ),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_would_be_done_in_capture_alone_is_refused(name: str) -> None:
    inside, rule = AT_ONCE[name]
    plain = Tensor.backward, torch.autograd.backward, torch.seed, torch.initial_seed
    with pytest.raises(ap.InvalidInput, match=rule) as caught:
        ap.parallelize(Two(inside), (X,), mesh=MESH, mode="data")
    assert name.removeprefix("torch.autograd.") in str(caught.value.got)
    assert "test_hooks.py" in str(caught.value.source)
    assert plain == (Tensor.backward, torch.autograd.backward, torch.seed, torch.initial_seed)


def sets_an_attribute(model: Two, hidden: Tensor) -> None:
    model.a.weight.requires_grad = False


FREEZING: dict[str, Inside] = {
    "of a parameter": lambda model, hidden: model.a.weight.requires_grad_(False),
    "of a module": lambda model, hidden: model.b.requires_grad_(False),
    "by an attribute": sets_an_attribute,
}


@pytest.mark.parametrize("name", FREEZING)
def test_freezing_in_forward_is_refused(name: str) -> None:
    model = Two(FREEZING[name])
    with pytest.raises(ap.InvalidInput, match="parameters that learn are known") as caught:
        capture(model, (X,))
    assert "test_hooks.py" in str(caught.value.source)
    assert all(parameter.requires_grad for parameter in model.parameters())


BEFORE: dict[str, Callable[[Two], Any]] = {
    "gradient of a.weight": lambda model: model.a.weight.register_hook(lambda grad: grad * 3),
    "gradient of b.bias": lambda model: model.b.bias.register_post_accumulate_grad_hook(print),
    "hook of the module a": lambda model: model.a.register_full_backward_hook(print),
    "hook of the module b": lambda model: model.b.register_full_backward_pre_hook(print),
    "hook of the module Two": lambda model: model.register_backward_hook(print),
    "hook of all modules": lambda model: modules.register_module_full_backward_hook(print),
}


@pytest.mark.parametrize("name", BEFORE)
def test_hooks_made_before_are_refused(name: str) -> None:
    model = Two()
    handle = BEFORE[name](model)
    try:
        with pytest.raises(ap.InvalidInput, match="gradients are those of the operators") as caught:
            ap.parallelize(model, (X,), mesh=MESH, mode="data")
        assert name in str(caught.value.got)
    finally:
        handle.remove()
    ap.parallelize(model, (X,), mesh=MESH, mode="data").step(X)


class Triple(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 3


FORWARD: dict[str, Callable[[Two], Any]] = {
    "hook": lambda model: model.a.register_forward_hook(lambda m, args, out: out * 3),
    "pre-hook": lambda model: model.a.register_forward_pre_hook(lambda m, args: (args[0] * 3,)),
    "hook of the root": lambda model: model.register_forward_hook(lambda m, args, out: out * 3),
    "hook of all": lambda model: modules.register_module_forward_hook(
        lambda m, args, out: out * 3 if isinstance(m, nn.Linear) else None
    ),
    "parametrization": lambda model: parametrize.register_parametrization(
        model.a, "weight", Triple()
    ),
    "weight norm": lambda model: parametrizations.weight_norm(model.a),
    "pruning": lambda model: prune.l1_unstructured(model.a, "weight", 0.5),
}


@pytest.mark.parametrize("name", FORWARD)
def test_hooks_on_forward_are_captured(name: str) -> None:
    single, parallel = Two(), Two()
    handles = [FORWARD[name](model) for model in (single, parallel)]
    try:
        module = ap.parallelize(parallel, (X,), mesh=MESH, mode="data")
        case = Case(name, single, (X,))
        assert_equal(parallel_outcome(module, case), single_outcome(case))
    finally:
        for handle in handles:
            if isinstance(handle, RemovableHandle):
                handle.remove()


def offloaded(model: Two, hidden: Tensor) -> Tensor:
    with graph.save_on_cpu():
        return hidden.tanh()


def test_offloading_keeps_its_results_and_is_told() -> None:
    case = Case("offload", Two(offloaded), (X,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = ap.parallelize(case.fresh().model, (X,), mesh=MESH, mode="data")
    (message,) = (str(one.message) for one in told if "save_on_cpu" in str(one.message))
    assert "kept where they are made" in message
    assert "test_hooks.py:" in message
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(parallel_outcome(module, case), single_outcome(case.fresh()))


def test_hooks_on_a_parallel_module_are_refused() -> None:
    module = ap.parallelize(Two(), (X,), mesh=MESH, mode="data")
    for register in (module.a.register_forward_hook, module.b.register_full_backward_hook):
        with pytest.raises(ap.InvalidInput, match="do not run themselves"):
            register(print)
    with pytest.raises(ap.InvalidInput, match="another eps"):
        module.a.eps = 1.0
    for handle, named in (
        (module.a.weight.register_hook(print), "gradient of a.weight"),
        (module.b.bias.register_post_accumulate_grad_hook(print), "gradient of b.bias"),
        (module.register_forward_hook(print), "in step()"),
    ):
        with pytest.raises(ap.InvalidInput, match="without hooks") as caught:
            module.step(X)
        assert named in str(caught.value)
        handle.remove()
    module.step(X)


class Extra(Two):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> int:
        return 1


def test_hooks_on_state_are_told_and_nothing_is_lost() -> None:
    model = Extra()
    model.register_state_dict_post_hook(
        lambda m, state, prefix, meta: state.update(other=state.pop("a.weight"))
    )
    for part in (model.a, model.b):
        part.register_load_state_dict_post_hook(print)
    with (
        pytest.warns(UserWarning, match="hooks of the model on state_dict do not run"),
        pytest.warns(
            UserWarning, match=r"get_extra_state.. of the model does not run: give ap.save"
        ),
        pytest.warns(UserWarning, match="hooks of a and 1 more on load_state_dict do not run"),
    ):
        module = ap.parallelize(model, (X,), mesh=MESH, mode="data")
    assert list(module.full_state_dict()) == list(Two().state_dict())
