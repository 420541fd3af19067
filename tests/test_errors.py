"""The family of errors."""

from __future__ import annotations

import pickle

import pytest

import cudaops
from cudaops import errors

NAMES = ("CompileError", "LaunchError", "EmulatorError", "SanitizerError", "UnsupportedError")


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_cudaops_error_and_a_runtime_error(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.CudaopsError)
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize("name", ["CudaopsError", *NAMES])
def test_each_is_public_and_survives_pickling(name: str) -> None:
    kind = getattr(errors, name)
    assert getattr(cudaops, name) is kind
    copy = pickle.loads(pickle.dumps(kind("what, got, limit, next")))
    assert type(copy) is kind
    assert str(copy) == "what, got, limit, next"


def test_no_other_error_is_defined() -> None:
    defined = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert defined == {"CudaopsError", *NAMES}
