"""`CudaModule`: a wrapper that moves a model and its inputs, and runs the model's forward on our kernels."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cudaops.info import is_available, why_unavailable
from cudaops.nn.forwards import Calls
from cudaops.nn.override import override
from cudaops.nn.placement import cuda_device
from cudaops.nn.select import Transparent

_INNER = "module"
_warned = False


class CudaModule(Transparent, nn.Module):
    """Run `model` on a GPU through our kernels: its parameters, buffers and each call's inputs are moved there.

    The forward runs with torch's matmul (`@`), mm, bmm, mv, dot, `F.linear` and `F.conv2d` replaced by ours, wherever
    it calls them, in layers or by itself. `state_dict` has the inner model's keys, and attributes are looked up there
    too. Where no GPU is usable, it warns once and runs torch's own functions on the CPU.

    Arguments:
        model: any module; moved in place.
        device: a CUDA device or its index; None is torch's current one; `'emulator'` runs our kernels on CPU tensors.

    Attributes:
        module: the inner model.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `device` is neither a CUDA device nor `'emulator'`.
    """

    def __init__(self, model: nn.Module, device: torch.device | int | str | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"cudaops.CudaModule takes a torch.nn.Module, got {type(model).__name__}")
        self._emulated = device == "emulator"
        target = torch.device("cpu")
        if not self._emulated:
            wanted = cuda_device(device)
            if is_available():
                target = wanted
            else:
                _warn_once(f"cudaops.CudaModule runs torch's own functions on the CPU: {why_unavailable()}")
        self._calls: dict[str, Calls] = {}
        self.module = model.to(target)
        self._fallback = target
        self.training = model.training  # not self.train(...): that would reset the mode of every layer below

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = self._place()
        args = moved(args, device)
        kwargs = moved(kwargs, device)
        if not self.overrides:
            return self.module(*args, **kwargs)
        with override() as ours:
            result = self.module(*args, **kwargs)
        if not torch.compiler.is_compiling():
            for name, count in ours.calls.items():
                self._calls.setdefault(name, Calls()).add(count)
        return result

    @property
    def calls(self) -> Counter[str]:
        """How often each function ran on our kernels, by name; in every thread, but not inside torch.compile."""
        return +Counter({name: calls.total for name, calls in list(self._calls.items())})

    @property
    def overrides(self) -> bool:
        """Whether the forward runs on our kernels: on a GPU, or because `'emulator'` was asked for."""
        return self._emulated or self._place().type == "cuda"

    def _place(self) -> torch.device:
        """Where the model is now, which is where the inputs must be; a model with no tensors has its first target."""
        tensor = next(itertools.chain(self.parameters(), self.buffers()), None)
        return self._fallback if tensor is None else tensor.device

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _INNER:
                raise  # while unpickling there is no inner model yet
        return getattr(self.module, name)

    # The inner model's names are this wrapper's: no key, and no parameter name, has a prefix.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Reached when this wrapper is a child of a larger model: torch then looks for the inner keys under its name.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}{_INNER}.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)


def moved(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`: tensors, what has a `.to`, and lists, tuples and dicts of them."""
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)) and not isinstance(value, nn.Module):  # PackedSequence, a tokenizer's batch
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if type(value) in (list, tuple):
        return type(value)(moved(item, device) for item in value)
    if type(value) is dict:
        return {key: moved(item, device) for key, item in value.items()}
    return value


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, stacklevel=3)
