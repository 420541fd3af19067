"""The kernel cache on disk: what was compiled once is not compiled again, by any process.

The folder is `CUDAOPS_CACHE_DIR`, or `~/.cache/cudaops`. An entry is one file: a magic word, the SHA-256 of the rest,
the rest. It is written under a temporary name and renamed, so that a reader sees all of it or nothing; whatever does
not match its checksum is a miss. There are no locks: two processes that make the same entry write the same bytes.
A folder that cannot be used costs time, never a result: one warning, and everything is made afresh.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"cudaops1"
_DIGEST_BYTES = hashlib.sha256().digest_size
_OURS = ".cudaops"  # in the name of every file we make: a folder that the user names may hold files of others
_TEMPORARY = ".cudaops-tmp-"

_logger = logging.getLogger("cudaops")
_lock = threading.Lock()
_warned: set[str] = set()
_private_folder: Path | None = None


def folder() -> Path:
    """The cache folder in force; it need not exist."""
    chosen = os.environ.get("CUDAOPS_CACHE_DIR")
    try:
        return Path(chosen or "~/.cache/cudaops").expanduser()
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"cudaops-{os.geteuid()}"


def load(kind: str, key: str) -> bytes | None:
    """The bytes stored under `key`, or None: no such entry, a damaged one, or a folder that cannot be read.

    Arguments:
        kind: what sort of thing it is; each has a folder of its own.
        key: a file name without separators, such as a SHA-256 in hex.
    """
    path = folder() / kind / (key + _OURS)
    try:
        if not _is_ours(path.parent):
            return None
        with path.open("rb") as file:
            data = file.read()
    except OSError:
        return None
    head = len(_MAGIC) + _DIGEST_BYTES
    payload = data[head:]
    if not data.startswith(_MAGIC) or data[len(_MAGIC) : head] != hashlib.sha256(payload).digest():
        return None
    return payload


def store(kind: str, key: str, payload: bytes) -> bool:
    """Keep `payload` under `key`. False where the folder cannot be written; that is logged once."""
    return _write(folder() / kind / (key + _OURS), _MAGIC + hashlib.sha256(payload).digest() + payload)


def file_with(name: str, content: bytes) -> Path:
    """A file with exactly `content`, for readers that take a path: in the cache, else in a folder of this process.

    Arguments:
        name: must differ for different contents.

    Raises:
        OSError: nowhere can be written, not even to the system's temporary folder.
    """
    for parent in (folder() / "files", _own_folder()):
        path = parent / f"{Path(name).stem}{_OURS}{Path(name).suffix}"
        try:
            if _is_ours(parent) and path.read_bytes() == content:
                return path
        except OSError:
            pass
        if _write(path, content):
            return path
    raise OSError(f"cannot write {name} to {folder()} nor to {_own_folder()}")


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The state of the cache folder; sizes in bytes."""

    folder: Path
    entries: int
    nbytes: int
    writable: bool

    def __str__(self) -> str:
        state = "" if self.writable else ", not writable: kernels are compiled afresh in every process"
        return f"{self.folder}: {self.entries} entries, {self.nbytes / 1e6:.1f} MB{state}"


def info() -> CacheInfo:
    """What the cache holds and where."""
    sizes = [size for _, size in _entries()]
    where = folder()
    existing = next((p for p in (where, *where.absolute().parents) if p.exists()), where)
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return CacheInfo(where, len(sizes), sum(sizes), writable)


def clear() -> int:
    """Delete every entry on disk; what this process has loaded stays loaded. Returns how many were deleted."""
    deleted = 0
    for path, _ in _entries(temporary=True):
        try:
            path.unlink()
            deleted += not path.name.startswith(_TEMPORARY)
        except FileNotFoundError:
            pass  # another process was faster
    return deleted


def _entries(temporary: bool = False) -> list[tuple[Path, int]]:
    found = []
    for kind in _kinds():
        try:
            for item in os.scandir(kind):
                unfinished = item.name.startswith(_TEMPORARY)
                if item.is_file(follow_symlinks=False) and _OURS in item.name and (temporary or not unfinished):
                    found.append((Path(item.path), item.stat(follow_symlinks=False).st_size))
        except OSError:
            continue
    return found


def _kinds() -> list[Path]:
    """The folders in the cache that only this user writes."""
    try:
        return [
            Path(item.path) for item in os.scandir(folder()) if item.is_dir(follow_symlinks=False) and _is_ours(item)
        ]
    except OSError:
        return []


def _is_ours(path: os.PathLike[str]) -> bool:
    """Whether what lies in `path` can be trusted: nobody but this user and root may write there."""
    state = os.stat(path)
    return state.st_uid in (os.geteuid(), 0) and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, data: bytes) -> bool:
    temporary = None
    try:
        _make_private(path.parent)
        handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
        return True
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _warn_once(path.parent.parent, error)
        return False


def _make_private(path: Path) -> None:
    """Make `path` and its missing parents, mode 0700. A parent the user made keeps its mode; ours below it is 0700."""
    if not path.is_dir():
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(path):
        raise PermissionError(f"{path} can be written by others; make it yours alone (chmod 700)")


def _own_folder() -> Path:
    """A folder of this process, deleted when it ends."""
    global _private_folder
    with _lock:
        if _private_folder is None:
            _private_folder = Path(tempfile.mkdtemp(prefix="cudaops-"))
            atexit.register(shutil.rmtree, _private_folder, ignore_errors=True)
        return _private_folder


def _warn_once(where: Path, error: OSError) -> None:
    with _lock:
        first = str(where) not in _warned
        _warned.add(str(where))
    if first:
        _logger.warning(
            "the kernel cache %s cannot be written (%s): kernels are compiled afresh in every process; "
            "set CUDAOPS_CACHE_DIR to a folder of yours",
            where,
            error,
        )


def _after_fork() -> None:
    """A lock that another thread held at the fork is held for ever in the child; and the folder is the parent's."""
    global _lock, _private_folder
    _lock = threading.Lock()
    _private_folder = None


os.register_at_fork(after_in_child=_after_fork)
