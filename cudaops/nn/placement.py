"""`cuda` and `cpu`: what `model.cuda()` and `model.cpu()` do, and the layers on our kernels while they are there."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import nn

from cudaops.info import is_available, why_unavailable
from cudaops.nn.forwards import binding_of
from cudaops.nn.select import is_product, walk
from cudaops.nn.swap import _check_module, convert, reason_left, restore

M = TypeVar("M", bound=nn.Module)


def cuda_device(device: torch.device | int | str | None) -> torch.device:
    """Read what the user gave as a CUDA device; None is torch's current one (no index).

    Raises:
        ValueError: another kind of device.
    """
    if isinstance(device, int):
        return torch.device("cuda", device)
    given = torch.device("cuda" if device is None else device)
    if given.type != "cuda":
        raise ValueError(
            f"a CUDA device is needed, got {given}; cudaops.cpu(model) goes back to the CPU, and "
            "cudaops.CudaModule(model, device='emulator') runs our kernels there"
        )
    return given


def cuda(model: M, device: torch.device | int | str | None = None) -> M:
    """Move a model's parameters and buffers to a GPU and put its layers on our kernels; see `convert`.

    As `model.cuda()`: the same model, with the same Parameters, in place. Move the inputs too. Where no GPU is usable
    the model stays as it is, on the CPU, with one warning that says why.

    Arguments:
        model: any module.
        device: a CUDA device or its index; None is torch's current one.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `device` is not a CUDA device.
    """
    _check_module(model, "cuda")
    target = cuda_device(device)
    if not is_available():
        warnings.warn(f"cudaops.cuda: the model stays on the CPU, unchanged: {why_unavailable()}", stacklevel=2)
        return model
    model.to(target)
    # A model with nothing to swap is moved all the same, without convert's warning about it.
    if any(is_product(s.module) and (binding_of(s.module) or reason_left(s) is None) for s in walk(model)):
        convert(model)
    return model


def cpu(model: M) -> M:
    """Move a model back to the CPU and give its layers their own forward back; see `restore`.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module.
    """
    _check_module(model, "cpu")
    model.cpu()
    return restore(model)
