"""Random programs in CUDA C do, thread by thread and bit by bit, what a host compiler makes of the same text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.emulator import c_programs
from tests.emulator.c_batch import Batch, Block, Grid
from tests.emulator.integer_steps import CONSTANTS

Inputs = list[tuple[int, int, int]]
BLOCKS = [(64, 1, 1), (40, 1, 1), (7, 1, 1), (33, 1, 1), (8, 8, 1), (5, 9, 1), (16, 2, 2), (3, 5, 4), (2, 2, 17)]
PATIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

_word = st.one_of(st.sampled_from(CONSTANTS), st.integers(0, 2**32 - 1))
BATCHES = given(
    batch=st.builds(Batch, st.lists(c_programs.programs, min_size=2, max_size=6).map(tuple)),
    grid=st.sampled_from(((1, 1), (3, 1), (2, 2))),
    block=st.sampled_from(BLOCKS),
    inputs=st.lists(st.tuples(_word, _word, st.one_of(_word, st.integers(0, 2**64 - 1))), min_size=1, max_size=2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the libraries that the host compiler makes."""
    return tmp_path_factory.mktemp("programs")


def check(folder: Path, batch: Batch, grid: Grid, block: Block, inputs: Inputs) -> None:
    for numbers in inputs:
        expected = batch.run_on_the_host(folder, grid, block, *numbers)
        got = batch.run(grid, block, *numbers)
        wrong = np.argwhere(got != expected)
        assert not wrong.size, (
            f"{len(wrong)} of {got.size} words, the first f{wrong[0][2]} of block {wrong[0][0]}, thread {wrong[0][1]}: "
            f"{got[tuple(wrong[0])]:#x}, not {expected[tuple(wrong[0])]:#x}"
        )


@settings(PATIENT, max_examples=25)
@BATCHES
def test_any_program_does_what_it_does_on_the_host(
    folder: Path, batch: Batch, grid: Grid, block: Block, inputs: Inputs
) -> None:
    check(folder, batch, grid, block, inputs)


@pytest.mark.slow
@settings(PATIENT, max_examples=400)
@BATCHES
def test_many_programs(folder: Path, batch: Batch, grid: Grid, block: Block, inputs: Inputs) -> None:
    check(folder, batch, grid, block, inputs)
