"""Environment variables that are looked at in every call."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


def _reader() -> Callable[[bytes], bytes | None]:
    """C's getenv: os.environ.get takes 2 us for a variable that is not set."""
    if os.name != "posix":
        return lambda name: (os.environ.get(name.decode()) or "").encode() or None
    getenv = ctypes.CDLL(None).getenv
    getenv.argtypes, getenv.restype = [ctypes.c_char_p], ctypes.c_char_p
    return getenv


variable = _reader()  # its value now, or None
