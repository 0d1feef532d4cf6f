"""Golden logs: what a log can be, in a healthy run: `python -m tests.tui.golden_logs NAME DIRECTORY`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tests.tui import golden
from tests.tui.golden import Run


def _run(lines: list[str], last: bytes = b"") -> Run:
    run = golden.healthy()
    run.log, run.raw = lines, {"train.log": last}
    return run


def half_line() -> Run:
    """The last line has no end yet."""
    return _run(golden.healthy().log, b"step  12346  loss 2.3")


def tqdm() -> Run:
    """Progress bars: one that is over, and one at work, each a line of 90,000 characters."""

    def bar(states: int) -> str:
        drawn = (f"{n * 100 // 1500:3}%|{'█' * (n // 75):20}| {n}/1500 [00:01<00:00]" for n in range(states))
        return "\r".join(("", *drawn))

    return _run(["tokenizing", bar(1501), "", "training"], bar(613).encode())


def colours() -> Run:
    """Ranks and threads, colours of a logger, errors, warnings, and codes that must do nothing."""
    lines = [
        "2026-11-30 00:51:07,123 [rank0]: \x1b[32mINFO\x1b[0m \x1b[1mstart\x1b[0m \x1b[2mquiet\x1b[22m",
        "[rank1]: \x1b[33mWARNING\x1b[0m \x1b[38;5;208mclose to the limit\x1b[0m \x1b[48;2;0;0;0mdark\x1b[0m",
        "00:51:09 drafter-1: checkpoint of step 12,000",
        "00:51:09 target-3: warning: a batch was skipped",
        "[default2]: RuntimeError: CUDA error: an illegal memory access",
        "\x1b[41m red ground \x1b[0m \x1b[5mblinks\x1b[0m \x1b[8mhidden\x1b[0m \x1b[7mreversed\x1b[0m",
        "\x1b[2J\x1b[1;1H\x1b]0;owned\x07\x1b]52;c;b3duZWQ=\x07\x1b[?1049h\x1bcafter codes",
        "\x1b]8;;http://192.0.2.1/\x1b\\a link\x1b]8;;\x1b\\ \u202egnirts [/u] [bold]x[/bold]",
    ]
    return _run(lines)


def huge_line() -> Run:
    """A line of 1 MB among others."""
    return _run(["before", "".join(f"{n:07} " for n in range(125_000)), "after"])


def wide() -> Run:
    """Characters of two columns, combining ones, emoji, and bytes that are no UTF-8."""
    return _run(
        ["訓練を開始します " * 12, "e\u0301" * 90, "🙂👩‍🚀 flags 🇩🇪 zero​width"], b"\xff\xfe half \xe8\xa8"
    )


def late() -> Run:
    """Attached late: of 2 GB the first 200 bytes and the end are here."""
    return _run([f"00:52:{n % 60:02} step {n}  loss 2.3" for n in range(40)])


def write(name: str, directory: Path) -> Path:
    """Write one; `late` gets its hole."""
    LOGS[name]().write(directory)
    if name == "late":
        log = directory / "train.log"
        data, size = log.read_bytes(), 2 << 30
        begin = size - len(data) + 217  # behind whole lines and a part of one
        with log.open("wb") as file:
            file.write(data[:200])
            file.seek(begin)
            file.write(data[217:])
        record = json.loads((directory / "mirror.json").read_text())
        record["files"]["train.log"] |= {"size": size, "extents": [[0, 200], [begin, size]]}
        (directory / "mirror.json").write_text(json.dumps(record))
    return directory


LOGS: dict[str, Callable[[], Run]] = {
    f.__name__: f for f in (half_line, tqdm, colours, huge_line, wide, late)
}


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
