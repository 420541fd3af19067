"""`cudaops demo train`: a small network learns scikit-learn's digits, forward and backward on our kernels.

Model, CrossEntropyLoss, SGD, `model.to(device)`, and the optimizer made afterwards, as in any torch program: the only
line of ours is `cudaops.convert(model)`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn, optim

import cudaops
from cudaops import launch
from cudaops.demos.checks import Check, needed, progress, verdict

TARGET = 0.97
TEST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of shape `(n, 1, 8, 8)`, float32 in 0 to 1, and their labels."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the training images; `losses` are those of its steps."""

    losses: list[float]
    accuracy: float
    seconds: float

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class Net(nn.Module):
    """Two convolutions and a linear layer, for `(n, 1, 8, 8)` images of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


def run(
    console: Console,
    *,
    epochs: int = 6,
    batch_size: int = 64,
    lr: float = 0.02,
    seed: int = 0,
    target: float = TARGET,
    out: Path = Path("cudaops-digits-loss.png"),
) -> bool:
    """Train and test; the loss curve is drawn into `out`.

    Returns:
        True if the accuracy on the test images is `target` or more, and every layer ran on our kernels in every step.

    Raises:
        ValueError: `epochs` or `batch_size` is below 1, or `out` cannot be written.
        UnsupportedError: scikit-learn or matplotlib is missing.
    """
    if epochs < 1 or batch_size < 2:
        raise ValueError(f"epochs must be 1 or more and batch_size 2 or more, got {epochs} and {batch_size}")
    needed("matplotlib", "matplotlib")
    _check_writable(out)
    device = torch.device("cuda" if cudaops.is_available() else "cpu")
    data = load(seed, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Net()
        cudaops.convert(model)
        model.to(device)
        criterion = nn.CrossEntropyLoss()
        optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9)

        history: list[Epoch] = []
        before = launch.launch_counts()
        steps = -(-len(data.train_images) // batch_size)
        with progress(console) as bar:
            task = bar.add_task("training", total=epochs * steps)
            for epoch in range(epochs):
                start = time.perf_counter()
                losses = []
                model.train()
                for chosen in torch.randperm(len(data.train_images)).to(device).split(batch_size):
                    loss = criterion(model(data.train_images[chosen]), data.train_labels[chosen])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                    bar.update(task, advance=1, description=f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
                history.append(Epoch(losses, accuracy(model, data), time.perf_counter() - start))
    launched = launch.launch_counts() - before
    draw(history, out)
    console.print(_table(history))
    seconds = sum(epoch.seconds for epoch in history)
    where = (
        torch.cuda.get_device_name() if device.type == "cuda" else f"the emulator, {torch.get_num_threads()} threads"
    )
    console.print(f"{seconds:.1f} s on {where}; loss curve: {out}", highlight=False)
    console.print("launches: " + ", ".join(f"{n} {kernel}" for kernel, n in sorted(launched.items())), highlight=False)

    rows = list(cudaops.report(model))
    swapped = sum(row.kernel is not None for row in rows)
    calls = epochs * (steps + 1)  # each step, and the test after each epoch
    fewest = min(row.calls for row in rows)
    # A launch for each call, and for each gradient of a step: weight and input, but the images need none.
    expected = {"Conv2d": 2 * calls + 3 * epochs * steps, "Linear": calls + 2 * epochs * steps}
    launches = {
        row.type: sum(n for kernel, n in launched.items() if kernel.startswith(row.kernel))
        for row in rows
        if row.kernel
    }
    reached = history[-1].accuracy
    return verdict(
        console,
        [
            Check(
                f"accuracy on {len(data.test_images)} test images",
                f"{reached:.1%}",
                f">= {target:.1%}",
                reached >= target,
            ),
            Check("layers on our kernels", str(swapped), "3", swapped == 3),
            Check("forward calls of each layer", str(fewest), str(calls), fewest == calls),
            *(
                Check(f"launches for {kind}", str(launches.get(kind, 0)), f">= {least}", launches.get(kind, 0) >= least)
                for kind, least in expected.items()
            ),
        ],
    )


def load(seed: int, device: torch.device) -> Digits:
    """scikit-learn's digits, a fifth of them kept for the test, each digit in proportion."""
    digits = needed("sklearn.datasets", "scikit-learn").load_digits()
    split = needed("sklearn.model_selection", "scikit-learn").train_test_split
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = split(
        torch.arange(len(labels)).numpy(), test_size=TEST_SHARE, random_state=seed, stratify=digits.target
    )
    return Digits(*(part.to(device) for part in (images[train], labels[train], images[test], labels[test])))


def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of the test images that `model` reads right."""
    model.eval()
    with torch.no_grad():
        return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


def draw(history: list[Epoch], out: Path) -> None:
    """The loss of every step, and of every epoch its mean and the accuracy, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [loss for epoch in history for loss in epoch.losses]
    ends = [len(epoch.losses) * (i + 1) for i, epoch in enumerate(history)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(steps) + 1), steps, color="0.7", linewidth=1, label="loss of a step")
    axes.plot(ends, [epoch.loss for epoch in history], color="tab:blue", marker="o", label="mean loss of an epoch")
    axes.set(xlabel="step", ylabel="cross-entropy loss", yscale="log")
    axes.set_title("digits: trained on cudaops kernels")
    right = axes.twinx()
    right.plot(ends, [epoch.accuracy * 100 for epoch in history], color="tab:orange", marker="s", label="test accuracy")
    right.set(ylabel="test accuracy, %", ylim=(0, 105))
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="center right")
    figure.savefig(out, dpi=120)


def _check_writable(out: Path) -> None:
    """Before the training, not after it."""
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise ValueError(f"the loss curve cannot be written to {out}; pass --out with a file in a folder of yours")


def _table(history: list[Epoch]) -> Table:
    table = Table(title="training on digits", title_justify="left")
    for header in ("epoch", "mean loss", "test accuracy", "seconds"):
        table.add_column(header, justify="right")
    for number, epoch in enumerate(history, 1):
        table.add_row(str(number), f"{epoch.loss:.4f}", f"{epoch.accuracy:.1%}", f"{epoch.seconds:.1f}")
    return table
