"""Benchmarks against torch, `pytest tests/bench`; with `--targets`, a ratio beyond its target fails the run.

Each round runs torch's op and ours one after the other, so that whatever else the machine does meets both; the ratio is
that of the medians. Kernels are compiled, and torch is warm, before the first round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS = 11
SHORT_SECONDS = 1e-3  # calls shorter than this are timed several at once
MOST_CALLS = 200

Call = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How a benchmark came out; medians in seconds a call."""

    name: str
    ours: float
    theirs: float
    target: float
    other: str = "torch"  # who theirs is

    @property
    def value(self) -> float:
        """Ours over theirs: 1 is as fast."""
        return self.ours / self.theirs

    @property
    def verdict(self) -> str:
        """In words, against the target."""
        return "within" if self.value <= self.target else "BEYOND"


@dataclass(frozen=True)
class Amount:
    """What a benchmark measured that is held to a number, not to torch."""

    name: str
    value: float
    unit: str
    most: float | None
    least: float | None

    @property
    def holds(self) -> bool:
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)

    @property
    def target(self) -> str:
        return f"at most {self.most:g}" if self.most is not None else f"at least {self.least:g}"


_ratios = pytest.StashKey[list[Ratio]]()
_amounts = pytest.StashKey[list[Amount]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--targets", action="store_true", help="fail where the ratio to torch is beyond its target")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ratios] = []
    config.stash[_amounts] = []
    if config.getoption("--targets") and config.getoption("benchmark_disable"):
        raise pytest.UsageError("--targets needs times, which --benchmark-disable leaves out: give one of them")


def pytest_report_header() -> str:
    from cudaops.emulator import describe

    return f"emulator: {describe()}; torch {torch.__version__}, {torch.get_num_threads()} threads"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ratios, amounts = config.stash[_ratios], config.stash[_amounts]
    if amounts:
        terminalreporter.section("beside the targets")
        width = max(len(amount.name) for amount in amounts)
    for amount in amounts:
        verdict = "within" if amount.holds else "BEYOND"
        terminalreporter.line(
            f"{amount.name:{width}}  {amount.value:9.3f} {amount.unit}  target {amount.target}: {verdict}"
        )
    if not ratios:
        return
    threads = torch.get_num_threads()
    terminalreporter.section(f"ratio to torch, medians of {ROUNDS} interleaved rounds, {threads} threads")
    width = max(len(ratio.name) for ratio in ratios)
    for ratio in ratios:
        terminalreporter.line(
            f"{ratio.name:{width}}  ours {ratio.ours * 1e3:9.3f} ms  {ratio.other} {ratio.theirs * 1e3:9.3f} ms  "
            f"ratio {ratio.value:7.2f}  target {ratio.target:g}: {ratio.verdict}"
        )


@pytest.fixture
def against_torch(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Callable[..., None]:
    """`against_torch(ours, theirs, target=8)`: time two calls without arguments, and compare.

    With `--benchmark-disable` each runs once.
    """
    return _comparison(request, benchmark, "torch")


@pytest.fixture
def against_plain(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> Callable[..., None]:
    """The same for a call of ours with something turned on and the call without it."""
    return _comparison(request, benchmark, "plain")


def _comparison(request: pytest.FixtureRequest, benchmark: BenchmarkFixture, other: str) -> Callable[..., None]:
    def run(ours: Call, theirs: Call, *, target: float) -> None:
        ours()  # compiles
        theirs()
        calls = _calls(theirs)
        times: list[float] = []

        def theirs_first() -> None:
            start = time.perf_counter()
            for _ in range(calls):
                theirs()
            times.append((time.perf_counter() - start) / calls)

        def timed() -> None:
            for _ in range(calls):
                ours()

        benchmark.pedantic(timed, setup=theirs_first, rounds=ROUNDS, iterations=1, warmup_rounds=1)
        if benchmark.stats is None:  # disabled
            return
        ratio = Ratio(
            request.node.name, benchmark.stats.stats.median / calls, statistics.median(times[-ROUNDS:]), target, other
        )
        benchmark.extra_info |= {"ratio": ratio.value, "target": target, "threads": torch.get_num_threads()}
        request.config.stash[_ratios].append(ratio)
        if request.config.getoption("--targets"):
            assert ratio.value <= target, f"{ratio.value:.2f} x {other}'s time, the target is {target:g} x"

    return run


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`figure(value, "ms", most=20)`: show a figure beside its target; `least` where more is better."""

    def note(value: float, unit: str, *, most: float | None = None, least: float | None = None) -> None:
        if request.config.getoption("benchmark_disable"):
            return
        amount = Amount(request.node.name, value, unit, most, least)
        request.config.stash[_amounts].append(amount)
        if request.config.getoption("--targets"):
            assert amount.holds, f"{value:.3f} {unit}, the target is {amount.target}"

    return note


@pytest.fixture
def best(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`best(call, other, rounds=11, calls=1)`: the least seconds of each call over rounds in which they take turns.

    A list for several, a number for one. With `--benchmark-disable` each runs once.
    """

    def run(*timed: Call, rounds: int = ROUNDS, calls: int = 1) -> list[float] | float:
        if request.config.getoption("benchmark_disable"):
            rounds = calls = 1
        else:
            for call in timed:
                call()
        least = [float("inf")] * len(timed)
        for _ in range(rounds):
            for n, call in enumerate(timed):
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                least[n] = min(least[n], (time.perf_counter() - start) / calls)
        return least if len(least) > 1 else least[0]

    return run


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch, and so the emulator, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _calls(call: Call) -> int:
    """How many calls make a round."""
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return 1 if seconds >= SHORT_SECONDS else min(MOST_CALLS, int(SHORT_SECONDS / max(seconds, 1e-7)) + 1)
