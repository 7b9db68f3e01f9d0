"""Folders that `from_pretrained` opens: weights, config, and what else the model's own folder holds."""

import json
import shutil
from pathlib import Path

import torch
from torch import nn

from secateur.io import save

_BESIDE = (  # what a folder of Transformers holds beside the weights, and what goes along
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "preprocessor_config.json"),
)
NAMES = ("config.json", "generation_config.json", *_BESIDE)


def write(model: nn.Module, source: Path, file: Path) -> None:
    """Write a model: in a folder that `from_pretrained` opens if it is one of Transformers, else for `secateur.load`.

    `source` is the folder that it came from, `file` where its weights go.
    """
    if not hasattr(model, "save_pretrained"):
        save(model, file)
        return
    model.to(_dtype(source))
    model.save_pretrained(file.parent, max_shard_size="1000GB")  # type: ignore[operator]
    for name in _BESIDE if source.is_dir() else ():
        if (source / name).is_file():
            shutil.copyfile(source / name, file.parent / name)


def _dtype(source: Path) -> torch.dtype:
    """That of the weights as they were; they are worked on in single precision."""
    file = source / "config.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    name = told.get("dtype") or told.get("torch_dtype")
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32
