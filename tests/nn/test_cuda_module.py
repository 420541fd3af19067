"""`CudaModule`: what it runs on our kernels, what it moves, and whose names it has."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence

import cudaops
from cudaops.nn import module as cuda_module
from tests.nn.layers import Net, net_and_input, whole, wholly


class Everything(nn.Module):
    """Calls each function once, in each of its spellings; every value stays exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole(4, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        w = self.weight
        return {
            "operator": x @ w,
            "reflected": w.__rmatmul__(x),
            "torch.matmul": torch.matmul(x, w),
            "linalg": torch.linalg.matmul(x, w),
            "method": x.matmul(w),
            "named": torch.matmul(other=w, input=x),
            "mm": torch.mm(x, w) + x.mm(w) + x.mm(mat2=w),
            "bmm": torch.bmm(x[None], w[None]) + x[None].bmm(w[None]),
            "mv": torch.mv(x, w[0]) + x.mv(w[0]),
            "dot": torch.dot(x[0], w[0]) + x[0].dot(w[0]),
            "linear": functional.linear(x, w) + functional.linear(x, w, bias=w[0]),
            "conv": functional.conv2d(x[None, None], w[None, None], padding=1)
            + torch.conv2d(x[None, None], w[None, None], None, 1, 1),
        }


CALLS = {"matmul": 6, "mm": 3, "bmm": 2, "mv": 2, "dot": 2, "linear": 2, "conv2d": 2}


def test_every_function_and_spelling_is_ours_with_torchs_result_and_gradient() -> None:
    model = Everything()
    x = whole(4, 4)
    expected = model(x)
    wrapped = cudaops.CudaModule(copy.deepcopy(model), device="emulator")
    ours = wrapped(x)
    assert dict(wrapped.calls) == CALLS
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    sum(value.sum() for value in expected.values()).backward()
    sum(value.sum() for value in ours.values()).backward()
    assert torch.equal(wrapped.module.weight.grad, model.weight.grad)


def test_outside_of_the_forward_torchs_functions_are_torchs() -> None:
    from cudaops import launch

    wrapped = cudaops.CudaModule(nn.Linear(2, 2), device="emulator")
    wrapped(torch.zeros(1, 2))
    before = launch.total_launches()
    torch.zeros(2, 2) @ torch.zeros(2, 2)
    assert launch.total_launches() == before


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.mm(torch.zeros(1, 2, 2), torch.zeros(2, 2)),
        lambda: torch.bmm(torch.zeros(2, 2, 2), torch.zeros(1, 2, 2)),
        lambda: torch.mv(torch.zeros(2, 2), torch.zeros(2, 2)),
        lambda: torch.dot(torch.zeros(2, 2), torch.zeros(2)),
        lambda: torch.matmul(torch.zeros(2)),
        lambda: torch.matmul(torch.zeros(2, 3), torch.zeros(2, 3)),
    ],
    ids=["mm 3-d", "bmm broadcast", "mv 2-d", "dot 2-d", "one operand", "sizes"],
)
def test_what_torch_refuses_is_refused_with_the_same_type(call: Any) -> None:
    class Calls(nn.Module):
        def forward(self) -> Any:
            return call()

    with pytest.raises((RuntimeError, TypeError)) as theirs:
        call()
    with pytest.raises(theirs.type):
        cudaops.CudaModule(Calls(), device="emulator")()


def test_an_out_argument_is_refused_and_left_alone() -> None:
    class Into(nn.Module):
        def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, x, out=out)

    out = torch.full((2, 2), 7.0)
    with pytest.raises(cudaops.UnsupportedError, match=r"matmul.*out"):
        cudaops.CudaModule(Into(), device="emulator")(torch.zeros(2, 2), out)
    assert torch.equal(out, torch.full((2, 2), 7.0))


# ---- names ----


def test_names_are_the_inner_models_and_state_goes_both_ways() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten())
    wrapped = cudaops.CudaModule(model, device="emulator")
    assert wrapped.state_dict().keys() == model.state_dict().keys()
    assert wrapped.state_dict()._metadata == model.state_dict()._metadata
    assert dict(wrapped.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert dict(wrapped.named_buffers()).keys() == dict(model.named_buffers()).keys()
    other = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten())
    wrapped.load_state_dict(other.state_dict())
    assert torch.equal(model[0].weight, other[0].weight)
    other.load_state_dict(wrapped.state_dict())
    missing = wrapped.load_state_dict({"0.bias": torch.zeros(3), "9.bias": torch.zeros(3)}, strict=False)
    assert "0.weight" in missing.missing_keys
    assert missing.unexpected_keys == ["9.bias"]


def test_names_are_the_inner_models_in_a_larger_model_too() -> None:
    plain = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2)))
    larger = nn.Sequential(OrderedDict(a=cudaops.CudaModule(nn.Linear(2, 2), device="emulator"), b=nn.Linear(2, 2)))
    assert larger.state_dict().keys() == plain.state_dict().keys()
    larger.load_state_dict(plain.state_dict())
    assert torch.equal(larger.a.module.weight, plain.a.weight)
    assert [name for name, _ in larger.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_attributes_and_modes_are_the_inner_models() -> None:
    model = Net()
    model.conv.eval()
    model.note = "kept"  # type: ignore[assignment]
    wrapped = cudaops.CudaModule(model, device="emulator")
    assert wrapped.note == "kept"
    assert wrapped.conv is model.conv
    assert wrapped.training
    assert model.training
    assert not model.conv.training
    wrapped.eval()
    assert not model.training
    assert not model.fc.training
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        wrapped.nothing_of_the_kind  # noqa: B018


def test_it_survives_deepcopy_and_pickle() -> None:
    model, x = net_and_input()
    wrapped = cudaops.CudaModule(model, device="emulator")
    expected = wrapped(x)
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(twin(x), expected)
        assert twin.module is not model
        assert twin.calls == {"conv2d": 1, "linear": 2}


def test_report_says_what_the_override_reaches() -> None:
    wrapped = cudaops.CudaModule(nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2)), device="emulator")
    linear, attention, out_proj = cudaops.report(wrapped)
    assert linear.name == "0"
    assert "inside CudaModule" in linear.reason
    assert "torch's own function" in attention.reason
    assert "never calls it" in out_proj.reason


def test_a_layer_that_is_swapped_as_well_runs_our_kernel_once() -> None:
    from cudaops import launch

    layer, x = wholly(nn.Linear(3, 2)), whole(4, 3)
    expected = layer(x)
    wrapped = cudaops.CudaModule(cudaops.convert(layer), device="emulator")
    before = launch.total_launches()
    assert torch.equal(wrapped(x), expected)
    assert launch.total_launches() - before == 1
    assert next(iter(cudaops.report(wrapped))).calls == 1


# ---- moving ----


def test_every_tensor_in_nested_inputs_is_moved_and_the_rest_is_passed_on() -> None:
    point = namedtuple("point", ["x", "label"])
    there = torch.device("meta")
    t = torch.zeros(2)
    value = {"list": [t, (t, 3)], "named": point(t, "a"), "none": None, "set": {1}}
    moved = cuda_module.moved(value, there)
    assert moved["list"][0].device == moved["list"][1][0].device == moved["named"].x.device == there
    assert moved["list"][1][1] == 3
    assert moved["named"].label == "a"
    assert isinstance(moved["named"], point)
    assert moved["none"] is None
    assert moved["set"] is value["set"]
    assert t.device.type == "cpu"
    assert cuda_module.moved(t, torch.device("cpu")) is t
    packed = pack_sequence([torch.zeros(2)])
    assert cuda_module.moved(packed, torch.device("cpu")) is packed
    layer = nn.Linear(1, 1)
    assert cuda_module.moved(layer, there) is layer
    assert layer.weight.device.type == "cpu"


def test_inputs_by_position_and_by_name_are_moved_to_where_the_model_is() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.ones(2, device="meta"))

        def forward(self, x: torch.Tensor, *, more: list[torch.Tensor]) -> torch.Tensor:
            return x + more[0] + self.offset

    wrapped = cudaops.CudaModule(nn.Identity(), device="emulator")
    wrapped.module = Add()
    assert wrapped(torch.zeros(2), more=[torch.zeros(2)]).device.type == "meta"


def test_with_a_gpu_the_model_goes_there_and_runs_under_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[torch.device] = []

    class Moving(nn.Linear):
        def to(self, device: torch.device) -> Moving:  # type: ignore[override]
            moves.append(device)
            return self

    monkeypatch.setattr(cuda_module, "is_available", lambda: True)
    cudaops.CudaModule(Moving(1, 1), device=1)
    cudaops.CudaModule(Moving(1, 1))
    assert moves == [torch.device("cuda:1"), torch.device("cuda")]


@pytest.mark.parametrize("device", [None, "cuda:0"])
def test_without_a_gpu_it_warns_once_and_runs_torchs_own(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cudaops import launch

    monkeypatch.setattr(cuda_module, "is_available", lambda: False)
    monkeypatch.setattr(cuda_module, "_warned", False)
    model, x = net_and_input()
    expected = model(x)
    before = launch.total_launches()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wrapped = cudaops.CudaModule(model, device)
        cudaops.CudaModule(model, device)
    (warning,) = said
    assert "runs torch's own functions on the CPU" in str(warning.message)
    assert warning.filename == __file__
    assert torch.equal(wrapped(x), expected)
    assert launch.total_launches() == before
    assert not wrapped.calls


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA device is needed"):
        cudaops.CudaModule(nn.Linear(1, 1), device="cpu")
