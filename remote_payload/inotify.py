"""The kernel's word that files in a folder changed, by inotify, so that nobody has to look all the time.

Looking every few milliseconds is what a log costs that is seen within a few milliseconds; the kernel tells
for nothing. ctypes, because the standard library has no inotify. Folders are watched by their descriptors,
so a name that was replaced by a link meanwhile is not followed. inotify tells of what happens on this
machine through the same mount; where it tells nothing (some network and overlay mounts), whoever uses this
must notice that by a look of their own. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Callable
from typing import Final

_MODIFY: Final = 0x2
_MOVED_FROM: Final = 0x40
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_DELETE: Final = 0x200
_OVERFLOW: Final = 0x4000
_MASK: Final = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_EVENT: Final = struct.Struct("iIII")  # watch, mask, cookie, bytes of the name behind it


class Watch:
    """What changed in some folders and files. Raises OSError where the kernel grants none (a limit, another
    system).

    `wake`: a descriptor that ends a wait when it can be read; it is not read here.
    """

    def __init__(self, wake: int) -> None:
        try:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._descriptor = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        except (AttributeError, OSError) as error:  # no such call in this C library
            raise OSError(str(error)) from error
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no inotify")
        self._told_as: dict[int, Callable[[str], str]] = {}
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._poll.register(wake, select.POLLIN)

    def add(self, descriptor: int, told_as: Callable[[str], str]) -> None:
        """Watch an open folder or file; twice is once. A folder's files are told as `told_as(name)`, a file
        as `told_as("")`. Raises OSError where the kernel refuses.
        """
        path = f"/proc/self/fd/{descriptor}".encode()
        watch = int(self._libc.inotify_add_watch(self._descriptor, path, ctypes.c_uint32(_MASK)))
        if watch < 0:
            raise OSError(ctypes.get_errno(), "inotify refuses a watch")
        self._told_as[watch] = told_as

    def wait(self, timeout: float) -> set[str] | None:
        """Names that changed, after at most `timeout` seconds; None: too many changes for the kernel."""
        ready = self._poll.poll(max(0.0, timeout * 1000))
        names: set[str] = set()
        if not any(descriptor == self._descriptor for descriptor, _ in ready):
            return names
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return names
        position = 0
        while position < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size
            if mask & _OVERFLOW:
                return None
            name = data[position : position + length].rstrip(b"\0").decode("utf-8", "surrogateescape")
            if watch in self._told_as:
                names.add(self._told_as[watch](name))
            position += length
        return names

    def close(self) -> None:
        """Give everything back."""
        os.close(self._descriptor)
