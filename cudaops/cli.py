"""The command line: `cudaops info | explain | demo ...`."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as missing:
    raise SystemExit(f"the cudaops command needs {missing.name}: pip install typer rich") from missing

import cudaops

app = typer.Typer(
    help="Raw CUDA C kernels as torch operations, on a GPU or in an emulator.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
demo = typer.Typer(
    help="Something whole, with its result checked; exits 1 when a check is missed.", no_args_is_help=True
)
app.add_typer(demo, name="demo")


class Weights(enum.StrEnum):
    """As in `demos.resnet.WEIGHTS`."""

    auto = "auto"
    random = "random"
    download = "download"


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(cudaops.__version__)
        raise typer.Exit


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """What is installed and what can run: torch, CuPy, NVRTC, driver, GPUs or why there is none, cache, emulator."""
    found = cudaops.info()
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        Console().print(found)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="matmul or linear.")],
    shapes: Annotated[list[str], typer.Argument(help="Sizes of each tensor, as in 1024x512.")],
    dtype: Annotated[str, typer.Option(help="torch's name, or tf32.")] = "float32",
    arch: Annotated[str | None, typer.Option(help="As in sm_90; by default the GPU's, or the emulator's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """What an op would launch for these shapes, and why: kernel, tile, grid, occupancy, registers, bound."""
    try:
        sizes = [tuple(int(size) for size in shape.split("x")) for shape in shapes]
    except ValueError:
        raise ValueError(f"a shape is sizes with x between, as in 1024x512; got {' '.join(shapes)}") from None
    try:
        found = cudaops.explain(op, *sizes, dtype=dtype, arch=arch)
    except RuntimeError as error:  # torch's kind: the shapes do not fit together
        raise ValueError(str(error)) from None
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        Console().print(found)


@demo.command()
def tensors() -> None:
    """Is CUDA there, a tensor to the GPU, and a matrix product of integers."""
    from cudaops.demos import tensors

    _finish(tensors.run(Console()))


@demo.command()
def resnet(
    image: Annotated[
        Path | None, typer.Option(help="A picture; by default china.jpg of scikit-learn.", show_default=False)
    ] = None,
    weights: Annotated[
        Weights,
        typer.Option(help="auto: trained ones if torch.hub's cache has them, else random; download fetches them."),
    ] = Weights.auto,
) -> None:
    """ResNet-18 on a photo, all 20 convolutions and the fc layer on our kernels, each compared with torch."""
    from cudaops.demos import resnet

    _finish(resnet.run(Console(), image=image, weights=weights.value))


@demo.command()
def train(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 6,
    batch_size: Annotated[int, typer.Option(min=2, help="Images a step.")] = 64,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD.")] = 0.02,
    seed: Annotated[int, typer.Option(help="Of the weights, the split and the order of the images.")] = 0,
    target: Annotated[float, typer.Option(min=0.0, max=1.0, help="Test accuracy to reach; exits 1 below it.")] = 0.97,
    out: Annotated[Path, typer.Option(help="Where the loss curve goes, a PNG.")] = Path("cudaops-digits-loss.png"),
) -> None:
    """Train a small network on scikit-learn's digits, forward and backward on our kernels."""
    from cudaops.demos import train

    _finish(train.run(Console(), epochs=epochs, batch_size=batch_size, lr=lr, seed=seed, target=target, out=out))


def _finish(holds: bool) -> None:
    raise typer.Exit(0 if holds else 1)


def main() -> None:
    """The `cudaops` command: an error of ours, or a bad argument, is one line and exit code 1."""
    try:
        app()
    except (cudaops.CudaopsError, ValueError) as error:
        print(f"cudaops: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
