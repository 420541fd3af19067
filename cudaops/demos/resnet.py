"""`cudaops demo resnet`: ResNet-18 looks at a photo, every convolution and the fc layer on our kernels.

Each layer's result is compared with torch's own layer on the very same input, and the logits with those of the whole
model by torch, in fp32 on the CPU.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import nn

import cudaops
from cudaops import compile as compiler
from cudaops import launch
from cudaops.demos.checks import Check, needed, progress, verdict
from cudaops.errors import UnsupportedError
from cudaops.plan import Plan

TOLERANCE = 1e-4  # of the logits, as a part of the largest one
LAYERS = 21  # 20 convolutions and the fc layer
WEIGHTS = ("auto", "random", "download")


@dataclass(slots=True)
class Layer:
    """One run of one layer: what went in and came out, which kernels ran, and how long it took, in seconds."""

    name: str
    module: nn.Module
    input: torch.Tensor
    output: torch.Tensor
    kernels: list[str]
    seconds: float


def run(console: Console, *, image: Path | None = None, weights: str = "auto") -> bool:
    """Run the demo.

    Arguments:
        image: a picture file; None is scikit-learn's china.jpg.
        weights: `'auto'` takes trained ones if torch.hub's cache has them, else random ones; `'random'`; `'download'`.

    Returns:
        True if the logits are torch's within `TOLERANCE`, the class is the same, and all `LAYERS` layers ran on our
        kernels.

    Raises:
        ValueError: `image` cannot be read as a picture, or `weights` is none of the three.
        UnsupportedError: torchvision, Pillow or scikit-learn is missing, or the weights cannot be downloaded.
    """
    models = needed("torchvision.models", "torchvision")
    picture, title = _picture(image)
    model, trained, origin = _model(models, weights)
    batch = models.ResNet18_Weights.IMAGENET1K_V1.transforms()(picture).unsqueeze(0)
    console.print(f"image: {title}, as {'x'.join(map(str, batch.shape))}", highlight=False)
    console.print(f"weights: {origin}", highlight=False)

    device = torch.device("cuda" if cudaops.is_available() else "cpu")
    reference = copy.deepcopy(model)
    cudaops.convert(model)
    model.to(device)
    with torch.no_grad(), progress(console) as bar:
        before = compiler.compilations()
        _forward(model, batch.to(device), bar, "first run (compiles what is not cached)")
        compiled = compiler.compilations() - before
        logits, layers = _forward(model, batch.to(device), bar, "each layer by our kernels")
        expected = reference(batch)
        errors = [_error(reference, layer) for layer in bar.track(layers, description="each layer by torch")]
        seconds, torch_seconds = _timed(model, batch.to(device)), _timed(reference, batch)

    console.print(_layer_table(layers, errors))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "the emulator"
    console.print(
        f"whole forward, median of 3: {seconds * 1e3:.0f} ms on {where}, {torch_seconds * 1e3:.0f} ms by torch "
        f"on the CPU, {torch.get_num_threads()} threads; kernels compiled: {compiled}",
        highlight=False,
    )
    if device.type != "cuda":
        console.print("the emulator's times say nothing about a GPU's", highlight=False)
    console.print(_top5(logits, expected, models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"], trained))
    error = float((logits - expected).abs().max() / expected.abs().max())
    rows = [row for row in cudaops.report(model) if row.kernel]
    idle = [row.name for row in rows if row.calls < 1]
    ours, theirs = int(logits.argmax()), int(expected.argmax())
    return verdict(
        console,
        [
            Check(
                "logits: max |ours - torch| / max |torch|", f"{error:.1e}", f"<= {TOLERANCE:.0e}", error <= TOLERANCE
            ),
            Check("class", str(ours), str(theirs), ours == theirs),
            Check("layers on our kernels", str(len(rows)), str(LAYERS), len(rows) == LAYERS),
            Check("layers never called", ", ".join(idle) or "none", "none", not idle),
        ],
    )


def _picture(path: Path | None) -> tuple[Any, str]:
    image = needed("PIL.Image", "Pillow")
    if path is None:
        samples = needed("sklearn.datasets", "scikit-learn")
        return image.fromarray(samples.load_sample_image("china.jpg")), "china.jpg of scikit-learn"
    try:
        with image.open(path) as opened:
            return opened.convert("RGB"), str(path)
    except OSError as error:  # PIL.UnidentifiedImageError is one
        raise ValueError(
            f"{path} cannot be read as a picture ({error}); pass --image FILE with a JPEG or PNG"
        ) from error


def _model(models: Any, weights: str) -> tuple[nn.Module, bool, str]:
    """resnet18, whether its weights are trained ones, and where they are from."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}; got {weights!r}")
    trained = models.ResNet18_Weights.IMAGENET1K_V1
    cached = Path(torch.hub.get_dir()) / "checkpoints" / Path(trained.url).name
    if weights == "download" or (weights == "auto" and cached.exists()):
        return _trained(models, trained), True, f"trained on ImageNet ({cached})"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = models.resnet18(weights=None)
    hint = "" if weights == "random" else f"; no {cached.name} in {cached.parent}, --weights download fetches it"
    return model.eval(), False, f"random, seed 0{hint}"


def _trained(models: Any, weights: Any) -> nn.Module:
    try:
        model: nn.Module = models.resnet18(weights=weights)
    except (OSError, RuntimeError) as error:  # no network; or a file that is not the whole of it
        raise UnsupportedError(
            f"the trained weights cannot be had from {weights.url} ({error}); try again, or take --weights random"
        ) from error
    return model.eval()


def _layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]


def _timed(model: nn.Module, batch: torch.Tensor) -> float:
    """The median time of three forwards, in seconds."""
    times = []
    for _ in range(3):
        start = _now(batch.device)
        model(batch)
        times.append(_now(batch.device) - start)
    return sorted(times)[1]


def _forward(
    model: nn.Module, batch: torch.Tensor, bar: Progress, description: str
) -> tuple[torch.Tensor, list[Layer]]:
    """One forward: logits on the CPU, and every layer that ran."""
    layers: list[Layer] = []
    task = bar.add_task(description, total=LAYERS)
    with _recorded(model, layers, functools.partial(bar.advance, task)):
        logits = model(batch)
    return logits.cpu(), layers


@contextmanager
def _recorded(model: nn.Module, layers: list[Layer], advance: Any) -> Iterator[None]:
    """Record each layer's run by hooks, and the kernels launched in it by the launcher's observer."""
    launched: list[str] = []
    started = 0.0

    def before(module: nn.Module, args: Any) -> None:
        nonlocal started
        launched.clear()
        started = _now(args[0].device)

    def after(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seconds = _now(output.device) - started
        kernels = list(dict.fromkeys(launched))
        layers.append(
            Layer(name, module, args[0].detach().cpu().clone(), output.detach().cpu().clone(), kernels, seconds)
        )
        advance()

    def seen(plan: Plan, seconds: float) -> None:
        launched.append(plan.source.entry)

    hooks = [module.register_forward_pre_hook(before) for _, module in _layers_of(model)]
    hooks += [module.register_forward_hook(functools.partial(after, name)) for name, module in _layers_of(model)]
    try:
        with launch.on_launch(seen):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _error(reference: nn.Module, layer: Layer) -> float:
    """max |ours - torch| / max |torch| of one layer, both from the same input."""
    expected = reference.get_submodule(layer.name)(layer.input)
    return float((layer.output - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo().tiny))


def _layer_table(layers: list[Layer], errors: list[float]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0),
        pad_edge=False,
        title="each layer against torch's on the same input",
        title_justify="left",
    )
    for header in ("layer", "output", "filter"):
        table.add_column(header, no_wrap=True)
    table.add_column("kernel", min_width=len("conv_implicit_gemm"))
    for header in ("ms", "error"):
        table.add_column(header, no_wrap=True, justify="right")
    for layer, error in zip(layers, errors, strict=True):
        shape = "x".join(map(str, layer.output.shape[1:]))
        kernels = " + ".join(layer.kernels) or "none"
        table.add_row(
            layer.name,
            shape,
            _filter(layer.module),
            kernels,
            f"{layer.seconds * 1e3:.1f}",
            f"{error:.0e}" if error else "0",
        )
    return table


def _filter(module: nn.Module) -> str:
    if isinstance(module, nn.Conv2d):
        return "x".join(map(str, module.kernel_size)) + (f" /{module.stride[0]}" if module.stride[0] > 1 else "")
    return "-"


def _top5(logits: torch.Tensor, expected: torch.Tensor, categories: list[str], trained: bool) -> Table:
    title = "top-5" if trained else "top-5 (the weights are random: it means nothing)"
    table = Table("class", "ours", "torch", title=title, title_justify="left")
    ours, theirs = logits.softmax(1)[0], expected.softmax(1)[0]
    for index in logits[0].topk(5).indices.tolist():
        table.add_row(Text(categories[index]), f"{ours[index] * 100:.2f} %", f"{theirs[index] * 100:.2f} %")
    return table
