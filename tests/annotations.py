"""Ways to annotate the models of the zoo, by the names of their modules.

>>> case = megatron(gpt(), "tp")
>>> case = sequence(case, "tp")

Every function annotates the model of a case in place and returns the case. `axes` may be one axis
or several, outermost first.
"""

from __future__ import annotations

import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar as ap
from tests.models import Attention, Case

Axes = str | tuple[str, ...]

_COLUMNS = re.compile(
    r"(^|\.)(q|k|v|qkv|up|c_attn|c_fc|[qkv]_proj|gate_proj|up_proj|query|key|value|fc1"
    r"|intermediate\.dense|layers\.0|convolutions\.0|stem)$"
)
_ROWS = re.compile(
    r"(^|\.)(out|down|c_proj|o_proj|down_proj|fc2|output\.dense|layers\.1|convolutions\.1)$"
)
_VOCABULARY = re.compile(
    r"(^|\.)(tokens|wte|embed_tokens|word_embeddings|head|lm_head|classifier)$"
)
_NORM = re.compile(r"(norm|Norm|ln_)[^.]*$")


def megatron(case: Case, axes: Axes = "tp") -> Case:
    """The first of each pair of layers cut by columns, the second by rows."""
    for name, module in case.model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or isinstance(weight, nn.Module):
            continue
        out_dim = 1 if type(module).__name__ == "Conv1D" else 0
        if _COLUMNS.search(name):
            _cut(module, out_dim, axes)
        elif _ROWS.search(name):
            _cut(module, 1 - out_dim, axes)
    return case


def vocabulary(case: Case, axes: Axes = "tp") -> Case:
    """Embedding and head cut by vocabulary (by classes)."""
    for name, module in case.model.named_modules():
        if _VOCABULARY.search(name):
            _cut(module, 0, axes)
    return case


def sequence(case: Case, axes: Axes = "tp", batch: Axes | None = None) -> Case:
    """The residual cut along the sequence: the inputs of every norm."""
    for name, module in case.model.named_modules():
        if _NORM.search(name) and not list(module.children()):
            ap.shard(module, ((batch, axes, None),))
    return case


def attention(case: Case, heads: Axes | None = None, rows: Axes | None = None) -> Case:
    """Queries, keys and values cut by heads, by rows, or both: Ulysses, a ring, or both."""
    for module in case.model.modules():
        if isinstance(module, Attention):
            cut = ((None, heads, rows, None),) * 3
            module.attend = ap.shard(F.scaled_dot_product_attention, cut)  # type: ignore[method-assign]
    return case


def hidden(case: Case, axes: Axes = "tp") -> Case:
    """The outputs of the embeddings, and what the rows of weights give, cut along their width."""
    for name, module in case.model.named_modules():
        if isinstance(module, nn.Embedding) or _ROWS.search(name):
            ndim = 2 if re.search(r"(^|\.)positions$", name) else 3
            ap.shard(module, out_strategy=((*(None,) * (ndim - 1), axes),))
    return case


def stored(case: Case, axes: Axes = "dp", least: int = 2) -> Case:
    """Every parameter of `least` rows stored cut on its first dim, and the batch cut: ZeRO-3."""
    for module in case.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.shape[0] >= least:
                ap.shard(module, params={name: (axes, *(None,) * (parameter.ndim - 1))})
    inputs = [*case.args, *case.kwargs.values()]
    ap.shard(case.model, tuple((axes, *(None,) * (value.ndim - 1)) for value in inputs))
    return case


def outputs(case: Case) -> dict[str, tuple[int, ...]]:
    """The modules that are called once and return one tensor, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    calls: Counter[str] = Counter()
    copy = case.fresh()
    for name, module in copy.model.named_modules():

        def note(module: nn.Module, args: tuple, result: object, name: str = name) -> None:
            calls[name] += 1
            if isinstance(result, Tensor) and name:
                shapes[name] = tuple(result.shape)

        module.register_forward_hook(note)
    with torch.no_grad():
        copy.run()
    return {name: shape for name, shape in shapes.items() if calls[name] == 1}


def _cut(module: nn.Module, dim: int, axes: Axes) -> None:
    ndim = module.get_parameter("weight").ndim
    ap.shard(module, params={"weight": tuple(axes if d == dim else None for d in range(ndim))})
