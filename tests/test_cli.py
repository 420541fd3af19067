"""The command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import cudaops
from cudaops import cli


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "120"})


def test_info_prints_a_table() -> None:
    done = run("info")
    assert done.exit_code == 0
    for fact in (torch.__version__, "NVRTC", "emulator", "cache"):
        assert fact in done.output


def test_info_as_json_is_the_same_as_the_functions() -> None:
    done = run("info", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output).keys() == cudaops.info().as_dict().keys()
    assert json.loads(done.output)["torch"] == torch.__version__


def test_explain_prints_a_table_and_json() -> None:
    command = ("explain", "matmul", "64x32", "32x48", "--dtype", "float16", "--arch", "sm_90")
    done = run(*command)
    assert done.exit_code == 0
    assert "matmul 64x32 32x48 in float16, on sm_90" in done.output
    done = run(*command, "--json")
    assert json.loads(done.output)["kernel"] == "matmul_mma"
    for wrong, why in (("64xx32", "a shape is sizes with x between"), ("64x31", r"cannot be multiplied")):
        done = run("explain", "matmul", wrong, "32x48")
        assert done.exit_code == 1
        assert why in str(done.exception)


def test_version() -> None:
    assert run("--version").output.strip() == cudaops.__version__


@pytest.mark.parametrize("arguments", [(), ("demo",)])
def test_no_command_shows_the_help(arguments: tuple[str, ...]) -> None:
    assert "Usage:" in run(*arguments).output


@pytest.mark.parametrize("name", ["tensors", "resnet", "train"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_demo_exits_1_when_a_check_is_missed(name: str, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    demo = importlib.import_module(f"cudaops.demos.{name}")
    monkeypatch.setattr(demo, "run", lambda console, **options: holds)
    assert run("demo", name).exit_code == (0 if holds else 1)


def test_the_options_reach_the_demos(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudaops.demos import resnet, train

    seen: list[dict[str, Any]] = []
    for demo in (resnet, train):
        monkeypatch.setattr(demo, "run", lambda console, **options: bool(seen.append(options)) or True)
    run("demo", "resnet", "--image", "a.jpg", "--weights", "random")
    run(
        "demo",
        "train",
        "--epochs",
        "3",
        "--batch-size",
        "8",
        "--lr",
        "0.1",
        "--seed",
        "5",
        "--target",
        "0.5",
        "--out",
        "b.png",
    )
    assert seen == [
        {"image": Path("a.jpg"), "weights": "random"},
        {"epochs": 3, "batch_size": 8, "lr": 0.1, "seed": 5, "target": 0.5, "out": Path("b.png")},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "resnet", "--weights", "golden"), "golden"),
        (("demo", "train", "--epochs", "0"), "epochs"),
        (("nonsense",), "nonsense"),
    ],
)
def test_a_bad_argument_is_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, and this source tree."""
    root = str(Path(cudaops.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)


def test_an_error_of_ours_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = process("-m", "cudaops.cli", "demo", "resnet", "--image", str(tmp_path / "none.jpg"))
    assert done.returncode == 1
    assert done.stderr.startswith("cudaops: ")
    assert "none.jpg cannot be read as a picture" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_typer_the_command_says_what_to_install() -> None:
    done = process("-c", "import sys; sys.modules['typer'] = None; import cudaops.cli")
    assert done.returncode == 1
    assert done.stderr.strip() == "the cudaops command needs typer: pip install typer rich"
