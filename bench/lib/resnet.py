"""ResNet-18 (He et al., 2016) for small pictures: 11 M parameters, and batch norm's buffers."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import nn


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.around = nn.Sequential()
        if stride != 1 or before != width:
            self.around = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.around(x))


class ResNet(nn.Sequential):
    """Of pictures (batch, 3, size, size), scores (batch, classes)."""

    def __init__(self, classes: int = 10) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 3, 1, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        ]
        before = 64
        for width in (64, 128, 256, 512):
            layers += [Block(before, width, 1 if width == 64 else 2), Block(width, width, 1)]
            before = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
