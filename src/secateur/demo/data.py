"""Image data sets that need no download."""

import gzip
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from secateur.errors import SecateurError

_FASHION = Path("/usr/share/datasets/fashion-mnist")
_REINSTALL = "apt-get install --reinstall dataset-fashion-mnist"
_TRAIN, _TEST = 6000, 2000  # of Fashion-MNIST: enough to see the point within a minute


class DemoError(SecateurError, RuntimeError):
    """The demo lacks something; the message is the line that installs it."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """Greyscale images with one channel, and their labels."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def size(self) -> int:
        """Of one side, in pixels."""
        return self.train[0].shape[-1]


def digits(seed: int) -> Pictures:
    """The 1,797 handwritten digits of 8×8 pixels that come inside scikit-learn; a third is for testing.

    >>> pictures = digits(0)
    >>> pictures.size, len(pictures.train[0]), len(pictures.test[0])
    (8, 1198, 599)
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        missing = "the digits come with scikit-learn, which is not installed"
        raise DemoError(f"{missing}: pip install scikit-learn") from error
    found = load_digits()
    pictures = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 3], order[len(order) // 3 :]
    return Pictures((pictures[train], labels[train]), (pictures[test], labels[test]))


def fashion_mnist(seed: int, folder: Path = _FASHION) -> Pictures:
    """A part of Fashion-MNIST, 28×28 pixels, from Debian's package."""
    if not folder.is_dir():
        raise DemoError(f"there is no Fashion-MNIST in {folder}: apt-get install dataset-fashion-mnist")
    parts = []
    for name, count in (("train", _TRAIN), ("t10k", _TEST)):
        pictures = _idx(folder / f"{name}-images-idx3-ubyte.gz").float().unsqueeze(1) / 255
        labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz").long()
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[:count]
        parts.append((pictures[chosen], labels[chosen]))
    return Pictures(*parts)


def _idx(path: Path) -> Tensor:
    """An array of bytes in the IDX format: two zeros, a type, the number of dimensions, their sizes, the elements."""
    try:
        data = gzip.decompress(path.read_bytes())
        zeros, kind, dims = struct.unpack_from(">HBB", data)
        sizes = struct.unpack_from(f">{dims}I", data, 4)
        array = np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(sizes)
    except (OSError, EOFError, struct.error, ValueError) as error:
        raise DemoError(f"{path} cannot be read ({error}): {_REINSTALL}") from error
    if zeros or kind != 8:
        raise DemoError(f"{path} is not an array of bytes: {_REINSTALL}")
    return torch.from_numpy(array.copy())
