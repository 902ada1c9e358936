"""The C library's heap on a CPU rank: what a step frees is kept for the next one, as torch keeps a GPU's memory.

glibc gives the end of its heap back to the system whenever much of it is free. The next step then has the system clear
and map every page anew: some 10,000 of them, or 3 to 7 % of a small model's step.
"""

from __future__ import annotations

import ctypes
import os
import sys

# Parameters of mallopt, of <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# What is larger is mapped by itself and given back. glibc would come to this bound by and by; its heap keeps larger
# blocks badly: before 2.38 an aligned one, as torch's are, does not fit where one of the same size was freed.
LARGEST = 1 << 25

SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def disable_malloc_trim() -> None:
    """Have glibc keep what this process frees from now on; nothing where another library, or the user, decides."""
    if sys.platform != "linux" or any(name in os.environ for name in SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # which only glibc has
    # Either setting ends glibc's own choice of the other, which begins at 128 KiB.
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGEST):
        mallopt(M_TRIM_THRESHOLD, -1)  # never
