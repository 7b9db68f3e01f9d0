"""MODEL: where a model comes from, in one word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.cli.exits import InputError, UsageError
from secateur.cli.packages import did_you_mean, optional
from secateur.cli.script import called, named

FORMS = "timm:NAME, torchvision:NAME, transformers:TYPE, FOLDER or config.json, or path/to/file.py:CALLABLE"
HELP = f"where the model comes from: {FORMS}; the callable returns a model, or a model and an example"


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model's source, beside its name."""

    pretrained: bool = False  # download the weights that its authors published
    weights: bool = True  # False: only its structure counts, so it may come on the meta device


@dataclass(frozen=True)
class Source:
    """A model as it was built.

    >>> Source(nn.Linear(2, 2), torch.zeros(1, 2)).trained
    False
    """

    model: nn.Module
    example: Any = None
    trained: bool = False  # its weights are not random


def build(spec: str, wanted: Wanted) -> Source:
    """Build the model that MODEL names, in eval mode."""
    check(spec)
    kind, _, name = spec.partition(":")
    source = _script(spec) if is_script(spec) else called(lambda: _KINDS[kind](name, wanted), spec)
    return replace(source, model=source.model.eval())


def check(spec: str) -> None:
    """Refuse a MODEL that is of no known form."""
    kind, _, name = spec.partition(":")
    if not is_script(spec) and not (name and kind in _KINDS):
        raise UsageError(f"{spec}: {_what_is_wrong(spec, kind)}")


def name_of(spec: str) -> str:
    """What to call the model that MODEL names.

    >>> name_of("timm:resnet18"), name_of("nets/mine.py:build"), name_of("transformers:models/tiny/config.json")
    ('resnet18', 'build', 'tiny')
    """
    path = Path(spec.rpartition(":")[2])
    if path.suffix == ".json":
        return path.resolve().parent.name if path.stem == "config" else path.stem
    return path.resolve().name if path.is_dir() else path.name


def is_script(spec: str) -> bool:
    """Whether MODEL names something in a user's own file."""
    return spec.rpartition(":")[0].endswith(".py")


def _what_is_wrong(spec: str, kind: str) -> str:
    if spec.endswith(".safetensors"):
        return f"this holds weights and no code; name the model, and pass it as --weights {spec}"
    if spec.endswith(".py"):
        return f"which callable in it builds the model? Say {spec}:NAME"
    if Path(spec).exists():
        return f"this is a {'folder' if Path(spec).is_dir() else 'file'}, not a model; MODEL is {FORMS}"
    if ":" in spec:
        return f"there is no source {kind!r}{did_you_mean(kind, _KINDS)} MODEL is {FORMS}"
    return f"MODEL is {FORMS}"


def _script(spec: str) -> Source:
    found = named(spec)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise InputError(
                f"{spec} is neither a model nor a callable that returns one; its type is {type(found).__name__}"
            )
        found = called(found, spec)
    example = None
    if isinstance(found, tuple) and len(found) == 2:
        found, example = found
    if not isinstance(found, nn.Module):
        kind = type(found).__name__
        raise InputError(f"{spec} returned something of type {kind}; return an nn.Module, or a model and an example")
    return Source(found, example, trained=True)


def _timm(name: str, wanted: Wanted) -> Source:
    timm = optional("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
    model = timm.create_model(name, pretrained=wanted.pretrained)
    example = _image(model.default_cfg.get("input_size", (3, 224, 224)))
    return Source(model, example, trained=wanted.pretrained)


def _torchvision(name: str, wanted: Wanted) -> Source:
    models = optional("torchvision", f"torchvision:{name}").models
    if name not in models.list_models():
        raise UsageError(f"torchvision has no model {name!r}{did_you_mean(name, models.list_models())}")
    model = models.get_model(name, weights="DEFAULT" if wanted.pretrained else None)
    transforms = models.get_model_weights(name).DEFAULT.transforms()
    crop = list(getattr(transforms, "crop_size", [224]))
    still = (3, crop[0], crop[-1])
    example = _image(still) if len(crop) == 1 else _image((3, 16, *crop))  # two sizes: video
    return Source(model, example, trained=wanted.pretrained)


def _image(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))


def _transformers(name: str, wanted: Wanted) -> Source:
    from secateur.cli.huggingface import source

    return source(name, wanted)


_KINDS: dict[str, Callable[[str, Wanted], Source]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
