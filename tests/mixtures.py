"""Small mixtures of experts: those of transformers, in float64 throughout."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import autopar as ap
from autopar.nn import moe
from autopar.strategies.kernels.experts.expert_kernels import experts
from tests.models import Case, _next_token_loss, _transformers

_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LATENT = {
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "topk_group": 1,
}
# What each calls the number of its experts, and what else it has to be told.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("num_local_experts", {}),
    "Qwen2Moe": (
        "num_experts",
        {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    ),
    "Qwen3Moe": ("num_experts", {"moe_intermediate_size": 12, "head_dim": 8}),
    "Olmoe": ("num_experts", {}),
    "DeepseekV2": ("n_routed_experts", {**_LATENT, "n_group": 1, "topk_method": "greedy"}),
    "DeepseekV3": ("n_routed_experts", {**_LATENT, "n_group": 2}),
    "GptOss": ("num_local_experts", {"head_dim": 8, "layer_types": ["full_attention"]}),
    "GraniteMoe": ("num_local_experts", {}),
    "Glm4Moe": ("n_routed_experts", {**_LATENT, "n_group": 1, "head_dim": 8}),
    "MiniMax": ("num_local_experts", {"head_dim": 8, "layer_types": ["full_attention"]}),
    "FlexOlmo": ("num_experts", {}),
    "Phimoe": ("num_local_experts", {}),
}


class _Precise:
    """torch, as a module of transformers sees it that computes in float64 throughout."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def family(name: str, monkeypatch: Any, *, experts: int = 4, batch: int = 4, **sizes: Any) -> Case:
    """A causal model of a family on random ids, in float64."""
    transformers = _transformers()
    moe = importlib.import_module("transformers.integrations.moe")
    # Its grouped product takes no float64; what it has for other devices does.
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    count, own = FAMILIES[name]
    told = {**_SIZES, "num_experts_per_tok": 2, **own, count: experts, **sizes}
    layers = told["num_hidden_layers"]
    if "layer_types" in told:
        told["layer_types"] = told["layer_types"] * layers
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**told)
        model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
        with torch.no_grad():  # as they are made some are zero, or small
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn_like(parameter))
        ids = torch.randint(32, (batch, 8))
    model.loss_function = _next_token_loss
    monkeypatch.setattr(sys.modules[type(model).__module__], "torch", _Precise())
    return Case(name, model, (), {"input_ids": ids, "labels": ids, "use_cache": False})


def cut_experts(case: Case, *axes: str) -> Case:
    """Every parameter of all experts cut by axes along the experts."""
    for name, module in case.model.named_modules():
        if name.endswith("experts") and not isinstance(module, nn.ModuleList):
            held = dict(module.named_parameters(recurse=False))
            if held:
                cut: Any = axes if len(axes) > 1 else axes[0]
                dims = {key: (cut, *[None] * (p.ndim - 1)) for key, p in held.items()}
                ap.shard(module, params=dims)
    return case


def tokens_of_experts(case: Case) -> list[list[int]]:
    """Of each call of `ap.nn.MoE` on one device, the tokens of each expert."""
    found: list[list[int]] = []

    def counting(
        x: Tensor, chosen: Tensor, weights: Tensor, down: Tensor, *rest: Any, **how: Any
    ) -> Tensor:
        count = len(down)  # one that there is not has what is dropped
        found.append(torch.bincount(chosen.flatten(), minlength=count)[:count].tolist())
        return experts(x, chosen, weights, down, *rest, **how)

    with patch.object(moe, "through_experts", counting), torch.no_grad():
        case.run()
    return found


class Mixture(nn.Module):
    """Blocks of ap.nn.MoE between an embedding and a head."""

    def __init__(self, blocks: int, hidden: int, inside: int, experts: int, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, hidden)
        self.blocks = nn.ModuleList(
            ap.nn.MoE(hidden, inside, experts, **options) for _ in range(blocks)
        )
        self.head = nn.Linear(hidden, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, own = self.embedding(ids), []
        for block in self.blocks:
            y, loss = block(x)
            x = x + y
            own.append(loss)
        logits = self.head(x)
        of_labels = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        has_own = self.blocks[0].balance_loss or self.blocks[0].z_loss
        return of_labels + sum(own) if has_own else of_labels


def mixture(
    *,
    blocks: int = 1,
    hidden: int = 8,
    inside: int = 12,
    experts: int = 4,
    batch: int = 4,
    **options: Any,
) -> Case:
    """A small one in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Mixture(blocks, hidden, inside, experts, **options).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        ids = torch.randint(16, (batch, 6))
    return Case("mixture", model, (ids, ids.roll(1, 1)))


def mixture_cut(case: Case, mesh: ap.Mesh) -> Case:
    """Tokens cut by dp and ep, experts by ep, their rows by tp, as far as there are such axes."""
    data = tuple(axis for axis in ("dp", "ep") if axis in mesh)
    rows = "tp" if "tp" in mesh else None
    ap.shard(case.model.embedding, ((data, None),))
    for block in case.model.blocks:
        cut = {"gate": ("ep", rows, None), "up": ("ep", rows, None), "down": ("ep", None, rows)}
        ap.shard(
            block, params={n: dims for n, dims in cut.items() if getattr(block, n) is not None}
        )
    return case
