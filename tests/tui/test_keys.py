"""Every key, pressed."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.binding import Binding

from controller.errors import LocalStateError
from controller.mirror import Mirror
from controller.tui.app import RunApp
from controller.tui.line_widgets import LineView
from controller.tui.log_view import LogView
from tests.tui import golden
from tests.tui.conftest import Open, screen_text


def log_of(app: object) -> LogView:
    assert isinstance(app, RunApp)
    return app._run_screen.log_view


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "text"), [("2", "gradient norm"), ("3", "waiting for batches"), ("4", "replica 0 ready on")]
)
async def test_a_number_key_shows_its_tab_and_1_comes_back(key: str, text: str, open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        assert text not in screen_text(pilot)
        await pilot.press(key)
        await pilot.pause()
        assert text in screen_text(pilot)
        await pilot.press("1")
        await pilot.pause()
        assert "step  12345" in screen_text(pilot)
        assert "Buckets" in screen_text(pilot)


async def test_a_click_on_a_tabs_name_shows_it(open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        await pilot.click("#tabs", offset=(24, 0))
        await pilot.pause()
        assert "drafter-1" in screen_text(pilot)


async def test_z_gives_the_log_the_room_of_the_panels_and_back(open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        await pilot.press("z")
        await pilot.pause()
        shown = screen_text(pilot)
        assert "Buckets" not in shown
        assert shown.count("tok/s") > 15
        await pilot.press("z")
        await pilot.pause()
        assert "Buckets" in screen_text(pilot)
        assert log_of(pilot.app).following


async def test_x_hides_the_crash_and_shows_the_panels(open_run: Open) -> None:
    async with open_run("dead_thread") as pilot:
        assert "failed first" in screen_text(pilot)
        await pilot.press("x")
        await pilot.pause()
        assert "failed first" not in screen_text(pilot)
        assert "Buckets" in screen_text(pilot)
        await pilot.press("x")
        await pilot.pause()
        assert "failed first" in screen_text(pilot)


async def test_y_copies_to_the_terminal_and_a_file_and_says_where(open_run: Open, tmp_path: Path) -> None:
    async with open_run("dead_thread", (160, 48)) as pilot:
        await pilot.press("y")
        await pilot.pause()
        assert "copied, also to" in screen_text(pilot)
        (copied,) = (tmp_path / "state-home").rglob("copied.txt")
        assert "CUDA graph trees" in copied.read_text()
        assert pilot.app.clipboard == copied.read_text().rstrip("\n")
        assert "/root" not in copied.read_text()
        assert "10.1.2.6" not in copied.read_text()


async def test_the_threads_tab_of_a_dead_run_has_the_failed_first_and_their_tracebacks_below(
    open_run: Open,
) -> None:
    async with open_run("dead_thread", (120, 60)) as pilot:
        await pilot.press("3")
        await pilot.pause()
        shown = screen_text(pilot)
        order = [
            "✗ drafter-1", "✗ drafter-0", "· reader", "drafter-1 (cuda:7) failed first", "what CUDA",
            '▸ File "remote_payload/train/pipeline.py", line 188', "AssertionError", "Memory of cuda:7",
            "The log's last lines", "drafter-0 (cuda:6) 1.0s later", "BrokenBarrierError",
        ]  # fmt: skip
        place = 0
        for text in order:
            place = shown.index(text, place)
        await pilot.press("y")
        assert "## First failure: drafter-1" in pilot.app.clipboard


async def test_question_mark_lists_every_binding(open_run: Open) -> None:
    async with open_run("healthy", (100, 40)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        shown = screen_text(pilot)
        for binding in RunApp.BINDINGS:
            assert isinstance(binding, Binding)
            assert binding.tooltip in shown
        assert isinstance(pilot.app, RunApp)
        pilot.app.tick()
        await pilot.pause()
        assert "Keys" in screen_text(pilot), "a tick behind the help changes nothing of it"
        await pilot.press("escape")
        await pilot.pause()
        assert "Keys" not in screen_text(pilot)


class Watched:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, timeout: float = 0.0) -> None:
        self.calls.append("stop")

    def poke(self) -> None:
        self.calls.append("poke")


@pytest.mark.slow
@pytest.mark.parametrize("size", [(60, 90), (80, 90)], ids=str)
async def test_the_help_cuts_no_line(size: tuple[int, int], open_run: Open) -> None:
    async with open_run("healthy", size) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        assert "…" not in screen_text(pilot)


async def test_what_keeps_the_copy_from_being_written_here_stands_on_the_screen(tmp_path: Path) -> None:
    directory = golden.no_news().write(tmp_path)
    mirror = Mirror(directory, place_opener=lambda: pytest.fail("connected"))
    mirror.error = LocalStateError("cannot open mirror.lock: Read-only file system", "it goes on when it can")
    app = RunApp(directory, mirror, clock=lambda: golden.NOW, period_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        shown = screen_text(pilot)
        assert "STALE 40s" in shown
        assert "cannot open mirror.lock: Read-only file system: it goes on when it can" in shown


async def test_capital_r_reconnects_now(tmp_path: Path) -> None:
    mirror = Watched()
    directory = golden.reconnecting().write(tmp_path)
    app = RunApp(directory, mirror, clock=lambda: golden.NOW, period_s=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("R")
        await pilot.pause()
        assert mirror.calls == ["poke"]
        assert "reconnecting now" in screen_text(pilot)


@pytest.mark.parametrize("key", ["q", "ctrl+c", "ctrl+q"])
async def test_leaving_ends_the_view_and_asks_nothing_of_the_run(key: str, open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert pilot.app.return_code == 0
        assert not pilot.app.is_running or pilot.app._exit


async def test_what_is_not_visible_is_not_drawn(open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        app = pilot.app
        assert isinstance(app, RunApp)
        for name in ("threads", "events"):
            assert not app.screen.query_one(f"#{name}", LineView).lines
