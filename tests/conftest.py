"""What every test gets: fresh random numbers, their seed printed on failure, and no test skipped quietly."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
NEEDS_GPU = "needs a CUDA GPU"  # the one reason to skip a test

_seed = pytest.StashKey[int]()
_wrong_skips: list[str] = []


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A new seed for every test, of torch, NumPy and random; CUDAOPS_TEST_SEED repeats one."""
    value = int(os.environ.get("CUDAOPS_TEST_SEED") or secrets.randbits(31))
    request.node.stash[_seed] = value
    torch.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    """A torch generator of the test's own."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache for this test alone; the folder does not exist yet."""
    folder = tmp_path / "kernel-cache"
    monkeypatch.setenv("CUDAOPS_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Run code in a new Python process, warnings being errors, with this source tree; returns what it printed."""

    def run(code: str, *, path: Path = ROOT, check: bool = True, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "error", "-c", code],
            env=os.environ | {"PYTHONPATH": str(path)} | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        output = done.stdout + done.stderr
        assert not check or done.returncode == 0, output
        return output

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _seed in item.stash:
        report.sections.append(("seed", f"CUDAOPS_TEST_SEED={item.stash[_seed]} repeats this test's random numbers"))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if reason.removeprefix("Skipped: ") != NEEDS_GPU:
            _wrong_skips.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _wrong_skips and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _wrong_skips:
        terminalreporter.section(f"skipped for another reason than '{NEEDS_GPU}': that is a failure")
        for line in _wrong_skips:
            terminalreporter.line(line, red=True)
