"""Small models of other libraries, and inputs that they take, for the harness of `beyond`.

Each entry gets the imported library and gives how to build a model, and its inputs: the example, then others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from beyond.harness import Do, floats, whole

Entry = Callable[[Any], tuple[Callable[[], Any], Callable[[], list[Any]]]]


def pictures(*sizes: tuple[int, ...]) -> Callable[[], list[Any]]:
    return lambda: [floats(*size, seed=i) for i, size in enumerate(sizes)]


def words(most: int, *sizes: tuple[int, int]) -> Callable[[], list[Any]]:
    return lambda: [whole(most, *size, seed=i) for i, size in enumerate(sizes)]


def graphs() -> list[Any]:
    """Nodes with features, and edges between them."""
    return [(floats(n, 4, seed=n), whole(n, 2, edges, seed=n)) for n, edges in ((5, 8), (7, 12), (3, 4))]


def decoder(lib: Any, **chosen: Any) -> Any:
    layers = lib.Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, **chosen)
    return lib.TransformerWrapper(num_tokens=11, max_seq_len=16, attn_layers=layers)


VIT = {"image_size": 16, "patch_size": 8, "num_classes": 3, "dim": 16, "depth": 1, "heads": 2, "mlp_dim": 24}
TILES = pictures((1, 3, 16, 16), (3, 3, 16, 16))

VIT_PYTORCH: dict[str, Entry] = {
    "ViT": lambda lib: (lambda: lib.ViT(**VIT, dim_head=8), TILES),
    "SimpleViT": lambda lib: (lambda: lib.SimpleViT(**VIT, dim_head=8), TILES),
    "CaiT": lambda lib: (lambda: lib.cait.CaiT(**VIT, cls_depth=1, dim_head=8), TILES),
    "DeepViT": lambda lib: (lambda: lib.deepvit.DeepViT(**VIT, dim_head=8), TILES),
}

X_TRANSFORMERS: dict[str, Entry] = {
    "rotary positions": lambda lib: (lambda: decoder(lib, rotary_pos_emb=True), words(11, (1, 5), (2, 9))),
    "gated, RMS norm": lambda lib: (
        lambda: decoder(lib, use_rmsnorm=True, ff_glu=True, ff_swish=True),
        words(11, (1, 5), (2, 9)),
    ),
    "grouped keys": lambda lib: (lambda: decoder(lib, attn_kv_heads=1), words(11, (1, 5), (2, 9))),
}

PYG: dict[str, Entry] = {
    name: lambda lib, name=name: (
        lambda: getattr(lib.nn, name)(in_channels=4, hidden_channels=12, num_layers=2, out_channels=3),
        graphs,
    )
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")
}

MONAI: dict[str, Entry] = {
    "UNet": lambda lib: (
        lambda: lib.networks.nets.UNet(2, 1, 2, channels=(4, 8, 12), strides=(2, 2), num_res_units=1),
        pictures((1, 1, 16, 16), (2, 1, 24, 16)),
    ),
    "SegResNet": lambda lib: (
        lambda: lib.networks.nets.SegResNet(2, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)),
        pictures((1, 1, 16, 16), (2, 1, 24, 16)),
    ),
    "AttentionUnet": lambda lib: (
        lambda: lib.networks.nets.AttentionUnet(2, 1, 2, channels=(4, 8), strides=(2,)),
        pictures((1, 1, 16, 16), (2, 1, 24, 16)),
    ),
    "ViT": lambda lib: (
        lambda: lib.networks.nets.ViT(1, (16, 16), (8, 8), 16, 24, 1, 2, spatial_dims=2, classification=True),
        pictures((1, 1, 16, 16), (3, 1, 16, 16)),
    ),
}

SEGMENTATION: dict[str, Entry] = {
    "Unet": lambda lib: (
        lambda: lib.Unet("mobilenet_v2", 3, None, decoder_channels=(16, 8, 8), classes=2),
        pictures((1, 3, 64, 64), (2, 3, 32, 96)),
    ),
}

TORCHAUDIO: dict[str, Entry] = {
    "Conformer": lambda lib: (
        lambda: lib.models.Conformer(8, 2, 12, 1, 3),
        lambda: [(floats(n, t, 8), torch.tensor([t] * n)) for n, t in ((1, 5), (3, 7))],
    ),
    "Emformer": lambda lib: (
        lambda: lib.models.Emformer(8, 2, 12, 1, segment_length=4, right_context_length=1),
        lambda: [(floats(n, t, 8), torch.tensor([t - 1] * n)) for n, t in ((1, 9), (2, 13))],
    ),
    "ConvTasNet": lambda lib: (
        lambda: lib.models.ConvTasNet(2, 4, 8, 3, 6, 8, 2, 1),
        pictures((1, 1, 40), (2, 1, 64)),
    ),
    "DeepSpeech": lambda lib: (lambda: lib.models.DeepSpeech(6, 12, 4), pictures((1, 1, 5, 6), (2, 1, 7, 6))),
}

OPEN_CLIP: dict[str, Entry] = {
    "CLIP": lambda lib: (
        lambda: lib.CLIP(
            12,
            {"image_size": 16, "layers": 1, "width": 16, "patch_size": 8, "head_width": 8},
            {"context_length": 6, "vocab_size": 20, "width": 16, "heads": 2, "layers": 1},
        ),
        lambda: [
            (floats(n, 3, 16, 16), whole(20, n, 6)) for n in (1, 3)
        ] + [Do(lambda m, text: m.encode_text(text), whole(20, 2, 6))],
    ),
}  # fmt: skip

MAMBAPY: dict[str, Entry] = {
    "Mamba": lambda lib: (
        lambda: lib.mamba.Mamba(lib.mamba.MambaConfig(d_model=8, n_layers=1, d_state=4, pscan=False)),
        pictures((1, 4, 8), (2, 7, 8)),
    ),
}

KORNIA: dict[str, Entry] = {
    "HardNet": lambda lib: (lambda: lib.feature.HardNet(pretrained=False), pictures((2, 1, 32, 32), (3, 1, 32, 32))),
}

LIBRARIES: dict[str, dict[str, Entry]] = {
    "vit_pytorch": VIT_PYTORCH,
    "x_transformers": X_TRANSFORMERS,
    "torch_geometric": PYG,
    "monai": MONAI,
    "segmentation_models_pytorch": SEGMENTATION,
    "torchaudio": TORCHAUDIO,
    "open_clip": OPEN_CLIP,
    "mambapy": MAMBAPY,
    "kornia": KORNIA,
}
