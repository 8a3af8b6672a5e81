"""Families of transformers as tiny models: their own configurations made small, with inputs.

>>> model, inputs = build("bert")

What a configuration says by name (sizes, depths, vocabularies) is shrunk by one table, and so are
those that it holds; what else a family wants stands in `WANTS`. Dropout stays what it is; what a
program cannot draw (layers left out at random, masks drawn by numpy) is not, as capture asks.
Where the library casts to float32 whatever a model's dtype, the model stays in float64, so that
results can be compared to the last digits.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import moe
from transformers.models.auto import configuration_auto, modeling_auto

BATCH, LENGTH, VOCABULARY, IMAGE, CLASSES = 4, 16, 64, 32, 4
# What decides by random numbers which program a step is, or draws outside of torch: switched off.
NOT_DRAWN = (
    "layerdrop",
    "speech_encoder_layerdrop",
    "encoder_layerdrop",
    "decoder_layerdrop",
    "apply_spec_augment",
    "mask_time_prob",
    "mask_feature_prob",
)
# By which head a family is trained: the first of these that it has.
HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "TIME_SERIES_PREDICTION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "IMAGE_TEXT_TO_TEXT",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "PRETRAINING",
    "",
)
LANGUAGE = ("MASKED_LM", "CAUSAL_LM")
# What takes pictures beside their words.
BOTH = ("ZERO_SHOT_IMAGE_CLASSIFICATION",)
# Names in a configuration, as patterns -> what a larger number becomes. The first that fits counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size", 2),
    (r".*vocab.*size.*|num_embeddings|codebook_size", VOCABULARY),
    (r"mask_(time|feature)_length", 2),
    (r"num_mel_bins|feature_size|mel_dim|input_feat_per_channel", 16),
    (r".*(key_value|kv)_heads|num_kv_groups", 2),
    (r".*(_|^)n?_?heads|n_head|num_head", 4),
    (r"(.*_)?(head_dim|d_kv|d_head|kv_channels|dim_head|head_size)|(qk|v)_.*_dim", 8),
    (r"rotary_dim", 4),
    (r"(.*_)?(q|kv|o)_lora_rank|.*_rank", 8),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups|num_groups|.*_n_groups", 2),
    (r"num_kv_shared_layers", 0),
    (r"num_encoder_blocks", 4),
    (r"(num_|n_)?(.*_)?(layers?|blocks?|depth)", 2),
    (r"max_source_positions", 32),
    (r"(num|n)_.*experts?|moe_num_experts", 4),
    (r"(num_experts_per_tok|top_k|topk_group|moe_top_?k|num_experts_per_token|moe_k)", 2),
    (r"n_group", 1),
    (r"image_size|.*_image_size|img_size|resolution|input_size", IMAGE),
    (r"patch_size", 8),
    (r".*(ffn|intermediate|mlp|feed_?forward|inner|d_ff|dff).*", 64),
    (r".*(positions?|position_embeddings|context_length|max_seq_len|n_ctx|max_length)", 128),
    (r".*(sliding_window|attention_window|local_attention|window_size)", 8),
    (r".*(state_size|d_state|state_dim)", 8),
    (r".*chunk_size", 8),
    (r"(.*_)?(hidden_(size|dim)|d_model|n_embd|(embed|embedding|emb)_?(dim|size)|dim|width)", 32),
    (r".*(hidden_size|embed_dim|_dim|channels|projection_size|embedding_size)", 32),
    (r"(tdnn|conv)_dim|classifier_proj_size", 32),
)
HIDDEN = (16, 32, 64, 128)
# What a family wants besides.
WANTS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4},
    "efficientnet": {"width_coefficient": 0.25, "hidden_dim": 320, "image_size": 64},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "levit": {"patch_size": 16, "image_size": 64},
    "ministral": {"head_dim": 8},
    "mobilevitv2": {"image_size": 128},
    "neomme": {"head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    "swin": {
        "window_size": 4,
        "image_size": 32,
        "patch_size": 2,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "embed_dim": 16,
    },
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
}
# Kept as they are: sizes that others follow from.
KEPT: dict[str, tuple[str, ...]] = {
    "hgnet_v2": ("hidden_sizes", "embedding_size"),
    "textnet": ("hidden_sizes",),
}
# Audio that stands with its bands before its times.
BANDS_FIRST = ("whisper", "qwen2_audio", "voxtral", "audioflamingo3", "musicflamingo", "glmasr")
_QUIET = {"use_cache": False, "return_dict": True}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


@contextmanager
def everything_double() -> Iterator[None]:
    """Inside, float32 is float64."""
    with ExitStack() as stack:
        for name in ("float32", "float"):
            stack.enter_context(patch.object(torch, name, torch.float64))
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        # Of which torch has none in float64: the library's own stands in for it.
        stack.enter_context(patch.object(moe, "_can_use_grouped_mm", lambda *_: False))
        yield


class Trained(nn.Module):
    """A model that gives its loss; one without gives the mean square of what it gives, in which
    features count differently: of what is normalised the square says nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        with everything_double():
            outputs = self.model(**inputs)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, Tensor):
            return loss.sum()
        values = outputs.values() if isinstance(outputs, Mapping) else (outputs,)
        tensors = [v for v in values if isinstance(v, Tensor) and v.requires_grad]
        return torch.stack([_counted(value).square().mean() for value in tensors[:2]]).sum()


def _counted(value: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, value.shape[-1] if value.ndim else 1, dtype=value.dtype)
    return value * weights


def names() -> tuple[str, ...]:
    """All families that have a model."""
    return tuple(name for name in configuration_auto.CONFIG_MAPPING_NAMES if head_of(name))


def head_of(name: str) -> tuple[str, str] | None:
    """Of the family: by which head it is trained, and the class of its model."""
    for head in HEADS:
        mapping = f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES"
        found = getattr(modeling_auto, mapping).get(name)
        if found is not None:
            return head or "BASE", found if isinstance(found, str) else found[0]
    return None


def build(name: str) -> tuple[Trained, dict[str, Any]]:
    """The tiny model of a family, in training mode, and a global batch for it."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    found = head_of(name)
    assert found is not None
    head, kind = found
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    made = getattr(transformers, kind)
    config = configuration(name)
    if not isinstance(config, made.config_class):
        config = config.get_text_config()
    with everything_double():
        model = made(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # freshly made they are zeros and ones, and would not be missed
                parameter.add_(0.1 * torch.randn_like(parameter))
    return Trained(model), inputs_of(model, name, head)


def configuration(name: str) -> Any:
    """A family's own configuration, made small."""
    kind = transformers.CONFIG_MAPPING[name]
    config = small(kind, {**_QUIET, **WANTS.get(name, {})}, KEPT.get(name, ()))
    for one in (config, config.get_text_config(decoder=True)):
        for key, value in _TOKENS.items():
            if getattr(one, key, None) is None:
                setattr(one, key, value)
    return config


def small(kind: type, wants: Mapping[str, Any], kept: Collection[str] = ()) -> Any:
    """The configuration that a class makes by itself, made small."""
    default = kind()
    given, chosen = vars(default), dict[str, Any]()
    ids = iter(range(VOCABULARY - 1, 3, -1))
    for field in dataclasses.fields(kind):
        value = given.get(field.name)
        if isinstance(value, transformers.PreTrainedConfig):
            chosen[field.name] = small(type(value), wants.get(field.name, {}))
        elif field.name.endswith(("token_id", "token_index")):
            if isinstance(value, int) and value >= VOCABULARY:
                chosen[field.name] = _TOKENS.get(field.name) or next(ids)
        elif field.name not in kept and (shrunk := _shrunk(field.name, value)) != value:
            chosen[field.name] = shrunk
        elif field.name in NOT_DRAWN and value:
            chosen[field.name] = type(value)(0)
    rope, ignored = given.get("rope_parameters"), kind.ignore_keys_at_rope_validation  # type: ignore[attr-defined]
    if isinstance(rope, dict) and "mrope_section" in {*rope, *(ignored or ())}:
        chosen["rope_parameters"] = {**rope, "mrope_section": _sections(rope)}
    heads = "num_attention_heads"
    if heads in chosen and given.get("num_key_value_heads") == given.get(heads):
        chosen["num_key_value_heads"] = chosen[heads]
    chosen |= {key: value for key, value in wants.items() if not isinstance(value, Mapping)}
    return kind(**chosen)


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        found = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), value)
        return min(value, found)
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        if name in ("depths", "num_block_repeats", "layers"):
            return type(value)(min(one, 2) for one in value)
        if "hidden_sizes" in name or name in ("embed_dims", "embed_dim"):
            return type(value)(HIDDEN[: len(value)]) if len(value) <= len(HIDDEN) else value
        if name in ("conv_dim", "tdnn_dim"):
            return type(value)(32 for _ in value)
        if name in ("num_attention_heads", "num_heads"):
            return type(value)(min(2**index, 4) for index in range(len(value)))
        if name == "image_size":
            return type(value)(IMAGE for _ in value)
    return value


def _sections(rope: Mapping[str, Any]) -> list[int]:
    """How many pairs of a head turn by time, height and width: all, of a head of eight."""
    pairs = int(4 * rope.get("partial_rotary_factor", 1.0))
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def inputs_of(model: Any, name: str, head: str) -> dict[str, Any]:
    """A global batch, by what the model's forward takes."""
    config, takes = model.config, inspect.signature(model.forward).parameters
    made: dict[str, Any] = {}
    main = getattr(model, "main_input_name", "input_ids")
    if main not in takes:
        main = next((one for one in takes if one in ("pixel_values", "input_features")), main)
    both = head in BOTH and {"input_ids", "pixel_values"} <= {*takes}
    if head == "IMAGE_TEXT_TO_TEXT" and "input_ids" in takes:
        main = "input_ids"
    if main == "input_ids" or both:
        made["input_ids"] = torch.randint(5, VOCABULARY // 2, (BATCH, LENGTH))
    if main == "pixel_values" or both:
        size = of_config(config, "image_size") or IMAGE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = of_config(config, "num_channels") or 3
        frames = [of_config(config, "num_frames")] if head.startswith("VIDEO") else []
        made["pixel_values"] = torch.randn(BATCH, *frames, channels, height, width)
    elif main == "inputs":
        made["inputs"] = torch.randint(5, VOCABULARY // 2, (BATCH, LENGTH))
    elif main == "past_values":
        made["past_values"] = torch.randn(BATCH, 64)
    elif main == "input_values":
        # Frames are many samples, and an alignment has more of them than labels.
        made["input_values"] = torch.randn(BATCH, 4096 if head == "CTC" else 1024)
    elif main == "input_features":
        bins = of_config(config, "num_mel_bins") or of_config(config, "input_feat_per_channel")
        shape = (bins or 16, 64) if name in BANDS_FIRST else (64, bins or 16)
        made["input_features"] = torch.randn(BATCH, *shape)
    elif not made:
        raise NotImplementedError(f"a batch of {main}")
    if "labels" in takes and (labels := _labels(made, model, head)) is not None:
        made["labels"] = labels
    return made


def of_config(config: Any, name: str) -> Any:
    """What a configuration says, or the first of those that it holds."""
    if isinstance(found := vars(config).get(name), int | list | tuple):
        return found
    held = [one for one in vars(config).values() if isinstance(one, transformers.PreTrainedConfig)]
    return next((found for one in held if (found := of_config(one, name)) is not None), None)


def _labels(made: Mapping[str, Tensor], model: Any, head: str) -> Tensor | None:
    ids = made.get("input_ids", made.get("inputs"))
    if ids is not None and head in ("SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", *LANGUAGE):
        return ids.clone()
    if head in ("CTC", "SPEECH_SEQ_2_SEQ"):
        return torch.randint(5, VOCABULARY // 2, (BATCH, 3 if head == "CTC" else 6))
    if head.endswith("CLASSIFICATION"):
        count = getattr(model.config, "num_labels", 2)
        shape = (BATCH, LENGTH) if head.startswith("TOKEN") else (BATCH,)
        return torch.randint(0, count, shape)
    if head == "SEMANTIC_SEGMENTATION":
        return torch.randint(0, 2, (BATCH, *made["pixel_values"].shape[-2:]))
    return None
