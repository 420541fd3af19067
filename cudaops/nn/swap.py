"""`convert` and `restore`: a model's layers onto our kernels, in place, and back."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from cudaops.errors import UnsupportedError
from cudaops.nn.forwards import SWAPS, bind, binding_of, unbind
from cudaops.nn.select import Rules, Selection, Site, is_product, type_name, walk
from cudaops.ops.conv_plan import CONV_DTYPES
from cudaops.plan import DTYPES

M = TypeVar("M", bound=nn.Module)

_DEVICES = ("cpu", "cuda", "meta")


def convert(model: M, *, include: Rules = None, exclude: Rules = None, strict: bool = False, tune: object = None) -> M:
    """Put a model's `nn.Conv2d` and `nn.Linear` on the kernels of this package, in place.

    Only the modules' `forward` is rebound: parameters, hooks, `state_dict` keys, types and tied weights stay what they
    are. Only these very types are taken, not subclasses, which may compute something else. What is left, and why, is in
    `cudaops.report(model)`. Converting twice changes nothing more. Where the tensors are decides where a layer runs: on
    their GPU, or by the emulator for CPU tensors.

    Arguments:
        model: any module, which may itself be a layer to convert.
        include: convert only these: a name pattern (`'layer1.*'`, as in fnmatch, over the whole dotted name), a type,
            a predicate `(module, name) -> bool`, or a list of them. None: all.
        exclude: leave these; the same forms.
        strict: raise, and change nothing, if a convolution or linear-like module that was asked for cannot be taken.
        tune: not there yet; must be None.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module, or a rule has another form.
        UnsupportedError: with `strict`, naming what cannot be converted and why; or `tune` is given.
    """
    if tune is not None:
        raise UnsupportedError("convert(tune=...) is not there yet; leave it out")
    _check_module(model, "convert")
    selection = Selection(include, exclude)
    rules = include is not None or exclude is not None
    chosen = [site for site in walk(model) if is_product(site.module) and site in selection]
    reasons = [(site, reason_left(site)) for site in chosen]
    left = [(site, reason) for site, reason in reasons if reason]
    if strict and (left or not chosen):
        raise UnsupportedError(_refusal(left))
    if all(reason for _, reason in reasons):
        warnings.warn(
            "cudaops.convert swapped nothing: "
            + (
                "none of the convolution or linear-like modules that were asked for can be swapped; "
                "print(cudaops.report(model)) says why"
                if chosen
                else f"no convolution or linear-like module{' matches include / exclude' if rules else ' in it'}"
            ),
            stacklevel=2,
        )
    for site, reason in reasons:
        binding = binding_of(site.module)
        if reason is None and not (binding and binding.own):
            bind(site.module)
    return model


def restore(model: M) -> M:
    """Undo `convert`: every module gets the very forward back that it had.

    A forward that someone bound over ours in the meantime is theirs, and stays.

    Returns:
        `model`.

    Raises:
        TypeError: `model` is not a module.
    """
    _check_module(model, "restore")
    for site in walk(model):
        unbind(site.module)
    return model


def _check_module(model: object, what: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"cudaops.{what} takes a torch.nn.Module, got {type(model).__name__}")


def _refusal(left: list[tuple[Site, str]]) -> str:
    if not left:
        return (
            "convert(strict=True): no convolution or linear-like module matches include / exclude; "
            "nothing was changed; print(cudaops.report(model)) lists them all"
        )
    lines = "".join(
        f"\n  {site.name or '(the model itself)'} ({type_name(site.module)}): {reason}" for site, reason in left
    )
    return (
        f"convert(strict=True): {len(left)} of the modules asked for cannot be swapped; nothing was changed; "
        f"exclude them, or leave strict out:{lines}"
    )


def reason_left(site: Site) -> str | None:
    """Why a convolution or linear-like module cannot be swapped; None if it can, or already is."""
    module = site.module
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript module: torch has compiled its forward"
    for parent in site.parents:
        if isinstance(parent, nn.MultiheadAttention):
            return "MultiheadAttention reads its weights and never calls it"
        if isinstance(parent, nn.TransformerEncoderLayer):
            return "TransformerEncoderLayer's fast path skips it"
    if isinstance(module, nn.MultiheadAttention):
        return "its products stay inside torch's own function"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"{type_name(module)} stays torch's"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "not materialised yet: run the model once, then convert"
    if binding_of(module) is not None:
        return None
    if "forward" in module.__dict__ or "_conv_forward" in module.__dict__:
        return "its forward is patched"
    return _reason_of_type(module) or _reason_of_weight(module)


def _reason_of_type(module: nn.Module) -> str | None:
    cls = type(module)
    if cls in SWAPS:
        # A forward set on the class by somebody else; its globals tell, functools.wraps copies the names.
        own = getattr(cls.forward, "__globals__", {}).get("__name__") == cls.__module__
        return None if own else f"{cls.__name__}.forward is patched for the whole class"
    if parametrize.is_parametrized(module):
        return "parametrized: its class has changed; convert first, parametrize afterwards"
    if cls.__name__.startswith("FSDP"):
        return "FSDP has changed its class; convert first, fully_shard afterwards"
    for taken in SWAPS:
        if isinstance(module, taken):
            return f"subclass of {taken.__name__}, which may compute something else; only the exact type is swapped"
    if cls.__module__.startswith("torch.nn.modules."):
        return f"no kernel for {cls.__name__} yet"
    return f"not one of torch's own layers ({cls.__module__})"


def _reason_of_weight(module: nn.Module) -> str | None:
    weight = getattr(module, "weight", None)
    if type(weight) not in (torch.Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    assert isinstance(weight, torch.Tensor)
    if weight.layout != torch.strided or weight.is_quantized:
        return f"its weight's layout is {weight.layout}{' (quantised)' if weight.is_quantized else ''}"
    return unsupported_dtype(module) or (
        None if weight.device.type in _DEVICES else f"device {weight.device} is neither CUDA nor the CPU"
    )


def unsupported_dtype(module: nn.Module) -> str | None:
    """Why no kernel takes the dtype of this module's weight; None if one does."""
    name = str(module.weight.dtype).removeprefix("torch.")
    known = DTYPES if isinstance(module, nn.Linear) else CONV_DTYPES
    return None if name in known else f"no kernel for {name} yet (there are: {', '.join(known)})"
