"""The trained models: weights out of packages, or trained here once and kept in the cache."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO

import torch
import torch.nn.functional as F
from benchmarks.accuracy import data, nets, packages
from benchmarks.accuracy.training import Batch, Recipe, draws, fit
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class _Inert(nn.Module):
    """Stands for every class in a whole-model pickle: holds the tensors, does nothing."""


_CLASSES_IN_CHECKPOINTS = (
    "resnet.ResNet",
    "resnet.BasicBlock",
    "torchvision.models.vgg.VGG",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.batchnorm.BatchNorm1d",
    "torch.nn.modules.batchnorm.BatchNorm2d",
    "torch.nn.modules.container.Sequential",
    "torch.nn.modules.conv.Conv2d",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.pooling.MaxPool2d",
)


def _cifar10_weights(file: str) -> Mapping[str, Tensor]:
    (raw,) = packages.read(packages.CIFAR10_WEIGHTS, f"torchopt/model/{file}")
    with torch.serialization.safe_globals([(_Inert, name) for name in _CLASSES_IN_CHECKPOINTS]):
        return torch.load(BytesIO(raw), map_location="cpu", weights_only=True).state_dict()


def resnet56() -> nn.Module:
    """ResNet-56 trained on CIFAR-10: 93.20% on the test set."""
    model = nets.CifarResNet(n_blocks=9)
    model.load_state_dict(_cifar10_weights("resnet56_cifar10_0.9320_45k.pth"))
    return model.eval()


def vgg16() -> nn.Module:
    """VGG16-BN trained on CIFAR-10: 92.25% on the test set."""
    model = nets.Vgg16()
    model.load_state_dict(_cifar10_weights("vgg16_cifar10_0.9225_45k.pth"))
    return model.eval()


def _trained(name: str, build: Callable[[], nn.Module], batches: Iterator[Batch], recipe: Recipe) -> nn.Module:
    """The model with the weights in the cache; when there are none, it is trained and they are put there."""
    kept = packages.cache("trained", f"{name}.safetensors")
    if not kept.exists():
        print(f"training {name}, {recipe.steps} steps, once", file=sys.stderr)
        torch.manual_seed(0)
        model = fit(build(), batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), recipe)
        part = kept.with_suffix(f".{os.getpid()}")
        save_file(model.state_dict(), part)
        part.replace(kept)
    model = build()
    model.load_state_dict(load_file(kept))
    return model.eval()


def _fashion_batches(size: int) -> Iterator[Batch]:
    split = data.fashion_mnist()
    return ((data.pixels(split.train_x[i]), split.train_y[i]) for i in draws(len(split.train_y), size, seed=0))


def _ecg_batches(size: int) -> Iterator[Batch]:
    split = data.ecg5000()
    return ((split.train_x[i], split.train_y[i]) for i in draws(len(split.train_y), size, seed=0))


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 at half width, trained on Fashion-MNIST."""
    return _trained("mobilenet_v2", nets.mobilenet_v2, _fashion_batches(128), Recipe(900, 128, 3e-3, decay=0.01))


def small_vit() -> nn.Module:
    """A ViT of four blocks, trained on Fashion-MNIST."""
    return _trained("small_vit", nets.small_vit, _fashion_batches(128), Recipe(2800, 128, 1e-3, decay=0.05))


def ecg_lstm() -> nn.Module:
    """Two layers of LSTM, trained on ECG5000."""
    return _trained("ecg_lstm", lambda: nets.Recurrent(nn.LSTM), _ecg_batches(64), Recipe(300, 64, 5e-3))


def ecg_gru() -> nn.Module:
    """Two layers of GRU, trained on ECG5000."""
    return _trained("ecg_gru", lambda: nets.Recurrent(nn.GRU), _ecg_batches(64), Recipe(300, 64, 5e-3))
