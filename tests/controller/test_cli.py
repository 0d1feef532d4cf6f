"""The command line as a process: exit codes, and what stands on stdout and stderr."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from controller.command_line import loudness_first
from controller.commands.table import app
from tests.dflashctl import ROOT, command, dflashctl, environment
from tests.waiting import until

JOB = 'target = "/nonexistent/model"\ndataset = "none.arrow"\nmask_token_id = 1\n'


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    home = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("STATE", "DATA", "CONFIG")}
    return {"HOME": str(tmp_path), **home}


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(JOB)
    return str(tmp_path / "mine.toml")


COMMANDS = sorted(
    info.name or info.callback.__name__ for info in app.registered_commands if info.callback is not None
)
HEAVY = ("paramiko", "fabric", "textual", "torch", "rich", "controller.inventory")  # typer needs pydantic


def imported(env: dict[str, str], *arguments: str) -> tuple[str, list[str]]:
    """What a command prints, and which heavy modules it imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command(*arguments)[1:]],
        env=environment(env),
        capture_output=True,
        text=True,
    )
    return done.stdout, [heavy for heavy in HEAVY if f" {heavy}\n" in done.stderr]


def test_help_names_every_command_and_starts_without_heavy_imports(env: dict[str, str]) -> None:
    done = dflashctl("--help", env=env)
    assert done.returncode == 0
    assert {"launch", "logs", "status", "stop", "tui", "runs", "resume", "pull", "watch"} <= set(COMMANDS)
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
    assert "..." not in done.stdout.partition("\nCommands:\n")[2]  # a sentence that was cut
    assert imported(env, "--help")[1] == []


def test_every_commands_help_has_an_example_and_starts_without_heavy_imports(env: dict[str, str]) -> None:
    code = (
        "import contextlib, io, json, sys\nfrom controller.cli import main\npages = {}\n"
        f"for name in {COMMANDS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as page: main([name, '-h'])\n"
        "    pages[name] = page.getvalue()\n"
        f"print(json.dumps([pages, [heavy for heavy in {HEAVY!r} if heavy in sys.modules]]))"
    )
    argv = [*command()[:2], code]
    done = subprocess.run(argv, env=environment(env), capture_output=True, text=True, check=True)
    pages, heavy = json.loads(done.stdout)
    assert heavy == []
    for name, page in pages.items():
        usage, _, text = page.partition("Options:")[0].partition("\n\n")
        assert usage.strip().startswith(f"Usage: dflashctl {name}")
        assert re.search(rf"^  dflashctl {name}\b", text, re.MULTILINE), f"{name} has no example"


def completed(env: dict[str, str], line: str) -> list[str]:
    """What bash is offered at the end of `line`."""
    words = line.split(" ")
    told = {"_DFLASHCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = dflashctl(env=env | told)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.slow
def test_a_shell_completes_commands_runs_places_jobs_and_what_to_pull(
    env: dict[str, str], tmp_path: Path
) -> None:
    for number, run in enumerate(("demo-1130-aaaa", "demo-1130-bbbb", "other-1130-cccc")):
        folder = tmp_path / "state" / "dflashctl" / "runs" / run / "local"
        folder.mkdir(parents=True)
        (folder / "place.json").write_text(json.dumps({"created": number, "job_name": "demo"}))
    hosts = tmp_path / "hosts.toml"
    hosts.write_text('[places.gpubox]\nkind = "ssh"\naddress = "10.1.2.6"\n[places.other]\nkind = "local"\n')
    known = env | {"DFLASHCTL_HOSTS": str(hosts)}
    assert {"launch", "logs"} <= set(completed(known, "dflashctl l"))
    assert completed(known, "dflashctl logs demo") == ["demo-1130-bbbb", "demo-1130-aaaa"]
    assert completed(known, "dflashctl pull other") == ["other-1130-cccc"]
    assert completed(known, "dflashctl pull other-1130-cccc checkpoints/b") == ["checkpoints/best"]
    assert completed(known, "dflashctl launch --host g") == ["gpubox"]
    assert completed(known, "dflashctl launch --job dem") == ["demo"]
    hosts.write_text("[[")
    assert completed(known, "dflashctl launch --host g") == []
    told = {"_DFLASHCTL_COMPLETE": "complete_bash", "COMP_WORDS": "dflashctl logs ", "COMP_CWORD": "2"}
    assert imported(known | told)[1] == []


def test_quiet_and_verbose_may_stand_anywhere_before_somebody_elses_words() -> None:
    assert loudness_first(["launch", "--job", "x", "-q"]) == ["-q", "launch", "--job", "x"]
    assert loudness_first(["--verbose", "exec", "-v", "--", "ls"]) == ["--verbose", "exec", "-v", "--", "ls"]
    assert loudness_first(["pull", "--", "-q"]) == ["pull", "--", "-q"]


@pytest.mark.slow
def test_quiet_leaves_data_and_errors_and_verbose_adds_what_is_run_elsewhere(
    env: dict[str, str], job: str
) -> None:
    quiet = dflashctl("launch", "--job", job, "--quiet", "--json", env=env)
    assert quiet.returncode == 0
    assert all(line.startswith("warning: ") for line in quiet.stderr.splitlines())
    run = json.loads(quiet.stdout)["run"]
    dflashctl("logs", "--follow", run, env=env)
    verbose = dflashctl("-v", "resume", run, env=env)
    assert verbose.returncode == 0, verbose.stderr
    assert re.search(r"^\+ .*remote_payload resume /", verbose.stderr, re.MULTILINE)
    refused = dflashctl("resume", run, "--set", "seed=3", "-q", env=env)
    assert refused.returncode == 64
    assert [line.split(":")[0] for line in refused.stderr.splitlines()] == ["error", "hint"]
    both = dflashctl("-q", "-v", "runs", env=env)
    assert (both.returncode, "exclude each other" in both.stderr) == (64, True)
    dflashctl("logs", "--follow", run, env=env)


def test_nothing_is_coloured_with_or_without_no_color(env: dict[str, str]) -> None:
    for extra in ({}, {"FORCE_COLOR": "1", "NO_COLOR": "1"}):
        for arguments in (["--help"], ["launch", "--hots"]):
            done = dflashctl(*arguments, env=env | extra)
            assert "\x1b" not in done.stdout + done.stderr


def test_without_a_command_it_explains_itself(env: dict[str, str]) -> None:
    assert dflashctl(env=env).stdout == dflashctl("--help", env=env).stdout
    assert dflashctl("--version", env=env).stdout.startswith("dflashctl 0.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "texts"),
    [
        (["lunch"], 64, ["error: No such command 'lunch'", "hint: See: dflashctl --help"]),
        (["launch", "--hots", "x"], 64, ["No such option: --hots", "See: dflashctl launch --help"]),
        (["launch", "--port", "x"], 64, ["Invalid value for '--port'", "See: dflashctl launch --help"]),
        (["launch", "--host", "a", "--host", "b"], 64, ["--host was given 2 times; a run uses one host"]),
        (["launch", "--host", "lcal"], 65, ["has no place called or addressed 'lcal'; did you mean local?"]),
        (["launch", "--job", "dmeo"], 64, ["--job dmeo: there is no such job"]),
        (["launch", "--job", "~nobody-here/x.toml"], 64, ["~nobody-here/x.toml: cannot be read (No such"]),
        (["launch", "--job", "absent.toml"], 64, ["absent.toml: cannot be read (No such file or directory)"]),
        (["launch", "--job", "JOB", "--set", "learning_rat=1"], 64, ["unknown key 'learning_rat'; did"]),
        (["launch", "--job", "JOB", "--set", "steps"], 64, ["--set 'steps': expected key=value"]),
        (["launch", "--job", "JOB", "--set", "steps=many"], 64, ["steps = 'many': expected a whole number"]),
        (["doctor", "--set", "steps=1"], 64, ["--set changes a job, and --job names none"]),
        (
            ["launch", "--dry-run", "--job", "JOB", "--include", "/dev/null"],
            64,
            ["/dev/null: is no plain file"],
        ),
        (["logs"], 64, ["no run is known on this machine"]),
        (["status", "demo"], 64, ["no run 'demo': none is known"]),
        (["stop"], 64, ["no run is known on this machine"]),
        (
            ["launch", "--job", "JOB", "--restart", "always"],
            64,
            ["restart = 'always': expected one of 'never'"],
        ),
        (["resume"], 64, ["no run is known on this machine"]),
        (["checkpoint", "demo"], 64, ["no run 'demo': none is known"]),
        (["pull", "demo", "log"], 64, ["no run 'demo': none is known"]),
        (["pull", "checkpoints/best"], 64, ["hint: Of the newest run: dflashctl pull - checkpoints/best"]),
        (["watch"], 64, ["no run is known on this machine"]),
        (["logs", "--tail", "-1"], 64, ["Invalid value for '--tail'"]),
        (["launch", "--json", "--follow"], 64, ["--json and --follow exclude", "dflashctl watch --json RUN"]),
        (["launch", "--json", "--dry-run"], 64, ["--json and --dry-run exclude each other"]),
        (["resume", "--json", "--follow"], 64, ["--json and --follow exclude each other"]),
        (["setup", "--json", "--dry-run"], 64, ["--json and --dry-run exclude each other"]),
        (["stop", "--grace", "inf"], 64, ["Invalid value for '--grace'"]),
        (["checkpoint", "--limit", "inf"], 64, ["Invalid value for '--limit'"]),
        (["launch", "--host", "", "--job", "JOB"], 64, ["--host is empty"]),
        (["probe", "--device", "gpu0"], 64, ["--device gpu0: expected auto, cpu or cuda:N"]),
        (["export", "--device", "gpu0"], 64, ["--device gpu0: expected auto, cpu or cuda:N"]),
    ],
)
def test_a_users_mistake_is_one_sentence_and_a_documented_code(
    env: dict[str, str], job: str, arguments: list[str], code: int, texts: list[str]
) -> None:
    done = dflashctl(*[job if word == "JOB" else word for word in arguments], env=env)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for text in texts:
        assert text in done.stderr


def test_a_host_that_refuses_is_one_sentence_and_its_code(env: dict[str, str], job: str) -> None:
    where = ["--host", "127.0.0.1", "--kind", "ssh", "--port", "1"]
    done = dflashctl("launch", "--job", job, *where, env=env)
    assert done.returncode == 66
    error, hint = done.stderr.splitlines()
    assert error == "error: 127.0.0.1 port 1: refuses the connection"
    assert hint.startswith("hint: Does sshd run there")


@pytest.mark.slow
def test_the_doctor_looks_at_the_other_hosts_too_when_one_cannot_be_reached(
    env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "hosts.toml").write_text(
        '[places.gone]\nkind = "ssh"\naddress = "127.0.0.1"\nport = 1\n'
        f'[places.here]\nkind = "local"\nworkspace = "{tmp_path}/w"\n'
    )
    env["DFLASHCTL_HOSTS"] = str(tmp_path / "hosts.toml")
    done = dflashctl("doctor", "--json", "--host", "gone", "--host", "here", env=env)
    assert done.returncode == 66
    gone, here = map(json.loads, done.stdout.splitlines())
    assert [(one["host"], one["checks"][0]["level"]) for one in (gone, here)] == [
        ("gone", "failure"),
        ("here", "ok"),
    ]


def test_a_dry_run_prints_the_job_as_data_and_touches_nothing(
    env: dict[str, str], job: str, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = dflashctl("launch", "--job", job, "--set", "steps=9", "--dry-run", env=env)
    assert done.returncode == 0
    (tmp_path / "again.toml").write_text(done.stdout)
    again = dflashctl("-v", "launch", "--job", str(tmp_path / "again.toml"), "--dry-run", env=env)
    assert again.stdout == done.stdout
    assert "\nsteps = 9\n" in done.stdout
    assert re.search(r"^payload: \d+ files, ", done.stderr, re.MULTILINE)
    assert "__main__.py" not in done.stderr
    assert "remote_payload/__main__.py" in again.stderr
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "again.toml"])


def test_an_unknown_host_contacts_nobody_in_a_dry_run(env: dict[str, str], job: str) -> None:
    done = dflashctl(
        "launch", "--job", job, "--host", "192.0.2.1", "--container", "200", "--dry-run", env=env, timeout=60
    )
    assert done.returncode == 0
    assert "ssh root@192.0.2.1 pct exec 200 -- /root/venv/bin/python" in done.stderr


@pytest.mark.slow
def test_a_launch_prints_the_id_alone_and_the_run_is_then_known(env: dict[str, str], job: str) -> None:
    done = dflashctl("launch", "--job", job, env=env)
    assert done.returncode == 0, done.stderr
    run_id = done.stdout.rstrip("\n")
    assert run_id.startswith("mine-")
    assert done.stdout == f"{run_id}\n"
    listed = [json.loads(line) for line in dflashctl("runs", "--json", env=env).stdout.splitlines()]
    assert [(row["run"], row["host"], row["job"]) for row in listed] == [(run_id, "local", "mine")]
    assert run_id in dflashctl("runs", env=env).stdout
    followed = dflashctl("logs", "--follow", run_id[:6], env=env)
    assert followed.returncode == 2, followed.stderr  # the trainer refuses the job: no such model
    log = Path(env["XDG_DATA_HOME"]) / "dflashctl" / "runs" / run_id / "train.log"
    assert followed.stdout == log.read_text()
    stopped = dflashctl("stop", env=env)
    assert (stopped.returncode, stopped.stderr.split(":")[0]) == (0, run_id)


def test_a_reader_that_goes_ends_it_quietly(env: dict[str, str]) -> None:
    process = subprocess.Popen(
        command("runs"), env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) == 141
    process.stderr.close()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_error_and_no_narration_gets_among_the_data(
    env: dict[str, str], job: str, closed: str
) -> None:
    argv = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *command("launch", "--dry-run", "--job", job)]
    done = subprocess.run(argv, env=environment(env), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if ">&-" in closed.split():
        assert done.stdout == ""
    else:
        assert done.stdout.startswith("# The frozen model to draft for")
    assert ("place: local" in done.stderr) is ("2>&-" not in closed)


def waits_in_the_kernel(pid: int) -> bool:
    """Whether a process sleeps in a system call, which a signal then interrupts."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def test_ctrl_c_ends_it_quietly_with_a_code_of_its_own(env: dict[str, str], tmp_path: Path) -> None:
    fifo = tmp_path / "mine.toml"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        command("launch", "--job", str(fifo), "--dry-run"),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with fifo.open("w"):  # opens once the command reads the job
        # One that comes between Python's last look for signals and its read(2) is seen after that read only.
        until(lambda: waits_in_the_kernel(process.pid), "the command to sleep in its read")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 80
    assert (out, err) == (b"", b"\ninterrupted; a run that was started goes on\n")


def test_ctrl_c_while_the_words_are_read_has_the_same_code(env: dict[str, str]) -> None:
    code = (
        "import sys, typer.core, controller.cli as cli\n"
        "def interrupted(*a, **k): raise KeyboardInterrupt\n"
        "typer.core.TyperGroup.parse_args = interrupted\n"
        "sys.exit(cli.main(['runs']))"
    )
    argv = [*command()[:2], code]
    done = subprocess.run(argv, env=environment(env), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (80, "")
    assert done.stderr == "\ninterrupted; a run that was started goes on\n"


@pytest.mark.slow
def test_ctrl_c_breaks_off_a_connection_that_nobody_answers(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        where = ["--host", "127.0.0.1", "--kind", "ssh", "--port", str(mute.getsockname()[1])]
        process = subprocess.Popen(
            command("exec", *where, "--", "true"),
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with mute.accept()[0]:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (80, b"")
    assert err == b"\ninterrupted; a run that was started goes on\n"


INTERRUPTS_ITSELF = """\
import atexit, os, signal, sys
def interrupt(): os.kill(os.getpid(), signal.SIGINT)
class Finder:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            interrupt()
sys.meta_path.insert(0, Finder())
from controller.cli import main
"""


@pytest.mark.parametrize("module", ["typer", "pydantic.errors", "controller.listing"])
def test_ctrl_c_in_the_midst_of_an_import_waits_for_its_end(env: dict[str, str], module: str) -> None:
    code = INTERRUPTS_ITSELF + "sys.exit(main(['runs']))"
    argv = [sys.executable, "-c", code, module]
    done = subprocess.run(argv, env=environment(env), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (80, "\ninterrupted; a run that was started goes on\n")


def test_a_second_ctrl_c_waits_for_no_import(env: dict[str, str]) -> None:
    code = INTERRUPTS_ITSELF.replace("interrupt()\nsys", "interrupt(); interrupt(); signal.pause()\nsys")
    argv = [sys.executable, "-c", code + "sys.exit(main(['runs']))", "typer"]
    done = subprocess.run(argv, env=environment(env), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (80, "\ninterrupted; a run that was started goes on\n")


def test_ctrl_c_after_the_command_is_done_changes_nothing_any_more(env: dict[str, str]) -> None:
    code = "atexit.register(interrupt)  # runs last\nsys.exit(main(['runs']))"
    code = INTERRUPTS_ITSELF + code
    done = subprocess.run(
        [sys.executable, "-c", code, "none"], env=environment(env), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["runs"], ["--help"], ["launch", "--dry-run", "-q"]])
def test_a_full_disk_under_stdout_is_no_defect(env: dict[str, str], arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(*arguments), env=environment(env), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 77
    assert done.stderr == (
        "error: stdout or a file: cannot be written (No space left on device)\nhint: Make room.\n"
    )


def failing(env: dict[str, str], expression: str) -> subprocess.CompletedProcess[str]:
    """`dflashctl runs` whose work is to evaluate `expression`."""
    code = (
        "import sys, controller.cli as cli; import controller.listing as listing;"
        "from controller.errors import UnreachableError\n"
        "def fail(error): raise error\n"
        f"listing.print_runs = lambda *a, **k: {expression}\n"
        "sys.exit(cli.main(['runs']))"
    )
    return subprocess.run(
        [*command()[:2], code], env=environment(env), capture_output=True, text=True, errors="replace"
    )


def test_what_a_host_says_in_an_error_moves_no_cursor_and_renames_no_window(env: dict[str, str]) -> None:
    done = failing(
        env, r"fail(UnreachableError('gpubox: \x1b]0;owned\x07\x1b[2J\x9b1mno', 'Try\x1b[A it\nor not'))"
    )
    assert done.stderr == "error: gpubox: no\nhint: Try it\nhint: or not\n"


def test_a_character_that_stdout_has_not_ends_no_command(env: dict[str, str]) -> None:
    done = failing(env | {"PYTHONIOENCODING": "ascii"}, r"print('tau \u2013, \udcff')")
    assert (done.returncode, done.stdout) == (0, "tau \\u2013, \\udcff\n")


def test_a_name_that_is_no_text_is_in_the_report_of_a_defect_all_the_same(env: dict[str, str]) -> None:
    done = failing(env, r"fail(RuntimeError('a\udcff'))")
    assert done.returncode == 99
    (line,) = done.stderr.splitlines()
    assert r"a\udcff" in Path(line.rpartition(" ")[2]).read_text()


def test_an_unexpected_error_is_one_line_with_a_report(env: dict[str, str]) -> None:
    done = failing(env, "1 // 0")
    assert done.returncode == 99
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: unexpected ZeroDivisionError")
    report = Path(line.rpartition(" ")[2])
    assert report.is_relative_to(Path(env["XDG_STATE_HOME"]))
    assert "Traceback" in report.read_text()


def test_the_entry_point_is_the_one_that_the_project_declares() -> None:
    assert 'dflashctl = "controller.cli:main"' in (ROOT / "pyproject.toml").read_text()
