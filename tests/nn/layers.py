"""Layers, inputs of small whole numbers: products and sums are exact in fp32, so results must be equal, not close."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random whole numbers from -3 to 3."""
    return torch.randint(-3, 4, shape).to(dtype)


def wholly(model: M) -> M:
    """Give `model` such parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(whole(*parameter.shape))
    return model


class Net(nn.Module):
    """A convolution, and a linear layer under two names; every value stays exact."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.fc = nn.Linear(3 * 4 * 4, 48)
        self.same_fc = self.fc

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.same_fc(self.fc(self.conv(x).flatten(1)))  # type: ignore[no-any-return]


def net_and_input() -> tuple[Net, torch.Tensor]:
    return wholly(Net()), whole(2, 2, 4, 4)
