"""Where the structures lie that generated code and runtime share. Offsets in bytes; every field is 8 bytes wide
unless said otherwise."""

from __future__ import annotations

# One a launch, shared by its workers.
LAUNCH = {
    name: 8 * n
    for n, name in enumerate(
        [
            "warp_function",
            "next_block",
            "blocks",
            "chunk",
            "grid_x",
            "grid_y",
            "grid_z",
            "abort",
            "buffer_count",
            "buffers",
            "arguments",
            "globals",
            "warps",
            "frame_bytes",
            "shared_bytes",
            "local_bytes",
            "last_mask",
            "log",
            "findings",  # of the sanitizer; 0: it is off
            "shadows",  # a pair of pointers for each buffer: races, initialisation
            "granule_shift",  # log2 of bytes: an element of the shadows of buffers
            "released",  # a byte for each block: it has done a fence and then an atomic
        ]
    )
}
LAUNCH_BYTES = 8 * len(LAUNCH)

# One a worker thread; generated code calls it ctx.
WORKER = {
    name: 8 * n
    for n, name in enumerate(
        [
            "launch",
            "arguments",
            "ctaid_xy",
            "ctaid_z",
            "nctaid_xy",
            "nctaid_z",
            "shared",
            "shared_bytes",
            "frames",
            "locals",
            "locals_bytes",
            "slots",
            "wide8",
            "wide16",
            "wide_store8",
            "wide_store16",
            "cold_wide16",
            "load8",
            "load16",
            "load32",
            "load64",
            "store8",
            "store16",
            "store32",
            "store64",
            "cold_load8",
            "cold_load16",
            "cold_load32",
            "cold_load64",
            "cold_store8",
            "cold_store16",
            "cold_store32",
            "cold_store64",
            "hull",
            "allowed",
            "printf",
            "poll",
            "budget",  # loop iterations until the next poll
            "budget_start",  # what it was when steps was last up to date
            "steps",  # of the block, up to the last poll
            "steps_limit",  # 0: none
            "watch",
            "aligned",
            "inactive",
            "tick_warp",
            "shadow",  # of shared memory, sanitizer.SHARED_SHADOW
            "shadow_words",
            "shadow_shift",  # log2 of bytes: an element of it
            "shared_init",
            "clock",  # moves on at every barrier
            "block_clock",  # when the block's last one was
            "warp_clocks",  # when each warp's last one was
            "fenced",  # the block has done a fence
            "acquired",  # the block has done an atomic
            "python",  # functions of CPython that run signal handlers; 0 but for the thread that called
            "raised_type",  # what a signal handler raised
            "raised_value",
            "raised_trace",
            "line",
            "globals",
            "warp",
            "block",
            "error_kind",
            "error_address",
            "error_site",
            "error_lane",
            "error_warp",
            "error_block",
            "error_thread_mask",
            "last_mask",
            "done",
        ]
    )
}
WORKER_BYTES = 8 * len(WORKER)

# A slot caches the extent that an access site found last: address, bytes.
SLOT_BYTES = 16
SHARED_SLOT, LOCAL_SLOT, FIRST_SLOT = 0, 1, 2

# Which extents an access may touch.
SPACES = {"shared": 1, "local": 2, "global": 4, "param": 4, "generic": 7}

# A warp's frame: its program counter, then registers that live across a barrier.
FRAME_REGISTERS = 64
FRAME_SITE = 4  # where it waits, an i32 kept for the sanitizer

ERROR_ACCESS, ERROR_STORE, ERROR_BARRIER, ERROR_TRAP, ERROR_DEADLOCK, ERROR_STEPS = 1, 2, 3, 4, 5, 6

POLL_EVERY = 65536  # loop iterations of a worker between two looks at whether the launch should stop
BLOCK_STEPS = 256  # what a finished block counts for in that

# printf: every call of a lane is a record in the launch's log. The first 8 bytes of the log count the bytes used.
LOG_BYTES = 1 << 20
RECORD_BYTES = 320
RECORD = {"block": 0, "worker_line": 8, "format": 16, "arguments": 24}
RECORD_ARGUMENTS = RECORD_BYTES - RECORD["arguments"]
