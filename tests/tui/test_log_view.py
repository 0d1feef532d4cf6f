"""The log on the screen: every key of it, floods, gaps, logs that begin anew, and nobody is ever moved."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from controller.mirror import WHOLE_LOG
from controller.tui import app as app_module
from controller.tui.app import RunApp
from controller.tui.log_view import LogView
from tests.tui import golden, golden_logs
from tests.tui.conftest import Open, app_of, screen_text

pytestmark = pytest.mark.slow  # each opens the app


def log_of(pilot: Pilot[int]) -> LogView:
    assert isinstance(pilot.app, RunApp)
    return pilot.app._run_screen.log_view


def run_with(lines: list[str], last: bytes = b"") -> golden.Run:
    run = golden.healthy()
    run.log, run.raw = lines, {"train.log": last}
    return run


def numbered(count: int) -> golden.Run:
    return run_with([f"12:00:00 line {n:06}" for n in range(count)])


class Log:
    """The log of an app's mirror folder, changed as a mirror does it."""

    def __init__(self, pilot: Pilot[int], folder: Path) -> None:
        self._pilot, self._folder, self._path = pilot, folder, folder / "train.log"

    def say(self, extents: list[list[int]] | None = None, generation: int = 1) -> None:
        size = self._path.stat().st_size
        record = json.loads((self._folder / "mirror.json").read_text())
        extents = [[0, size]] if extents is None else extents
        record["files"]["train.log"] = {"generation": generation, "size": size, "extents": extents}
        new = self._folder / "mirror.json.new"
        new.write_text(json.dumps(record))
        new.replace(self._folder / "mirror.json")

    async def look(self) -> None:
        assert isinstance(self._pilot.app, RunApp)
        self._pilot.app.tick()
        await self._pilot.pause()

    async def add(self, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data)
        await self.look()

    async def begin_anew(self, data: bytes, generation: int) -> None:
        new = self._folder / "train.log.new"
        new.write_bytes(data)
        new.replace(self._path)
        self.say(generation=generation)
        await self.look()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


async def press(pilot: Pilot[int], *keys: str) -> str:
    await pilot.press(*keys)
    await pilot.pause()
    return screen_text(pilot)


async def test_a_reader_who_scrolled_up_is_left_alone_until_he_follows_again(
    open_run: Open, folder: Path
) -> None:
    async with open_run(numbered(3000)) as pilot:
        log, view = Log(pilot, folder), log_of(pilot)
        shown = await press(pilot, "pageup", "pageup")
        assert "follow OFF" in shown
        before = view.visible_text()
        for n in range(5):
            await log.add(b"".join(b"new %d %d\n" % (n, m) for m in range(4000)))
            assert view.visible_text() == before
        assert "follow OFF +20,000 lines" in screen_text(pilot)
        shown = await press(pilot, "f")
        assert view.following
        assert "new 4 3999" in shown


@pytest.mark.parametrize("key", ["end", "G"])
async def test_home_is_the_first_line_and_end_follows_again(key: str, open_run: Open) -> None:
    async with open_run(numbered(3000)) as pilot:
        assert "line 000000" in await press(pilot, "home")
        assert "line 002999" in await press(pilot, key)
        assert log_of(pilot).following


async def test_every_way_down_comes_to_the_end_and_follows(open_run: Open) -> None:
    async with open_run(numbered(900)) as pilot:
        view = log_of(pilot)
        await press(pilot, "z", "home")
        seen = set(view.visible_text().split("\n"))
        for _ in range(200):
            await press(pilot, "pagedown")
            seen.update(view.visible_text().split("\n"))
            if view.following:
                break
        assert view.following
        assert len(seen) == 900, "no line was passed over"
        await press(pilot, "up", "up", "k")
        assert not view.following
        assert "line 000896" in view.visible_text().split("\n")[-1]
        await press(pilot, "j", "down", "down")
        assert view.following


async def test_slash_finds_by_regular_expression_and_n_goes_on(open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        view = log_of(pilot)
        shown = await press(pilot, "slash", *"Target \\d on", "enter")
        assert "6 lines match" in shown
        places = [view._mark]
        assert "Target 5 on" in shown
        for _ in range(5):
            await press(pilot, "N")
            places.append(view._mark)
        assert len(set(places)) == 6
        assert "no match above" in await press(pilot, "N")
        await press(pilot, "n")
        assert view._mark == places[4]
        assert "lines match" not in await press(pilot, "escape")


async def test_a_wrong_regular_expression_is_taken_literally(open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        assert "1 line matches" in await press(pilot, "slash", *"[   0,", "enter")


async def test_a_search_finds_the_lowest_line_on_the_screen_and_what_is_only_below(open_run: Open) -> None:
    async with open_run(run_with([f"line {n:04}" for n in range(3000)])) as pilot:
        view = log_of(pilot)
        await press(pilot, "slash", *"2999", "enter")
        assert view._mark == 2999 * 10
        await press(pilot, "escape", "home")
        assert "line 2500" in await press(pilot, "slash", *"2500", "enter")
        assert "no line matches" in await press(pilot, "slash", *"absent", "enter")


async def test_matches_are_counted_in_all_of_the_log_and_new_ones_join_them(
    open_run: Open, folder: Path
) -> None:
    async with open_run(numbered(50_000)) as pilot:
        shown = await press(pilot, "slash", *"9$", "enter")
        assert "5,000 lines match" in shown
        await Log(pilot, folder).add(b"line 9\nline 8\n")
        assert "5,001 lines match" in screen_text(pilot)


async def test_e_goes_from_error_to_error(open_run: Open) -> None:
    lines = [f"quiet {n}" for n in range(30_000)]
    lines[20] = "RuntimeError: the first"
    lines[15_000] = "ValueError: the second"
    async with open_run(run_with(lines)) as pilot:
        assert "the second" in await press(pilot, "E")
        assert "the first" in await press(pilot, "E")
        assert "no line of an error above" in await press(pilot, "E")
        assert "the second" in await press(pilot, "e")
        assert "no line of an error below" in await press(pilot, "e")


async def test_t_shows_only_the_lines_of_a_rank_and_escape_all_of_them(open_run: Open, folder: Path) -> None:
    lines = [f"[rank{n % 2}]: says {n}" for n in range(400)]
    lines += ["rank 1 is spoken of", "12:00:00 drafter-0: hello"]
    async with open_run(run_with(lines), (120, 30)) as pilot:
        assert "drafter-0, rank-1, rank0, rank1" in await press(pilot, "t")
        shown = await press(pilot, *"rank1", "enter")
        assert "[rank1]: says 399" in shown
        assert "rank0" not in shown
        assert "only rank1: 200 lines match" in shown
        await Log(pilot, folder).add(b"[rank0]: no\n[rank1]: yes\n")
        shown = screen_text(pilot)
        assert "[rank1]: yes" in shown
        assert "[rank0]: no" not in shown
        assert "[rank1]: says 1" in await press(pilot, "home")
        assert "no line matches" in await press(pilot, "slash", *"rank0", "enter"), (
            "a search is of what is shown"
        )
        await press(pilot, "escape", "escape")
        assert "[rank0]: no" in await press(pilot, "end")


async def test_w_wraps_long_lines_and_every_character_is_on_the_screen(open_run: Open) -> None:
    line = "".join(chr(97 + n % 26) for n in range(300)) + "宽字符" * 20 + "END"
    async with open_run(run_with(["first", line, "last"])) as pilot:
        assert "END" not in screen_text(pilot)
        shown = await press(pilot, "z", "w")
        rows = [row.removesuffix("│").removesuffix("┃").rstrip() for row in shown.split("\n")]
        assert line in "".join(rows)
        await press(pilot, "w")
        assert "END" not in screen_text(pilot)
        for _ in range(60):
            await pilot.press("right")
        assert "END" in await press(pilot, "right")


async def test_a_line_that_goes_on_beyond_the_screen_is_marked_wherever_it_is_scrolled_to(
    open_run: Open,
) -> None:
    async with open_run(run_with(["".join(chr(97 + n % 26) for n in range(100))])) as pilot:
        (row,) = (row for row in screen_text(pilot).split("\n") if row.startswith("abc"))
        assert row[76:79] == "yz…"
        (row,) = (row for row in (await press(pilot, "right")).split("\n") if row.startswith("ijk"))
        assert row[76:79] == "gh…"
        shown = await press(pilot, "right", "right")
        (row,) = (row for row in shown.split("\n") if row.startswith("vwx"))
        assert "…" not in row


async def test_v_selects_lines_y_copies_them_and_says_so(open_run: Open) -> None:
    async with open_run(numbered(500)) as pilot:
        shown = await press(pilot, "v", "up", "up")
        assert "selecting" in shown
        assert "copied, also to" in await press(pilot, "y")
        assert pilot.app.clipboard == "\n".join(f"12:00:00 line {n:06}" for n in (497, 498, 499))
        assert "selecting" not in await press(pilot, "v", "escape")


async def test_a_click_selects_a_line(open_run: Open) -> None:
    async with open_run(numbered(500)) as pilot:
        await pilot.click("#log", offset=(3, 1))
        await pilot.pause()
        await press(pilot, "y")
        assert pilot.app.clipboard.count("line") == 1


async def test_s_saves_what_is_shown_and_says_where(open_run: Open, tmp_path: Path) -> None:
    async with open_run(numbered(5000), (160, 30)) as pilot:
        await press(pilot, "t", *"00$", "enter")
        shown = await press(pilot, "s")
        (saved,) = (tmp_path / "state-home" / "dflashctl" / "saved").iterdir()
        assert f"50 lines saved to {saved}" in shown
        assert saved.read_text().split("\n")[0] == "12:00:00 line 000000"


async def test_a_gap_is_shown_as_one_and_o_asks_the_mirror_for_it(open_run: Open, folder: Path) -> None:
    async with open_run(numbered(1000)) as pilot:
        log, view = Log(pilot, folder), log_of(pilot)
        size = (folder / "train.log").stat().st_size
        begin = size - 10 * 21
        log.say([[begin, size]])
        await log.look()
        shown = await press(pilot, "z")
        assert "⋯ 20.3 KiB older bytes are not on this machine: o copies them ⋯" in shown
        assert "line 000989" not in shown
        assert "line 000990" in shown
        assert "asked for the 20.3 KiB" in await press(pilot, "o")
        assert (folder / WHOLE_LOG).exists()
        await press(pilot, "v", "escape")
        before = view.visible_text()
        for have in (2_100, 10_500):
            log.say([[0, have], [begin, size]])
            await log.look()
            assert view.visible_text().split("\n")[1:] == before.split("\n")[1:]
        log.say([[0, size]])
        await log.look()
        assert view.visible_text().split("\n")[1:] == before.split("\n")[1:], (
            "nothing slides when it is filled"
        )
        assert "line 000989" in await press(pilot, "up")
        assert "line 000000" in await press(pilot, "home")


async def test_a_log_that_begins_anew_is_said_to_and_taken_from_no_reader(
    open_run: Open, folder: Path
) -> None:
    async with open_run(numbered(500)) as pilot:
        log, view = Log(pilot, folder), log_of(pilot)
        await press(pilot, "pageup")
        before = view.visible_text()
        await log.begin_anew(b"another log\n", 2)
        assert view.visible_text() == before
        assert "the log began anew" in screen_text(pilot)
        shown = await press(pilot, "f")
        assert "another log" in shown
        assert "began anew 1×" in shown


async def test_an_unfinished_line_is_shown_as_it_grows(open_run: Open, folder: Path) -> None:
    async with open_run(run_with(["whole"], b"hal")) as pilot:
        assert "hal" in screen_text(pilot)
        await Log(pilot, folder).add(b"f a line\n")
        assert "half a line" in screen_text(pilot)


async def test_colours_of_a_log_are_shown_in_ours_and_no_other_code_has_any_effect(open_run: Open) -> None:
    lines = [
        "\x1b[31mred\x1b[0m \x1b[38;5;208morange\x1b[m \x1b[8mhidden\x1b[0m",
        "\x1b[2J\x1b]0;title\x07\x1b[10;10Hmoved\x1b[?1049h",
    ]
    async with open_run(run_with(lines)) as pilot:
        shown = screen_text(pilot)
        assert "red orange hidden" in shown
        assert "moved" in shown
        assert "\x1b" not in shown
        strips = [log_of(pilot).render_line(y) for y in range(2)]
        colours = {s.text: s.style.color.name for s in strips[0] if s.style and s.style.color}
        assert colours["red"].lower() == "#d55e00"
        assert not any(s.style and (s.style.conceal or s.style.blink) for s in strips[0])


@pytest.mark.slow
async def test_two_gigabytes_open_at_once_at_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, were_read = os.pread, 0

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal were_read
        data = pread(descriptor, size, offset)
        were_read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    run = numbered(10)
    directory = run.write(tmp_path / "run")
    with (directory / "train.log").open("r+b") as file:
        file.truncate(2 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe last line\n")
        size = file.tell()
    record = json.loads((directory / "mirror.json").read_text())
    record["files"]["train.log"] |= {"size": size, "extents": [[0, size]]}
    (directory / "mirror.json").write_text(json.dumps(record))
    app = RunApp(directory, clock=lambda: golden.NOW, period_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.pause()
        assert "the last line" in screen_text(pilot)
        assert 0 < were_read < 32 << 20
        for key in ("pageup", "home", "end"):
            await pilot.press(key)
            await pilot.pause()
        assert were_read < 64 << 20
        assert "the last line" in screen_text(pilot)


@pytest.mark.slow
async def test_keys_are_answered_while_a_hundred_thousand_lines_a_second_arrive(tmp_path: Path) -> None:
    """The flood is written by this very process, in portions of a tenth of a second."""
    directory = numbered(10).write(tmp_path / "run")
    app = RunApp(directory, clock=lambda: golden.NOW, period_s=1.0)
    portion = b"".join(b"12:00:00 flood %060d\n" % n for n in range(10_000))
    waits: list[float] = []
    async with app.run_test(size=(160, 48)) as pilot:
        view = app._run_screen.log_view
        with (directory / "train.log").open("ab") as file:
            for n in range(20):
                began, used = time.monotonic(), time.process_time()
                file.write(portion)
                file.flush()
                await pilot.press("pageup" if n % 2 else "f")
                waits.append(time.process_time() - used)  # of this process: a busy machine adds nothing
                await asyncio.sleep(max(0.0, began + 0.1 - time.monotonic()))
        end = time.monotonic() + 60
        while not (view.following and "flood" in view.visible_text()) and time.monotonic() < end:
            view.set_following(True)
            await asyncio.sleep(0.05)
        assert "flood" in view.visible_text()
    assert sorted(waits)[len(waits) // 2] < 0.5, waits


SNAPSHOTS = [("hostile_text", (60, 20)), ("hostile_text", (160, 48))]


@pytest.mark.parametrize(
    ("name", "size"), SNAPSHOTS, ids=lambda v: v if isinstance(v, str) else f"{v[0]}x{v[1]}"
)
def test_the_log_is_as_it_was_approved(
    name: str, size: tuple[int, int], snap_compare: Any, tmp_path: Path
) -> None:
    app = app_of(golden.SITUATIONS[name](), tmp_path / "run")

    async def settle(pilot: Any) -> None:
        await pilot.pause()
        await pilot.press("z")
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=settle)


class _Ended:
    """A mirror whose run is here whole but for the log's beginning."""

    running = False

    def __init__(self) -> None:
        self.started = 0

    def start(self) -> None:
        self.started += 1

    def stop(self, timeout: float = 0.0) -> None:
        pass

    def poke(self) -> None:
        pass


async def test_o_starts_a_mirror_that_had_come_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = golden_logs.write("late", tmp_path / "run")
    monkeypatch.setattr(app_module, "Mirror", _Ended)
    mirror = _Ended()
    app = RunApp(directory, mirror, clock=lambda: golden.NOW, period_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "asked for the 2.0 GiB" in await press(pilot, "o")
        assert (directory / WHOLE_LOG).exists()
        assert mirror.started == 1


LOG_SNAPSHOTS = [
    ("half_line", (60, 20), ()), ("tqdm", (80, 24), ()), ("colours", (80, 24), ()),
    ("wide", (60, 20), ("w",)), ("huge_line", (60, 20), ("w",)), ("late", (60, 20), ("home",)),
    ("late", (160, 48), ("slash", *"step", "enter")),
]  # fmt: skip


def _id(value: object) -> str:
    return (
        "x".join(map(str, value))
        if isinstance(value, tuple) and value and value[0] != "slash"
        else (value if isinstance(value, str) else "keys")
    )


@pytest.mark.parametrize(("name", "size", "keys"), LOG_SNAPSHOTS, ids=_id)
def test_each_kind_of_log_is_as_it_was_approved(
    name: str, size: tuple[int, int], keys: tuple[str, ...], snap_compare: Any, tmp_path: Path
) -> None:
    directory = golden_logs.write(name, tmp_path / "run")
    app = RunApp(directory, clock=lambda: golden.NOW, period_s=None)

    async def settle(pilot: Any) -> None:
        await pilot.pause()
        await pilot.press("z", *keys)
        await pilot.pause()
        app._run_screen._note = ""
        app._run_screen.draw()
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=settle)


@pytest.mark.parametrize(("name", "size"), [("dead_thread", (160, 48)), ("killed", (80, 24))], ids=_id)
def test_the_threads_of_a_dead_run_are_as_they_were_approved(
    name: str, size: tuple[int, int], snap_compare: Any, tmp_path: Path
) -> None:
    app = app_of(golden.SITUATIONS[name](), tmp_path / "run")

    async def settle(pilot: Any) -> None:
        await pilot.pause()
        await pilot.press("3")
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=settle)
