"""`cuda` and `cpu`: on a machine without a GPU, and with the GPU's part taken by a stand-in."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import cudaops
from cudaops.nn import placement
from tests.nn.layers import net_and_input


def test_without_a_gpu_cuda_warns_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "is_available", lambda: False)
    monkeypatch.setattr(placement, "why_unavailable", lambda: "no NVIDIA driver; install it")
    model, x = net_and_input()
    parameters = [id(parameter) for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert cudaops.cuda(model) is model
    (warning,) = said
    assert str(warning.message) == "cudaops.cuda: the model stays on the CPU, unchanged: no NVIDIA driver; install it"
    assert warning.filename == __file__
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert all(row.kernel is None for row in cudaops.report(model))
    model(x)


class Moving(nn.Sequential):
    """Records where it is told to go, and stays: there is no GPU here."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.moves: list[torch.device] = []

    def to(self, device: torch.device) -> Moving:  # type: ignore[override]
        self.moves.append(device)
        return self

    def cpu(self) -> Moving:
        return self.to(torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "expected"), [(None, "cuda"), (1, "cuda:1"), ("cuda:0", "cuda:0"), (torch.device("cuda", 2), "cuda:2")]
)
def test_with_a_gpu_the_model_is_moved_and_converted(
    device: torch.device | int | str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "is_available", lambda: True)
    model = Moving(nn.Linear(2, 2), nn.ReLU())
    assert cudaops.cuda(model, device) is model
    assert model.moves == [torch.device(expected)]
    assert [row.kernel for row in cudaops.report(model)] == ["matmul"]
    assert cudaops.cpu(model) is model
    assert model.moves == [torch.device(expected), torch.device("cpu")]
    assert "forward" not in vars(model[0])


def test_a_model_with_nothing_to_swap_is_moved_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "is_available", lambda: True)
    model = Moving(nn.ReLU(), nn.Conv1d(1, 1, 1))
    cudaops.cuda(model)
    assert model.moves == [torch.device("cuda")]


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu")])
def test_a_device_that_is_no_gpu_is_refused(device: torch.device | str) -> None:
    with pytest.raises(ValueError, match=r"CUDA device is needed.*cudaops\.cpu\(model\)"):
        cudaops.cuda(nn.Linear(1, 1), device)


def test_cpu_keeps_the_parameters_and_their_optimizer() -> None:
    model, x = net_and_input()
    expected = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    cudaops.cpu(cudaops.convert(model))
    assert torch.equal(model(x), expected)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert held == [id(parameter) for parameter in model.parameters()]
