"""Configuration objects that describe a whole model: `hidden_size` and the like, kept true where all layers agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

Shapes = Mapping[str, Sequence[int]]
# (before, after) of everything in the model that a field describes
Sizes = Iterator[tuple[int, int]]


def _embeddings(model: nn.Module, config: Any, before: Shapes) -> Sizes:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == getattr(config, "vocab_size", None):
            yield _width(before, f"{name}.weight", module.weight, 1)


def _layers(*suffixes: str, dim: int = 0) -> Callable[[nn.Module, Any, Shapes], Sizes]:
    def sizes(model: nn.Module, config: Any, before: Shapes) -> Sizes:
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if name.endswith(suffixes) and weight is not None and weight.ndim == 2:
                yield _width(before, f"{name}.weight", weight, dim)

    return sizes


def _heads(suffix: str) -> Callable[[nn.Module, Any, Shapes], Sizes]:
    def sizes(model: nn.Module, config: Any, before: Shapes) -> Sizes:
        for name, module in model.named_modules():
            head, heads = getattr(module, "head_dim", None), getattr(config, _HEADS[suffix], None)
            layer = getattr(module, suffix, None)
            if isinstance(head, int) and head > 0 and isinstance(layer, nn.Linear) and heads:
                rows, now = _width(before, f"{name}.{suffix}.weight", layer.weight, 0)
                yield heads if rows % heads == 0 else -1, now // head

    return sizes


def _head_dims(model: nn.Module, config: Any, before: Shapes) -> Sizes:
    for module in model.modules():
        head = getattr(module, "head_dim", None)
        if isinstance(head, int) and isinstance(getattr(module, "q_proj", None), nn.Linear):
            yield config.head_dim, head


def _width(before: Shapes, name: str, weight: Any, dim: int) -> tuple[int, int]:
    return before.get(name, weight.shape)[dim], weight.shape[dim]


_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_FIELDS: dict[tuple[str, ...], Callable[[nn.Module, Any, Shapes], Sizes]] = {
    ("hidden_size", "n_embd", "d_model", "dim"): _embeddings,
    ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"): _layers(
        "up_proj", "fc1", "wi", "wi_0", "dense_h_to_4h", "intermediate.dense", "lin1"
    ),
    ("num_attention_heads",): _heads("q_proj"),
    ("num_key_value_heads",): _heads("k_proj"),
    ("head_dim",): _head_dims,
}


def refresh_configs(model: nn.Module, before: Shapes) -> None:
    """Rewrite a field where everything that it describes had its value before and now has one other."""
    configs = {id(c): c for m in model.modules() if (c := m.__dict__.get("config")) is not None}
    for config in configs.values():
        held = getattr(config, "__dict__", {})
        for names, sizes in _FIELDS.items():
            for field in names:
                if isinstance(held.get(field), int) and not isinstance(held[field], bool):
                    pairs = set(sizes(model, config, before))
                    if len(pairs) == 1 and next(iter(pairs))[0] == held[field]:
                        held[field] = next(iter(pairs))[1]
