"""Two hosts that could talk to each other, on loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

from remote_payload import reaching
from tests.ports import free_port

PAYLOAD = Path(reaching.__file__).parent


def test_one_listens_until_its_stdin_ends_and_the_other_reaches_it() -> None:
    port = free_port()
    argv = [sys.executable, "-S", str(PAYLOAD), "listen", str(port)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    assert json.loads(process.stdout.readline())["why"] is None
    for _ in range(2):
        assert reaching.reach(["127.0.0.1"], port) == {"reached": "127.0.0.1", "why": None}
    second = subprocess.run(argv, input=b"", capture_output=True)
    assert "cannot be listened on (Address already in use)" in json.loads(second.stdout)["why"]
    process.stdin.close()
    assert process.wait(60) == 0
    process.stdout.close()


def test_what_is_in_the_way_is_said_for_each_address() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert reaching.reach(["127.0.0.1"], port)["why"] == "127.0.0.1: Connection refused"
        assert "no address but its own loopback" in reaching.reach([], port)["why"]
        server.listen()

        def other() -> None:
            peer, _ = server.accept()
            peer.sendall(b"SSH-2.0-OpenSSH\r\n")
            peer.close()

        thread = threading.Thread(target=other)
        thread.start()
        assert "something else answers" in reaching.reach(["127.0.0.1"], port)["why"]
        thread.join()


def test_own_addresses_are_those_of_the_kernels_local_routes(tmp_path: Path) -> None:
    table = tmp_path / "fib_trie"
    table.write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.1.2.0\n        /24 link UNICAST\n"
        "     |-- 10.1.2.6\n        /32 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
        "Local:\n     |-- 10.1.2.6\n        /32 host LOCAL\n     |-- 10.1.2.255\n        /32 link BROADCAST\n"
    )
    assert reaching.own_addresses(table) == ["10.1.2.6"]
    assert reaching.own_addresses(tmp_path / "absent") == []
