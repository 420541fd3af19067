"""The demos do what they claim, and notice when it is not so."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import cudaops
from cudaops import ops
from cudaops.demos import checks, resnet, tensors, train


def screen(width: int = 100) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def spoiled(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Any], Any]) -> None:
    """Let an op of ours give a wrong result."""
    right = getattr(ops, name)
    for owner in (ops, cudaops):
        monkeypatch.setattr(owner, name, lambda *args, **options: spoil(right(*args, **options)))


# ---- tensors ----


@pytest.mark.parametrize("width", [80, 120])
def test_tensors_shows_the_product_of_integers(width: int) -> None:
    console = screen(width)
    assert tensors.run(console)
    text = shown(console)
    assert "[[19, 22], [43, 50]]" in text
    assert "MISSED" not in text
    assert ("not available" in text) is (not cudaops.is_available())
    assert max(map(len, text.splitlines())) <= width


def test_tensors_notices_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, "matmul", lambda product: product + 1)
    console = screen()
    assert not tensors.run(console)
    assert "MISSED" in shown(console)


def test_tensors_notices_a_product_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudaops, "matmul", torch.matmul)
    console = screen()
    assert not tensors.run(console)
    (line,) = [line for line in shown(console).splitlines() if "launched" in line]
    assert "MISSED" in line


# ---- resnet ----


def test_resnet_runs_21_layers_on_our_kernels_and_agrees_with_torch() -> None:
    console = screen(80)
    assert resnet.run(console, weights="random")
    text = shown(console)
    assert "china.jpg" in text
    assert "it means nothing" in text
    assert "MISSED" not in text
    assert max(map(len, text.splitlines())) <= 80
    lines = [line for line in text.splitlines() if "conv_implicit_gemm" in line or "matmul_" in line]
    assert len(lines) == 21
    assert sum("conv_implicit_gemm" in line for line in lines) == 20


def test_resnet_notices_a_wrong_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled(monkeypatch, "conv2d", lambda image: image * 1.001)
    console = screen()
    assert not resnet.run(console, weights="random")
    assert "MISSED" in shown(console)


def test_resnet_takes_a_picture_of_yours(tmp_path: Path) -> None:
    Image.new("L", (300, 250), 99).save(tmp_path / "grey.png")
    picture, title = resnet._picture(tmp_path / "grey.png")
    assert picture.mode == "RGB"
    assert picture.size == (300, 250)
    assert "grey.png" in title
    (tmp_path / "no.jpg").write_text("not a picture")
    for name in ("no.jpg", "missing.jpg"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as a picture"):
            resnet.run(screen(), image=tmp_path / name)


def test_resnet_takes_trained_weights_only_if_they_are_there_or_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torchvision import models

    made: list[Any] = []

    def make(weights: Any) -> nn.Module:
        made.append(weights)
        return nn.Linear(1, 1)

    trained = models.ResNet18_Weights.IMAGENET1K_V1
    stand_in: Any = type("models", (), {"ResNet18_Weights": models.ResNet18_Weights, "resnet18": staticmethod(make)})
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert resnet._model(stand_in, "auto")[1] is False
    assert resnet._model(stand_in, "random")[1] is False
    assert resnet._model(stand_in, "download")[1] is True
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / Path(trained.url).name).write_bytes(b"")
    assert resnet._model(stand_in, "auto")[1] is True
    assert resnet._model(stand_in, "random")[1] is False
    assert made == [None, None, trained, trained, None]
    with pytest.raises(ValueError, match="auto, random, download; got 'golden'"):
        resnet._model(stand_in, "golden")


def test_resnet_says_what_to_do_when_the_weights_cannot_be_downloaded() -> None:
    from torchvision import models

    def offline(weights: Any) -> nn.Module:
        raise OSError("no route to host")

    stand_in: Any = type("models", (), {"ResNet18_Weights": models.ResNet18_Weights, "resnet18": staticmethod(offline)})
    with pytest.raises(cudaops.UnsupportedError, match=r"download\.pytorch\.org.*no route to host.*--weights random"):
        resnet._model(stand_in, "download")


def test_resnets_random_weights_are_the_same_every_time_and_disturb_no_one() -> None:
    from torchvision import models

    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    first, second = (resnet._model(models, "random")[0] for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.fc.weight, second.fc.weight)


# ---- train ----


def test_train_reaches_97_percent_on_our_kernels_and_draws_the_loss(tmp_path: Path) -> None:
    console = screen(80)
    out = tmp_path / "loss.png"
    assert train.run(console, out=out)
    text = shown(console)
    assert "MISSED" not in text
    assert max(map(len, text.splitlines())) <= 80
    with Image.open(out) as drawn:
        assert drawn.format == "PNG"
        assert min(drawn.size) >= 400
        assert len(drawn.convert("RGB").getcolors(maxcolors=1 << 20) or ()) > 50  # not a blank page


def test_train_notices_an_accuracy_that_is_missed(tmp_path: Path) -> None:
    console = screen()
    assert not train.run(console, epochs=1, target=1.0, out=tmp_path / "loss.png")
    assert "MISSED" in shown(console)


def test_train_notices_a_layer_that_is_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    convert = cudaops.convert
    monkeypatch.setattr(cudaops, "convert", lambda model: convert(model, exclude="classifier"))
    console = screen()
    assert not train.run(console, epochs=1, target=0.0, out=tmp_path / "loss.png")
    (line,) = [line for line in shown(console).splitlines() if "layers on our kernels" in line]
    assert "MISSED" in line


@pytest.mark.parametrize("options", [{"epochs": 0}, {"batch_size": 1}, {"out": Path("/nowhere/at/all/loss.png")}])
def test_train_refuses_bad_options_before_it_trains(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"epochs|cannot be written"):
        train.run(screen(), **options)


# ---- what they share ----


def test_what_is_not_installed_is_named_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.models", raising=False)
    with pytest.raises(cudaops.UnsupportedError, match="needs torchvision: pip install torchvision"):
        checks.needed("torchvision.models", "torchvision")


def test_a_package_that_is_there_but_broken_keeps_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package.py").write_text("import this_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="this_is_not_there"):
        checks.needed("broken_package", "broken")
