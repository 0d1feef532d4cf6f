"""`watch`: a line for each change of a run, and the run's exit code."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from controller import waiting
from controller.changes import print_changes
from controller.diagnose import diagnose_text
from controller.errors import UnreachableError
from controller.mirror import Mirror
from controller.mirror_reader import MirrorReader
from controller.trouble import Trouble
from controller.waiting import Waiter, wait_until_current
from controller.watching import wait_for
from remote_payload import rundir
from tests.controller.fake_feed import TIMING, Line, Remote, mirror_folder

OOM = diagnose_text("CUDA out of memory")
assert OOM is not None


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.01")


def ended() -> Remote:
    remote = Remote()
    remote.small["run.json"] = b'{"kind":"run","id":"run-1","job":"tiny"}\n'
    remote.small["status.json"] = (
        b'{"kind":"status","t":5,"attempt":1,"state":"failed","exit_code":1,'
        b'"reason":"CUDA out of memory.\\u001b[31m"}\n'
    )
    remote.small["progress.json"] = b'{"kind":"progress","attempt":1,"step":7,"steps":9,"loss":1.5}\n'
    remote.supervisor = remote.trainer = "gone"
    return remote


def test_a_long_copy_is_said_with_what_is_still_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "1")  # or a record of a tenth of a second ago is an old one
    monkeypatch.setattr(waiting, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(waiting, "is_quiet", lambda: False)
    folder = mirror_folder(tmp_path / "mirror")

    class Notes(io.StringIO):
        """The copy is complete as soon as something was said of it."""

        def write(self, text: str) -> int:
            record(complete=True)
            return super().write(text)

    def record(*, complete: bool) -> None:
        files = {"events.jsonl": {"generation": 1, "size": 5 << 20, "extents": [[0, 1 << 20]]}}
        known = {"state": "connected", "complete": complete, "files": files}
        rundir.write_whole(folder / "mirror.json", rundir.encode(rundir.stamp("mirror", known)))

    record(complete=False)
    reader, notes = MirrorReader(folder), Notes()
    wait_until_current(reader, Trouble(notes, lambda: True), Waiter(reader, None))
    assert notes.getvalue() == "dflashctl: copying what the run wrote: 4.0 MiB are still to come\n"


def test_whoever_waits_for_a_run_hears_at_once_that_its_mirror_has_ended_before_it(tmp_path: Path) -> None:
    folder = mirror_folder(tmp_path / "mirror")
    (folder / "mirror.json").write_text('{"state":"ended","complete":true,"files":{}}')
    (folder / "status.json").write_text('{"kind":"status","attempt":1,"state":"running"}')
    line = Line(Remote())
    line.error = UnreachableError("no route")
    mirror = Mirror(folder, place_opener=line.open, timing=TIMING)
    mirror.start()
    with pytest.raises(UnreachableError, match="no route"):
        wait_for(folder, mirror, lambda state: False, limit_s=3600, what="its end")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_ended_run_is_one_line_with_its_reason_and_the_code_is_the_runs(
    as_json: bool, tmp_path: Path
) -> None:
    folder, line = mirror_folder(tmp_path / "mirror"), Line(ended())
    mirror = Mirror(folder, place_opener=line.open, timing=TIMING)
    mirror.start()
    out = io.StringIO()
    try:
        assert print_changes(folder, mirror, as_json=as_json, out=out) == 1
    finally:
        mirror.stop()
    (said,) = out.getvalue().splitlines()
    assert said.isprintable()
    if as_json:
        record = json.loads(said)
        assert (record["state"], record["exit_code"], record["step"], record["event"]) == (
            "FAILED",
            1,
            7,
            None,
        )
    else:
        assert said.endswith(f"run-1 FAILED rc=1 step 7/9: CUDA out of memory. What to do: {OOM.do}")
