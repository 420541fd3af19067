"""What `convert` leaves alone, with the reason that `report` gives, and `strict` refuses with."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cudaops
from tests.nn.layers import whole, wholly


class Sub(nn.Linear):
    """A subclass whose forward means something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Conv1D(nn.Module):
    """Linear by another name, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))


class Named(torch.Tensor):
    """A tensor subclass, as quantised and distributed weights are."""


def patched() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


def patched_inside() -> nn.Module:
    layer = nn.Conv2d(1, 1, 1)
    layer._conv_forward = types.MethodType(lambda self, input, weight, bias: input, layer)  # type: ignore[method-assign]
    return layer


def parametrized() -> nn.Module:
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def sharded() -> nn.Module:
    """What fully_shard does to a module's class."""
    layer = nn.Linear(2, 2)
    layer.__class__ = type("FSDPLinear", (nn.Linear,), {})
    return layer


def with_weight(weight: torch.Tensor) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        return layer

    return make


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated
        return torch.jit.script(nn.Linear(2, 2))  # type: ignore[no-any-return]


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Sub(2, 2), "subclass of Linear"),
    "lazy linear": (lambda: nn.LazyLinear(2), "not materialised"),
    "lazy convolution": (lambda: nn.LazyConv2d(2, 1), "not materialised"),
    "patched forward": (patched, "its forward is patched"),
    "patched _conv_forward": (patched_inside, "its forward is patched"),
    "parametrized": (parametrized, "parametrized: its class has changed; convert first"),
    "FSDP": (sharded, "FSDP has changed its class; convert first"),
    "TorchScript": (scripted, "TorchScript"),
    "float8": (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "no kernel for float8_e4m3fn yet"),
    "half": (lambda: nn.Conv2d(1, 1, 1).half(), "no kernel for float16 yet"),
    "complex": (lambda: nn.Conv2d(1, 1, 1, dtype=torch.complex64), "no kernel for complex64 yet"),
    "tensor subclass": (with_weight(torch.zeros(2, 2).as_subclass(Named)), "its weight is a Named"),
    "sparse": (with_weight(torch.eye(2).to_sparse()), "its weight's layout is torch.sparse_coo"),
    "Conv1d": (lambda: nn.Conv1d(1, 1, 1), "no kernel for Conv1d yet"),
    "Conv3d": (lambda: nn.Conv3d(1, 1, 1), "no kernel for Conv3d yet"),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(1, 1, 1), "no kernel for ConvTranspose2d yet"),
    "Bilinear": (lambda: nn.Bilinear(1, 1, 1), "no kernel for Bilinear yet"),
    "LSTM": (lambda: nn.LSTM(2, 2), "LSTM stays torch's"),
    "GRUCell": (lambda: nn.GRUCell(2, 2), "GRUCell stays torch's"),
    "someone else's": (Conv1D, "not one of torch's own layers"),
}


@pytest.mark.parametrize(("make", "reason"), LEFT.values(), ids=LEFT)
def test_left_as_it_is_with_its_reason(make: Callable[[], nn.Module], reason: str) -> None:
    layer = make()
    model = nn.Sequential(nn.Linear(2, 2), layer)
    before = vars(layer).get("forward")
    with pytest.raises(cudaops.UnsupportedError) as caught:
        cudaops.convert(model, strict=True)
    assert "\n  1 (" in str(caught.value)
    assert reason in str(caught.value)
    assert "forward" not in vars(model[0])
    cudaops.convert(model)
    taken, left = cudaops.report(model)
    assert taken.kernel == "matmul"
    assert (left.name, left.kernel, left.calls) == ("1", None, 0)
    assert reason in left.reason
    assert vars(layer).get("forward") is before


def test_a_lazy_layer_is_taken_once_it_has_run() -> None:
    layer = nn.LazyLinear(2)
    layer(torch.zeros(1, 3))
    assert next(iter(cudaops.report(cudaops.convert(layer)))).kernel == "matmul"


def test_a_forward_patched_for_the_whole_class_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: input)
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1))
    cudaops.convert(model)
    fc, conv = cudaops.report(model)
    assert fc.kernel is None
    assert "Linear.forward is patched for the whole class" in fc.reason
    assert conv.kernel


def test_quantised_layers_are_left() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao says that it moves to torchao
        quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
    (row,) = cudaops.report(quantised)
    assert (row.type, row.kernel) == ("Linear", None)
    assert "torch.ao" in row.reason


def test_attention_is_left_with_its_out_proj_and_still_works() -> None:
    model = nn.MultiheadAttention(4, 2)
    expected_names = ["", "out_proj"]
    with pytest.warns(UserWarning, match="swapped nothing"):
        cudaops.convert(model)
    whole_module, out_proj = cudaops.report(model)
    assert [whole_module.name, out_proj.name] == expected_names
    assert "inside torch's own function" in whole_module.reason
    assert "never calls it" in out_proj.reason


def test_the_encoders_fast_path_loses_nothing() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True), nn.Linear(4, 3)).eval()
    x = torch.randn(2, 5, 4)
    with torch.no_grad():
        expected = model[0](x)
        cudaops.convert(model)
        assert torch.equal(model[0](x), expected)
    left = {row.name: row.reason for row in cudaops.report(model) if row.kernel is None}
    assert left.keys() == {"0.self_attn", "0.self_attn.out_proj", "0.linear1", "0.linear2"}
    assert "fast path" in left["0.linear1"]


def test_the_decoders_layers_are_taken() -> None:
    model = nn.TransformerDecoderLayer(4, 2, dim_feedforward=6)
    cudaops.convert(model)
    assert {row.name for row in cudaops.report(model) if row.kernel} == {"linear1", "linear2"}


def test_a_subclass_is_torchs_before_and_after() -> None:
    layer, x = wholly(Sub(3, 2)), whole(4, 3)
    expected = layer(x)
    model = nn.Sequential(layer, nn.Linear(2, 1))
    cudaops.convert(model)
    assert torch.equal(layer(x), expected)
    assert torch.equal(cudaops.restore(model)[0](x), expected)
