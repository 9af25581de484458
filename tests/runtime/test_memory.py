from __future__ import annotations

import ctypes
import gc
import mmap
import resource

import numpy as np
import pytest

from ingot.runtime.machine import collected_later, keep_freed_memory

MEBIBYTE = 1 << 20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_memory_that_was_freed_is_taken_again_without_asking_the_system():
    keep_freed_memory()
    page_faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [np.full(3 * MEBIBYTE, 1, np.uint8) for _ in range(8)]
        page_faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del blocks
    assert min(page_faults[1:]) < MEBIBYTE // mmap.PAGESIZE, page_faults  # 1 MiB of 24, once they were there


def test_garbage_is_left_alone_for_a_while_and_who_switched_that_off_keeps_it_off():
    with collected_later():
        assert not gc.isenabled()
        with collected_later():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
