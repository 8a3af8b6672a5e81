"""The models of `benchmarks/choices.py`, at their real sizes on the meta device.

Configurations are those of their papers. They are planned in 16 bits, never run.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.nets import UNet
from tests import large_models
from tests.large_models import gpt2, language, llama, meta
from tests.models import Case, _transformers

GIGABYTE = 10**9


def mixtral_8x7b(*, batch: int = 256, sequence: int = 4096, layers: int = 32) -> Case:
    """Mixtral 8x7B: of eight experts each token goes to two."""
    transformers = _transformers()
    config = transformers.MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32768,
        use_cache=False,
    )
    return language("mixtral", lambda: transformers.MixtralForCausalLM(config), batch, sequence)


def deepseek_v3(*, batch: int = 15360, sequence: int = 4096, layers: int = 61) -> Case:
    """DeepSeek-V3: 671 billion parameters; of 256 experts each token goes to eight."""
    transformers = _transformers()
    config = transformers.DeepseekV3Config(num_hidden_layers=layers, use_cache=False)
    return language(
        "deepseek-v3", lambda: transformers.DeepseekV3ForCausalLM(config), batch, sequence
    )


def llama3_405b(*, batch: int = 2048, sequence: int = 8192, layers: int = 126) -> Case:
    """Llama 3 with 405 billion parameters."""
    return llama("llama3-405b", batch, sequence, layers, hidden=16384, inner=53248, heads=128)


def long_7b(*, batch: int = 16, sequence: int = 262_144, layers: int = 32) -> Case:
    """A Llama with 7 billion parameters on long sequences."""
    sizes = {"hidden": 4096, "inner": 11008, "heads": 32, "key_heads": 32}
    return llama("long-7b", batch, sequence, layers, **sizes)


def gpt2_small(*, batch: int = 512, sequence: int = 1024, layers: int = 12) -> Case:
    """GPT-2 with 124 million parameters."""
    return gpt2("gpt2", batch, sequence, layers, hidden=768, heads=12)


def vit_22b(*, batch: int = 4096, layers: int = 48) -> Case:
    """ViT-22B on images of 224 x 224 in patches of 14 x 14."""
    transformers = _transformers()
    config = transformers.ViTConfig(
        hidden_size=6144,
        intermediate_size=24576,
        num_hidden_layers=layers,
        num_attention_heads=48,
        image_size=224,
        patch_size=14,
        num_labels=1000,
    )
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config).to(torch.bfloat16).train()
    pixels = meta(batch, 3, 224, 224, dtype=torch.bfloat16)
    return Case("vit-22b", model, (), {"pixel_values": pixels, "labels": _ids(batch)})


def t5_11b(*, batch: int = 2048, layers: int = 24) -> Case:
    """T5 with 11 billion parameters: 512 tokens read, 128 written."""
    transformers = _transformers()
    config = transformers.T5Config(
        d_model=1024,
        d_kv=128,
        d_ff=65536,
        num_layers=layers,
        num_heads=128,
        decoder_start_token_id=0,
        dropout_rate=0.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).train()
    return Case("t5-11b", model, (), {"input_ids": _ids(batch, 512), "labels": _ids(batch, 128)})


def unet(*, batch: int = 1024, width: int = 384, size: int = 64) -> Case:
    """A U-Net that tells the noise of images."""
    with torch.device("meta"):
        model = UNet(width).to(torch.bfloat16).train()
    images = meta(batch, 3, size, size, dtype=torch.bfloat16)
    steps = meta(batch, dtype=torch.bfloat16)
    return Case("unet", model, (images, images, steps))


class Recommender(nn.Module):
    """Deep learning recommendation: a table for each category, and products of pairs of vectors."""

    def __init__(self, rows: list[int], width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, width) for count in rows)
        self.bottom = _perceptron(dense, 512, 256, width)
        features = len(rows) + 1
        self.top = _perceptron(features * features + width, 1024, 1024, 512, 256, 1)

    def forward(self, dense: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        first = self.bottom(dense)
        vectors = [first, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, dim=1)
        pairs = (stacked @ stacked.transpose(1, 2)).flatten(1)
        logits = self.top(torch.cat([first, pairs], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


def recommender(*, batch: int = 65536, gigabytes: int = 100, width: int = 128) -> Case:
    """A recommender whose 26 tables, a few of them large, hold so many gigabytes in 32 bits."""
    rows = gigabytes * GIGABYTE // (4 * width)
    large, small = [rows * 3 // 16 // 64 * 64] * 5, [rows // 16 // 21 // 64 * 64] * 21
    with torch.device("meta"):
        model = Recommender([*large, *small], width, dense=13).train()
    args = meta(batch, 13), _ids(batch, 26), meta(batch)
    return Case("recommender", model, args)


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _ids(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.long)


gpt2_xl, gpt3, gpt_1t = large_models.gpt2_xl, large_models.gpt3, large_models.gpt_1t
llama3, llama3_70b = large_models.llama3, large_models.llama3_70b
