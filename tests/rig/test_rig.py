"""The rig itself: what pct, ssh and the container do is what facts measured on real ones say."""

import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rig.cgroups import alive
from tests.rig.rig import Rig
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def open_ssh(rig: Rig, command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["ssh", "-F", rig.ssh_config, rig.alias, command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


def test_bytes_of_every_kind_survive_the_way_through_ssh_and_pct_and_back(rig: Rig) -> None:
    data = bytes(range(256)) * 4096
    call = rig.pct("exec", "200", "--keep-env", "0", "--", "cat", input=data)
    assert (call.returncode, call.stdout, call.stderr) == (0, data, b"")


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)])
def test_pct_exec_ends_with_its_commands_own_code(rig: Rig, script: str, code: int) -> None:
    assert rig.pct("exec", "200", "--", "sh", "-c", script).returncode == code


@pytest.mark.parametrize(
    ("program", "code", "why"),
    [("/nonexistent", 127, "No such file or directory"), ("/etc/passwd", 126, "Permission denied")],
)
def test_a_program_that_cannot_start_is_lxc_attachs_error(
    rig: Rig, program: str, code: int, why: str
) -> None:
    call = rig.pct("exec", "200", "--", program)
    assert call.returncode == code
    said = call.stderr.decode()
    assert said.startswith("lxc-attach: 200: ../src/lxc/attach.c: lxc_attach_run_command: ")
    assert said.endswith(f'{why} - Failed to exec "{program}"\n')


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ("exec 201 -- true", 255, "container '201' not running!\n"),
        (
            "exec 999 -- true",
            2,
            "Configuration file 'nodes/rig/lxc/999.conf' does not exist\n",
        ),
        ("status 999", 2, "Configuration file 'nodes/rig/lxc/999.conf' does not exist\n"),
        ("exec 200", 255, "missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.\n"),
        (
            "exec 200 bash -lc true",
            2,
            "Unknown option: lc\n400 unable to parse option\npct exec <vmid> [<extra-args>] [OPTIONS]\n",
        ),
        (
            "exec abc -- true",
            2,
            "400 Parameter verification failed.\n"
            "vmid: type check ('integer') failed - got 'abc'\n"
            "pct exec <vmid> [<extra-args>] [OPTIONS]\n",
        ),
        (
            "status 0200",
            2,
            "400 Parameter verification failed.\n"
            "vmid: invalid format - value does not look like a valid VM ID\n"
            "pct status <vmid> [OPTIONS]\n",
        ),
        ("status", 2, "400 not enough arguments\npct status <vmid> [OPTIONS]\n"),
        ("start 200", 255, "CT 200 already running\n"),
        ("stop 201", 255, "CT 201 not running\n"),
    ],
)
def test_pct_refuses_in_the_words_and_with_the_code_of_the_real_one(
    rig: Rig, args: str, code: int, said: str
) -> None:
    pct = rig.state / "bin" / "pct"
    call = subprocess.run([pct, *args.split()], capture_output=True, text=True)
    assert (call.returncode, call.stdout, call.stderr) == (code, "", said)


def test_options_before_the_double_dash_are_pcts_and_those_after_are_the_commands(
    rig: Rig,
) -> None:
    call = rig.pct("exec", "200", "--keep-env", "0", "--", "echo", "--keep-env", "1", "-n")
    assert call.stdout == b"--keep-env 1 -n\n"


def environment(output: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in output.decode().splitlines())


def test_keep_env_0_gives_the_containers_own_path_and_nothing_of_the_hosts(rig: Rig) -> None:
    env = environment(rig.pct("exec", "200", "--keep-env", "0", "--", "env").stdout)
    assert env.pop("PATH") == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert env.keys() <= {"container", "TERM", "PWD"}


@pytest.mark.parametrize("option", [(), ("--keep-env", "1"), ("--keep-env",)])
def test_by_default_the_hosts_environment_leaks_in_without_usr_local_bin(
    rig: Rig, option: tuple[str, ...]
) -> None:
    env = environment(rig.pct("exec", "200", *option, "--", "env").stdout)
    assert env["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin"
    assert "SSH_CONNECTION" in env


def test_an_older_pct_does_not_know_keep_env_and_runs_without_it(rig: Rig) -> None:
    rig.older_pct()
    call = rig.pct("exec", "200", "--keep-env", "0", "--", "true")
    assert call.returncode == 2
    assert call.stderr.startswith(b"Unknown option: keep-env\n400 unable to parse option\n")
    call = rig.pct("exec", "200", "--", "env")
    assert environment(call.stdout)["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin"


def test_list_has_fixed_widths_and_status_tells_both_states(rig: Rig) -> None:
    assert rig.pct("list").stdout.decode() == (
        "VMID       Status     Lock         Name                \n"
        "200        running                 dflash-ct           \n"
        "201        stopped                 dflash-ct           \n"
    )
    assert rig.pct("status", "200").stdout == b"status: running\n"
    stopped = rig.pct("status", "201")
    assert (stopped.returncode, stopped.stdout) == (0, b"status: stopped\n")


def test_config_prints_keys_and_then_raw_lxc_keys(rig: Rig) -> None:
    given = rig.pct("config", "200").stdout.decode().splitlines()
    assert "dev0: /dev/nvidia0" in given
    raw = rig.pct("config", "201").stdout.decode().splitlines()
    assert raw[-1].startswith("lxc.mount.entry: /dev/nvidia-uvm ")
    assert "lxc.cgroup2.devices.allow: c 195:* rwm" in raw


def test_a_locked_container_refuses_start_but_not_exec(rig: Rig) -> None:
    rig.lock_container("backup", 201)
    rig.lock_container("backup", 200)
    call = rig.pct("start", "201")
    assert (call.returncode, call.stderr) == (255, b"CT is locked (backup)\n")
    assert rig.pct("exec", "200", "--", "echo", "runs").stdout == b"runs\n"
    assert rig.pct("list").stdout.decode().splitlines()[1][22:34].strip() == "backup"


def test_a_configuration_that_another_call_holds_is_given_up_after_a_while(rig: Rig) -> None:
    with rig.config_lock_held(201):
        call = rig.pct("start", "201")
    assert call.returncode == 255
    assert call.stderr.decode().splitlines()[-1] == (
        "can't lock file '/run/lock/lxc/pve-config-201.lock' - got timeout"
    )


def test_push_and_pull_copy_one_file_whole(rig: Rig, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    (tmp_path / "sent").write_bytes(data)
    assert rig.pct("push", "200", str(tmp_path / "sent"), "/workspace/got").returncode == 0
    assert rig.container_path("/workspace/got").read_bytes() == data
    assert rig.pct("pull", "200", "/workspace/got", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_bytes() == data


def test_the_second_container_starts_and_stops_by_pct_with_a_new_boot_id_each_time(
    rig: Rig,
) -> None:
    boots = []
    for _ in range(2):
        assert rig.pct("start", "201").returncode == 0
        boot_id = "/proc/sys/kernel/random/boot_id"
        boots.append(rig.pct("exec", "201", "--", "cat", boot_id).stdout)
        assert rig.pct("stop", "201").returncode == 0
        assert rig.pct("status", "201").stdout == b"status: stopped\n"
    assert len({*boots, Path("/proc/sys/kernel/random/boot_id").read_bytes()}) == 3


def test_what_a_container_writes_is_in_it_and_outlasts_a_restart_but_is_not_on_the_host(
    rig: Rig,
) -> None:
    rig.container_run(["sh", "-c", "echo kept >/workspace/kept; echo gone >/tmp/gone"], check=True)
    assert not Path("/workspace/kept").exists()
    assert rig.container_path("/workspace/kept").read_text() == "kept\n"
    rig.stop_container()
    assert rig.container_path("/workspace/kept").read_text() == "kept\n"
    rig.start_container()
    assert rig.container_run(["cat", "/workspace/kept"]).stdout == b"kept\n"
    assert not rig.container_path("/tmp/gone").exists()


def test_files_of_the_hosts_tmp_are_not_in_the_container(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    assert rig.container_run(["ls", str(tmp_path)]).returncode == 2


def test_the_projects_interpreter_runs_in_the_container(rig: Rig) -> None:
    call = rig.container_run([rig.python, "-c", "import multiprocessing as m; m.Lock(); print(m)"])
    assert call.returncode == 0, call.stderr


def test_the_hash_inside_equals_the_hash_of_the_file_seen_from_outside(rig: Rig) -> None:
    data = os.urandom(1000)
    rig.container_path("/workspace/some").write_bytes(data)
    inside = rig.container_sha256("/workspace/some")
    outside = subprocess.run(
        ["sha256sum", rig.container_path("/workspace/some")], capture_output=True, check=True
    )
    assert inside == outside.stdout.decode().split()[0]


def test_a_detached_orphan_is_reaped_when_it_ends(rig: Rig) -> None:
    script = "setsid sh -c 'echo $$ >/workspace/pid; sleep 0.2' </dev/null >/dev/null 2>&1 &"
    rig.pct("exec", "200", "--", "sh", "-c", script)
    file = rig.container_path("/workspace/pid")
    pid = until(lambda: file.exists() and file.read_text().strip())
    until(lambda: rig.container_run(["test", "-e", f"/proc/{pid}"]).returncode == 1)


def test_a_broken_connection_ends_the_client_and_leaves_the_command_running(rig: Rig) -> None:
    ssh = open_ssh(rig, "pct exec 200 -- sh -c 'echo begun; exec sleep 1000'")
    assert ssh.stdout is not None
    assert ssh.stdout.readline() == b"begun\n"
    sleeper = until(rig.container_processes)
    until(lambda: len(rig.sshd_children()) == 1, "the call before to end", seen=rig.sshd_children)
    assert rig.kill_connections() == 1
    assert finish(ssh)[0] == b""
    assert ssh.returncode == 255
    until(lambda: not rig.sshd_children(), "the server's end to end")
    assert rig.container_processes() == sleeper
    for pid in sleeper:
        os.kill(pid, signal.SIGKILL)


def test_a_frozen_connection_says_nothing_until_it_is_thawed(rig: Rig) -> None:
    ssh = open_ssh(rig, "while sleep 0.02; do echo tick; done")
    assert ssh.stdout is not None
    os.set_blocking(ssh.stdout.fileno(), False)
    until(ssh.stdout.read)
    until(lambda: len(rig.sshd_children()) == 1, "the call before to end", seen=rig.sshd_children)
    assert rig.freeze_connections() == 1

    def is_silent() -> bool:  # what was on its way has arrived, and nothing follows it
        time.sleep(0.3)
        return ssh.stdout is not None and ssh.stdout.read() is None

    until(is_silent)
    rig.thaw_connections()
    until(ssh.stdout.read)
    rig.kill_connections()
    finish(ssh)


def test_a_server_that_is_gone_refuses_and_comes_back_on_its_port(rig: Rig) -> None:
    port = rig.port
    rig.stop_sshd()
    call = rig.ssh("true")
    assert call.returncode == 255
    assert b"Connection refused" in call.stderr
    rig.start_sshd()
    assert rig.port == port
    assert rig.ssh("echo back").stdout == b"back\n"


def test_a_changed_host_key_is_refused_until_it_is_trusted(rig: Rig) -> None:
    rig.rotate_host_key()
    call = rig.ssh("true")
    assert call.returncode == 255
    assert b"Host key verification failed." in call.stderr
    rig.trust_host_key()
    assert rig.ssh("true").returncode == 0


def test_login_noise_comes_before_a_commands_own_output(rig: Rig) -> None:
    rig.login_noise("Welcome to PVE!\nno newline at its end")
    assert rig.ssh("echo own").stdout == b"Welcome to PVE!\nno newline at its endown\n"


def test_sessions_run_nothing_of_this_machines_own_shell_files(rig: Rig) -> None:
    env = environment(rig.ssh("env").stdout)
    assert env["PATH"].split(":")[0] == str(rig.state / "bin")
    assert env["HOME"] == pwd.getpwuid(os.geteuid()).pw_dir
    assert not {key for key in env if key.startswith(("PYENV", "VIRTUAL_ENV", "CI"))}


def test_more_memory_than_the_limit_is_a_kill_in_the_container(rig: Rig) -> None:
    eat = "b = bytearray(256 << 20); print(len(b))"
    assert rig.pct("exec", "200", "--", rig.python, "-c", eat).returncode == 0
    with rig.container_memory(64 << 20):
        assert rig.pct("exec", "200", "--", rig.python, "-c", eat).returncode == 137
    assert rig.pct("exec", "200", "--", rig.python, "-c", eat).returncode == 0


def test_a_frozen_container_makes_pct_exec_hang(rig: Rig) -> None:
    rig.freeze_container()
    with pytest.raises(subprocess.TimeoutExpired):
        rig.pct("exec", "200", "--", "true", timeout=0.7)
    rig.thaw_container()
    assert rig.pct("exec", "200", "--", "echo", "goes on").stdout == b"goes on\n"


def test_calls_of_pct_are_recorded_with_their_arguments_as_they_were(rig: Rig) -> None:
    before = len(rig.pct_calls())
    rig.pct("exec", "200", "--", "printf", "a\tb\\c\nd e")
    assert rig.pct_calls()[before:] == [["exec", "200", "--", "printf", "a\tb\\c\nd e"]]


def test_the_servers_processes_are_known_and_live(rig: Rig) -> None:
    ssh = open_ssh(rig, "sleep 1000")
    until(lambda: len(rig.sshd_children()) == 1, "its connection alone", seen=rig.sshd_children)
    (child,) = rig.sshd_children()
    assert alive(child)
    rig.kill_connections()
    finish(ssh)


def test_an_interpreter_below_tmp_is_shown_to_the_container_though_its_tmp_is_its_own(
    rig: Rig, tmp_path: Path
) -> None:
    del rig
    place = tmp_path / "a venv"
    venv = [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(place)]
    subprocess.run(venv, check=True)
    program = (
        "from tests.rig.rig import Rig\n"
        "with Rig() as rig: print(rig.container_run([rig.python, '-c', 'import sys; "
        "print(sys.prefix)']).stdout.decode())"
    )
    call = subprocess.run([place / "bin" / "python", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert call.stdout.strip() == str(place), call.stderr
