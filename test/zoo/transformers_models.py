"""Fifteen architectures of transformers, in their smallest useful configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Entry

__all__ = ["transformers_entries"]

GROUP = "transformers"
_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_IMAGE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_DECODER: dict[str, Any] = {**_TEXT, "num_key_value_heads": 1, "use_cache": False}

_DECODERS = ("GPT-2", "Llama", "Qwen2")
_LOGITS_TO_KEEP = "it makes logits_to_keep=0 a tensor, which selects one position instead of all"

# model class, configuration class, arguments of the configuration, inputs
_MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "BERT": ("BertForSequenceClassification", "BertConfig", _TEXT, "text"),
    "DistilBERT": (
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
        "text",
    ),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", _TEXT, "text"),
    "ViT": ("ViTForImageClassification", "ViTConfig", _IMAGE, "image"),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", _IMAGE, "image"),
    "Swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        "image",
    ),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "image_size": 32},
        "image",
    ),
    "CLIP": ("CLIPModel", "CLIPConfig", {}, "clip"),
    "GPT-2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 64,
            "n_positions": 32,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "use_cache": False,
        },
        "text",
    ),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER, "text"),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER, "text"),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        "seq2seq",
    ),
    "Whisper encoder": (
        "WhisperModel",
        "WhisperConfig",
        {
            "vocab_size": 64,
            "num_mel_bins": 16,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 32,
            "pad_token_id": 0,
        },
        "mel",
    ),
    "Wav2Vec2": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "conv_dim": (16, 16, 16),
            "conv_stride": (5, 2, 2),
            "conv_kernel": (10, 3, 3),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "apply_spec_augment": False,
            # Without layers dropped at random every step trains every layer.
            "layerdrop": 0.0,
        },
        "wave",
    ),
    "SegFormer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 16,
            "num_attention_heads": [1, 2, 2, 2],
        },
        "image64",
    ),
}


def transformers_entries() -> list[Entry]:
    """Return the fifteen entries."""
    return [_entry(name, kind) for name, (_, _, _, kind) in _MODELS.items()]


def _entry(name: str, kind: str) -> Entry:
    refused_by = {"TorchScript": _LOGITS_TO_KEEP} if name in _DECODERS else {}
    build = partial(_build, name)
    return Entry(GROUP, "transformers", name, build, _INPUTS[kind], _TEXTS[kind], refused_by)


def _build(name: str) -> nn.Module:
    import transformers

    model_class, config_class, arguments, _ = _MODELS[name]
    if name == "CLIP":
        arguments = {
            # eos_token_id 2 makes CLIP take the position of the largest token, as it did first
            "text_config": {**_TEXT, "eos_token_id": 2},
            "vision_config": dict(_IMAGE),
            "projection_dim": 16,
        }
    config = getattr(transformers, config_class)(**arguments)
    model: nn.Module = getattr(transformers, model_class)(config)
    return model.get_encoder() if name == "Whisper encoder" else model


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _tokens(batch: int) -> Tensor:
    return torch.randint(3, 64, (batch, 8), generator=_generator())


def _text(batch: int) -> Mapping[str, Tensor]:
    mask = torch.ones(batch, 8, dtype=torch.long)
    return {"input_ids": _tokens(batch), "attention_mask": mask}


def _seq2seq(batch: int) -> Mapping[str, Tensor]:
    return {**_text(batch), "decoder_input_ids": _tokens(batch)[:, :4].contiguous()}


def _image(size: int, batch: int) -> Mapping[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size, generator=_generator())}


def _clip(batch: int) -> Mapping[str, Tensor]:
    return {**_text(batch), **_image(32, batch)}


def _mel(batch: int) -> Mapping[str, Tensor]:
    return {"input_features": torch.randn(batch, 16, 64, generator=_generator())}


def _wave(batch: int) -> Mapping[str, Tensor]:
    return {"input_values": torch.randn(batch, 800, generator=_generator())}


_INPUTS: dict[str, Callable[[int], Mapping[str, Tensor]]] = {
    "text": _text,
    "image": partial(_image, 32),
    "image64": partial(_image, 64),
    "clip": _clip,
    "seq2seq": _seq2seq,
    "mel": _mel,
    "wave": _wave,
}
_TEXTS = {
    "text": "2x8 tokens",
    "image": "2x3x32x32",
    "image64": "2x3x64x64",
    "clip": "2x8 tokens, 2x3x32x32",
    "seq2seq": "2x8 and 2x4 tokens",
    "mel": "2x16x64",
    "wave": "2x800 samples",
}
