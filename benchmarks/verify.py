"""Verify: the models of the tests and families of transformers, plain, captured and in parallel.

    python -m benchmarks.verify

Prints a line of JSON for each: whether the three programs are one, the largest errors, and the
first value that differs. Models are built from small configurations with dropout at zero.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar as ap
from tests import models
from tests.models import Case

MESH = ap.Mesh(dp=2, tp=2)
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
DROPS = ("dropout", "drop", "layerdrop")
# Name in transformers -> what its configuration wants besides, or calls otherwise.
CAUSAL: dict[str, dict[str, Any]] = {
    "GPTNeoX": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"sliding_window": 4},
    "Mistral": {"sliding_window": 4},
    "Phi": {},
    "Phi3": {},
    "Olmo2": {},
    "Cohere": {},
    "StableLm": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32},
}


def causal(name: str) -> Case:
    """A causal language model of a family, from a small configuration."""
    config = getattr(transformers, f"{name}Config")(**TEXT, **CAUSAL[name])
    for key in vars(config):
        if any(word in key for word in DROPS) and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    return _case(name, getattr(transformers, f"{name}ForCausalLM"), config)


def paligemma() -> Case:
    """Text alone: its attention mask is another one when it is exported."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 32,
        "num_image_tokens": 4,
    }
    config = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config={**TEXT, "model_type": "gemma"},
        image_token_index=63,
        projection_dim=32,
    )
    case = _case("PaliGemma", transformers.PaliGemmaForConditionalGeneration, config)
    case.kwargs.update(attention_mask=torch.ones_like(case.kwargs["input_ids"]), use_cache=False)
    return case


def t5() -> Case:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64}
    tokens: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(**sizes, **tokens, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.use_cache = False
    return _case("T5", transformers.T5ForConditionalGeneration, config)


def _case(name: str, kind: Callable[[Any], nn.Module], config: Any) -> Case:
    torch.manual_seed(0)
    ids: Tensor = torch.randint(3, 60, (4, 8))
    return Case(name, kind(config).train(), (), {"input_ids": ids, "labels": ids.clone()})


OF_THE_TESTS: dict[str, Callable[[], Case]] = {
    name: getattr(models, name) for name in ("mlp", "resnet", "gpt", "gpt2", "llama", "bert", "vit")
}
CASES: dict[str, Callable[[], Case]] = {
    **OF_THE_TESTS,
    **{name: partial(causal, name) for name in CAUSAL},
    "T5": t5,
    "PaliGemma": paligemma,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    torch.set_num_threads(1)
    for name in parser.parse_args().names or CASES:
        start = time.perf_counter()
        line: dict[str, Any] = {"model": name}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case = CASES[name]()
                found = ap.verify(case.model, case.args, case.kwargs, mesh=MESH)
            data = found.to_json()
            for program in ("captured", "parallel"):
                rows = data[program]
                line[program] = max((row["error"] or 0.0 for row in rows), default=0.0)
            line |= {
                key: data[key] for key in ("ok", "unverified", "dtype", "tolerance", "differences")
            }
        except ap.AutoparError as error:
            line["refused"] = str(error)
        line["seconds"] = round(time.perf_counter() - start, 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
