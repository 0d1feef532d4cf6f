"""Export and evaluate through a real sshd and container: written there, pulled, and brought back again."""

import json
import signal
import subprocess
from pathlib import Path

from safetensors.torch import load_file

from tests.dflashctl import command, dflashctl, environment
from tests.payload.tiny import random_samples, write_arrow
from tests.rig.rig import Rig
from tests.rig.test_launch import job
from tests.waiting import until

__all__ = ["job"]  # the fixture


def test_a_drafter_is_exported_in_the_container_pulled_and_evaluated_there_as_run_and_as_folder(
    rig: Rig, job: str, tmp_path: Path
) -> None:
    env = rig.laptop_env()
    done = dflashctl(
        "launch", "--host", "rig", "--job", job, "--set", "steps=5", "--follow", env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.splitlines()[0]
    idle = rig.container_processes()
    done = dflashctl("export", run_id, "--to", str(tmp_path / "here"), "--json", env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    exported = json.loads(done.stdout)
    folder = Path(exported["directory"])
    there = rig.container_path(exported["path"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in there.iterdir()
    }
    assert len(load_file(folder / "model.safetensors")) == exported["tensors"] == 14
    samples, lengths = random_samples(3, seed=4)
    prompts = write_arrow(tmp_path / "asked by me.arrow", samples, lengths)
    words = ("--prompts", str(prompts), "--max-new-tokens", "6", "--json")
    records = []
    for what in ((run_id,), (str(folder), "--host", "rig")):
        done = dflashctl("evaluate", *what, *words, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        records.append(json.loads(done.stdout))
    run, pulled = records
    assert run["prompts"] == pulled["prompts"] == run["text_equal"] == pulled["text_equal"] == 3
    assert run["prompts_path"].startswith(rig.workspace) and run["prompts_path"].endswith(
        "/asked by me.arrow"
    )
    assert pulled["drafter"].startswith(rig.workspace) and pulled["step"] == run["step"] == 5
    assert not list(rig.container_path(rig.workspace).glob(".given-*"))
    done = dflashctl("export", run_id, env=env, timeout=120)
    assert done.returncode == 83 and "exports/step-5 exists already" in done.stderr
    until(lambda: rig.container_processes() <= idle, "the refused export's processes to end")

    endless = command("evaluate", run_id, "--max-new-tokens", "100000")
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(endless, env=environment(env), stdin=subprocess.DEVNULL, stderr=said)
    until(lambda: "Decoding" in (tmp_path / "said").read_text(), "the evaluation to begin")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 80
    until(lambda: rig.container_processes() <= idle, "the evaluation in the container to end")
