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
    "timm coat_tiny": "parallel_blocks",  # one layer under several names
    "timm dla46x_c": "cardinality",
    "timm hrnet_w18_small": "makes it 64 at hrnet.py",  # widths that its code has as numbers, here and below
    "timm ens_adv_inception_resnet_v2": "makes it 192",
    "timm adv_inception_v3": "makes it 192",
    "timm inception_v4": "makes it 256",
    "timm nextvit_small": "makes it 384 at nextvit.py",
    "timm pnasnet5large": "makes it 432",
    "timm rdnet_tiny": "bottleneck_width_ratio",  # no other value of it was found with which all sizes come out
    "timm regnetx_002": "cfg.bottle_ratio",  # tensors compute the widths
    "timm rexnet_100": "width_mult",
    "timm legacy_seresnet18": "makes it 64 at senet.py",
    "timm tresnet_m": "width_factor",
    "timm legacy_xception": "makes it 728 at xception.py",
}


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
    else:
        assert answer in ("same", "aligned"), said


def test_most_of_transformers_open() -> None:
    """By the names above; that these and no others are refused is for each to show."""
    assert len([line for line in TRANSFORMERS if line not in REFUSED]) >= 75
