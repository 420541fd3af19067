"""The table of `report`."""

from __future__ import annotations

import sys

import pytest
import torch
from rich.console import Console
from torch import nn

import cudaops
from tests.nn.layers import net_and_input


def test_rows_say_name_type_kernel_reason_and_calls() -> None:
    model, x = net_and_input()
    before = cudaops.report(model)
    assert [(row.name, row.type, row.kernel, row.reason, row.calls) for row in before] == [
        ("conv", "Conv2d", None, "not converted", 0),
        ("fc", "Linear", None, "not converted", 0),
    ]
    cudaops.convert(model)
    assert all("never called" in row.reason for row in cudaops.report(model))
    model(x)
    report = cudaops.report(model)
    assert [(row.name, row.type, row.kernel, row.reason, row.calls) for row in report] == [
        ("conv", "Conv2d", "conv_implicit_gemm", "", 1),
        ("fc", "Linear", "matmul", "", 2),
    ]
    assert len(report) == 2
    assert report.summary == "2 of 2 convolution and linear-like modules on cudaops kernels"


def test_the_kernel_a_row_names_is_the_one_that_was_launched() -> None:
    from cudaops import launch

    model, x = net_and_input()
    cudaops.convert(model)
    launched: list[str] = []
    with launch.on_launch(lambda plan, seconds: launched.append(plan.source.entry)):
        model(x)
    kernels = [row.kernel for row in cudaops.report(model)]
    assert kernels == ["conv_implicit_gemm", "matmul"]  # the latter is a family: matmul_simt, matmul_skinny
    families = [family for entry in launched for family in kernels if entry.startswith(family)]
    assert families == ["conv_implicit_gemm", "matmul", "matmul"]


def test_a_swapped_layer_that_was_never_called_is_said_so() -> None:
    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(2, 2)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    model = cudaops.convert(Bypass())
    model(torch.zeros(1, 2))
    used, unused = cudaops.report(model)
    assert (used.calls, used.reason) == (1, "")
    assert unused.calls == 0
    assert "never called" in unused.reason
    assert cudaops.report(model).summary.endswith("1 of them never called")


@pytest.mark.parametrize("without_rich", [False, True])
def test_it_prints_as_a_table(without_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"[b]": nn.Linear(1, 1), "conv": nn.Conv1d(1, 1, 1)})
    if without_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    text = str(cudaops.report(model))
    lines = text.splitlines()
    assert [line for line in lines if "[b]" in line and "Linear" in line and "not converted" in line]
    assert [line for line in lines if "conv" in line and "Conv1d" in line and "no kernel for Conv1d yet" in line]
    assert "0 of 2" in lines[-1]


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal_and_loses_no_letter_of_a_name(width: int) -> None:
    model = nn.ModuleDict({"encoder_with_quite_a_long_name_that_needs_room": nn.TransformerEncoderLayer(4, 2)})
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(cudaops.report(model))
    text = console.export_text()
    console.file.close()
    assert max(map(len, text.splitlines())) <= width
    cells = "".join(line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│"))
    assert "encoder_with_quite_a_long_name_that_needs_room.self_attn.out_proj" in cells


def test_a_model_with_nothing_of_the_kind_says_so() -> None:
    report = cudaops.report(nn.ReLU())
    assert list(report) == []
    assert "no convolution or linear-like module" in str(report)
