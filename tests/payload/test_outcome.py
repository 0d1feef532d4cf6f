from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remote_payload import memory_events, outcome
from remote_payload.attempt import Attempt, Inbox, Timing
from remote_payload.memory_events import MemoryEvents


def judge(returncode: int, word: dict[str, Any] | None = None, **known: Any) -> tuple[Any, ...]:
    known = {"why_killed": None, "last_line": None} | known
    ended = outcome.judge(returncode, word, **known)
    return str(ended.state), ended.reason, ended.exit_code, ended.signal


STOPPED = {"outcome": "stopped", "step": 12}


@pytest.mark.parametrize(
    ("returncode", "word", "expected"),
    [
        (0, {"outcome": "finished"}, ("finished", None, 0, None)),
        (3, STOPPED, ("finished", "stopped on request at step 12", 3, None)),
        (3, {"outcome": "stopped"}, ("finished", "stopped on request", 3, None)),
        (3, None, ("finished", "stopped on request", 3, None)),
        (2, {"outcome": "refused", "error": "no data"}, ("failed", "no data", 2, None)),
        (1, {"outcome": "crashed", "error": "boom"}, ("failed", "boom", 1, None)),
        (0, {"outcome": "crashed", "error": "boom"}, ("failed", "boom", 1, None)),
        (0, None, ("finished", "the trainer ended well, but left no exit.json", 0, None)),
        (7, None, ("failed", "the trainer ended with exit code 7", 7, None)),
        (1, {"outcome": "crashed"}, ("failed", "the trainer crashed", 1, None)),
        (-9, None, ("killed", "killed by SIGKILL", 137, "SIGKILL")),
        (-35, None, ("killed", "killed by signal 35", 163, "signal 35")),
        (-6, {"outcome": "crashed", "error": "boom"}, ("failed", "boom", 134, "SIGABRT")),
        (-15, {"outcome": "someday"}, ("killed", "killed by SIGTERM", 143, "SIGTERM")),
    ],
)
def test_the_trainers_own_word_counts_first_then_the_kernels(
    returncode: int, word: dict[str, Any] | None, expected: tuple[Any, ...]
) -> None:
    assert judge(returncode, word) == expected


def test_a_death_after_the_last_word_does_not_undo_it_but_is_said() -> None:
    state, reason, code, name = judge(-11, {"outcome": "finished"})
    assert (state, code, name) == ("finished", 0, "SIGSEGV")
    assert "SIGSEGV" in reason
    assert judge(-11, STOPPED)[:3] == (
        "finished",
        "stopped on request at step 12; the trainer died by SIGSEGV while it was closing down",
        3,
    )


def test_without_a_word_the_logs_last_line_is_the_reason() -> None:
    assert judge(1, None, last_line="ValueError: x")[1] == "ValueError: x"
    assert judge(1, {"outcome": "crashed", "error": None}, last_line="y")[1] == "y"


def test_what_is_known_of_a_kill_stands_behind_the_signal() -> None:
    assert judge(-9, None, why_killed="out of memory")[1] == "killed by SIGKILL: out of memory"


def test_a_reason_is_one_line_of_bounded_length() -> None:
    reason = judge(1, {"outcome": "crashed", "error": "a\nb " + "x" * 10_000})[1]
    assert reason.startswith("a b x") and len(reason) == 500


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", None),
        (b"\n\n", None),
        (b"one\ntwo\n\n", "two"),
        (b"one\nhalf", "half"),
        (b"10%\r50%\r100%\r\n", "100%"),
        (b"x" * 20_000 + b"\nlast \xff\n", "last �"),
    ],
)
def test_the_last_line_of_a_log_that_is_not_empty(
    tmp_path: Path, content: bytes, expected: str | None
) -> None:
    (tmp_path / "log").write_bytes(content)
    assert outcome.last_line(tmp_path / "log") == expected


def test_a_log_that_is_not_there_has_no_last_line(tmp_path: Path) -> None:
    assert outcome.last_line(tmp_path / "none") is None


def tree(root: Path, version: int, kills: int, machine: int = 0, at_limit: int = 0) -> tuple[Path, Path]:
    cgroups, proc = root / "cgroup", root / "proc"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "vmstat").write_text(f"nr_free 1\noom_kill {machine}\n")
    if version == 2:
        folder = cgroups / "box"
        folder.mkdir(parents=True, exist_ok=True)
        (proc / "self" / "cgroup").write_text("0::/box\n")
        (folder / "memory.events").write_text(f"low 0\noom {kills + at_limit}\noom_kill {kills}\n")
        (folder / "memory.max").write_text(f"{6 * 2**30}\n")
        (cgroups / "memory.max").write_text("max\n")
    else:
        folder = cgroups / "memory" / "lxc" / "200"
        folder.mkdir(parents=True, exist_ok=True)
        (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/x\n9:memory:/lxc/200\n0::/\n")
        (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (folder / "memory.limit_in_bytes").write_text(f"{6 * 2**30}\n")
        (cgroups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    return cgroups, proc


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_for_lack_of_memory_is_known_by_the_cgroups_counter(tmp_path: Path, version: int) -> None:
    before = memory_events.read(*tree(tmp_path, version, 3))
    after = memory_events.read(*tree(tmp_path, version, 4))
    assert before == MemoryEvents(3, 0, 6.0, 3 if version == 2 else None)
    assert memory_events.hint(before, after) == "out of memory: the kernel killed it (limit 6 GiB)"
    assert "not by the kernel" in memory_events.hint(before, before)


def test_a_container_that_was_not_at_its_limit_was_killed_for_the_machines_memory(tmp_path: Path) -> None:
    before = memory_events.read(*tree(tmp_path, 2, 3))
    after = memory_events.read(*tree(tmp_path, 2, 4, at_limit=-1))
    assert memory_events.hint(before, after) == (
        "out of memory: the kernel killed it (not at its limit of 6 GiB: the whole machine had no more)"
    )


def test_a_failure_beside_which_a_process_was_killed_for_memory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = memory_events.read(*tree(tmp_path, 2, 3))
    after = memory_events.read(*tree(tmp_path, 2, 4))
    assert memory_events.beside(before, before) is None
    status: Any = SimpleNamespace(attempt=1, note=lambda *_, **__: None)
    attempt = Attempt(tmp_path, {}, [], status=status, inbox=Inbox(), timing=Timing())
    monkeypatch.setattr(memory_events, "read", lambda: after)
    (tmp_path / "train.log").write_text("BrokenProcessPool\n")
    ended = attempt._judge(SimpleNamespace(started=0.0), 1, before)  # type: ignore[arg-type]
    assert ended.reason == (
        "BrokenProcessPool; meanwhile the kernel killed a process here for lack of memory (limit 6 GiB)"
    )
    assert attempt._judge(SimpleNamespace(started=0.0), 1, after).reason == "BrokenProcessPool"  # type: ignore[arg-type]


def test_where_only_the_machine_counts_the_hint_says_probably(tmp_path: Path) -> None:
    before, after = MemoryEvents(None, 1, None), MemoryEvents(None, 2, None)
    assert memory_events.hint(before, after).startswith("probably out of memory")
    assert memory_events.hint(after, after).startswith("out of memory?")
    nothing = memory_events.read(tmp_path / "no", tmp_path / "none")
    assert nothing == MemoryEvents(None, None, None)
    assert memory_events.hint(nothing, nothing).startswith("out of memory?")


def test_this_machine_can_be_read() -> None:
    assert memory_events.read().machine is not None
