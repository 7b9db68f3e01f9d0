"""A small model, a valid file of it, and files that are valid but for what a test changes."""

import copy
import functools
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sec
from secateur.io import load, save


class Options:
    """What a model's configuration may look like."""

    limit = 16

    def __init__(self) -> None:
        self.width = 16
        self.scales = [1, 2, 3]


class Net(nn.Module):
    """A model that holds ints in every way, and some things that are no business of a plan's."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 16
        self.options = Options()
        self.table = {"width": 16, 3: 16}
        self.sizes = (4, 16)
        self.flag = True
        self.note = "text"
        self.kind = Options
        self.function = len
        self.others = [nn.Linear(16, 16)]
        self.offset = torch.zeros(16)
        self.embed = nn.Embedding(8, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8)
        self.out = nn.Linear(8, 8, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        self.offset = self.offset * 1  # its own: what a model is only given is not cut
        h = torch.relu(self.norm(self.up(self.embed(ids)))) + self.offset
        h = h.reshape(-1, 4, self.width // 4).reshape(ids.shape[0], self.width)
        return self.out(self.down(h))


IDS = torch.arange(5)


def cut_net() -> Net:
    net = Net().eval()
    return sec.apply(net, sec.plan(sec.trace(net, IDS), sec.Ratio(0.5)), verify=False)


@dataclass(frozen=True)
class Parts:
    """A file taken apart: what its tensors are, its own JSON, and the bytes."""

    tensors: dict[str, Any]
    said: dict[str, Any]
    data: bytes

    @staticmethod
    def of(path: Path) -> "Parts":
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        return Parts(
            {name: value for name, value in header.items() if name != "__metadata__"},
            json.loads(header["__metadata__"]["secateur"]),
            raw[8 + length :],
        )

    def to(self, path: Path, said: str | None = None) -> Path:
        """Put together again; `said` is text to take the place of the JSON."""
        text = json.dumps(self.said) if said is None else said
        header = json.dumps({"__metadata__": {"secateur": text}, **self.tensors}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + self.data)
        return path

    def changed(self, change: Callable[[dict[str, Any]], Any]) -> "Parts":
        """With a change to the JSON."""
        said = copy.deepcopy(self.said)
        change(said)
        return replace(self, said=said)


def valid(path: Path) -> tuple[Net, Path]:
    net = cut_net()
    save(net, path)
    return net, path


@functools.cache
def genuine() -> Parts:
    """A valid file, taken apart."""
    with tempfile.TemporaryDirectory() as folder:
        return Parts.of(valid(Path(folder, "file"))[1])


def refuses(path: Any, words: str, model: nn.Module | None = None) -> None:
    """Loading a file must fail with these words, say which file, and leave the model as it was."""
    model = Net() if model is None else model
    before = fingerprint(model)
    with pytest.raises(sec.FileError, match=words) as caught:
        load(path, model)
    assert fingerprint(model) == before
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything about a model: two are equal only if nothing at all was changed in between."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        seen.append((name, type(module), module.training, sorted(vars(module))))
        for registry in (module._parameters, module._buffers, vars(module)):
            for key, value in registry.items():
                seen.append((key, _print(value)))
    return seen


def _print(value: Any) -> Any:
    if isinstance(value, Tensor):
        content = value.detach().contiguous().flatten().view(torch.uint8).tolist() if value.numel() else []
        return id(value), value.dtype, value.shape, value.stride(), value.requires_grad, content
    if isinstance(value, Options):
        return id(value), copy.deepcopy(vars(value))
    if isinstance(value, dict | list | set):
        return id(value), repr(value)
    return id(value) if callable(value) else repr(value)
