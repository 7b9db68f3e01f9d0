"""Real architectures with random weights, built by name; nothing is downloaded."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODELS = tuple(Path(__file__).with_name("models.txt").read_text().split("\n")[:-1])

_VISION = {
    *("vit", "deit", "beit", "swin", "swinv2", "convnext", "convnextv2", "resnet", "regnet", "mobilevit", "pvt", "cvt"),
    *("mobilenet_v2", "dinov2", "segformer", "poolformer", "levit", "efficientnet", "focalnet", "dpt"),
}
# Small versions of whatever a configuration calls these things.
_SMALL = {
    64: "hidden_size n_embd d_model dim embedding_size attention_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads kv_n_heads "
    "num_experts_per_tok eos_token_id",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_experts num_local_experts",
    128: "intermediate_size d_ff ffn_dim hidden_dim encoder_ffn_dim decoder_ffn_dim max_position_embeddings d_inner",
    16: "head_dim d_kv d_head",
    256: "vocab_size",
    0: "pad_token_id",
    1: "bos_token_id",
}


def build(line: str) -> tuple[nn.Module, Any]:
    """A model in eval mode and an example for it. No weight is zero, because zeros hide mistakes."""
    source, name = line.split()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, example = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[source](name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for key, buffer in model.named_buffers():
            if key.endswith("running_mean"):
                buffer.add_(torch.randn_like(buffer) * 0.05)
            elif key.endswith("running_var"):
                buffer.add_(torch.rand_like(buffer) * 0.2)
    return model.eval(), example


def _timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    model = timm.create_model(name)
    return model, torch.randn(1, *model.default_cfg["input_size"])


def _torchvision(name: str) -> tuple[nn.Module, Any]:
    from torchvision.models import get_model

    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    size = 299 if name == "inception_v3" else 224
    return get_model(name, **options), torch.randn(1, 3, size, size)


def _transformers(name: str) -> tuple[nn.Module, Any]:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.for_model(name)
    tokens = torch.randint(3, 200, (1, 16))
    if name in _VISION:
        size = getattr(config, "image_size", 224)
        size = size if isinstance(size, int) else size[0]
        return AutoModel.from_config(config), {"pixel_values": torch.randn(1, 3, size, size)}
    if name in ("clip", "siglip"):
        _shrink(config.text_config)
        _shrink(config.vision_config)
        if name == "siglip":
            config.text_config.projection_size = 64
        size = config.vision_config.image_size
        example = {"input_ids": tokens[:, :8], "pixel_values": torch.randn(1, 3, size, size)}
        return AutoModel.from_config(config), example
    _shrink(config)
    if name in ("wav2vec2", "hubert"):
        return AutoModel.from_config(config), {"input_values": torch.randn(1, 4000)}
    if name in ("whisper", "speech_to_text"):
        shape = (config.num_mel_bins, 3000) if name == "whisper" else (100, config.input_feat_per_channel)
        return AutoModel.from_config(config), {
            "input_features": torch.randn(1, *shape),
            "decoder_input_ids": tokens,
        }
    try:
        model = AutoModelForCausalLM.from_config(config)
    except ValueError:  # an encoder
        model = AutoModel.from_config(config)
    example = {"input_ids": tokens}
    if config.is_encoder_decoder and type(model).__name__.endswith("Model"):
        example["decoder_input_ids"] = tokens
    if name == "layoutlm":
        example["bbox"] = torch.zeros(1, 16, 4, dtype=torch.long)
    return model, example


def _shrink(config: Any) -> None:
    for value, names in _SMALL.items():
        for key in names.split():
            now = getattr(config, key, None)
            if isinstance(now, int) and not isinstance(now, bool):
                with contextlib.suppress(AttributeError, NotImplementedError):  # derived from another setting
                    setattr(config, key, value)
    if "layer_types" in config.__dict__ and config.layer_types:
        config.layer_types = config.layer_types[:2]
