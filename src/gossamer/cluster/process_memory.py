"""What a worker process gives back to the system of the memory that it no longer uses.

The C library keeps freed blocks of up to 32 MiB for later, in pools for several threads. Training,
messages and checkpoints free blocks of that size in turn and in different threads, so that a worker
came to hold half as much again as its tensors need.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # <malloc.h>

_LARGE_BYTES = 1 << 20  # smaller ones would make steps slower: a fresh page costs time as well
_SPARE_BYTES = 16 << 20
_POOLS = 2


def return_freed_memory() -> bool:
    """Let blocks of 1 MiB and more go back when they are freed; for a process of its own.

    To be called before threads are started. Does nothing with other C libraries than glibc. Returns
    whether it was done.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    wanted = (
        (_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _SPARE_BYTES), (_ARENA_MAX, _POOLS),
    )  # fmt: skip
    return all(mallopt(option, value) == 1 for option, value in wanted)
