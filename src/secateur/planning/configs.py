"""Configuration objects that describe a whole model: `hidden_size` and the like, kept true where all layers agree."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from secateur.state.held import Place

Shapes = Mapping[str, Sequence[int]]  # of tensors by name, after the cut
Changes = Iterator[tuple[int, int]]  # before and after, of everything that a field describes
Describes = Callable[[nn.Module, Any, Shapes], Changes]


def _embeddings(model: nn.Module, config: Any, after: Shapes) -> Changes:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == getattr(config, "vocab_size", None):
            yield module.embedding_dim, after[f"{name}.weight"][1]


def _layers(*suffixes: str) -> Describes:
    def sizes(model: nn.Module, config: Any, after: Shapes) -> Changes:
        for name, module in model.named_modules():
            if name.endswith(suffixes) and isinstance(module, nn.Linear) and f"{name}.weight" in after:
                yield module.out_features, after[f"{name}.weight"][0]

    return sizes


def _heads(suffix: str) -> Describes:
    def sizes(model: nn.Module, config: Any, after: Shapes) -> Changes:
        for name, module in model.named_modules():
            head, layer = getattr(module, "head_dim", None), getattr(module, suffix, None)
            if isinstance(head, int) and head > 0 and isinstance(layer, nn.Linear):
                width = after.get(f"{name}.head_dim", (head,))[0]
                yield layer.out_features // head, after[f"{name}.{suffix}.weight"][0] // width

    return sizes


def _head_dims(model: nn.Module, config: Any, after: Shapes) -> Changes:
    for name, module in model.named_modules():
        head = getattr(module, "head_dim", None)
        if isinstance(head, int) and isinstance(getattr(module, "q_proj", None), nn.Linear):
            yield head, after.get(f"{name}.head_dim", (head,))[0]


_FIELDS: dict[tuple[str, ...], Describes] = {
    ("hidden_size", "n_embd", "d_model", "dim"): _embeddings,
    ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"): _layers(
        "up_proj", "fc1", "wi", "wi_0", "dense_h_to_4h", "intermediate.dense", "lin1"
    ),
    ("num_attention_heads",): _heads("q_proj"),
    ("num_key_value_heads",): _heads("k_proj"),
    ("head_dim",): _head_dims,
}


def config_fields(model: nn.Module, after: Shapes, read: set[Place]) -> Iterator[tuple[Place, int, int]]:
    """Fields to rewrite, with their old and new values: those of which everything that they describe had the old value
    and will have one other. Fields that the model's code reads (`read`) are not touched: these follow by themselves."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        config = module.__dict__.get("config")
        if config is None or id(config) in seen:
            continue
        seen.add(id(config))
        held = getattr(config, "__dict__", {})
        for fields, describes in _FIELDS.items():
            for field in fields:
                place, value = Place(name, ("config", field)), held.get(field)
                if isinstance(value, int) and not isinstance(value, bool) and place not in read:
                    pairs = set(describes(model, config, after))
                    if len(pairs) == 1 and (pair := pairs.pop())[0] == value != pair[1]:
                        yield place, *pair
