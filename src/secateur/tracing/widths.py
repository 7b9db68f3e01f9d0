"""Attributes of torch's modules that only say what their weights are: `in_features`, `out_channels` and the like."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from secateur.compat import BatchNorm, Convolution, TransposedConvolution

# type of module -> {attribute: its value, read from the weights}
_READ: dict[type, dict[str, Callable[[Any], int]]] = {
    nn.Linear: {"in_features": lambda m: m.weight.shape[1], "out_features": lambda m: m.weight.shape[0]},
    nn.Bilinear: {
        "in1_features": lambda m: m.weight.shape[1],
        "in2_features": lambda m: m.weight.shape[2],
        "out_features": lambda m: m.weight.shape[0],
    },
    TransposedConvolution: {
        "in_channels": lambda m: m.weight.shape[0],
        "out_channels": lambda m: m.weight.shape[1] * m.groups,
    },
    Convolution: {
        "in_channels": lambda m: m.weight.shape[1] * m.groups,
        "out_channels": lambda m: m.weight.shape[0],
    },
    BatchNorm: {"num_features": lambda m: (m.weight if m.weight is not None else m.running_mean).shape[0]},
    nn.GroupNorm: {"num_channels": lambda m: m.weight.shape[0]},
    nn.Embedding: {"embedding_dim": lambda m: m.weight.shape[1]},
    nn.EmbeddingBag: {"embedding_dim": lambda m: m.weight.shape[1]},
    nn.PReLU: {"num_parameters": lambda m: m.weight.shape[0]},
    nn.RNNCellBase: {
        "input_size": lambda m: m.weight_ih.shape[1],
        "hidden_size": lambda m: m.weight_hh.shape[1],
    },
    nn.RNNBase: {
        "input_size": lambda m: m.weight_ih_l0.shape[1],
        "hidden_size": lambda m: m.weight_hh_l0.shape[0] // {"LSTM": 4, "GRU": 3}.get(m.mode, 1),
    },
    nn.MultiheadAttention: {
        "embed_dim": lambda m: m.out_proj.weight.shape[0],
        "head_dim": lambda m: m.out_proj.weight.shape[1] // m.num_heads,
        "kdim": lambda m: (m.in_proj_weight if m.in_proj_weight is not None else m.k_proj_weight).shape[1],
        "vdim": lambda m: (m.in_proj_weight if m.in_proj_weight is not None else m.v_proj_weight).shape[1],
    },
}


def told_widths(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Each such attribute that a module holds, with its value, read from the weights."""
    known = next((_READ[kind] for kind in _READ if isinstance(module, kind)), {})
    for attribute, value in known.items():
        if isinstance(module.__dict__.get(attribute), int):
            try:
                yield attribute, value(module)
            except (AttributeError, IndexError):  # no weights of its own: lazy, or without affine
                continue
