"""diffusers opens what is cut from its models, by its own means, in a process that does not have this library."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sec
from zoo.opener import Opener, answered, reopened

pytestmark = pytest.mark.ecosystem

BLOCKS = {"block_out_channels": (32, 64), "norm_num_groups": 8, "sample_size": 16}
UNET = {
    **BLOCKS,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
}
CONDITIONED = {
    **BLOCKS,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
}
AUTOENCODER = {
    **BLOCKS,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "shift_factor": 0.1,
}
WIDTH = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4, "patch_size": 2}
SD3 = {
    **WIDTH,
    "sample_size": 8,
    "pos_embed_max_size": 16,
    "out_channels": 4,
    "joint_attention_dim": 32,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 48,
}
FLUX = {
    **WIDTH,
    "patch_size": 1,
    "num_layers": 1,
    "num_single_layers": 1,
    "axes_dims_rope": (4, 4, 8),
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
}
DIT = {**WIDTH, "out_channels": 8, "sample_size": 8, "norm_num_groups": 8}


def _noise(channels: int, size: int, **more: Any) -> dict[str, Any]:
    return {"sample": torch.randn(1, channels, size, size), "timestep": torch.tensor([3.0]), **more}


def _latent(**more: Any) -> dict[str, Any]:
    return {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([3]), **more}


def _text(width: int, pooled: int = 0) -> dict[str, torch.Tensor]:
    text = {"encoder_hidden_states": torch.randn(1, 7, width)}
    return text | ({"pooled_projections": torch.randn(1, pooled)} if pooled else {})


def _models() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    torch.manual_seed(0)
    places = {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(7, 3)}
    tokens = {"hidden_states": torch.randn(1, 16, 4), "timestep": torch.tensor([0.5])}
    no_size = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    fourier = {"time_embedding_type": "fourier"}
    return {
        "autoencoder": ("AutoencoderKL", AUTOENCODER, {"sample": torch.randn(1, 3, 16, 16)}),
        "sd3": ("SD3Transformer2DModel", SD3, _latent(**_text(32, 48))),
        "flux": ("FluxTransformer2DModel", FLUX, {**tokens, **_text(32, 32), **places}),
        "unet": ("UNet2DModel", {**UNET, **fourier}, _noise(3, 16)),
        "unet with text": ("UNet2DConditionModel", {**CONDITIONED, **fourier}, _noise(4, 16, **_text(32))),
        "unet by position": ("UNet2DModel", UNET, _noise(3, 16)),
        "unet with text by position": ("UNet2DConditionModel", CONDITIONED, _noise(4, 16, **_text(32))),
        "dit": ("DiTTransformer2DModel", DIT, _latent(class_labels=torch.tensor([2]))),
        "pixart": (
            "PixArtTransformer2DModel",
            {**DIT, "cross_attention_dim": 64, "caption_channels": 32, "use_additional_conditions": False},
            _latent(**_text(32), **no_size),
        ),
    }


# The first width is the number of frequencies that a time step becomes; a table of positions is made anew.
REFUSED = {
    "unet by position": "block_out_channels[0]",
    "unet with text by position": "block_out_channels[0]",
    "dit": "pos_embed.pos_embed is not in files",
    "pixart": "pos_embed.pos_embed is not in files",
}


def _built(name: str) -> tuple[Any, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers")
    kind, config, example = _models()[name]
    model = getattr(diffusers, kind)(**config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # zeros would hide mistakes
    return model, example


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    torch.set_num_threads(1)
    one = Opener()
    yield one
    one.close()


@pytest.mark.parametrize("name", _models())
def test_from_pretrained_opens_it(name: str, opener: Opener, tmp_path: Path) -> None:
    model, example = _built(name)
    answer, said = reopened(model, example, "", opener, tmp_path / "model")
    print(f"{name:<30} {answer:<8} {said}")
    if name in REFUSED:
        assert answer == "refused"
        assert REFUSED[name] in said
    else:
        assert answer in ("same", "aligned"), said


@pytest.mark.parametrize("name", ["dit", "pixart"])
def test_whole_blocks_where_the_width_cannot_change(name: str, opener: Opener, tmp_path: Path) -> None:
    model, example = _built(name)
    graph = sec.trace(model, example, variants=False)
    plan = sec.plan_depth(graph, ["transformer_blocks.0"], loadable=True)
    assert plan.fields == {"num_layers": 1}
    answer, said = answered(model, plan, example, "", opener, tmp_path / "model")
    assert answer in ("same", "aligned"), said


PIPELINE = """
import sys, torch
import diffusers
torch.set_num_threads(1)
folder = sys.argv[1]
absent = dict.fromkeys(sys.argv[2:])
pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, **absent)
pipeline.set_progress_bar_config(disable=True)
given = torch.load(folder + "/given.pt", weights_only=True)
images = pipeline(**given, generator=torch.Generator().manual_seed(0)).images
assert torch.equal(torch.from_numpy(images), torch.load(folder + "/images.pt", weights_only=True))
assert "secateur" not in sys.modules
"""


def test_a_pipeline_of_cut_models(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.set_num_threads(1)
    parts = {}
    for part, name in (("transformer", "sd3"), ("vae", "autoencoder")):
        model, example = _built(name)
        plan = sec.plan(sec.trace(model, example, variants=False), sec.Params(0.75), loadable=True)
        parts[part] = sec.apply(model, plan)
    others = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    pipeline = diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **parts, **dict.fromkeys(others)
    )
    pipeline.set_progress_bar_config(disable=True)
    given = {
        "prompt_embeds": torch.randn(1, 7, 32),
        "pooled_prompt_embeds": torch.randn(1, 48),
        "guidance_scale": 1.0,
        "num_inference_steps": 2,
        "height": 16,
        "width": 16,
        "output_type": "np",
    }
    pipeline.save_pretrained(tmp_path)
    torch.save(given, tmp_path / "given.pt")
    images = pipeline(**given, generator=torch.Generator().manual_seed(0)).images
    torch.save(torch.from_numpy(images), tmp_path / "images.pt")
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["num_attention_heads"] < WIDTH["num_attention_heads"]
    reopening = (Path(__file__).parents[1] / "torchvision_ops.py").read_text() + PIPELINE
    subprocess.run([sys.executable, "-c", reopening, str(tmp_path), *others], check=True, timeout=300)
