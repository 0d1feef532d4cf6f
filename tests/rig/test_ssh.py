"""SSH against a real sshd, and beside OpenSSH's own client: the same configuration, the same result."""

import contextlib
import os
import pty
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller import ssh_login
from controller.errors import AuthenticationError, DflashctlError, HostKeyError, UnreachableError
from controller.inventory import Host
from controller.place import open_place
from tests.controller.test_ssh import keygen
from tests.dflashctl import command, environment
from tests.rig.rig import Rig
from tests.waiting import until

PASSPHRASE = "correct horse battery"


@pytest.fixture
def home(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A laptop's home with the rig's known_hosts; no agent, and a configuration that a test writes."""
    ssh = tmp_path / ".ssh"
    ssh.mkdir(mode=0o700)
    shutil.copy(rig.known_hosts, ssh / "known_hosts")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr(ssh_login, "_unlocked", {})
    return tmp_path


def configure(rig: Rig, home: Path, *lines: str) -> None:
    body = [f"  {line}" for line in lines]
    common = [f"HostName {rig.host}", f"Port {rig.port}", f"User {rig.user}"]
    head = ["Host box", *(f"  {line}" for line in common)]
    known = f"UserKnownHostsFile {home}/.ssh/known_hosts"
    rest = ["Host *", f"  {known}", "  GlobalKnownHostsFile none", "  BatchMode yes", "  ConnectTimeout 20"]
    (home / ".ssh" / "config").write_text("\n".join([*head, *body, *rest]) + "\n")


def ours() -> str | DflashctlError:
    """What our own connection to `box` makes of the configuration: `in`, or the error."""
    with open_place(Host(name="box", kind="ssh", address="box", workspace="/w", venv="/v")) as place:
        try:
            return place.run(["echo", "in"], timeout=60).stdout.decode().strip()
        except DflashctlError as error:
            return error


def openssh(home: Path) -> bool:
    """Whether OpenSSH's own client gets in."""
    argv = ["ssh", "-F", str(home / ".ssh" / "config"), "box", "echo in"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    return done.stdout == b"in\n"


def authorize(rig: Rig, key: Path) -> None:
    """Let the server accept `key` as well."""
    with (rig.sshd.ssh / "authorized_keys").open("a") as file:
        file.write(key.with_name(f"{key.name}.pub").read_text())


@pytest.fixture
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An agent of our own, empty; its socket."""
    path = tmp_path_factory.mktemp("a") / "s"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: path.exists() or process.poll() is not None, "the agent to listen")
        assert process.poll() is None
        yield path
    finally:
        process.terminate()
        process.wait()


def add(agent: Path, key: Path, passphrase: str = "") -> None:
    askpass = key.with_name("askpass")
    askpass.write_text(f"#!/bin/sh\necho {shlex.quote(passphrase)}\n")
    askpass.chmod(0o700)
    env = os.environ | {
        "SSH_AUTH_SOCK": str(agent),
        "SSH_ASKPASS": str(askpass),
        "SSH_ASKPASS_REQUIRE": "force",
    }
    subprocess.run(["ssh-add", str(key)], env=env, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    askpass.unlink()


CASES = {
    "a key that is named": ["IdentityFile {rig.identity}", "IdentitiesOnly yes"],
    "a key that is absent before it": ["IdentityFile /nonexistent/key", "IdentityFile {rig.identity}"],
    "a wrong key before it": ["IdentityFile {home}/wrong", "IdentityFile {rig.identity}"],
    "only a wrong key": ["IdentityFile {home}/wrong", "IdentitiesOnly yes"],
    "an RSA key": ["IdentityFile {home}/rsa"],
    "a key that others may read": ["IdentityFile {home}/open", "IdentitiesOnly yes"],
    "a jump through another name": ["IdentityFile {rig.identity}", "ProxyJump jump"],
    "a jump with user and port": ["IdentityFile {rig.identity}", "ProxyJump {rig.user}@jump:{rig.port}"],
    "two jumps": ["IdentityFile {rig.identity}", "ProxyJump jump,jump2"],
    "a jump to a closed port": ["IdentityFile {rig.identity}", "ProxyJump jump:1"],
    "a proxy command": ["IdentityFile {rig.identity}", "ProxyCommand {pipe} %h %p"],
    "a proxy command that fails": ["IdentityFile {rig.identity}", "ProxyCommand /bin/false"],
    "a known_hosts file without it": ["IdentityFile {rig.identity}", "UserKnownHostsFile /dev/null"],
    "the same, new keys accepted": [
        "IdentityFile {rig.identity}",
        "UserKnownHostsFile {home}/new",
        "StrictHostKeyChecking accept-new",
    ],
    "an alias that known_hosts has not": ["IdentityFile {rig.identity}", "HostKeyAlias other"],
    "no keys at all": ["IdentityFile none", "IdentitiesOnly yes"],
}
PIPE = """\
import os, select, socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
while True:
    ready, _, _ = select.select([0, s], [], [])
    for source in ready:
        data = os.read(0, 65536) if source == 0 else s.recv(65536)
        if not data:
            sys.exit()
        os.write(1, data) if source is s else s.sendall(data)
"""


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_gets_in_or_not_as_with_openssh(rig: Rig, home: Path, case: str) -> None:
    keygen(home / "wrong")
    authorize(rig, keygen(home / "rsa", kind="rsa"))
    authorize(rig, keygen(home / "open"))
    (home / "open").chmod(0o644)
    (home / "pipe.py").write_text(PIPE)
    pipe = f"{sys.executable} -S {home}/pipe.py"
    configure(rig, home, *(line.format(rig=rig, home=home, pipe=pipe) for line in CASES[case]))
    with (home / ".ssh" / "config").open("a") as file:
        for name in ("jump", "jump2"):
            file.write(f"Host {name}\n  HostName {rig.host}\n  Port {rig.port}\n  User {rig.user}\n")
            file.write(f"  IdentityFile {rig.identity}\n")
    expected = openssh(home)
    got = ours()
    assert (got == "in") is expected, (got, case)
    if expected is False:
        assert isinstance(got, DflashctlError)
        assert got.hint, got.message


def test_each_hop_of_a_jump_is_a_connection_and_none_is_left(rig: Rig, home: Path) -> None:
    configure(rig, home, f"IdentityFile {rig.identity}", "ProxyJump jump")
    with (home / ".ssh" / "config").open("a") as file:
        file.write(f"Host jump\n  HostName {rig.host}\n  Port {rig.port}\n  IdentityFile {rig.identity}\n")
    with open_place(Host(name="box", kind="ssh", address="box", workspace="/w", venv="/v")) as place:
        assert place.run(["true"], timeout=60).status == 0
        until(lambda: len(rig.sshd_children()) == 2, "two connections", seen=rig.sshd_children)
    until(lambda: not rig.sshd_children(), "the connections to end")


def test_a_proxy_command_that_fails_is_quoted(rig: Rig, home: Path) -> None:
    configure(rig, home, "ProxyCommand echo no route to %h >&2; false")
    error = ours()
    assert isinstance(error, UnreachableError)
    assert f"no route to {rig.host}" in error.message


def test_a_key_in_the_agent_needs_no_file_and_only_named_ones_are_tried_when_that_is_said(
    rig: Rig, home: Path, agent: Path
) -> None:
    key = keygen(home / "locked", passphrase=PASSPHRASE)
    authorize(rig, key)
    add(agent, key, PASSPHRASE)
    configure(rig, home, f"IdentityAgent {agent}")
    assert openssh(home) and ours() == "in"
    configure(rig, home, f"IdentityAgent {agent}", f"IdentityFile {key}", "IdentitiesOnly yes")
    assert openssh(home) and ours() == "in"
    wrong = keygen(home / "wrong")
    configure(rig, home, f"IdentityAgent {agent}", f"IdentityFile {wrong}", "IdentitiesOnly yes")
    assert not openssh(home)
    assert isinstance(ours(), AuthenticationError)
    key.unlink()  # its public half stands for it
    configure(rig, home, f"IdentityAgent {agent}", f"IdentityFile {key}", "IdentitiesOnly yes")
    assert openssh(home) and ours() == "in"


def test_the_named_key_comes_before_an_agents_many_others(rig: Rig, home: Path, agent: Path) -> None:
    for number in range(8):  # more than a server's MaxAuthTries
        add(agent, keygen(home / f"other{number}"))
    key = keygen(home / "named")
    authorize(rig, key)
    add(agent, key)
    configure(rig, home, f"IdentityAgent {agent}", f"IdentityFile {key}")
    assert openssh(home) and ours() == "in"
    configure(rig, home, f"IdentityAgent {agent}", "IdentityFile none")
    error = ours()
    assert isinstance(error, AuthenticationError)
    assert "hung up after" in error.message or "accepts none" in error.message
    assert "IdentitiesOnly" in error.hint or "ssh-copy-id" in error.hint


def test_a_locked_key_without_a_terminal_is_named_with_ssh_add(rig: Rig, home: Path) -> None:
    key = keygen(home / "locked", passphrase=PASSPHRASE)
    authorize(rig, key)
    configure(rig, home, f"IdentityFile {key}")
    error = ours()
    assert isinstance(error, AuthenticationError)
    assert error.message.endswith(f"the key {key} is locked by a passphrase")
    assert error.hint == f"Unlock it first: ssh-add {key}"


def test_a_passphrase_is_asked_for_once_a_process_and_shown_nowhere(
    rig: Rig, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    key = keygen(home / "locked", passphrase=PASSPHRASE)
    authorize(rig, key)
    configure(rig, home, f"IdentityFile {key}")
    answers = ["wrong", PASSPHRASE]
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(getattr(ssh_login.sys, stream), "isatty", lambda: True)
    monkeypatch.setattr(ssh_login.getpass, "getpass", lambda *a, **k: answers.pop(0))
    assert ours() == "in"
    assert answers == []
    assert ours() == "in"
    place = Host(name="box", kind="ssh", address="box", workspace="/w", venv="/v")
    with open_place(place) as opened:
        listing = opened.run(["sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ"], timeout=60)
    seen = capfd.readouterr()
    for text in (seen.out, seen.err, listing.stdout.decode(errors="replace"), rig.sshd.log.read_text()):
        assert PASSPHRASE not in text
    assert PASSPHRASE not in " ".join(os.environ.values())


def on_terminal(argv: list[str], env: dict[str, str], answers: list[bytes], cue: bytes) -> tuple[int, bytes]:
    """Run `argv` on a terminal of its own, answer each `cue` on it; its exit code and all that it showed."""
    with warnings.catch_warnings():  # Python 3.12 warns of a fork beside threads; it executes at once
        warnings.simplefilter("ignore")
        pid, terminal = pty.fork()
    if pid == 0:
        os.execve(argv[0], argv, env)
    shown, seen = b"", 0
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(terminal, 4096):
            shown += data
            while shown.count(cue) > seen and answers:
                seen += 1
                os.write(terminal, answers.pop(0) + b"\n")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_on_a_real_terminal_a_locked_key_is_asked_for_without_an_echo(rig: Rig, home: Path) -> None:
    key = keygen(home / "locked", passphrase=PASSPHRASE)
    authorize(rig, key)
    configure(rig, home, f"IdentityFile {key}")
    (home / "hosts.toml").write_text('[places.box]\nkind = "ssh"\naddress = "box"\nvenv = "/v"\n')
    env = environment({"HOME": str(home), "DFLASHCTL_HOSTS": str(home / "hosts.toml")})
    code, shown = on_terminal(
        command("exec", "--host", "box", "--", "echo", "in"),
        env,
        [b"wrong", PASSPHRASE.encode()],
        f"Passphrase of the key {key}:".encode(),
    )
    assert (code, shown.count(b"Passphrase of the key")) == (0, 2)
    assert shown.replace(b"\r", b"").endswith(b"in\n")
    assert PASSPHRASE.encode() not in shown and b"wrong" not in shown
    # A script has no terminal to be asked on.
    done = subprocess.run(
        command("exec", "--host", "box", "--", "true"), env=env, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert done.returncode == 68
    assert f"hint: Unlock it first: ssh-add {key}".encode() in done.stderr


def test_pruning_asks_on_a_terminal_and_takes_no_for_an_answer(rig: Rig) -> None:
    old = rig.container_path(f"{rig.workspace}/runs/old-1")
    old.mkdir(parents=True)
    (old / "status.json").write_text('{"state": "finished"}')
    os.utime(old, (1, 1))
    os.utime(old / "status.json", (1, 1))
    env = environment(rig.laptop_env())
    argv = command("prune", "--host", "rig")
    refused = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    assert refused.returncode == 64 and b"no terminal to answer on" in refused.stderr
    for answer, there in ((b"n", True), (b"y", False)):
        code, shown = on_terminal(argv, env, [answer], b"[y/N]")
        assert code == 0
        assert b"GOES  run" in shown and b"old-1" in shown
        assert old.exists() is there


def test_a_changed_key_of_a_jump_host_is_refused_by_its_own_line(rig: Rig, home: Path) -> None:
    configure(rig, home, f"IdentityFile {rig.identity}", "ProxyJump jump")
    with (home / ".ssh" / "config").open("a") as file:
        file.write(f"Host jump\n  HostName {rig.host}\n  Port {rig.port}\n  HostKeyAlias jumper\n")
    known = home / ".ssh" / "known_hosts"
    other = keygen(home / "key").with_suffix(".pub").read_text().split()
    known.write_text(known.read_text() + f"jumper {other[0]} {other[1]}\n")
    error = ours()
    assert isinstance(error, HostKeyError)
    assert f"{known}:2" in error.message
    assert error.hint.count(f"ssh-keygen -f {known} -R jumper") == 1


def test_one_connection_serves_every_place_and_thread_of_a_process(rig: Rig, home: Path) -> None:
    configure(rig, home, f"IdentityFile {rig.identity}")
    host = Host(name="box", kind="ssh", address="box", workspace="/w", venv="/v")
    places = [open_place(host) for _ in range(4)]
    outputs: list[bytes] = []
    threads = [
        threading.Thread(target=lambda p=p: outputs.append(p.run(["echo", "in"], timeout=60).stdout))  # type: ignore[misc]
        for p in places
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [b"in\n"] * 4
    until(lambda: len(rig.sshd_children()) == 1, "one connection", seen=rig.sshd_children)
    for place in places[1:]:
        place.close()
    assert places[0].run(["echo", "still"], timeout=60).stdout == b"still\n"
    places[0].close()


def test_our_socket_sends_small_packets_at_once(rig: Rig, home: Path) -> None:
    configure(rig, home, f"IdentityFile {rig.identity}")
    host = Host(name="box", kind="ssh", address="box", workspace="/w", venv="/v")
    with open_place(host) as place:
        place.run(["true"], timeout=60)
        (hop,) = place._connection._path  # type: ignore[attr-defined]
        assert hop.transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
