"""Networks from a description: `image(stem, blocks, head)` and `sequence(stem, blocks, head)`.

A block is `(kind, knob)`, or `(wrapper, knob, blocks)` for a residual or dense connection around others; a
description is what a failing example prints, and enough to build the network again.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import image_blocks, sequence_blocks

Blocks = list[Any]


def chain(home: ModuleType, blocks: Blocks, width: int) -> tuple[nn.Module, int]:
    """Blocks one after the other, and the width that comes out."""
    made = []
    for kind, knob, *inside in blocks:
        if inside:
            inner, out = chain(home, inside[0], width)
            module, width = home.WRAPPERS[kind](inner, width, out, knob)
        else:
            module, width = home.BLOCKS[kind](width, knob)
        made.append(module)
    return nn.Sequential(*made), width


def image(stem: int, blocks: Blocks, head: int) -> tuple[nn.Module, Tensor]:
    """An image network and an input for it."""
    width = image_blocks.pick(image_blocks.WIDTHS, stem)
    body, out = chain(image_blocks, blocks, width)
    net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), body, image_blocks.head(out, head))
    return net, torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sequence(stem: int, blocks: Blocks, head: int) -> tuple[nn.Module, Tensor]:
    """A sequence network, on tokens or on features, and an input for it."""
    width = sequence_blocks.pick(sequence_blocks.WIDTHS, stem)
    body, out = chain(sequence_blocks, blocks, width)
    first = nn.Embedding(9, width) if stem % 2 else nn.Linear(3, width)
    net = nn.Sequential(first, body, sequence_blocks.head(out, head))
    generator = torch.Generator().manual_seed(1)
    if stem % 2:
        return net, torch.randint(0, 9, (2, 5), generator=generator)
    return net, torch.randn(2, 5, 3, dtype=torch.float64, generator=generator)
