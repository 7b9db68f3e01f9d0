"""A Llama as GGUF, which llama.cpp and what is built on it open: cut to other counts in each layer, if need be.

llama.cpp has one architecture for layers that are all alike ("llama") and one whose layers have heads and units of
their own number ("deci"); both compute what Llama, Mistral and Qwen2 do. What else a cut may change is said in terms of
these: other frequencies as factors of the usual ones, another scale of attention as part of the query's weights.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import FileError, MissingPackageError
from secateur.io.atomic import replacing
from secateur.io.file import about
from secateur.pipeline.apply import plan_of
from secateur.pipeline.rebuild import origin_in
from secateur.tracing import unwrap

_KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
_DTYPES = ("f32", "f16", "bf16", "q8_0")


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: str = "f32",
) -> None:
    """Write a causal Llama, Mistral or Qwen2 of Transformers, cut or not, as a GGUF file.

        from secateur.gguf import export
        sec.apply(model, plan)
        export(model, "small.gguf", tokenizer="whole.gguf")

    `tokenizer` is a GGUF file of the model before it was cut, whose vocabulary is taken over; without one the file has
    none, and takes and gives numbers of tokens. `dtype` is that of the matrices: f32, f16, bf16 or q8_0. A plan need
    not be loadable. Refused is what llama.cpp would compute in another way. Needs the package gguf.
    """
    with about(path) as target:
        inner: Any = unwrap(model)
        _check(inner, dtype)
        with replacing(target, overwrite=True) as new:
            _write(inner, new, tokenizer, dtype)


def _check(model: Any, kind: str) -> None:
    """Refuse what is no model that llama.cpp has, as it is."""
    if kind not in _DTYPES:
        raise FileError(f"dtype={kind!r} is none of {', '.join(_DTYPES)}")
    name = model.__class__.__name__
    if name not in _KINDS or not model.__class__.__module__.startswith("transformers."):
        raise FileError(f"GGUF is written of {', '.join(_KINDS)} of Transformers, not of a {name}")
    found = origin_in(model, plan_of(model))
    if found.origin is None:
        raise FileError(f"this is not what Transformers builds, so llama.cpp may compute something else: {found.why}")
    config = model.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < config.max_position_embeddings:
        raise FileError(
            f"attention to the last {window} tokens only is not written; llama.cpp's own converter may do it"
        )
    if config.hidden_act != "silu" or model.model.rotary_emb.attention_scaling != 1:
        raise FileError(
            "llama.cpp computes it with SiLU and unscaled rotary embeddings, which this model does not have"
        )
    scaled = getattr(model.model.rotary_emb, "rope_type", "default")
    if scaled not in ("default", "linear", "llama3"):
        raise FileError(f"rotary embeddings of the type {scaled!r} change with the length of the text")


def _write(model: Any, path: Path, tokenizer: Any, kind: str) -> None:
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise MissingPackageError(f"GGUF needs a package of this name ({error}); pip install gguf") from None
    heads, kv_heads, units = (_counts(model, what) for what in ("q_proj", "k_proj", "up_proj"))
    alike = all(len(set(counts)) == 1 for counts in (heads, kv_heads, units))
    arch = gguf.MODEL_ARCH.LLAMA if alike else gguf.MODEL_ARCH.DECI
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    quantized = gguf.GGMLQuantizationType[kind.upper()]
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    config, width = model.config, 2 * len(model.model.rotary_emb.inv_freq)
    writer.add_block_count(len(heads))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(model.model.embed_tokens.weight.shape[1])
    writer.add_feed_forward_length(units[0] if alike else units)
    writer.add_head_count(heads[0] if alike else heads)
    writer.add_head_count_kv(kv_heads[0] if alike else kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(_base(model))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_vocabulary(gguf, writer, tokenizer, model.model.embed_tokens.weight.shape[0])
    names = gguf.get_tensor_name_map(arch, len(heads))
    for name, tensor in _tensors(model):
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise FileError(f"llama.cpp has no {name} in such a model")
        array, own = (
            tensor.detach().float().cpu().numpy(),
            quantized if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32,
        )
        try:
            data = gguf.quantize(array, own)
        except gguf.QuantError as error:
            raise FileError(f"{name} {list(tensor.shape)} cannot be {kind}: {error}; write it as f16") from None
        writer.add_tensor(found, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _counts(model: Any, of: str) -> list[int]:
    """Heads or units of each layer."""
    layers = model.model.layers
    if of == "up_proj":
        return [layer.mlp.up_proj.weight.shape[0] for layer in layers]
    return [getattr(layer.self_attn, of).weight.shape[0] // layer.self_attn.head_dim for layer in layers]


def _base(model: Any) -> float:
    config = model.config
    told = getattr(config, "rope_parameters", None) or {}
    return float(told.get("rope_theta") or config.rope_theta)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors as llama.cpp has them, by Transformers' names; tied ones once."""
    rotary = model.model.rotary_emb.inv_freq.double()
    usual = _base(model) ** (-torch.arange(len(rotary), dtype=torch.float64) / len(rotary))
    factors = usual / rotary.cpu()
    if not torch.allclose(factors, torch.ones_like(factors), rtol=1e-6):
        yield "rope_freqs.weight", factors.float()
    modules = dict(model.named_modules())
    for name, tensor in model.named_parameters():
        owner, _, layer = name.rpartition(".")[0].rpartition(".")
        if layer in ("q_proj", "k_proj"):
            attention = modules[owner]
            tensor = _pairs_together(tensor, attention.head_dim)
            change = attention.scaling * attention.head_dim**0.5
            tensor = tensor * change if layer == "q_proj" and abs(change - 1) > 1e-9 else tensor
        yield name, tensor


def _pairs_together(tensor: Tensor, width: int) -> Tensor:
    """Rows of heads in llama.cpp's order: what rotates together lies together, not half a head apart.

    >>> _pairs_together(torch.arange(4), 4)
    tensor([0, 2, 1, 3])
    """
    rows = tensor.shape[0]
    return tensor.reshape(rows // width, 2, width // 2, -1).transpose(1, 2).reshape(tensor.shape)


def _add_vocabulary(gguf: Any, writer: Any, source: Any, tokens: int) -> None:
    """The vocabulary of another file, or none."""
    if source is None:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(tokens)
        return
    fields = gguf.GGUFReader(source).fields
    listed: Sequence[Any] = fields["tokenizer.ggml.tokens"].data if "tokenizer.ggml.tokens" in fields else ()
    if len(listed) != tokens:
        raise FileError(f"tokenizer={os.fspath(source)!r} has {len(listed)} tokens, the model {tokens}")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if array else None)


__all__ = ["export"]
