"""What a captured program says of its model: names, ties, inputs, outputs, origins, devices."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from autopar.capture import capture, listing, run, verify
from autopar.capture.marker import ANNOTATE
from tests.capture.support import Function, check, placeholder, program, random, targets
from tests.models import gpt, gpt2, mlp, resnet


def test_tied_parameters_have_the_first_name() -> None:
    captured = check(*_parts(gpt(batch=2)))
    assert captured.tied == {"head.weight": "tokens.weight"}
    assert captured.parameters["p_tokens_weight"] == "tokens.weight"
    assert "head.weight" not in captured.parameters.values()
    assert len(placeholder(captured, "p_tokens_weight").users) == 2


def test_placeholders_are_in_order_and_unused_ones_stay() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4), persistent=False)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * self.table.double()

    model = Unused().double()
    captured = check(model, (random(3, 4),))
    names = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    assert names[:4] == [f"p_{m}_{p}" for m in ("first", "second") for p in ("weight", "bias")]
    assert names[4] == "b_scale"
    assert names[-1] == "x"
    assert list(captured.parameters.values()) == [name for name, _ in model.named_parameters()]
    assert not placeholder(captured, "p_second_weight").users
    assert set(names[5:-1]) == set(captured.constants)


def warns_of_its_caller(self: Any, x: Tensor) -> Tensor:
    warnings.warn("nothing is clamped", stacklevel=3)
    return self.linear(x)


def counts_and_warns(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    warnings.warn("nothing is clamped", stacklevel=1)
    return self.linear(x)


@pytest.mark.parametrize(
    ("forward", "texts"),
    [
        (warns_of_its_caller, ["nothing is clamped"]),
        (counts_and_warns, ["nothing is clamped", "calls is another number"]),
        (lambda self, x: F.mse_loss(self.linear(x), torch.zeros(3, 1)), ["Using a target size"]),
        (lambda self, x: F.softmax(self.linear(x)), ["Implicit dimension choice"]),
        (lambda self, x: self.linear(x) * torch.tensor(torch.tensor(2.0)), ["To copy construct"]),
        (lambda self, x: self.linear(x), []),
    ],
)
def test_what_forward_and_torch_warn_of_is_shown_once(
    forward: Callable[..., Tensor], texts: list[str]
) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        capture(Function(forward), (torch.randn(3, 4),))
    assert [text in str(one.message) for text, one in zip(texts, shown, strict=True)] == [
        True for _ in texts
    ]
    assert {warning.filename for warning in shown} <= {__file__}


def test_inputs_keep_their_flat_order() -> None:
    def forward(self: Any, x: Tensor, pair: list[Any], flag: bool, *, scale: Tensor) -> Any:
        y = self.linear(x) * pair[0] * pair[1] + scale
        return {"y": y if flag else -y, "again": [y, None, 3], "x": x}

    model = Function(forward).double()
    args, kwargs = (random(3, 4), [2, random(3, 4)], True), {"scale": random(4)}
    captured = check(model, args, kwargs)
    assert [name is None for name in captured.inputs] == [False, True, False, True, False]
    assert captured.static_inputs == {1: 2, 3: True}
    assert captured.output_spec.num_leaves == 5
    nodes = [leaf for leaf in captured.output_leaves if isinstance(leaf, torch.fx.Node)]
    assert nodes == list(captured.graph.output_node().args[0])  # type: ignore[arg-type]


def test_a_tensor_given_twice_is_two_inputs() -> None:
    model = Function(lambda self, a, b: self.linear(a) - b).double()
    x, other = random(3, 4), random(3, 4, seed=2)
    captured = capture(model, (x, x))
    result, _ = run(captured, dict(model.named_parameters()), {}, (x, other))
    assert torch.equal(result, model(x, other))


def test_the_order_of_keywords_is_free() -> None:
    model = Function(lambda self, a, *, b, c: self.linear(a) * b - c).double()
    check(model, (random(3, 4),), {"c": random(4), "b": random(3, 4, seed=2)})


def test_requires_grad_decides_what_is_differentiable() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.learnt = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.frozen(x)
            return self.learnt(hidden) + hidden.argmax(-1, keepdim=True)

    model = Frozen().double()
    captured = check(model, (random(3, 4),))
    flags = {node.name: node.meta["differentiable"] for node in captured.graph.nodes}
    assert not flags["p_frozen_weight"]
    assert not flags["linear"]
    assert not flags["argmax"]
    assert flags["p_learnt_weight"]
    assert flags["linear_1"]
    with_gradient = capture(model, (random(3, 4).requires_grad_(),))
    assert placeholder(with_gradient, "x").meta["differentiable"]
    assert placeholder(with_gradient, "linear").meta["differentiable"]


def test_every_call_knows_its_module_and_line() -> None:
    captured = capture(*_parts(gpt(batch=2)))
    by_name = {node.name: node for node in captured.graph.nodes}
    assert by_name["layer_norm"].meta["module"] == "layers.0.norm1"
    source = by_name["gelu"].meta["source"]
    assert source.startswith("tests/models.py:") or "/tests/models.py:" in source
    assert source.endswith("return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))")
    assert all(n.meta["source"] for n in captured.graph.nodes if n.op == "call_function")


def test_lines_of_transformers_are_of_the_model_s_file() -> None:
    captured = capture(*_parts(gpt2(batch=2, layers=1)))
    product = next(node for node in captured.graph.nodes if node.name == "matmul")
    assert product.meta["module"] == "transformer.h.0.attn.c_attn"
    assert product.meta["source"].startswith("transformers/models/gpt2/modeling_gpt2.py:")


def test_meta_models_capture_like_real_ones() -> None:
    case = gpt(batch=2, tied=False)
    expected = listing(capture(case.model, case.args).graph)
    case.model.to("meta")
    on_meta = tuple(value.to("meta") for value in case.args)
    assert listing(capture(case.model, on_meta).graph) == expected
    assert listing(capture(case.model, case.args).graph) == expected
    assert all(p.device.type == "meta" for p in case.model.parameters())
    assert listing(capture(gpt(batch=2, tied=False).model, on_meta).graph) == expected


def test_models_under_fake_tensor_mode() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(4, 3), torch.randn(2, 4)
        inside = capture(model, (x,))
    assert listing(capture(model, (x,)).graph) == listing(inside.graph)
    assert targets(inside) == ["linear", "add"]


def test_a_model_of_175_billion_parameters() -> None:
    hidden = 12288
    with torch.device("meta"):
        blocks = [nn.TransformerEncoderLayer(hidden, 96, 4 * hidden, 0.0, norm_first=True)]
        for _ in range(3):
            blocks.append(nn.TransformerEncoderLayer(hidden, 96, 4 * hidden, 0.0, norm_first=True))
        model = nn.Sequential(*blocks)
        x = torch.empty(2048, 32, hidden)
    captured = capture(model, (x,))
    assert targets(captured).count("scaled_dot_product_attention") == 4


def test_the_model_s_own_attributes_are_left_alone() -> None:
    def forward(self: Function, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        self.calls = getattr(self, "calls", 0) + 1
        return self.last * 2

    model = Function(forward)
    capture(model, (torch.randn(3, 4),))
    assert not hasattr(model, "last")
    assert not hasattr(model, "calls")


def test_annotations_survive_and_stop_reshapes() -> None:
    def forward(self: Function, x: Tensor) -> Tensor:
        flat = torch.ops.autopar.annotate(x.view(-1, 4), "{}")
        return torch.ops.autopar.annotate(self.linear(flat), "{}").view(2, 3, 4)

    model = Function(forward).double()
    captured = capture(model, (random(2, 3, 4),))
    marks = [node for node in captured.graph.nodes if node.target is ANNOTATE]
    assert [mark.args[0].name for mark in marks] == ["reshape", "add"]  # type: ignore[union-attr]
    assert all("test_export.py" in mark.meta["source"] for mark in marks)
    assert placeholder(captured, "linear").meta["val"].shape == (6, 4)
    assert placeholder(captured, "autopar_annotate_1")


def test_shapes_of_values_are_those_of_the_run() -> None:
    captured = capture(*_parts(resnet(batch=2)))
    verify(captured.graph, "captured")
    assert listing(captured.graph).count("\n") == len(captured.graph.nodes) - 1


def test_the_listing_of_a_small_program() -> None:
    case = mlp(batch=2, inputs=3, hidden=4, outputs=2, layers=2)
    lines = listing(capture(case.model, case.args).graph).splitlines()
    line = next(line for line in lines if line.startswith("linear ="))
    start = "linear = linear(x, p_layers_0_weight)"
    assert line.startswith(start)
    assert ": f64[2, 4]" in line
    assert line.endswith(f"# layers.0  {_location()}")


def _location() -> str:
    from tests import models

    lines, first = inspect.getsourcelines(models.MLP.forward)
    offset = next(i for i, line in enumerate(lines) if "torch.relu(layer(x))" in line)
    return f"tests/models.py:{first + offset}"


def _parts(case: Any) -> tuple[Any, ...]:
    return case.model, case.args, case.kwargs


def test_a_function_program_is_checked_too() -> None:
    assert targets(program(lambda self, x: self.linear(x), random(3, 4))) == ["linear", "add"]
