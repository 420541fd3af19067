"""The cache on disk cannot hurt: damaged, shared, read-only or hostile folders cost time at most."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cudaops import cache

KEY = "ab" * 32
NAME = KEY + ".cudaops"

# In a new process: the module without the package around it, which would import torch. It needs nothing but Python.
ALONE = f"""
import sys, types
package = types.ModuleType("cudaops")
package.__path__ = [{str(Path(cache.__file__).parent)!r}]
sys.modules["cudaops"] = package
from cudaops import cache
"""


@pytest.fixture(autouse=True)
def may_warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_warned", set())


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The messages of the logger, filled when asked for."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("cudaops").addHandler(handler)
    yield messages
    logging.getLogger("cudaops").removeHandler(handler)


def test_what_is_stored_is_loaded(cache_dir: Path) -> None:
    assert cache.load("kernels", KEY) is None
    assert cache.store("kernels", KEY, b"payload")
    assert cache.load("kernels", KEY) == b"payload"
    assert cache.load("other", KEY) is None
    assert cache.store("kernels", KEY, b"")
    assert cache.load("kernels", KEY) == b""


def test_the_folder_is_the_environments_or_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDAOPS_CACHE_DIR", str(tmp_path / "there"))
    assert cache.folder() == tmp_path / "there"
    monkeypatch.delenv("CUDAOPS_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "cudaops"
    monkeypatch.setenv("CUDAOPS_CACHE_DIR", "~/there")
    assert cache.folder() == tmp_path / "there"


def test_a_user_without_a_home_has_a_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUDAOPS_CACHE_DIR", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert cache.folder() == Path(tempfile.gettempdir()) / f"cudaops-{os.geteuid()}"


def test_folders_that_are_made_are_private(cache_dir: Path) -> None:
    old = os.umask(0)
    try:
        cache.store("kernels", KEY, b"x")
    finally:
        os.umask(old)
    for folder in (cache_dir, cache_dir / "kernels"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache_dir / "kernels" / NAME).stat().st_mode) == 0o600


def test_a_folder_that_the_user_made_keeps_its_mode_and_its_files(cache_dir: Path) -> None:
    cache_dir.mkdir(mode=0o755)
    os.chmod(cache_dir, 0o755)
    (cache_dir / "notes.txt").write_text("mine")
    (cache_dir / "projects").mkdir(mode=0o700)
    (cache_dir / "projects" / "thesis.tex").write_text("mine")
    (cache_dir / "shared").mkdir()
    os.chmod(cache_dir / "shared", 0o777)
    (cache_dir / "shared" / "theirs").write_text("theirs")
    cache.store("kernels", KEY, b"x")
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o755
    assert stat.S_IMODE((cache_dir / "kernels").stat().st_mode) == 0o700
    assert cache.info().entries == 1
    assert cache.clear() == 1
    assert (cache_dir / "notes.txt").exists()
    assert (cache_dir / "projects" / "thesis.tex").exists()
    assert (cache_dir / "shared" / "theirs").exists()


@pytest.mark.parametrize("change", ["cut", "grown", "flipped", "emptied", "other format"])
def test_a_damaged_entry_is_a_miss(cache_dir: Path, change: str) -> None:
    cache.store("kernels", KEY, b"payload" * 100)
    path = cache_dir / "kernels" / NAME
    data = bytearray(path.read_bytes())
    match change:
        case "cut":
            del data[-1:]
        case "grown":
            data += b"x"
        case "flipped":
            data[len(data) // 2] ^= 1
        case "emptied":
            data.clear()
        case "other format":
            data[0] ^= 1
    path.write_bytes(data)
    assert cache.load("kernels", KEY) is None
    cache.store("kernels", KEY, b"again")
    assert cache.load("kernels", KEY) == b"again"


def test_every_single_flipped_bit_is_seen(cache_dir: Path) -> None:
    cache.store("kernels", KEY, b"four")
    path = cache_dir / "kernels" / NAME
    whole = path.read_bytes()
    for at in range(len(whole) * 8):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        assert cache.load("kernels", KEY) is None


def test_a_folder_in_the_place_of_an_entry_is_a_miss(cache_dir: Path, warnings: list[str]) -> None:
    (cache_dir / "kernels" / NAME).mkdir(parents=True)
    os.chmod(cache_dir / "kernels", 0o700)
    assert cache.load("kernels", KEY) is None
    assert not cache.store("kernels", KEY, b"x")
    assert len(warnings) == 1
    assert os.listdir(cache_dir / "kernels") == [NAME]  # and no temporary file stays


def test_an_unwritable_folder_warns_once_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warnings: list[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUDAOPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for kind in ("kernels", "kernels", "objects"):
        assert not cache.store(kind, KEY, b"x")
        assert cache.load(kind, KEY) is None
    assert len(warnings) == 1
    assert str(tmp_path / "file" / "cache") in warnings[0]
    assert "cannot be written" in warnings[0]
    assert "set CUDAOPS_CACHE_DIR" in warnings[0]
    assert not cache.info().writable
    assert "not writable" in str(cache.info())


def test_a_read_only_folder_is_still_read(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    cache.store("kernels", KEY, b"payload")

    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(cache.tempfile, "mkstemp", refused)
    assert cache.load("kernels", KEY) == b"payload"
    assert not cache.store("kernels", "cd" * 32, b"x")
    assert not cache.store("kernels", "ef" * 32, b"x")
    assert len(warnings) == 1


def test_a_full_disk_leaves_the_old_entry_and_no_temporary_file(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    cache.store("kernels", KEY, b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    assert not cache.store("kernels", KEY, b"new")
    assert cache.load("kernels", KEY) == b"old"
    assert os.listdir(cache_dir / "kernels") == [NAME]
    assert len(warnings) == 1


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    cache_dir: Path, mode: int, warnings: list[str]
) -> None:
    cache.store("kernels", KEY, b"planted")
    os.chmod(cache_dir / "kernels", mode)
    assert cache.load("kernels", KEY) is None
    assert not cache.store("kernels", KEY, b"x")
    assert len(warnings) == 1
    assert "chmod 700" in warnings[0]


def test_info_counts_and_clear_empties(cache_dir: Path) -> None:
    assert (cache.info().entries, cache.info().nbytes) == (0, 0)
    cache.store("kernels", KEY, b"abc")
    cache.store("objects", KEY, b"abcdef")
    info = cache.info()
    assert (info.folder, info.entries, info.writable) == (cache_dir, 2, True)
    assert info.nbytes == sum(path.stat().st_size for path in cache_dir.rglob(NAME))
    assert str(cache_dir) in str(info)
    (cache_dir / "kernels" / ".cudaops-tmp-left-by-a-killed-process").write_bytes(b"half")
    assert cache.info().entries == 2
    assert cache.clear() == 2
    assert cache.clear() == 0
    assert [path for path in cache_dir.rglob("*") if path.is_file()] == []
    assert cache.load("kernels", KEY) is None


def test_a_file_with_given_content_is_made_again_when_it_is_not_that(cache_dir: Path) -> None:
    path = cache.file_with("k.cubin", b"content")
    assert path.read_bytes() == b"content"
    assert path.is_relative_to(cache_dir)
    before = path.stat().st_mtime_ns
    assert cache.file_with("k.cubin", b"content") == path
    assert path.stat().st_mtime_ns == before
    path.write_bytes(b"damaged")
    assert cache.file_with("k.cubin", b"content").read_bytes() == b"content"


def test_a_file_is_made_elsewhere_when_the_cache_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    code = """
path = cache.file_with("k.cubin", b"content")
assert path.read_bytes() == b"content"
assert cache.file_with("k.cubin", b"content") == path
print(path.parent)
"""
    output = run_python(ALONE + code, CUDAOPS_CACHE_DIR=str(tmp_path / "file" / "cache"))
    private = Path(output.splitlines()[0])
    assert not private.exists(), "the folder goes when its process ends"
    assert output.count("cannot be written") == 1


def test_nowhere_to_write_is_said(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setattr(cache, "_write", lambda path, data: False)
    with pytest.raises(OSError, match=r"cannot write k\.cubin to"):
        cache.file_with("k.cubin", b"content")


def test_many_processes_write_and_read_one_entry(cache_dir: Path) -> None:
    """A reader sees a whole entry or none, whoever is writing."""
    code = f"""{ALONE}
payload = bytes([int(sys.argv[1])]) * 200_000
for _ in range(40):
    assert cache.store("kernels", "{KEY}", payload)
    got = cache.load("kernels", "{KEY}")
    assert got is not None and len(got) == 200_000 and len(set(got)) == 1, "half an entry was read"
"""
    running = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(4)]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    assert os.listdir(cache_dir / "kernels") == [NAME]


def test_many_threads_write_and_read_one_entry(cache_dir: Path) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        for _ in range(50):
            cache.store("kernels", KEY, bytes([number]) * 1000)
            got = cache.load("kernels", KEY)
            if got is None or len(set(got)) != 1:
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_after_a_fork_the_child_neither_hangs_nor_shares_the_private_folder(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    code = """
import os
mine = cache._own_folder()
cache._lock.acquire()  # as another thread might at the moment of the fork
child = os.fork()
if child == 0:
    os._exit(0 if cache._own_folder() != mine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert mine.exists()
"""
    run_python(ALONE + code, CUDAOPS_CACHE_DIR=str(tmp_path / "file" / "cache"))
