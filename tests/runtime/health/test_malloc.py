"""What a CPU rank frees stays with its process, unless the user has said how the heap is to be kept."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from autoptd.runtime.health.malloc import SETTINGS

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's heap is left as it is")

BLOCKS, PAGES = 6, 4000  # 96 MiB: more than glibc keeps by itself
CODE = f"""
import ctypes
import resource
from autoptd.runtime.health.malloc import disable_malloc_trim

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [ctypes.c_void_p(libc.malloc({PAGES} * 4096)) for _ in range({BLOCKS})]
    for block in blocks:
        ctypes.memset(block, 1, {PAGES} * 4096)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

disable_malloc_trim()
count_faults()
print(count_faults())
"""


def count_faults(**environment: str) -> int:
    """Pages that the system gives to a process which takes the blocks for the second time."""
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env={**clean, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout)


def test_memory_freed_once_is_not_given_back() -> None:
    assert count_faults() < PAGES / 10


def test_the_users_own_setting_stays() -> None:
    assert count_faults(MALLOC_MMAP_THRESHOLD_="1000000") > BLOCKS * PAGES / 2
