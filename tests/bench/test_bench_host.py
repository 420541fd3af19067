"""What a call costs before the launch: 2 x 2 operands, the plan known, no gradients, the launch itself left out."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import cudaops

Figure = Callable[..., None]


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_bench_host_time(
    name: str, figure: Figure, best: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    ours, theirs = getattr(cudaops, name), {"matmul": torch.matmul, "linear": functional.linear}[name]
    ours(a, b)  # plans and compiles
    monkeypatch.setattr(importlib.import_module("cudaops.ops.matmul"), "launch", lambda plan, tensors: None)
    beside = best(lambda: theirs(a, b), calls=1000)
    figure(1e6 * best(lambda: ours(a, b), calls=1000), f"us (torch, computing: {1e6 * beside:.1f})", most=10)
