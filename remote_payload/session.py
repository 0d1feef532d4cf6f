"""Several commands of the payload in one process, one after the other, for whoever asks more than once.

A launch that asks twice pays for one `pct exec` and one interpreter. Each line of stdin is an order, each
line of stdout its answer; what a command reads and prints is inside. Standard library only.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Sequence

from remote_payload import rundir

Main = Callable[[Sequence[str]], int]


def serve(main: Main, first: str = "") -> int:
    """Carry out `{"argv", "stdin"}` after `{"argv", "stdin"}` until stdin ends; `first` came before them.

    Answers `{"status", "stdout", "stderr"}`; texts are UTF-8.
    """
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    for line in itertools.chain([first.encode()] if first else [], iter(orders.readline, b"")):
        order = rundir.decode(line) or {}
        answer = _carry_out(main, order["argv"], str(order["stdin"]).encode())
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
    return 0


def _carry_out(main: Main, argv: Sequence[str], stdin: bytes) -> dict[str, object]:
    before = sys.stdin, sys.stdout, sys.stderr
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (stdin, b"", b"")]
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    for stream in streams:
        stream.flush()
    out, err = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in streams[1:])
    return {"status": status, "stdout": out, "stderr": err}
