"""MODEL: the argument that names a model and where it comes from."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.cli.exits import InputError, UsageError
from secateur.cli.packages import called, did_you_mean, named, optional
from secateur.cli.screen import size
from secateur.io.compressing import Checkpoint

FORMS = "timm:NAME, torchvision:NAME, transformers:TYPE, FOLDER or config.json, or path/to/file.py:CALLABLE"
HELP = f"where the model comes from: {FORMS}; the callable returns a model, or a model and an example"
_TOKENS = 16
_SAMPLES = 16_000


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model's source, beside its name."""

    pretrained: bool = False  # download the weights that its authors published
    weights: bool = True  # False: only its structure counts, so it may come on the meta device


@dataclass(frozen=True)
class BuiltModel:
    """A model as it was built.

    >>> BuiltModel(nn.Linear(2, 2), torch.zeros(1, 2)).trained
    False
    """

    model: nn.Module
    example: Any = None
    trained: bool = False  # its weights are not random
    files: Checkpoint | None = None  # where these are, if they are too many for memory


def build(spec: str, wanted: Wanted) -> BuiltModel:
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


def _script(spec: str) -> BuiltModel:
    found = named(spec)
    if not isinstance(found, nn.Module):
        if not callable(found):
            kind = type(found).__name__
            raise InputError(f"{spec} is neither a model nor a callable that returns one; its type is {kind}")
        found = called(found, spec)
    example = None
    if isinstance(found, tuple) and len(found) == 2:
        found, example = found
    if not isinstance(found, nn.Module):
        kind = type(found).__name__
        raise InputError(f"{spec} returned something of type {kind}; return an nn.Module, or a model and an example")
    return BuiltModel(found, example, trained=True)


def _timm(name: str, wanted: Wanted) -> BuiltModel:
    timm = optional("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise UsageError(f"timm has no model {name!r}{did_you_mean(name, timm.list_models())}")
    model = timm.create_model(name, pretrained=wanted.pretrained)
    example = _drawn(*model.default_cfg.get("input_size", (3, 224, 224)))
    return BuiltModel(model, example, trained=wanted.pretrained)


def _torchvision(name: str, wanted: Wanted) -> BuiltModel:
    models = optional("torchvision", f"torchvision:{name}").models
    if name not in models.list_models():
        raise UsageError(f"torchvision has no model {name!r}{did_you_mean(name, models.list_models())}")
    model = models.get_model(name, weights="DEFAULT" if wanted.pretrained else None)
    transforms = models.get_model_weights(name).DEFAULT.transforms()
    crop = list(getattr(transforms, "crop_size", [224]))
    example = _drawn(3, *crop, *crop) if len(crop) == 1 else _drawn(3, 16, *crop)  # two sizes: video
    return BuiltModel(model, example, trained=wanted.pretrained)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))


def _transformers(name: str, wanted: Wanted) -> BuiltModel:
    """The model that a type, a folder or a configuration file describes; nothing from outside runs or is unpickled."""
    transformers = optional("transformers", f"transformers:{name}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = Path(name)
    if wanted.pretrained or _holds_weights(path):
        if path.is_dir() and _too_large(path):
            files = Checkpoint.of(path)
            return BuiltModel(files.model, _example(files.model), trained=True, files=files)
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        options = {"use_safetensors": True, "dtype": "auto"}  # the weights' own
        model = _class(transformers, config).from_pretrained(name, config=config, **options)
        return BuiltModel(model, _example(model), trained=True)
    config = _config(transformers, name, path)
    make = _class(transformers, config)._from_config
    with torch.device("meta"):
        outline = make(config)
    if not wanted.weights:
        return BuiltModel(outline, _example(outline))
    _check_memory(outline, name)
    return BuiltModel(make(config), _example(outline))


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
    """The class that the configuration names; else the causal language model, else the model without a head."""
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
    free = free_memory()
    if needed > free:
        raise InputError(
            f"transformers:{name} has {size(needed)} of weights, and {size(free)} of memory are free; "
            "give a folder or a config.json of a smaller one"
        )


def _too_large(folder: Path) -> bool:
    """Whether a checkpoint and what is made of it would not be in memory together."""
    return 2 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) > free_memory()


def free_memory() -> int:
    """Bytes that programs can still have, as the system estimates."""
    told = Path("/proc/meminfo")
    for line in told.read_text().splitlines() if told.is_file() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    if name == "input_ids":
        return {name: _tokens(config)}
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        image = getattr(vision, "image_size", None) or 224
        height, width = (image, image) if isinstance(image, int) else tuple(image)[-2:]
        return {name: _drawn(getattr(vision, "num_channels", None) or 3, height, width)}
    if name == "input_values":
        return {name: _drawn(_SAMPLES)}
    if name == "input_features":
        return {name: _drawn(getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500))}
    return {}


def _tokens(config: Any) -> Tensor:
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))


_KINDS = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}
