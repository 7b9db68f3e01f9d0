"""The architectures, as ordinary modules."""

import torch.nn.functional as F
import torchvision
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """He et al.'s ResNet for 32×32 images: three stages of `n_blocks` blocks, 16, 32 and 64 wide."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, n_blocks)
        self.layer2 = self._stage(16, 32, n_blocks)
        self.layer3 = self._stage(32, 64, n_blocks)
        self.linear = nn.Linear(64, 10)

    @staticmethod
    def _stage(width_in: int, width: int, n_blocks: int) -> nn.Sequential:
        first = BasicBlock(width_in, width, stride=width // width_in)
        return nn.Sequential(first, *(BasicBlock(width, width, stride=1) for _ in range(n_blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Vgg16(nn.Module):
    """VGG-16 with BatchNorm for 32×32 images, with dropout between the convolutions of a stage."""

    STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width_in = 3
        for width, n_convolutions in self.STAGES:
            for i in range(n_convolutions):
                layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                if i < n_convolutions - 1:
                    layers.append(nn.Dropout(0.3 if width_in == 3 else 0.4))
                width_in = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def mobilenet_v2() -> nn.Module:
    """torchvision's MobileNetV2 at half width, for 1×28×28 images: the first convolution keeps the resolution."""
    net = torchvision.models.mobilenet_v2(num_classes=10, width_mult=0.5, dropout=0.0)
    net.features[0][0] = nn.Conv2d(1, net.features[0][0].out_channels, 3, 1, 1, bias=False)
    return net


def small_vit() -> nn.Module:
    """timm's VisionTransformer for 1×28×28 images: 49 patches, 128 wide, four blocks of four heads."""
    return VisionTransformer(28, 4, 1, num_classes=10, embed_dim=128, depth=4, num_heads=4)


class Recurrent(nn.Module):
    """Two recurrent layers over a series; the last state decides."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(1, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class ReviewLstm(nn.Module):
    """Word vectors, one LSTM, one logit: positive or not."""

    def __init__(self, n_words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(n_words, 100)
        self.rnn = nn.LSTM(100, 128, batch_first=True)
        self.head = nn.Linear(128, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(ids))[0][:, -1]).squeeze(-1)
