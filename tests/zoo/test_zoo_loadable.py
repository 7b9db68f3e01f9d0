"""How many architectures are cut such that their own library opens the result, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zoo.architectures import MODELS, build
from zoo.opener import Opener, reopened

TRANSFORMERS = [line for line in MODELS if line.startswith("transformers ")]
TIMM = [line for line in MODELS if line.startswith("timm ")]
REFUSED = {  # with what the refusal must name
    "transformers bloom": "inv_norm_factor",  # heads have slopes by number, and a head's width is in its scale
    "transformers mpt": "d_model",  # the same
    "transformers marian": "cannot be reached",  # most of it are embeddings, whose width crosses to an encoder unseen
    "transformers layoutlm": "hidden_size",  # the width is that of the output
    "transformers whisper": "d_model",  # the same
    "transformers clip": "cannot be reached",  # the same
    "transformers efficientnet": "no counts were found",  # which does not say that there are none
    "timm coat_tiny": "parallel_blocks",  # one layer under several names
    "timm regnetx_002": "cfg.bottle_ratio",  # tensors compute the widths
}
OPEN = [  # of timm, by what its arguments can say
    "beit_base_patch16_224",
    "cait_xxs24_224",
    "convit_tiny",
    "convmixer_768_32",
    "cpubone_nano",
    "deit_tiny_patch16_224",
    "densenet121",
    "efficientvit_b0",
    "fasternet_t0",
    "ghostnet_050",
    "gmlp_ti16_224",
    "halonet_h1",
    "levit_128s",
    "mobilenetv3_small_050",
    "pit_ti_224",
    "poolformerv2_s12",
    "pvt_v2_b0",
    "starnet_s050",
    "swin_tiny_patch4_window7_224",
    "test_byobnet",
    "test_convnext",
    "test_efficientnet",
    "test_mambaout",
    "test_nfnet",
    "test_resnet",
    "test_vit",
    "xcit_nano_12_p8_224",
]


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    one = Opener()
    yield one
    one.close()


SOME = ("transformers mpnet", "transformers xlnet", "transformers bloom", "timm test_efficientnet")


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=() if line in SOME else pytest.mark.zoo) for line in (*TRANSFORMERS, *TIMM)]
)
def test_architecture(line: str, opener: Opener, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    library, name = line.split()
    answer, said = reopened(*build(line), name if library == "timm" else "", opener, tmp_path / "model")
    print(f"{line:<30} {answer:<8} {said}", flush=True)
    if line in REFUSED:
        assert answer == "refused"
        assert REFUSED[line] in said
    elif line in TRANSFORMERS or name in OPEN:
        assert answer in ("same", "aligned"), said
    else:  # whether timm's arguments can say it was not looked into
        assert answer in ("same", "aligned", "refused"), said


def test_most_of_transformers_open() -> None:
    """By the names above; that these and no others are refused is for each to show."""
    assert len([line for line in TRANSFORMERS if line not in REFUSED]) >= 75
