"""Whether two hosts of a run could talk to each other: one listens on a port, the other connects to it.

Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

WORD: Final = b"dflashctl is here\n"
_CONNECT_S: Final = 3.0
_ROUTES = Path("/proc/net/fib_trie")


def listen(port: int) -> int:
    """Listen on `port` until stdin ends; a line says `addresses` (IPv4, not loopback), or `why` not."""
    try:
        server = socket.create_server(("", port), reuse_port=False)
    except OSError as error:
        _say({"addresses": [], "why": f"port {port} cannot be listened on ({os.strerror(error.errno or 0)})"})
        return 0
    with server:
        _say({"addresses": own_addresses(), "why": None})
        while True:
            ready, _, _ = select.select([server, sys.stdin.buffer], [], [])
            if sys.stdin.buffer in ready:
                return 0
            peer, _ = server.accept()
            with peer:
                peer.sendall(WORD)


def reach(addresses: Sequence[str], port: int) -> dict[str, Any]:
    """`reached`: the first of `addresses` that answers as `listen` does, or null and `why`."""
    trouble = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_S) as peer:
                if peer.recv(len(WORD)) == WORD:
                    return {"reached": address, "why": None}
                trouble.append(f"{address}: something else answers")
        except OSError as error:
            trouble.append(f"{address}: {error.strerror or 'no answer'}")
    return {"reached": None, "why": "; ".join(trouble) or "it has no address but its own loopback"}


def own_addresses(routes: Path = _ROUTES) -> list[str]:
    """This machine's IPv4 addresses but loopback, as the kernel's table of local routes has them."""
    try:
        text = routes.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    found = re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", text)
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def _say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)
