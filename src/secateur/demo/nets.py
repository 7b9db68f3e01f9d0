"""Two small image classifiers: a residual network, and an LSTM that reads an image row by row."""

import torch
from torch import Tensor, nn


class ConvBlock(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResidualNet(nn.Module):
    """A small residual network.

    >>> ResidualNet()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        inputs = widths[0]
        for stage, width in enumerate(widths):
            blocks += [ConvBlock(inputs, width, 2 if stage else 1), ConvBlock(width, width, 1)]
            inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 10)

    def forward(self, x: Tensor) -> Tensor:
        """A score per class."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class RowLSTM(nn.Module):
    """An LSTM that reads an image from top to bottom, one row at a time.

    >>> RowLSTM(8)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, row: int, width: int = 96) -> None:
        super().__init__()
        self.lstm = nn.LSTM(row, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """A score per class."""
        rows, _ = self.lstm(x.squeeze(1))
        return self.head(rows[:, -1])
