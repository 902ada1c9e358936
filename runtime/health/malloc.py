"""Memory of a CPU rank: keep freed memory in the process for the next step, as torch keeps a GPU's memory.

glibc returns the end of its heap to the system whenever much of it is free. In the next step the system then has to
clear and map every page again: some 10,000 pages, or 3 to 7 % of the step of a small model.
"""

import ctypes
import os
import sys

# Parameters of mallopt, of <malloc.h>.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Larger blocks are mapped one by one and returned. glibc would raise its own bound to this one in time. Its heap is bad
# at larger blocks: before 2.38, an aligned block, as torch's are, does not fit into a freed one of the same size.
LARGEST = 1 << 25

SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def disable_malloc_trim() -> None:
    """Have glibc keep the memory that this process frees, unless the user has set it otherwise; only for glibc."""
    if sys.platform != "linux" or any(name in os.environ for name in SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # None in other C libraries
    # Setting one of the two fixes the other at its default of 128 KiB.
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGEST):
        mallopt(M_TRIM_THRESHOLD, -1)  # never
