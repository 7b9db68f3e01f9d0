"""`transformers:`: a model type, a configuration, or a folder with both configuration and weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.cli.exits import InputError, UsageError
from secateur.cli.models import Source, Wanted
from secateur.cli.packages import did_you_mean, optional
from secateur.cli.screen import size

_TOKENS = 16
_SAMPLES = 16_000


def source(name: str, wanted: Wanted) -> Source:
    """The model that a type, a folder or a configuration file describes; nothing from outside runs or is unpickled."""
    transformers = optional("transformers", f"transformers:{name}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = Path(name)
    if wanted.pretrained or _holds_weights(path):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        options = {"use_safetensors": True, "dtype": torch.float32}
        model = _class(transformers, config).from_pretrained(name, config=config, **options)
        return Source(model, _example(model), trained=True)
    config = _config(transformers, name, path)
    make = _class(transformers, config)._from_config
    with torch.device("meta"):
        outline = make(config)
    if not wanted.weights:
        return Source(outline, _example(outline))
    _check_memory(outline, name)
    return Source(make(config), _example(outline))


def _holds_weights(path: Path) -> bool:
    if not path.is_dir():
        return False
    if any(path.glob("*.safetensors")):
        return True
    pickled = next(iter(sorted(path.glob("*.bin"))), None)
    if pickled is not None:
        raise InputError(
            f"{pickled} is a pickle, which can run code when opened; "
            "load it where you trust it and save_pretrained(folder), which writes safetensors"
        )
    return False


def _config(transformers: Any, name: str, path: Path) -> Any:
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise UsageError(f"transformers:{name}: there is no {file}")
        return transformers.AutoConfig.from_pretrained(str(file), trust_remote_code=False)
    types = list(transformers.CONFIG_MAPPING)
    if name not in types:
        hint = did_you_mean(name, types) or "; give a model type, a folder or a config.json"
        raise UsageError(f"Transformers has no model type {name!r}{hint}")
    return transformers.AutoConfig.for_model(name)


def _class(transformers: Any, config: Any) -> Any:
    """The class that the configuration names; else a language model where it is one that generates, else the bare."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    kind = type(config)
    causal, masked = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MASKED_LM_MAPPING
    if kind in causal and kind not in masked and not config.is_encoder_decoder:
        return causal[kind]
    if kind not in transformers.MODEL_MAPPING:
        raise InputError(f"Transformers has no model for the configuration {kind.__name__}; name it in architectures")
    found = transformers.MODEL_MAPPING[kind]
    return found[0] if isinstance(found, tuple) else found


def _check_memory(outline: nn.Module, name: str) -> None:
    needed = sum(p.numel() * p.element_size() for p in outline.parameters())
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise InputError(
            f"transformers:{name} has {size(needed)} of weights, and {size(free)} of memory are free; "
            "give a folder or a config.json of a smaller one"
        )


def _example(model: Any) -> dict[str, Tensor] | None:
    """Inputs by what the model says that it takes; None where that is not enough to know them."""
    config, main = model.config, model.main_input_name
    modalities = getattr(model, "input_modalities", ())
    kinds = {modalities} if isinstance(modalities, str) else set(modalities)
    inputs = _one_input(main, config)
    if inputs and main == "input_ids" and "image" in kinds:
        inputs |= _one_input("pixel_values", config)
    if inputs and config.is_encoder_decoder and main != "pixel_values":
        inputs |= {"decoder_input_ids": _tokens(config)}
    return inputs or None


def _one_input(name: str, config: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...]
    if name == "input_ids":
        return {name: _tokens(config)}
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        image = getattr(vision, "image_size", None) or 224
        height, width = (image, image) if isinstance(image, int) else tuple(image)[-2:]
        shape = (1, getattr(vision, "num_channels", None) or 3, height, width)
    elif name == "input_values":
        shape = (1, _SAMPLES)
    elif name == "input_features":
        shape = (1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500))
    else:
        return {}
    return {name: torch.randn(shape, generator=generator)}


def _tokens(config: Any) -> Tensor:
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
