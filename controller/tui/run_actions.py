"""What the screen does to a run, and not only shows of it: stop, checkpoint, doctor, launch.

Each asks over a connection, so each works in a thread (`background`); what comes back is said in the key
line, an error with its hint in a notice. That the run did it is seen in its own records, as everything is.
What connects is imported only when it is asked for: the first screen must not wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import on
from textual.app import App

from controller import figures, paths
from controller.run_records import text
from controller.run_state import RunState
from controller.tui import background
from controller.tui.dialogs import Notice, StopQuestion, error_lines
from remote_payload import rundir
from remote_payload.rundir import Request

if TYPE_CHECKING:
    from controller.checkup import Report
    from controller.inventory import Host
    from controller.run_place import RunPlace

GRACE_S = 60.0
"""Until a run that was asked to stop is ended by force; as `dflashctl stop` has it."""


def ask_to_stop(run_place: RunPlace) -> None:
    """Place the request. Raises RunLostError when nobody is there, and what a connection raises."""
    from controller.run_control import stop

    stop(run_place, grace_s=GRACE_S)


def ask_for_checkpoint(run_place: RunPlace) -> None:
    """Place the request. Raises RunLostError when nobody is there, and what a connection raises."""
    from controller.run_control import ask

    ask(run_place, Request.CHECKPOINT)


def look_at(host: Host) -> Report:
    """The doctor's report. Never raises for what is wrong with the place."""
    from controller.checkup import look_at as look

    return look(host, None)


class RunActions(App[int]):
    """The half of the app that acts on runs; `RunApp` is the other, and the only one that is made."""

    if TYPE_CHECKING:  # what the other half has

        @property
        def directory(self) -> Path:
            """The mirror folder of the run that is shown."""

        @property
        def state(self) -> RunState:
            """The run's newest state."""

        def say(self, note: str) -> None:
            """Say something for some seconds."""

        def look_at_run(self, directory: Path) -> None:
            """Show another run."""

    asked_checkpoint: float | None = None
    """When one was asked for of the run that is shown, by the container's clock; None: none is awaited."""

    def _begin(self, work: str, function: Any) -> None:
        from controller.run_place import RunPlace

        try:
            run_place = RunPlace.read(self.directory)
        except Exception as error:  # its place.json is damaged or gone: nobody knows where it is
            self._refused(str(error), "without it nobody knows where the run is")
            return
        background.begin(self, work, lambda say: function(run_place))

    def _refused(self, error: str, hint: str) -> None:
        self.push_screen(Notice("This did not work", error_lines(error, hint, max(30, self.size.width - 12))))

    def _only_watched(self) -> bool:
        """Whether this is a log that dflashctl did not start; says so."""
        place = rundir.read_whole(self.directory / paths.PLACE) or {}
        if not text(place, "log_path"):
            return False
        self.say("this is a log, not a run that dflashctl started: it can only be watched")
        return True

    def action_stop_run(self) -> None:
        """Ask for the run's name, then stop it."""
        state = self.state
        if self._only_watched():
            return
        if state.ended:
            self.say(f"it has ended already: {state.health.headline}")
            return
        step = figures.count(state.progress.step if state.progress else None)

        def answered(stop: bool | None) -> None:
            if stop:
                self.say("asking it to stop ...")
                self._begin("stop", ask_to_stop)
            else:
                self.say("nothing was stopped")

        self.push_screen(StopQuestion(state.run_id, state.place or state.host, step), answered)

    def action_checkpoint(self) -> None:
        """Have a checkpoint written now."""
        state = self.state
        if self._only_watched():
            return
        if state.ended:
            self.say(f"it has ended: {state.health.headline}")
            return
        if state.progress is None:
            self.say("nothing is known of its training yet; no checkpoint was asked for")
            return
        self.asked_checkpoint = state.now + state.clock_difference_s
        self.say("asking for a checkpoint ...")
        self._begin("checkpoint", ask_for_checkpoint)

    def action_doctor(self) -> None:
        """Examine the run's place."""
        from controller.run_place import RunPlace
        from controller.tui.doctor_screen import DoctorScreen

        try:
            host = RunPlace.read(self.directory).host
        except Exception as error:
            self._refused(str(error), "without it nobody knows where the run is")
            return
        self.push_screen(DoctorScreen(host, look_at))

    def action_launch(self) -> None:
        """Launch a job, and look at it."""
        from controller.tui.launch_form import LaunchForm

        def answered(directory: Path | None) -> None:
            if directory is not None:
                self.call_later(self.look_at_run, directory)  # once the form is gone

        self.push_screen(LaunchForm(), answered)

    @on(background.Done)
    def _on_asked(self, message: background.Done) -> None:
        if message.error:
            self.asked_checkpoint = None
            self._refused(message.error, message.hint)
        elif message.work == "stop":
            self.say("asked to stop: it writes a checkpoint and ends")
        elif message.work == "checkpoint":
            self.say("asked for a checkpoint; it is said here when it is written")

    def notice_checkpoint(self, state: RunState) -> None:
        """Say what came of the checkpoint that was asked for."""
        asked = self.asked_checkpoint
        if asked is None:
            return
        for event in state.history.events:
            if event.kind in ("checkpoint", "checkpoint_failed") and event.t is not None and event.t > asked:
                self.asked_checkpoint = None
                written = f"checkpoint of step {figures.count(event.step)} is written"
                self.say(written if event.kind == "checkpoint" else event.line)
                return
