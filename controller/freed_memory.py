"""Memory of a transfer's buffers, kept by the process from one buffer to the next.

glibc takes every block of 128 KiB or more from the kernel and gives it back when it is freed, so that a
transfer, which has a new buffer of a megabyte for every megabyte, lets the kernel zero as much memory page by
page as it moves bytes: a quarter of its work. The size from which glibc does so rises to that of the
largest block that was ever freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD). Elsewhere this does nothing.
"""

from __future__ import annotations

from typing import Final

_LARGEST: Final = 31 << 20


def keep_freed_memory() -> None:
    """Have the buffers of this process, from now on, be made of memory that was freed before."""
    bytes(_LARGEST)  # made of zeros that nobody looks at: no page of it is ever touched
