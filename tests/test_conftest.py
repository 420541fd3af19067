"""The rules that conftest.py sets for every test hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")

SUITE = """
import warnings
import pytest
import torch

def test_fails():
    print("drew", torch.rand(1).item())
    assert False

def test_passes():
    pass

@pytest.mark.gpu
def test_on_a_gpu():
    pass
"""

WRONG = {
    "skip": "import pytest\n@pytest.mark.skip(reason='flaky')\ndef test(): pass\n",
    "call": "import pytest\ndef test(): pytest.skip('needs a CUDA GPU, or luck')\n",
    "module": "import pytest\npytest.skip('not today', allow_module_level=True)\n",
}


def run(folder: Path, suite: str, *options: str, **environment: str) -> tuple[int, str]:
    shutil.copy(CONFTEST, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA GPU\n")
    (folder / "test_it.py").write_text(suite)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)],
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_failure_prints_the_seed_that_repeats_it(tmp_path: Path) -> None:
    code, output = run(tmp_path, SUITE)
    assert code == 1
    assert "1 failed, 1 passed, 1 skipped" in output
    seed = re.search(r"CUDAOPS_TEST_SEED=(\d+) repeats", output)
    drawn = re.search(r"drew (\S+)", output)
    assert seed is not None
    assert drawn is not None
    _, again = run(tmp_path, SUITE, CUDAOPS_TEST_SEED=seed.group(1))
    assert f"drew {drawn.group(1)}" in again


def test_only_the_want_of_a_gpu_skips_a_test(tmp_path: Path) -> None:
    code, output = run(tmp_path, SUITE, "-k", "gpu")
    assert code == 0, output
    for name, suite in WRONG.items():
        (tmp_path / f"test_{name}.py").write_text(suite)
    code, output = run(tmp_path, SUITE, "-k", "not fails")
    assert code == 1, output
    _, _, summary = output.partition("skipped for another reason than 'needs a CUDA GPU'")
    assert [f"test_{name}.py" in summary for name in WRONG] == [True] * 3
    assert "test_it.py" not in summary
