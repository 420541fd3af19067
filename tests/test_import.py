"""`import cudaops`: quick, and without what is only needed on first use."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

import cudaops

HEAVY = ("cupy", "cupy_backends", "llvmlite", "rich", "typer", "matplotlib", "torchvision", "sklearn")

CODE = f"""
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import cudaops
seconds = time.perf_counter() - start
loaded = [name for name in {HEAVY!r} if name in sys.modules and name not in before]
print(json.dumps([seconds, loaded]))
"""

# The public names there are so far; design: the table of names is closed.
PUBLIC = {
    "CompileError",
    "CudaModule",
    "CudaopsError",
    "EmulatorError",
    "LaunchError",
    "RawKernel",
    "RawModule",
    "SanitizerError",
    "UnsupportedError",
    "__version__",
    "cache",
    "conv2d",
    "convert",
    "cpu",
    "cuda",
    "emulation",
    "explain",
    "info",
    "is_available",
    "linear",
    "matmul",
    "report",
    "restore",
    "sanitize",
    "to_cupy",
    "to_torch",
}


def test_import_takes_under_half_a_second_beyond_torch_and_loads_nothing_heavy(run_python: Callable[..., str]) -> None:
    runs = [json.loads(run_python(CODE)) for _ in range(3)]
    assert [loaded for _, loaded in runs] == [[], [], []]
    assert min(seconds for seconds, _ in runs) < 0.5


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(cudaops.__all__) == PUBLIC
    assert set(dir(cudaops)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(cudaops, name) is not None
    modules = {name.split(".")[1] for name in sys.modules if name.startswith("cudaops.")}
    others = {name for name in vars(cudaops) if not name.startswith("_")} - PUBLIC - modules
    assert others == set()


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        cudaops.conv4d  # type: ignore[attr-defined]  # noqa: B018


def test_every_public_thing_has_a_docstring() -> None:
    assert [name for name in PUBLIC - {"__version__"} if not getattr(cudaops, name).__doc__] == []
