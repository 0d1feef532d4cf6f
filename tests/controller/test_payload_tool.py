"""Tools of the payload: words and answers through a place, with tools of a few lines and no torch."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from controller import evaluating, exporting
from controller.cli import main
from controller.errors import ConnectionLostError, PayloadEnvironmentError, ToolError, UsageError
from controller.evaluating import Question, evaluate_folder, evaluate_run, is_folder
from controller.inventory import Host
from controller.local import Local
from controller.payload_tool import run_tool
from controller.run_place import RunPlace
from controller.ship import PACKAGE, pack
from tests.waiting import until

TOOL = """\
import json, os, pathlib, sys, time
argv = sys.argv[1:]
print("hears", len(argv), "words", file=sys.stderr, flush=True)
if "refuse" in argv:
    print("export: there is no such checkpoint", file=sys.stderr)
    sys.exit(2)
if "die" in argv:
    os.kill(os.getpid(), 9)
if "module" in argv:
    import no_such_module_at_all
if "silent" in argv:
    time.sleep(float(argv[-1]))
if "forever" in argv:
    pathlib.Path(argv[-1]).write_text(str(os.getpid()))
    time.sleep(600)
if "mute" in argv:
    sys.exit(0)
contents = {path: pathlib.Path(path).read_text() for path in argv if os.path.isfile(path)}
print(json.dumps({"argv": argv, "x": os.environ.get("X"), "cwd": os.getcwd(), "contents": contents}))
"""


class Here:
    def __init__(self, tmp_path: Path) -> None:
        self.workspace = tmp_path / "w"
        self.host = Host.model_validate(
            {"name": "here", "kind": "local", "workspace": str(self.workspace), "env": {"X": "y z"}}
        )
        self.said: list[str] = []

    def run(self, *argv: str, **options: Any) -> dict[str, Any]:
        with Local(self.host) as place:
            return dict(run_tool(place, "export", argv, say=self.said.append, **options))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    copy = tmp_path / "source" / "remote_payload"
    ignored = shutil.ignore_patterns("train", "tools", "jobs", "__pycache__")
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    (copy / "tools").mkdir()
    (copy / "tools" / "__init__.py").write_text("")
    for name in ("export", "evaluate"):
        (copy / "tools" / f"{name}.py").write_text(TOOL)
    monkeypatch.setattr("controller.payload_tool.pack", lambda: pack(copy))
    monkeypatch.setenv("DFLASHCTL_TIME_SCALE", "0.1")
    return Here(tmp_path)


def test_words_come_as_they_are_said_and_the_answer_at_the_end(here: Here) -> None:
    answer = here.run("a", "b c", "--x=ä")
    assert answer["argv"] == ["a", "b c", "--x=ä"]
    assert (answer["x"], answer["cwd"]) == ("y z", str(here.workspace))
    assert here.said == ["hears 3 words"]


def test_a_refusal_is_the_tools_own_sentence_said_once(here: Here) -> None:
    with pytest.raises(ToolError, match=r"^here: export: there is no such checkpoint$"):
        here.run("refuse")
    assert here.said == ["hears 1 words"]


@pytest.mark.parametrize(("word", "said"), [("die", "was killed (SIGKILL)"), ("mute", "ended with status 0")])
def test_a_tool_that_ends_without_an_answer_has_failed(here: Here, word: str, said: str) -> None:
    with pytest.raises(ToolError, match=re.escape(said)):
        here.run(word)


def test_a_package_that_is_missing_there_is_an_environment_to_be_made(here: Here) -> None:
    with pytest.raises(PayloadEnvironmentError, match="no_such_module_at_all") as error:
        here.run("module")
    assert error.value.hint == "Make its venv: dflashctl setup --host here"


@pytest.mark.slow
def test_a_long_silence_of_the_tool_is_none_of_the_connection(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    for silence in (0.6, 2.0, 6.0):  # a busy machine may be silent itself for longer
        monkeypatch.setattr("controller.payload_tool.SILENCE_S", silence)
        with contextlib.suppress(ConnectionLostError):
            assert here.run("silent", str(1.5 * silence))["argv"] == ["silent", str(1.5 * silence)]
            return
    pytest.fail("a silence of the tool was taken for a lost connection")


@pytest.mark.slow
def test_a_tool_ends_when_nobody_waits_for_it_any_more(here: Here, tmp_path: Path) -> None:
    note, failed = tmp_path / "pid", []

    def ask() -> None:
        with Local(here.host) as place:
            try:
                run_tool(place, "export", ["forever", str(note)], say=lost)
            except ConnectionError as error:
                failed.append(error)

    def lost(_: str) -> None:
        raise ConnectionError

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    assert failed
    until(lambda: not note.exists() or not Path("/proc", note.read_text() or "0").exists(), "the tool to end")


def test_files_are_taken_from_where_they_lie_on_this_machine_and_brought_to_another(
    here: Here, tmp_path: Path
) -> None:
    path = tmp_path / "some prompts.jsonl"
    path.write_text('"hello"\n')
    answer = here.run("include:some prompts.jsonl", "include:other", files=[path])
    assert answer["argv"] == [str(path), "include:other"]
    elsewhere = here.host.model_copy(update={"kind": "ssh"})
    with Local(here.host) as place:
        place.description = elsewhere
        answer = dict(
            run_tool(place, "export", ["include:some prompts.jsonl"], files=[path], say=here.said.append)
        )
    (brought,) = answer["argv"]
    assert brought != str(path) and brought.startswith(str(here.workspace))
    assert answer["contents"] == {brought: '"hello"\n'}
    assert not list(here.workspace.glob(".given-*"))


def question(**changes: Any) -> Question:
    values = {"prompts": None, "count": None, "max_new_tokens": None, "device": "auto", "dtype": None}
    return Question(**{**values, **changes})


@pytest.fixture
def mirror(here: Here, tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    run_dir = here.workspace / "runs" / "a-run"
    run_dir.mkdir(parents=True)
    RunPlace(
        host=here.host, run_id="a-run", run_dir=str(run_dir), payload_dir=str(tmp_path / "source"),
        digest="d", python=here.host.python, created=0.0, job_name="job",
    ).write(folder)  # fmt: skip
    return folder


def test_a_run_is_evaluated_with_what_was_asked_and_nothing_else(
    here: Here, mirror: Path, tmp_path: Path
) -> None:
    run_dir = RunPlace.read(mirror).run_dir
    answer = evaluate_run(mirror, question(), checkpoint=None, say=here.said.append)
    assert answer["argv"] == [run_dir, "--device", "auto", "--json"]
    prompts = tmp_path / "p.arrow"
    with pytest.raises(UsageError, match=r"--prompts .*p.arrow: there is no such file"):
        evaluate_run(mirror, question(prompts=prompts), checkpoint=None, say=here.said.append)
    prompts.write_bytes(b"x")
    asked = question(prompts=prompts, count=3, max_new_tokens=9, device="cuda:1", dtype="float32")
    answer = evaluate_run(mirror, asked, checkpoint="last", say=here.said.append)
    assert answer["argv"] == [
        run_dir, "--count", "3", "--max-new-tokens", "9", "--device", "cuda:1", "--dtype", "float32",
        "--prompts", str(prompts), "--json", "--checkpoint", "last",
    ]  # fmt: skip


def test_a_folder_is_evaluated_on_this_machine_where_it_lies(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = tmp_path / "drafter", tmp_path / "p.jsonl"
    folder.mkdir()
    prompts.write_text('"x"')
    options: dict[str, Any] = {"target": None, "trust_remote_code": False, "say": here.said.append}
    with pytest.raises(UsageError, match=r"drafter: has no config.json; expected the folder"):
        evaluate_folder(folder, question(prompts=prompts), here.host, **options)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="has no prompts of its own"):
        evaluate_folder(folder, question(), here.host, **options)
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    options |= {"target": "model", "trust_remote_code": True}
    answer = evaluate_folder(Path("drafter"), question(prompts=Path("p.jsonl")), here.host, **options)
    assert answer["argv"][0] == str(folder)
    rest = " ".join(answer["argv"])
    assert f"--prompts {prompts}" in rest and f"--target {tmp_path / 'model'} --trust-remote-code" in rest
    assert f"--cache {here.workspace}/cache" in rest
    assert evaluating._located("owner/model", here.host) == "owner/model"


def test_a_word_is_a_folder_when_it_looks_like_a_path_or_holds_a_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-1130").mkdir()  # where `pull demo-1130` puts things
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{}")
    words = ["demo-1130", "drafter", "./demo-1130", "a/b", ".", None]
    assert [is_folder(word) for word in words] == [False, True, True, True, True, False]


def test_an_export_is_pulled_and_its_record_says_where_it_is(
    here: Here, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = Path(RunPlace.read(mirror).run_dir)
    tool = Path(tmp_path, "source", "remote_payload", "tools", "export.py")
    tool.write_text(
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1], 'exports', 'first')\n"
        "folder.mkdir(parents=True, exist_ok=True)\n"
        "(folder / 'model.safetensors').write_bytes(b'weights')\n"
        "print(json.dumps({'name': 'first', 'step': 7, 'dtype': 'bfloat16', 'bytes': 7, 'tensors': 1,"
        " 'tau': 2.5, 'tau_macro': None, 'path': str(folder), 'check': {'argv': sys.argv[1:]}}))\n"
    )
    monkeypatch.setattr("controller.pull.pack", lambda: pack(tmp_path / "source" / "remote_payload"))
    monkeypatch.setattr(exporting, "pull", _pull_by(PACKAGE))
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "say": here.said.append}
    there = exporting.export(mirror, checkpoint=None, name=None, force=False, to=None, **options)
    assert (there.name, there.step, there.tau, there.tau_macro, there.directory) == (
        "first",
        7,
        2.5,
        None,
        None,
    )
    assert there.check["argv"] == [str(run_dir), "--dtype", "bfloat16", "--device", "cpu", "--json"]
    to = tmp_path / "here"
    pulled = exporting.export(mirror, checkpoint="best", name="first", force=True, to=to, **options)
    assert pulled.directory == str(to / "exports" / "first")
    assert (to / "exports" / "first" / "model.safetensors").read_bytes() == b"weights"
    assert pulled.check["argv"][-4:] == ["--checkpoint", "best", "--name=first", "--force"]
    assert json.loads(json.dumps(pulled.check)) == pulled.check and [path.name for path in to.iterdir()] == [
        "exports"
    ]


def _pull_by(package: Path) -> Any:
    """`pull`, with the payload of this tree as the run's own."""
    from controller.pull import pull

    def pulled(directory: Path, *words: Any, **options: Any) -> Any:
        place = RunPlace.read(directory)
        place.model_copy(update={"payload_dir": str(package.parent)}).write(directory)
        return pull(directory, *words, **options)

    return pulled


@pytest.mark.parametrize(
    "line",
    [
        "export --dtype int8",
        "export --device cuda",
        "export --no-pull --to x",
        "evaluate --dtype auto",
        "evaluate --device gpu0",
        "evaluate ./x --checkpoint last",
        "evaluate run --target x",
    ],
)
def test_options_that_cannot_be_are_refused_before_anybody_is_asked(line: str) -> None:
    assert main(line.split()) == UsageError.exit_code
