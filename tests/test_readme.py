"""Every Python block of README.md runs as it stands, and the commands are the ones that are tested."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_a_python_block_runs_and_prints_what_its_comments_say(code: str, run_python: Callable[..., str]) -> None:
    lines = run_python(code).splitlines()
    for line in re.findall(r"^ *print\(.*\)  # ([\[({].*)$", code, re.M):
        assert line in lines


def test_there_is_a_block_for_each_way_of_use() -> None:
    text = "\n".join(BLOCKS)
    for name in (
        "cudaops.matmul",
        "cudaops.conv2d",
        "cudaops.convert",
        "cudaops.report",
        "cudaops.CudaModule",
        "cudaops.RawKernel",
        "cudaops.sanitize",
    ):
        assert name in text


def test_both_commands_are_there_word_for_word() -> None:
    assert "pip install -e '.[cuda12,demo]' && cudaops demo resnet" in README
    assert "pip install -e '.[cuda12,demo,test]' && pytest" in README
