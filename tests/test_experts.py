"""Mixtures of experts: recognised, cut by experts, and equal to one device."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import autopar as ap
from autopar import Mesh
from autopar.capture import capture, listing
from autopar.collectives import joint_kernels
from autopar.strategies.kernels.experts.expert_kernels import experts
from tests.mixtures import FAMILIES, _Precise, cut_experts, family, mixture, mixture_cut
from tests.models import Case, _transformers
from tests.parity import assert_parity

TRAINED = ["Mixtral", "DeepseekV3", "GptOss"]


def routed(case: Case, *axes: str) -> Case:
    """The batch cut by axes of which the last cuts the experts."""
    ap.shard(case.model.model.embed_tokens, ((axes, None),))
    return cut_experts(case, axes[-1])


@contextmanager
def trades() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what one member sends to another, of every trade of the first member."""
    seen: list[tuple[int, ...]] = []
    deliver = joint_kernels._deliver

    def watched(asked: Any) -> Any:
        if isinstance(asked[0], joint_kernels.AllToAll):
            seen.append(tuple(asked[0].tensors[0].shape))
        return deliver(asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_kernels, "_deliver", watched)
        yield seen


@pytest.mark.parametrize("name", TRAINED)
def test_families_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens go to the ranks that have their experts: the model is what it is on one device."""
    case = routed(family(name, monkeypatch), "dp", "ep")
    module = assert_parity(case, Mesh(dp=2, ep=2))
    assert str(module.graph).count("routed_experts(") == 1


@pytest.mark.parametrize(
    ("mesh", "batch", "experts"),
    [(Mesh(ep=3), 6, 5), (Mesh(ep=4), 5, 6), (Mesh(ep=4), 4, 5), (Mesh(ep=2, dp=2), 4, 4)],
    ids=str,
)
def test_meshes(mesh: Mesh, batch: int, experts: int) -> None:
    """What does not divide, a rank without tokens, one without experts, another order of axes."""
    case = mixture_cut(mixture(batch=batch, experts=experts), mesh)
    assert "routed_experts(" in str(assert_parity(case, mesh).graph)


def test_all_tokens_choose_the_experts_of_one_rank() -> None:
    case = mixture()
    with torch.no_grad():
        case.model.embedding.weight.abs_()
        case.model.blocks[0].router.weight.abs_()[2:] *= -1
    assert_parity(mixture_cut(case, Mesh(ep=2)), Mesh(ep=2))


def test_experts_cut_where_tokens_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds what its experts give; on the other axis their rows are cut inside."""
    case = family("GptOss", monkeypatch)
    cut = {
        "gate_up_proj": ("ep", None, "tp"),
        "gate_up_proj_bias": ("ep", "tp"),
        "down_proj": ("ep", "tp", None),
    }
    ap.shard(case.model.get_submodule("model.layers.0.mlp.experts"), params=cut)
    module = assert_parity(case, Mesh(ep=2, tp=2))
    assert "f64[4@ep, 16, 48@tp]" in str(module.graph)


def test_tokens_are_exchanged_twice_forward_and_twice_backward() -> None:
    mesh = Mesh(ep=8)
    case = mixture_cut(mixture(hidden=16, batch=8, experts=8), mesh)
    about: Any = {"mesh": mesh, "mode": "propagate", "backend": "virtual"}
    module = ap.parallelize(case.model, case.args, **about)
    with trades() as seen:
        module.step(*case.args)
    # Sizes; tokens with two choices and their weights; results; their gradients; those of tokens.
    assert [shape[-1] for shape in seen] == [2, 16 + 4, 16, 16, 16 + 2]
    assert str(module.graph).count("f64[8@ep, 12, 16]") == 2


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in TRAINED])
def test_families_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = family(name, monkeypatch)
    captured = capture(case.model, case.args, case.kwargs)
    text = listing(captured.graph)
    assert text.count("autopar.experts(") == 1
    assert "histc" not in text
    assert "sort(" not in text


def test_a_layer_of_deepseek_is_planned_by_experts() -> None:
    """Of its real sizes, on the meta device: 256 experts on 64 ranks."""
    config = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "use_cache": False}
    transformers = _transformers()
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**config))
        ids = torch.empty(64, 4096, dtype=torch.long)
    called = {"input_ids": ids, "labels": ids, "use_cache": False}
    cluster = ap.Cluster.preset("dgx-h100", nodes=8)
    plan = ap.plan(
        model.to(torch.bfloat16), (), called, mesh=Mesh(ep=64), cluster=cluster, pipeline=None
    )
    assert "routed_experts(" in str(plan.graph)
    assert "bf16[256@ep, 4096, 7168]" in str(plan)


def test_an_expert_is_chosen_several_times() -> None:
    """By one token: more choices than there are experts."""
    down, gate, up = (torch.randn(2, 4, 4, dtype=torch.float64) for _ in range(3))
    weights = torch.randn(4, 3, dtype=torch.float64)

    class Hashed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = torch.nn.Parameter(down)

        def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            return experts(x, chosen, weights, self.down, gate, up).square().sum()

    inputs = torch.randn(4, 4, dtype=torch.float64), torch.randint(2, (4, 3))
    assert ap.verify(Hashed(), inputs, mesh=Mesh(ep=2)).ok


def test_a_layer_that_nothing_reads_has_gradients_of_zeros() -> None:
    shapes = (2, 4, 3), (2, 3, 4), (2, 3, 4)
    down, gate, up = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    routing = torch.tensor([[0], [1]]), torch.ones(2, 1)
    experts(torch.randn(2, 4), *routing, down, gate, up, inner="relu(gate)").sum().backward()
    assert up.grad is not None
    assert not up.grad.any()


def test_a_norm_behind_the_experts_is_of_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's choices are tokens of their own then."""
    found = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
    moe = importlib.import_module("transformers.integrations.moe")
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)
    monkeypatch.setattr(found, "torch", _Precise())
    config = found.MuseSparkTextConfig(
        **{
            "hidden_size": 16,
            "moe_hidden_size": 12,
            "moe_intermediate_size": 8,
            "num_attention_heads": 2,
        },
        **{"num_local_experts": 6, "num_experts_per_tok": 2},
    )
    config._experts_implementation = "grouped_mm"

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = found.MuseSparkMoE(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mixture(x).square().sum()

    torch.manual_seed(0)
    model, x = Mixture().double(), torch.randn(4, 5, 16, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    text = listing(capture(model, (x,)).graph)
    assert text.count("autopar.experts(") == 1
    assert "grouped_mm" not in text
    for mesh in (Mesh(ep=3), Mesh(dp=2, ep=2)):
        assert ap.verify(model, (x,), mesh=mesh).ok


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_in_float32_they_are_taken_as_they_come(name: str) -> None:
    """With the grouped product that their configurations choose."""
    transformers = pytest.importorskip("transformers")
    count = "num_local_experts" if name == "Mixtral" else "num_experts"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    told = {**sizes, **more, **ids, count: 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(**told)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    given = torch.randint(64, (4, 8))
    assert model.config._experts_implementation == "grouped_mm"
    plain = model(given, labels=given).loss
    options = {"mesh": Mesh(dp=2, ep=2), "backend": "virtual"}
    module = ap.parallelize(model, (given,), {"labels": given}, **options)
    assert listing(module.plan.captured.graph).count("autopar.experts(") == 2
    torch.testing.assert_close(module(given, labels=given).loss, plain)
