import dataclasses
import io
import json
import time
from pathlib import Path

import pytest

from controller.diagnose import RECOMPILING, SILENT_SUPERVISOR, SILENT_TRAINER, TAU_GAP
from controller.errors import UnreachableError
from controller.mirror import Mirror
from controller.run_reader import RunReader
from controller.run_records import progress
from controller.run_state import News, RunState, reduce
from controller.status import print_status, state_record, status_lines
from controller.watching import catch_up
from tests.controller.fake_feed import TIMING, Line, Remote, mirror_folder
from tests.tui.golden import NOW, SITUATIONS


def state_of(situation: str, folder: Path) -> RunState:
    SITUATIONS[situation]().write(folder)
    return RunReader(folder).catch_up(NOW)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_situation_has_safe_lines_and_a_json_twin(situation: str, tmp_path: Path) -> None:
    state = state_of(situation, tmp_path)
    lines = status_lines(state)
    assert state.state in lines[0]
    assert all(len(line) < 4200 and line.isprintable() for line in lines)
    text = json.dumps(state_record(state), allow_nan=False)
    record = json.loads(text)
    assert record["state"] == state.state
    assert record["ended"] == state.ended
    assert record["exit_code"] == state.exit_code
    assert record["run"] == state.run_id


def test_the_json_twin_leaves_nothing_of_the_state_out(tmp_path: Path) -> None:
    state = state_of("dead_thread", tmp_path)
    record = state_record(state)
    renamed = {"run_id", "health", "history", "gpu_table", "supervisor_events"}
    missing = {field.name for field in dataclasses.fields(RunState)} - set(record) - renamed
    assert not missing
    assert set(record) >= {"events", "gpus", "curves", "evaluations", "headline", "detail", "alarms"}
    assert record["crashes"][0]["traceback"] == state.crashes[0].traceback
    step, loss = record["curves"]["loss"][-1]
    assert (step, loss) == state.curves["loss"].all_points[-1]


def test_a_person_sees_state_step_loss_and_where(tmp_path: Path) -> None:
    text = "\n".join(status_lines(state_of("healthy", tmp_path)))
    assert "LIVE" in text
    assert "news of 1.2s ago" in text
    assert "step 12,345 of 50,000 (25%)" in text
    assert "loss " in text and "MFU 38%" in text
    assert "tau " in text
    assert "job qwen3-8b on gpu1/200, attempt 1" in text


def test_figures_that_are_old_say_how_old(tmp_path: Path) -> None:
    assert " as of " not in "\n".join(status_lines(state_of("healthy", tmp_path / "live")))
    lines = status_lines(state_of("no_news", tmp_path / "old"))
    assert lines[2].endswith("left, as of 41s ago")
    gpus = [line for line in lines if "GPU" in line]
    assert gpus[0] == "  GPUs as of 42s ago:"
    assert gpus[1].startswith("  GPU 0 NVIDIA H200: ")
    run = SITUATIONS["killed"]()
    for record in run.gpu:
        record["t"] -= 3600
    run.write(tmp_path / "ended")
    ended = status_lines(RunReader(tmp_path / "ended").catch_up(NOW))
    assert [line for line in ended if " as of " in line] == ["  GPUs as of 1h00m ago:"]


def test_a_run_that_has_not_trained_yet_shows_no_row_of_dashes(tmp_path: Path) -> None:
    state = state_of("healthy", tmp_path)
    began = progress({"phase": "loading", "step": 0, "steps": 50})
    text = "\n".join(status_lines(dataclasses.replace(state, progress=began)))
    assert "step 0 of 50 (0%), loading" in text
    assert "tokens/s" not in text and "loss" not in text


def test_lines_that_could_not_be_read_are_counted_by_file(tmp_path: Path) -> None:
    damaged = dataclasses.replace(
        state_of("healthy", tmp_path), unparsable={"events.jsonl": 2, "gpu.jsonl": 1}
    )
    lines = [line for line in status_lines(damaged) if "no record" in line]
    assert lines == ["  ! 2 lines of events.jsonl hold no record", "  ! 1 line of gpu.jsonl holds no record"]


def test_an_alarm_stands_with_what_to_do_about_it_in_the_words_of_the_tui(tmp_path: Path) -> None:
    run = SITUATIONS["healthy"]()
    assert run.progress is not None
    run.progress |= {"alarm": {"reason": "leak_or_misalignment"}, "recompiles": 2}
    run.write(tmp_path)
    lines = [line for line in status_lines(RunReader(tmp_path).catch_up(NOW)) if line.startswith("  ! ")]
    assert lines == [f"  ! {alarm.what} {alarm.do}" for alarm in (TAU_GAP, RECOMPILING)]


def test_a_silent_trainer_and_a_silent_supervisor_have_each_its_own_meaning(tmp_path: Path) -> None:
    lines = status_lines(state_of("stalled", tmp_path / "trainer"))
    assert lines[-2:] == [f"  cause: {SILENT_TRAINER.what}", f"  what to do: {SILENT_TRAINER.do}"]
    silent = state_of("stale_heartbeat", tmp_path / "supervisor")
    assert (silent.state, silent.health.detail) == ("STALLED", "the supervisor writes no status")
    assert status_lines(silent)[-1] == f"  what to do: {SILENT_SUPERVISOR.do}"


def test_times_are_this_machines_and_one_that_no_calendar_has_breaks_nothing() -> None:
    late = tuple({"kind": "recompile", "t": t, "replica": n} for n, t in enumerate((NOW + 3600, 1e300)))
    state = reduce(RunState(), News(events=late, mirror={"clock_difference_s": 3600.0}), NOW)
    clock = time.strftime("%H:%M:%S", time.localtime(NOW))
    text = "\n".join(status_lines(state))
    assert f"  {clock} replica 0 recompiled" in text
    assert "  --:--:-- replica 1 recompiled" in text


def test_a_failed_run_shows_who_failed_first_and_what_to_do(tmp_path: Path) -> None:
    text = "\n".join(status_lines(state_of("dead_thread", tmp_path)))
    assert "FAILED" in text
    assert "failed first: thread drafter-1 (cuda:7)\n" in text
    assert "what to do:" in text


@pytest.mark.parametrize(("situation", "shown"), [("killed", True), ("lost", True), ("stopped", False)])
def test_the_end_of_the_log_is_shown_of_a_run_that_died(situation: str, shown: bool, tmp_path: Path) -> None:
    text = "\n".join(status_lines(state_of(situation, tmp_path)))
    assert ("step  12345  loss" in text) is shown


def test_no_news_is_not_shown_as_a_dead_run(tmp_path: Path) -> None:
    state = state_of("no_news", tmp_path)
    text = "\n".join(status_lines(state))
    assert not state.ended
    assert "FAILED" not in text
    assert "LOST" not in text


@pytest.mark.parametrize("as_json", [False, True])
def test_the_folder_is_brought_up_to_date_first(
    as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.01")
    remote = Remote()
    remote.small["run.json"] = b'{"kind":"run","id":"run-1","job":"tiny","place":"local"}\n'
    remote.small["progress.json"] = b'{"kind":"progress","step":7,"steps":9,"loss":1.5}\n'
    folder, line = mirror_folder(tmp_path / "mirror"), Line(remote)
    mirror = Mirror(folder, place_opener=line.open, timing=TIMING, once=True)
    mirror.start()
    out = io.StringIO()
    assert print_status(folder, as_json, mirror=mirror, out=out) == 0
    if as_json:
        assert json.loads(out.getvalue())["progress"]["step"] == 7
        assert out.getvalue().count("\n") == 1
    else:
        assert out.getvalue().startswith("run-1  ")
        assert "step 7 of 9" in out.getvalue()
    mirror.stop()


def test_a_copy_that_could_not_be_brought_up_to_date_for_this_machines_own_folder_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mirror_folder(tmp_path / "mirror")
    SITUATIONS["healthy"]().write(folder)
    (folder / "mirror.lock").mkdir()
    for once in (True, False):  # one that goes on trying is not waited for either
        mirror = Mirror(folder, place_opener=Line(Remote()).open, timing=TIMING, once=once)
        mirror.start()
        if once:
            print_status(folder, False, mirror=mirror)
        else:
            catch_up(folder, mirror)
        mirror.stop(60)
    told = f"dflashctl: cannot open {folder}/mirror.lock: Is a directory\n"
    assert capsys.readouterr().err == 2 * told


def test_a_run_that_was_never_heard_of_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.01")
    folder, line = mirror_folder(tmp_path / "mirror"), Line(Remote())
    line.error = UnreachableError("no route to host")
    mirror = Mirror(folder, place_opener=line.open, timing=TIMING, once=True)
    mirror.start()
    with pytest.raises(UnreachableError):
        print_status(folder, False, mirror=mirror, out=io.StringIO())
    mirror.stop()
