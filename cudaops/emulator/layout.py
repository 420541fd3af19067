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
            "log",
            "findings",  # of the sanitizer; 0: it is off
            "shadows",  # for each buffer where its shadow arrays are, and how far apart (shadow.py)
            "granule_shift",  # log2 of bytes: an element of the shadows of buffers
            "released",  # a byte for each block: it has done a fence and then an atomic
            "copies",  # 1: its warps ask for copies
            "workers",
            "finished",  # workers that have no block left
            "standing",  # an epoch << 16 | workers that have looked in vain since it began; see turns.py
        ]
    )
}

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
            "fault",
            "hull",
            "allowed",
            "misaligned",
            "printf",
            "poll",
            "budget",  # loop iterations until the next poll
            "budget_start",  # what it was when steps was last up to date
            "steps",  # of the block, up to the last poll
            "steps_limit",  # 0: none
            "watch",
            "watch_shared_load",
            "watch_shared_store",
            "watch_global_load",
            "watch_global_store",
            "watch_local_load",
            "watch_local_store",
            "aligned",
            "inactive",
            "members",
            "tick_warp",
            "shadow",  # of shared memory, where that of address 0 would be; 0: the sanitizer is off
            "shadow_distance",  # bytes from one array of it to the next
            "shadow_shift",  # log2 of bytes: an element of it
            "local_shadow",
            "local_words",  # elements for a warp
            "local_shift",
            "born",  # clock before anything that the block did
            "clock",  # moves on at every barrier
            "block_clock",  # when the block's last one was
            "warp_clocks",  # when each warp's last one was
            "fenced",  # the block has done a fence for other blocks
            "fenced_block",  # or one for its own threads
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
            "barriers",  # BARRIERS
            "copies",  # COPIES of each warp
            "copy",
            "copy_commit",
            "copy_wait",
            "mbarrier",
            "progress",  # in this turn the warp changed something that others may wait for
            "done",
        ]
    )
}

# A slot caches the extent that an access site found last: address, bytes; of a buffer also its entry in `shadows`.
SLOT_BYTES = 32
SLOT_SIZE, SLOT_SHADOW, SLOT_DISTANCE = 8, 16, 24
SHARED_SLOT, LOCAL_SLOT, FIRST_SLOT = 0, 1, 2

# Which extents an access may touch.
SPACES = {"shared": 1, "local": 2, "global": 4, "param": 4, "generic": 7}

# A warp's frame: where it goes on (-1: it has ended), what it waits for, then registers that live across a stop.
FRAME = {
    "pc": 0,
    "site": 4,  # the place in the source where it waits
    "released": 8,  # a bit for each barrier that its lanes have waited for and that is complete
    "live": 12,  # lanes that have not ended
    "waits": 16,  # 0: it has something to do
    "parked": 20,  # lanes that wait in loops
    "counts": 32,  # lanes that wait at each barrier, 16 x i16
}
FRAME_REGISTERS = 64

# What each turn of a warp returns.
ENDED, WAITS, LOOPS = 0, 1, 2

# The 16 named barriers of a block. Counts of threads; a warp all of whose lanes have come counts for 32.
BARRIERS = {
    "expected": 0,  # 16 x i16; 0: all threads of the block
    "arrived": 32,  # 16 x i16, without waiting for it
    "true": 64,  # 16 x i32: lanes whose predicate held, so far
    "lanes": 128,  # 16 x i32: lanes that gave one
    "last_true": 192,  # the same when it was complete
    "last_lanes": 256,
}
BARRIERS_BYTES = 320

# cp.async: the copies that a warp has asked for and not yet waited for, oldest first, in a ring.
COPIES = {"first": 0, "count": 4, "group": 64, "ring": 192}  # group: 32 x i32, the one that each lane is filling
COPY = {"to": 0, "from": 256, "bytes": 512, "group": 640, "mask": 768, "size": 772, "site": 776}
COPY_BYTES = 832
MOST_COPIES = 128  # a power of two; to ask for more is to get the oldest at once
COPIES_BYTES = COPIES["ring"] + MOST_COPIES * COPY_BYTES
ALL_COPIES = -1  # to wait for: those of the group being filled as well

# mbarrier: what its 64 bits hold, (first bit, width). Counts of arrivals; of bytes, signed.
MBARRIER = {"expected": (0, 20), "pending": (20, 20), "bytes": (40, 22), "phase": (62, 1)}

ERROR_ACCESS, ERROR_STORE, ERROR_BARRIER, ERROR_TRAP, ERROR_DEADLOCK, ERROR_STEPS, ERROR_ARRIVALS, ERROR_NUMBER = range(
    1, 9
)

LOOK_TURNS = 16  # times that a waiting loop goes round in one turn of its warp
STUCK_ROUNDS = 1 << 15  # rounds in which no warp of a block goes on, until that counts as a deadlock
POLL_EVERY = 65536  # loop iterations of a worker between two looks at whether the launch should stop
BLOCK_STEPS = 256  # what a finished block counts for in that

# printf: every call of a lane is a record in the launch's log. The first 8 bytes of the log count the bytes used.
LOG_BYTES = 1 << 20
RECORD_BYTES = 320
RECORD = {"block": 0, "worker_line": 8, "format": 16, "arguments": 24}
RECORD_ARGUMENTS = RECORD_BYTES - RECORD["arguments"]
