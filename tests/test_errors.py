"""Bad input: every message says the rule, what was given, the remedy and the user's line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar import Mesh, errors, shard
from autopar.admission import warn_about_virtual_mesh
from autopar.strategies import registry
from autopar.text.source_lines import LONGEST, describe

D4 = Mesh(d=4)
LOCAL, D8 = (ap.Cluster.local(devices, measure=False) for devices in (4, 8))


class Two(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


class Calls(nn.Module):
    """A model that calls a function of its input and its weight."""

    def __init__(self, function: Callable[..., Any], **members: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


@torch.library.custom_op("tests_errors::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("tests_errors::strange", mutates_args=())
def strange(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("tests_errors::halved", mutates_args=())
def halved(x: Tensor, y: Tensor) -> Tensor:
    return (x + y)[:, :2].clone()


halved.register_fake(lambda x, y: torch.empty_like(x[:, :2]))
unknown.register_fake(torch.empty_like)
strange.register_fake(torch.empty_like)


def noisy(self: nn.Module, x: Tensor) -> Tensor:
    return (x @ self.weight + torch._standard_gamma(torch.ones(8))).square().mean()  # type: ignore[operator]


DEFAULTS = {"mode": "propagate"}


def parallel(model: Any, *args: Any, mesh: Any = D4, **options: Any) -> ap.ParallelModule:
    if "plan" not in options:
        options = {**DEFAULTS, **options}
    return ap.parallelize(model, args or (ones(),), mesh=mesh, **options)


def several_gradients(module: ap.ParallelModule) -> Any:
    found = module(ones()), list(module.parameters()), torch.ones(3)
    return torch.autograd.grad(*found, is_grads_batched=True)


class Scaled(nn.Linear):
    """Takes an argument by the name of one of a step."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x, scale=2.0):  # type: ignore[no-untyped-def]
        return (super().forward(x) * scale).square().mean()


def ones(batch: int = 8) -> Tensor:
    return torch.ones(batch, 4)


def product(*strategies: Any, **options: Any) -> Calls:
    """x @ w with an annotated matmul."""
    annotated = shard(torch.matmul, *strategies, **options)
    return Calls(lambda self, x: annotated(x, self.weight))


def annotated_weight(*entries: Any) -> Two:
    model = Two()
    shard(model.up, params={"weight": entries})
    return model


def contradicted() -> Two:
    model = Two()
    shard(model.up, params={"weight": ("d", None)})  # one place
    shard(model, params={"up.weight": (None, "d")})  # the other
    return model


def tied() -> nn.Module:
    model = Calls(lambda self, x: self.one(x) + self.two(x), one=nn.Linear(4, 8, bias=False))
    model.two = nn.Linear(4, 8, bias=False)
    model.two.weight = model.get_submodule("one").weight  # type: ignore[assignment]
    shard(model.get_submodule("one"), params={"weight": ("d", None)})
    shard(model.two, params={"weight": (None, "d")})
    return model


def depends_on_values(self: Calls, x: Tensor) -> Tensor:
    if x.sum() > 0:  # the line
        return x @ self.weight
    return x


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Two()


def planned_for_another() -> ap.ParallelModule:
    plan = ap.plan(Two(), (ones(),), mesh=D4)
    return ap.parallelize(nn.Linear(4, 2), (ones(),), plan=plan)


def too_early(kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    model = Two()
    optimizer = kind(model.parameters())
    parallel(model).step(ones())
    return optimizer


# name -> (what is done, what the message must say)
BAD: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "too few inputs": (
        lambda: parallel(product(((1, 1),))),
        ["one entry for each of the tensor inputs", "1 for matmul with 2", "give 2"],
    ),
    "too many outputs": (
        lambda: parallel(product(None, ((1, 1), (1, 1)))),
        ["one entry for each of the tensor outputs", "2 for matmul with 1", "give 1"],
    ),
    "too many dims": (
        lambda: parallel(product(((1, 1, 1), (1, 4)))),
        ["one entry for each dim", "(1, 1, 1) for a tensor of shape (8, 4)", "give 2"],
    ),
    "too few dims of a tensor": (
        lambda: parallel(Calls(lambda self, x: shard(x, ("d",)) @ self.weight)),
        ["one entry for each dim", "('d',) for a tensor of shape (8, 4)", "give 2"],
    ),
    "too few dims of a parameter": (
        lambda: annotated_weight("d"),
        ["one entry for each dim", "('d',) for 'weight' of shape (8, 4)", "give 2"],
    ),
    "a number that does not divide the dim": (
        lambda: parallel(product(((3, 1), (1, 1))), mesh=Mesh(d=3)),
        ["must divide the dim", "3 slices of a dim of size 8", "a divisor of 8"],
    ),
    "a number that does not divide the mesh": (
        lambda: parallel(product(((2, 1), (1, 1)))),
        ["a free axis of the mesh", "2 in (2, 1)", "d=4", "another mesh"],
    ),
    "numbers that need more axes than there are": (
        lambda: parallel(product(((4, 1), (1, 4)))),
        ["a free axis of the mesh", "4 in (1, 4)", "nothing"],
    ),
    "more pieces than elements": (
        lambda: parallel(annotated_weight(None, "d"), mesh=Mesh(d=5)),
        ["as many pieces as it has elements", "cuts 4 into 5", "fewer"],
    ),
    "an unknown axis": (
        lambda: parallel(annotated_weight("tp", None)),
        ["one of the mesh's", "'tp' in ('tp', None) for Linear.weight", "'d'", "Mesh(d=4, tp=1)"],
    ),
    "an axis used twice": (
        lambda: parallel(annotated_weight("d", "d")),
        ["used once on one tensor", "uses 'd' 2 times", "keep one"],
    ),
    "an axis used twice on one dim": (
        lambda: parallel(Calls(lambda self, x: shard(x, (("d", "d"), None)) @ self.weight)),
        ["used once on one tensor", "uses 'd' 2 times", "keep one"],
    ),
    "contradictory inputs": (
        lambda: parallel(product(((1, 4), (1, 1)))),
        ["contradict each other", "4 for input 0 at", "None for input 1 at", "the same way"],
    ),
    "one axis for two factors": (
        lambda: parallel(product((("d", None), (None, "d")))),
        ["an axis may cut one factor", "'d' cuts 'm' at", "and 'n' at", "another axis"],
    ),
    "contradictory parameters": (
        lambda: parallel(contradicted()),
        ["must agree", "# one place", "# the other", "remove one"],
    ),
    "contradictory tied parameters": (
        lambda: parallel(tied()),
        ["must agree", "one.weight", "[@d, _]", "[_, @d]", "remove one"],
    ),
    "a dim that a rule keeps whole": (
        lambda: parallel(
            Calls(lambda self, x: self.norm(x), norm=shard(nn.LayerNorm(4), ((1, 4),)))
        ),
        ["keeps whole is not cut", "(1, 4) for input 0 of LayerNorm", "give None (or 1)"],
    ),
    "a dim that a function's rule keeps whole": (
        lambda: parallel(Calls(lambda self, x: shard(torch.cumprod, ((1, 4),))(x, -1))),
        ["keeps whole is not cut", "(1, 4) for input 0 of cumprod", "give None (or 1)"],
    ),
    "data-dependent control flow": (
        lambda: parallel(Calls(depends_on_values)),
        ["must not depend on the values", "if x.sum() > 0:  # the line", "torch.where"],
    ),
    "a value taken out": (
        lambda: parallel(Calls(lambda self, x: x * x.sum().item())),
        ["must not depend on the values", "item", "torch.where"],
    ),
    "operators without rules": (
        lambda: parallel(Calls(lambda self, x: unknown(strange(x)) @ self.weight), strict=True),
        ["every operator has a rule", '"tests_errors.unknown" at', '"tests_errors.strange" at'],
    ),
    "random numbers of an operator without a rule": (
        lambda: parallel(Calls(lambda self, x: torch._standard_gamma(x @ self.weight))),
        ["its bits would depend on the layout", "gamma in the model on Mesh(d=4)", "an input"],
    ),
    "a seed in forward": (
        lambda: parallel(Calls(lambda self, x: (torch.manual_seed(0), x @ self.weight)[1])),
        ["follow from one key", "torch.manual_seed in forward", "before step()"],
    ),
    "random numbers of one of several results": (
        lambda: parallel(Calls(lambda self, x: self.rnn(x)[0], rnn=nn.LSTM(4, 4, 2, dropout=0.1))),
        ["its bits would depend on the layout", "lstm in rnn on Mesh(d=4)", "nn.Dropout between"],
    ),
    "random numbers of no interval": (
        lambda: parallel(Calls(lambda self, x: x.clone().uniform_(2, 1) @ self.weight)),
        ["an interval begins before it ends", "from 2.0 to 1.0"],
    ),
    "random numbers in micro-batches": (
        lambda: parallel(Calls(noisy), mesh=Mesh(d=1), microbatches=2),
        ["its bits would depend on the layout", "gamma in the model in 2 micro-batches"],
    ),
    "no world": (
        lambda: parallel(Two(), backend="torch"),
        ["runs under torch.distributed", "a single process", "torchrun"],
    ),
    "inputs of a shape that the model does not take": (
        lambda: parallel(Two())(torch.ones(8, 5)),
        ["the model runs on the inputs of this call", "in up, a Linear", "mend the inputs"],
    ),
    "inputs of a dtype that the model does not take": (
        lambda: parallel(Two())(ones().double()),
        ["in the dtype that it computes in", "float64, torch.float32", "hand over inputs"],
    ),
    "inputs by names that the model does not have": (
        lambda: parallel(Two())(y=ones()),
        ["fit the signature of forward", "missing a required argument: 'x'"],
    ),
    "inputs without values": (
        lambda: parallel(Two())(ones().to("meta")),
        ["needs inputs with data", "(8, 4) on the meta device", "tensors of a device"],
    ),
    "a batch smaller than the mesh": (
        lambda: parallel(Two(), ones(2)),
        ["cut the batch, which must not be smaller", "batch 2", "a larger batch"],
    ),
    "a step without a loss": (
        lambda: parallel(Calls(lambda self, x: x @ self.weight)).step(ones()),
        ["returns its loss", "outputs f32[8, 8]", "return the loss"],
    ),
    "a step of a frozen model": (
        lambda: parallel(Two().requires_grad_(False)).step(ones()),
        ["a step takes a gradient", "parameters are all frozen", "requires_grad_()"],
    ),
    "a step that multiplies by text": (
        lambda: parallel(Two()).step(ones(), scale="half"),  # type: ignore[call-overload]
        ["multiplies its gradients by a finite number", "scale='half', of type str", "1 / n"],
    ),
    "a step that multiplies by more than the loss can be": (
        lambda: parallel(Two()).step(ones(), scale=1e300),
        ["finite number, which the dtype", "scale=1e+300, of type float", "torch.float32"],
    ),
    "a step that multiplies by more than anything can be": (
        lambda: parallel(Two()).step(ones(), scale=10**5000),
        ["finite number, which the dtype", "of many digits, of type int", "torch.float32"],
    ),
    "a call of several at once": (
        lambda: torch.vmap(parallel(Two(), ones()))(torch.ones(2, 8, 4)),
        ["called on plain tensors", "torch.vmap", "torch.autograd.grad"],
    ),
    "a call that is differentiated forward": (
        lambda: torch.func.jvp(parallel(Two(), ones()), (ones(),), (ones(),)),
        ["called on plain tensors", "forward automatic differentiation", "torch.autograd.grad"],
    ),
    "several gradients at once": (
        lambda: several_gradients(parallel(Two(), ones())),
        ["one gradient of each output at a time", "is_grads_batched", "retain_graph=True"],
    ),
    "a word that may be the step's or the model's": (
        lambda: parallel(Scaled()).step(ones(), scale=0.5),
        ["if the example call has it", "forward(x, scale=2.0)", "microbatches=n"],
    ),
    "backward of what a step returns": (
        lambda: parallel(Two()).step(ones()).backward(),
        ["a step has run backward already", "backward() of the loss", "optimizer.step()"],
    ),
    "backward of the mean of what steps return": (
        lambda: (sum([parallel(Two()).step(ones())] * 2) / 2).backward(),  # type: ignore
        ["a step has run backward already", "backward() of the loss", "optimizer.step()"],
    ),
    "backward of a share of what a step returns": (
        lambda: (1 - parallel(Two()).step(ones()).div(2)).backward(),
        ["a step has run backward already", "backward() of the loss", "optimizer.step()"],
    ),
    "torch's backward of what a step returns": (
        lambda: torch.autograd.backward([parallel(Two()).step(ones())]),
        ["a step has run backward already", "torch.autograd.backward() of the", "optimizer.step()"],
    ),
    "an optimizer of the model's own parameters": (
        lambda: too_early(torch.optim.AdamW).step(),
        ["made of the module's own parameters", "a step of AdamW", "AdamW(pm.parameters()"],
    ),
    "an optimizer of the model's own parameters that calls a closure": (
        lambda: too_early(torch.optim.LBFGS).step(lambda: 0.0),
        ["made of the module's own parameters", "a step of LBFGS", "LBFGS(pm.parameters()"],
    ),
    "a model that fails": (
        lambda: parallel(Two(), torch.ones(8, 5)),
        ["the model runs on the example inputs", "in up, a Linear: a and b must", "mend the"],
    ),
    "no model": (
        lambda: parallel(lambda x: x),
        ["a model is a torch.nn.Module", "function", "wrap"],
    ),
    "a model that is parallel already": (
        lambda: parallel(parallel(Two(), ones()), ones()),
        ["one that is parallel already", "the model, which is a ParallelModule", "the plain model"],
    ),
    "a part that is parallel already": (
        lambda: ap.plan(nn.Sequential(parallel(Two(), ones())), (ones(),), mesh=D4),
        ["one that is parallel already", "0, which is a ParallelModule", "the plain model"],
    ),
    "one reason against all numbers of stages": (
        lambda: ap.plan(nn.Linear(4, 2), (ones(),), cluster=LOCAL, microbatches=2),
        ["a step needs a model that returns its loss", "outputs f32[8, 2]", "from forward"],
    ),
    "one reason against all numbers of micro-batches": (
        lambda: ap.plan(nn.Linear(4, 2), (ones(),), cluster=LOCAL, pipeline=2),
        ["a step needs a model that returns its loss", "outputs f32[8, 2]", "return the loss"],
    ),
    "a mesh of more stages than layers": (
        lambda: ap.plan(Two(), (torch.ones(12, 4),), cluster=D8, mesh=Mesh(pp=8)),
        ["at most as many stages as the model has layers", "8 stages for 2 layers", "fewer stages"],
    ),
    "inputs that are no tuple": (
        lambda: ap.parallelize(Two(), ones(), mesh=D4),  # type: ignore[arg-type]
        ["the positional example inputs are a tuple", "Tensor", "(x,)"],
    ),
    "inputs by name in the place of a tuple": (
        lambda: ap.plan(Two(), {"x": ones()}, cluster=D8),  # type: ignore[arg-type]
        ["the positional example inputs are a tuple", "dict", "as kwargs="],
    ),
    "too many arguments": (
        lambda: parallel(Two(), ones(), ones()),
        ["fit the signature of forward", "too many positional", "def forward(self, x"],
    ),
    "parameters without data": (
        lambda: ap.verify(on_meta(), (ones(),)),
        [
            "needs parameters and inputs with data",
            "up.weight is on the meta device",
            "parallelize() makes them",
        ],
    ),
    "a plan of another model": (
        planned_for_another,
        ["a plan is for one model", "no parameter up.weight: f32[", "make a plan for this"],
    ),
    "a plan and more": (
        lambda: parallel(Two(), plan=ap.plan(Two(), (ones(),), mesh=D4)),
        ["leaves nothing to decide", "plan= together with mesh", "plan()"],
    ),
    "an unknown mode": (
        lambda: parallel(Two(), mode="best"),
        ["mode is one of", "'best'", "'auto'"],
    ),
    "an unknown backend": (
        lambda: parallel(Two(), backend="nccl"),
        ["backend is one of", "'nccl'", "virtual"],
    ),
    "a mesh that is none": (
        lambda: parallel(Two(), mesh={"dp": 2}),
        ["mesh is a Mesh or a torch DeviceMesh", "dict", "ap.Mesh(dp=2, tp=4)"],
    ),
    "a cluster by its name alone": (
        lambda: parallel(Two(), cluster="dgx-a100"),
        ["cluster is a Cluster", "'dgx-a100', of type str", 'ap.Cluster.preset("dgx-a100")'],
    ),
    "a number of machines": (lambda: parallel(Two(), cluster=4), ["cluster is a Cluster", "int"]),
    "a cluster by half a name": (
        lambda: parallel(Two(), cluster="dgx-h10"),
        ["cluster is a Cluster", 'ap.Cluster.preset("dgx-h100")', "presets: dgx-a100, dgx-h100"],
    ),
    "an unknown preset": (
        lambda: ap.Cluster.preset("dgx-h10"),
        ["a preset is one of 'dgx-a100'", "Cluster.load", "'dgx-h10'", "remedy: 'dgx-h100'"],
    ),
    "memory in another unit": (
        lambda: parallel(Two(), memory="40 gigs"),
        [
            "memory is a number of bytes from 1000 on, or with its unit",
            "'40 gigs'",
            'memory="40GB"',
        ],
    ),
    "no memory": (
        lambda: parallel(Two(), memory=0),
        ["a number of bytes from 1000 on", "memory=0"],
    ),
    "less than no memory": (lambda: parallel(Two(), memory=-1.0), ["from 1000 on", "memory=-1.0"]),
    "memory that is a flag": (lambda: parallel(Two(), memory=True), ["from 1000", "memory=True"]),
    "memory without its unit": (
        lambda: parallel(Two(), memory="2"),
        ["a number of bytes from 1000 on", "memory='2'", 'memory="40GB"'],
    ),
    "more memory than there is": (
        lambda: parallel(Two(), memory="500GB", cluster=ap.Cluster.preset("dgx-h100")),
        ["memory is at most what each device has", "'500GB' on H100", "has 80 GB", "or None"],
    ),
    "strict as text": (
        lambda: parallel(Two(), strict="no"),
        ["strict is True or False", "strict='no', of type str", "strict=True"],
    ),
    "micro-batches as a flag": (
        lambda: parallel(Two(), microbatches=True),
        ['microbatches is a number from 1, or "auto"', "microbatches=True", "microbatches=8"],
    ),
    "no micro-batches": (
        lambda: parallel(Two(), microbatches=0),
        ["microbatches is a number from 1", "microbatches=0", "microbatches=8"],
    ),
    "a pipeline of a part": (
        lambda: parallel(Two(), pipeline=2.5),
        ["pipeline is the name of an axis", "pipeline=2.5, of type float", "pipeline=4"],
    ),
    "a list of schedules": (
        lambda: parallel(Two(), mesh=Mesh(pp=2), schedule=["1f1b"]),
        ["schedule is given by its name", "['1f1b'], of type list", 'schedule="chimera"'],
    ),
    "a schedule with a number for a name": (
        lambda: parallel(Two(), mesh=Mesh(pp=2), schedule={"name": [5]}),
        ["the name of a schedule is one of '1f1b'", "[5]"],
    ),
    "an unknown schedule without a pipeline": (
        lambda: parallel(Two(), mesh=D4, schedule="1f2b"),
        ["schedule is one of 'auto', '1f1b'", "given:  '1f2b'", "remedy: '1f1b'"],
    ),
    "an unknown schedule by a mapping": (
        lambda: parallel(Two(), mesh=D4, schedule={"name": "chimaera"}),
        ["the name of a schedule is one of", "given:  'chimaera'", "remedy: 'chimera'"],
    ),
    "unknown states": (
        lambda: parallel(Two(), states="zero4"),
        ["states is one of 'auto', 'whole', 'zero1'", "or a States", "'zero4'", "remedy: 'zero"],
    ),
    "options of a schedule as text": (
        lambda: parallel(Two(), mesh=Mesh(pp=2), schedule="chimera", schedule_options="pipes=2"),
        ["schedule_options is a mapping", "'pipes=2', of type str", 'schedule_options={"pipes"'],
    ),
    "recompute in another word": (
        lambda: parallel(Two(), recompute="everything"),
        ["recompute is one of 'auto', 'selective', 'full'", "'everything'", "a Recompute"],
    ),
    "recompute of a module in another word": (
        lambda: parallel(Two(), recompute={"up": "ful"}),
        ["recompute of 'up' is one of 'selective', 'full'", "'ful'", "remedy: 'full'"],
    ),
    "progress as text": (
        lambda: parallel(Two(), progress="yes"),
        ["progress is True, False, None or a function", "'yes', of type str", "progress=print"],
    ),
    "the name of a plan's file": (
        lambda: ap.parallelize(Two(), (ones(),), plan="plan.json"),  # type: ignore[arg-type]
        ["plan is what plan() made", "'plan.json', of type str", "plan=ap.Plan.load"],
    ),
    "a mesh in the place of inputs": (
        lambda: ap.plan(Two(), (ones(),), D4),  # type: ignore[arg-type]
        ["inputs by name are a mapping", "kwargs=Mesh(d=4)", "options by name, as in mesh="],
    ),
    "a mesh in the place of inputs of parallelize": (
        lambda: ap.parallelize(Two(), (ones(),), D4),  # type: ignore[arg-type]
        ["inputs by name are a mapping", "kwargs=Mesh(d=4)", "options by name, as in mesh="],
    ),
    "a mesh in the place of inputs of verify": (
        lambda: ap.verify(Two(), (ones(),), D4),  # type: ignore[arg-type]
        ["inputs by name are a mapping", "kwargs=Mesh(d=4)", "options by name, as in mesh="],
    ),
    "inputs whose names are none": (
        lambda: ap.plan(Two(), (), {1: ones()}, mesh=D4),  # type: ignore[dict-item]
        ["inputs by name are a mapping", "kwargs={1: tensor(", 'write {"labels": labels}'],
    ),
    "a mode with two letters changed": (
        lambda: parallel(Two(), mode="porpagate"),
        ["mode is one of", "'porpagate'", "remedy: 'propagate'"],
    ),
    "a mesh without ranks": (lambda: Mesh(d=0), ["at least 1", "d=0", "Mesh(dp=2, tp=4)"]),
    "local inputs on the virtual mesh": (
        lambda: parallel(Two(), backend="virtual", local_inputs=True),
        ["one process of several", "local_inputs=True", "global batch"],
    ),
    "pieces of outputs on the virtual mesh": (
        lambda: parallel(Two(), backend="virtual", outputs="local"),
        ["one process of several", "outputs='local'", 'outputs="whole"'],
    ),
    "another form of outputs": (
        lambda: parallel(Two(), outputs="dtensors"),
        ["outputs is one of", "'dtensors'", "remedy: 'dtensor'"],
    ),
    "a check of local inputs": (
        lambda: parallel(Two(), backend="torch", local_inputs=True, check=True),
        ["what is checked is the global batch", "local_inputs=True with check=True", "one of them"],
    ),
    "no strategy for a tensor": (
        lambda: shard(ones()),
        ["a tensor takes one strategy", "in_strategy=None", 'shard(x, ("dp", None))'],
    ),
    "parameters of a function": (
        lambda: shard(torch.matmul, params={"weight": ("d",)}),
        ["a function has none", "matmul with params", "the module that owns"],
    ),
    "parameters that do not exist": (
        lambda: shard(nn.Linear(4, 8), params={"wieght": ("d", None)}),
        ["names parameters of the module", "'wieght'; Linear has 'weight', 'bias'", "use one"],
    ),
    "parameters without names": (
        lambda: shard(nn.Linear(4, 8), params=("d", None)),  # type: ignore[arg-type]
        ["maps names of parameters", "('d', None) for Linear", "params={"],
    ),
    "one strategy in place of several": (
        lambda: shard(nn.Linear(4, 8), ("d", None)),
        ["a tuple with one tuple for each tensor", "('d', None) for Linear", "in_strategy=(("],
    ),
    "zero slices": (
        lambda: shard(nn.Linear(4, 8), ((0, 1),)),
        ["a number of slices from 1", "0 for Linear", "(2, 1, 4)"],
    ),
    "half a slice": (
        lambda: shard(ones(), (0.5, 1)),  # type: ignore[arg-type]
        ["a number of slices from 1", "0.5 for the tensor", "(2, 1, 4)"],
    ),
    "something that cannot be annotated": (
        lambda: shard("weight", ("d",)),
        ["a module, a function or a tensor", "str", "shard(x, ...)"],
    ),
    "another dtype afterwards": (
        lambda: parallel(Two()).double(),
        ["keeps the dtype", "torch.float32 on cpu to torch.float64", "convert the model first"],
    ),
}


def test_what_is_long_is_printed_on_several_lines(monkeypatch) -> None:
    monkeypatch.setattr(errors, "WIDTH", 88)
    path, words = "/a/" + 30 * "folder/", ", ".join(f"layer {n}" for n in range(20))
    given = f"{path}file\n  as it is\n{words}"
    error = ap.InvalidInput("a rule", got=given, remedy=words, source="here.py:1")
    rule, *lines = str(error).splitlines()
    long = [line for line in lines if len(line) > 100]
    assert long == [f"  given:  {path}file"]  # which can be copied
    assert "            as it is" in lines
    assert lines[-1] == "  at:     here.py:1"
    assert rule == "a rule"
    assert " ".join(str(error).split()).count(words) == 2
    assert (error.got, error.remedy) == (given, words)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(name: str) -> None:
    act, sayings = BAD[name]
    with pytest.raises(ap.AutoparError) as caught:
        act()
    error, text = caught.value, str(caught.value)
    assert isinstance(error, ap.InvalidInput)
    assert isinstance(error, ValueError)
    assert error.rule
    assert error.got
    assert error.remedy
    assert __file__.rsplit("/", 1)[1] in (error.source or "")
    for saying in sayings:
        assert saying in text, f"{saying!r} is not in\n{text}"


ANNOTATIONS = [
    name for name in BAD if list(BAD).index(name) < list(BAD).index("data-dependent control flow")
]


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_impossible_annotations_are_explained_by_a_search_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEFAULTS, "mode", "auto")
    test_bad_input_is_explained(name)


def test_a_long_line_is_cut() -> None:
    shown = describe("/elsewhere/train.py", 12, "x = " + "f(x) + " * 50)
    assert shown.startswith("/elsewhere/train.py:12: x = f(x) + f(x)")
    assert shown.endswith("…")
    assert len(shown) <= LONGEST + len("/elsewhere/train.py:12: ")


def test_operators_without_rules_are_said_once_with_what_helps() -> None:
    model = Calls(lambda self, x: (unknown(unknown(x)) @ self.weight, halved(x, x)))
    with pytest.warns(UserWarning, match="has no rule and runs replicated") as caught:
        module = parallel(model)
    assert [one.filename for one in caught] == [__file__] * 2
    said = [str(one.message) for one in caught]
    assert 'register_rule("tests_errors.unknown", "... -> ...") cuts it' in said[0]
    assert 'register_rule("tests_errors.halved", "b a!, b c! -> b d!") cuts the batch' in said[1]
    assert torch.equal(module(ones())[0], model(ones())[0])


def test_the_line_that_is_advised_does_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_RESOLVED", {})
    model = Calls(lambda self, x: unknown(x.detach()) @ self.weight)
    with pytest.warns(UserWarning, match="has no rule and runs replicated") as caught:
        parallel(model)
    (line,) = re.findall(r"register_rule\(.*?\)", str(caught[0].message))
    eval(line, {"register_rule": ap.register_rule})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(model)


@pytest.mark.parametrize(("devices", "backend"), [(4, None), (4, "virtual"), (1, None)])
def test_one_process_on_several_devices_is_told_of_once(
    devices: int, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    warn_about_virtual_mesh.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            parallel(Two(), backend=backend)
    is_told = devices > 1 and backend is None
    assert [one.filename for one in caught] == [__file__] * is_told
    assert all("torchrun --nproc-per-node 4" in str(one.message) for one in caught)
    warn_about_virtual_mesh.cache_clear()


def test_numbers_of_numpy_and_lists_are_welcome() -> None:
    model = product([[np.int64(1), 1], [1, np.int64(4)]])
    mesh = Mesh(d=np.int64(4))  # type: ignore[arg-type]
    assert parallel(model, mesh=mesh).plan.layouts["weight"].dims[1] == ("d",)
