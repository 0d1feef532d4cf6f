"""ssh_config, host keys and login keys, as far as they need no server; tests/rig/test_ssh.py has one."""

import base64
import math
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import paramiko
import pytest

from controller import ssh, ssh_config, ssh_hop, ssh_login
from controller.errors import ConnectionLostError, HostKeyError, UnreachableError
from controller.known_hosts import KnownHosts, fingerprint, matches
from controller.ssh import SshConnection
from controller.ssh_config import SshSettings, look_up
from controller.ssh_process import SshProcess
from tests.waiting import until

NAME = "[127.0.0.1]:2222"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir(mode=0o700)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / ".ssh" / "config"


@pytest.fixture
def key() -> paramiko.PKey:
    return paramiko.ECDSAKey.generate()


def settings(config: Path, path: Path, strict: str = "ask") -> SshSettings:
    config.write_text(
        f"UserKnownHostsFile {path}\nGlobalKnownHostsFile none\nStrictHostKeyChecking {strict}\n"
    )
    return look_up("127.0.0.1", user="me", port=2222)


def policy(path: Path, *, accept_new: bool = False, strict: str = "ask") -> KnownHosts:
    config = Path.home() / ".ssh" / "config"
    return KnownHosts(settings(config, path, strict), accept_new=accept_new)


def line(name: str, key: paramiko.PKey) -> str:
    return f"{name} {key.get_name()} {key.get_base64()}\n"


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (socket.gaierror(-2, "Name or service not known"), "no such host name is known"),
        (ConnectionRefusedError(111, "Connection refused"), "refuses the connection"),
        (TimeoutError(), "no answer within the connect timeout"),
        (OSError(101, "Network is unreachable"), "cannot be reached (Network is unreachable)"),
        (EOFError(), "something answers, but not as an SSH server"),
    ],
)
def test_a_host_that_cannot_be_reached_is_told_with_what_to_look_at(
    config: Path, tmp_path: Path, raised: Exception, said: str
) -> None:
    error = ssh_hop._explained(raised, settings(config, tmp_path / "known"), False, "")
    assert isinstance(error, UnreachableError)
    assert error.message.startswith(f"127.0.0.1 port 2222: {said}")
    assert error.hint.endswith(("?", "."))


def test_an_unknown_key_is_refused_with_fingerprint_and_command(tmp_path: Path, key: paramiko.PKey) -> None:
    with pytest.raises(HostKeyError) as caught:
        policy(tmp_path / "known").verify(key)
    assert fingerprint(key) in caught.value.message
    assert "ssh -p 2222 me@127.0.0.1 true" in caught.value.hint
    assert not (tmp_path / "known").exists()


@pytest.mark.parametrize("how", ["flag", "accept-new", "no"])
def test_a_new_key_is_added_when_asked_for_and_is_known_from_then_on(
    tmp_path: Path, key: paramiko.PKey, how: str
) -> None:
    path = tmp_path / "ssh" / "known"
    path.parent.mkdir()
    path.write_text("# without a last newline")
    policy(path, accept_new=how == "flag", strict="ask" if how == "flag" else how).verify(key)
    first, added = path.read_text().splitlines()
    assert first == "# without a last newline"
    assert added == f"{NAME} {key.get_name()} {key.get_base64()}"
    policy(path).verify(key)
    with pytest.raises(HostKeyError, match="another host key"):  # a changed one is refused even so
        policy(path, accept_new=True).verify(paramiko.ECDSAKey.generate())


@pytest.mark.parametrize("nowhere", ["/dev/null", "none"])
def test_a_new_key_is_written_nowhere_where_the_user_has_no_file_for_it(
    config: Path, tmp_path: Path, key: paramiko.PKey, nowhere: str
) -> None:
    machine = tmp_path / "ssh_known_hosts"
    machine.write_text("")
    config.write_text(
        f"UserKnownHostsFile {nowhere}\nGlobalKnownHostsFile {machine}\nStrictHostKeyChecking no\n"
    )
    KnownHosts(look_up("127.0.0.1"), accept_new=False).verify(key)
    assert machine.read_text() == ""


def test_the_line_of_a_changed_key_is_found_also_when_its_name_is_hashed(
    tmp_path: Path, key: paramiko.PKey
) -> None:
    path = tmp_path / "known"
    path.write_text(
        "# comment\n\nnonsense\n@revoked other x y\n"
        + line("other,10.0.0.1", key)
        + line(paramiko.HostKeys.hash_host(NAME), key)
    )
    with pytest.raises(HostKeyError) as caught:
        policy(path).verify(paramiko.ECDSAKey.generate())
    assert f"{path}:6" in caught.value.message
    assert f"ssh-keygen -f {path} -R '{NAME}'" in caught.value.hint


def test_the_command_that_removes_a_changed_key_does(tmp_path: Path, key: paramiko.PKey) -> None:
    path = tmp_path / "known"
    path.write_text(line("other", key) + line(NAME, key))
    with pytest.raises(HostKeyError) as caught:
        policy(path).verify(paramiko.ECDSAKey.generate())
    command = caught.value.hint.partition("with: ")[2].partition(" . If")[0]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert path.read_text() == line("other", key)


def test_a_revoked_key_is_refused_although_it_is_also_known(tmp_path: Path, key: paramiko.PKey) -> None:
    path = tmp_path / "known"
    path.write_text(line(NAME, key) + "@revoked * " + line("", key).lstrip())
    with pytest.raises(HostKeyError, match=r"known:2 revokes"):
        policy(path, accept_new=True).verify(key)


def test_a_certificate_authority_is_said_to_be_beyond_us(tmp_path: Path, key: paramiko.PKey) -> None:
    path = tmp_path / "known"
    path.write_text("@cert-authority * " + line("", key).lstrip())
    with pytest.raises(
        HostKeyError, match=r"certificate authority .*known:1\), which dflashctl cannot check"
    ):
        policy(path).verify(paramiko.ECDSAKey.generate())


def test_a_key_that_is_known_without_the_port_is_good_and_asked_for_first(
    tmp_path: Path, key: paramiko.PKey
) -> None:
    path = tmp_path / "known"
    path.write_text(line("127.0.0.1", key))
    policy(path).verify(key)
    assert policy(path).key_types == [key.get_name()]


@pytest.mark.parametrize(
    ("hosts", "name", "found"),
    [
        ("box.example", "BOX.example", True),
        ("*.example", "box.example", True),
        ("*.example,!bad.example", "bad.example", False),
        ("!bad.example,*.example", "box.example", True),
        ("10.0.0.?", "10.0.0.7", True),
        ("10.0.0.?", "10.0.0.77", False),
        ("[box]:22", "b", False),
        ("[box]:2222", "[box]:2222", True),
        ("|1|nonsense", "box", False),
    ],
)
def test_names_and_patterns_match_as_for_ssh(tmp_path: Path, hosts: str, name: str, found: bool) -> None:
    assert matches(hosts, name) is found
    if "|" not in hosts:  # ssh-keygen's own opinion, where it has one
        path = tmp_path / "known"
        path.write_text(line(hosts, paramiko.ECDSAKey.generate()))
        argv = ["ssh-keygen", "-F", name.lower(), "-f", str(path)]
        assert (subprocess.run(argv, capture_output=True).returncode == 0) is found


def test_a_fingerprint_is_the_one_that_openssh_prints() -> None:
    text = "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
    key = paramiko.Ed25519Key(data=base64.b64decode(text))
    assert fingerprint(key) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"  # github.com's


def test_lines_that_are_no_keys_do_no_harm(tmp_path: Path, key: paramiko.PKey) -> None:
    path = tmp_path / "known"
    path.write_bytes(
        b"\xff\xfe\nhost ssh-rsa !!!notbase64\nhost ssh-ed25519 AAAA\nhost\n" + line(NAME, key).encode()
    )
    policy(path).verify(key)


CONFIGS = [
    ("", "box"),
    ("Host box\n  HostName 10.0.0.1\n  Port 2022\n  User me\n", "box"),
    ("Host b*\n  HostName %h.example\nHost box\n  User late\nHost *\n  User all\n", "box"),
    ("Host !box *\n  Port 1\n", "box"),
    ("Match host box user me\n  Port 7\nMatch all\n  Port 8\n", "box"),
    ("Match originalhost box exec true\n  Port 9\n", "box"),
    ("Include more\nHost box\n  Port 3\n", "box"),
    ("Host box\n  Include more\n  User inner\nHost other\n  Include more\n", "box"),
    ("Host box\n  ProxyJump me@a:3,b\n", "box"),
    ("Host box\n  ProxyCommand nc -x %r %h %p\n", "box"),
    ("Host box\n  HostKeyAlias other\n  UserKnownHostsFile ~/a ~/b\n  StrictHostKeyChecking no\n", "box"),
    ("Host box\n  IdentityFile ~/.ssh/%n\n  IdentityFile ~/two\n  IdentitiesOnly yes\n", "box"),
    ("Host box\n  ConnectTimeout 3\n  IdentityAgent none\n  AddressFamily inet6\n", "box"),
]


@pytest.mark.parametrize(("text", "host"), CONFIGS)
def test_a_configuration_means_what_it_means_for_ssh(
    config: Path, text: str, host: str, tmp_path: Path
) -> None:
    more = tmp_path / "more.conf"
    more.write_text("Host box\n  Port 4444\n")
    config.write_text(text.replace("Include more", f"Include {more}"))
    found = look_up(host)
    argv = ["ssh", "-F", str(config), "-G", host]
    said: dict[str, list[str]] = {}
    for row in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines():
        key, _, value = row.partition(" ")
        said.setdefault(key, []).append(value)
    assert (found.hostname, [str(found.port)], [found.user]) == (
        said["hostname"][0],
        said["port"],
        said["user"],
    )
    assert found.proxy_jump == said.get("proxyjump", [""])[0]
    assert found.identities_only is (said["identitiesonly"] == ["yes"])
    names = [Path(name.replace("%n", host)).expanduser() for name in said["identityfile"]]
    assert list(found.identity_files) == names
    assert found.connect_timeout == (None if said["connecttimeout"] == ["none"] else 3.0)


def test_what_a_configuration_comes_to(config: Path, tmp_path: Path) -> None:
    config.write_text(
        "Host box\n  HostName 10.0.0.1\n  Port 2022\n  User me\n  ProxyCommand nc -x %r %h %p 100%%\n"
        "  UserKnownHostsFile ~/a ~/b\n  StrictHostKeyChecking accept-new\n"
    )
    found = look_up("box")
    assert found.proxy_command == "nc -x me 10.0.0.1 2022 100%"
    assert found.known_hosts[:2] == (tmp_path / "a", tmp_path / "b")
    assert (found.strict_host_keys, found.host_key_name) == ("accept-new", "[10.0.0.1]:2022")
    assert found.identity_agent is None
    assert look_up("box", user="you", port=1).login == "-p 1 you@box"


def test_without_an_ssh_program_paramiko_reads_it_and_an_include_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_config.shutil, "which", lambda name: None)
    monkeypatch.setattr(ssh_config, "_SYSTEM", Path("/nonexistent"))
    config.write_text("Host box\n  HostName 10.0.0.1\n  Port 2022\n  IdentityFile ~/one\n")
    found = look_up("box")
    assert (found.hostname, found.port, found.identity_files) == ("10.0.0.1", 2022, (Path.home() / "one",))
    config.write_text("\n  Include more\n")
    with pytest.raises(UnreachableError, match=r"config:2: Include cannot be followed without the ssh"):
        look_up("box")
    config.write_text("nonsense\n")
    with pytest.raises(UnreachableError, match="cannot be used"):
        look_up("box")


def keygen(path: Path, *, passphrase: str = "", kind: str = "ed25519") -> Path:
    argv = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(path)]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    return path


def test_the_public_part_of_a_locked_key_is_read_without_its_passphrase(tmp_path: Path) -> None:
    path = keygen(tmp_path / "locked", passphrase="secret words")
    public = path.with_suffix(".pub")
    blob = base64.b64decode(public.read_text().split()[1])
    assert ssh_login.public_part(path) == blob
    public.unlink()
    assert ssh_login.public_part(path) == blob
    assert ssh_login.public_part(tmp_path / "absent") == b""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_a_locked_key_is_told_from_a_broken_one_and_opens_with_its_passphrase(
    tmp_path: Path, kind: str
) -> None:
    path = keygen(tmp_path / "key", passphrase="secret words", kind=kind)
    assert ssh_login._load(path, None) == "locked"
    assert ssh_login._load(path, "wrong words") == "locked"
    assert isinstance(ssh_login._load(path, "secret words"), paramiko.PKey)
    (tmp_path / "bad").write_text("no key")
    assert ssh_login._load(tmp_path / "bad", None) == "bad"


def test_a_passphrase_is_asked_for_on_a_terminal_in_the_main_thread_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_login.getpass, "getpass", lambda *a, **k: "typed")
    assert ssh_login.ask_on_terminal(tmp_path) is None  # pytest has no terminal
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(getattr(ssh_login.sys, stream), "isatty", lambda: True)
    assert ssh_login.ask_on_terminal(tmp_path) == "typed"
    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(ssh_login.ask_on_terminal(tmp_path)))
    thread.start()
    thread.join()
    assert answers == [None]


def test_a_host_has_one_connection_however_many_places_use_it() -> None:
    def get(port: int) -> SshConnection:
        return ssh.shared("192.0.2.1", user="", port=port, timeout=1, accept_new=False)

    one, two, other = get(1), get(1), get(2)
    assert one is two
    assert one is not other
    ssh.release(one)
    assert get(1) is one
    for connection in (one, one, other):
        ssh.release(connection)
    assert get(1) is not one
    ssh._shared.clear()


@pytest.mark.parametrize("text", ["Port many\n", "nonsense\n"])
def test_a_broken_ssh_config_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / ".ssh" / "config").write_text(text)
    connection = SshConnection("192.0.2.1", user="", port=None, timeout=1, accept_new=False)
    with pytest.raises(UnreachableError, match=r"~/\.ssh/config cannot be used"):
        connection.start("true")


def test_a_host_that_drops_packets_is_given_up_at_the_connect_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        full = [socket.socket() for _ in range(3)]
        for waiting in full:
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        connection = SshConnection(
            "127.0.0.1", user="", port=server.getsockname()[1], timeout=0.3, accept_new=False
        )
        with pytest.raises(UnreachableError, match="no answer within the connect timeout"):
            connection.start("true")
        for waiting in full:
            waiting.close()


def test_a_jump_in_a_circle_is_said(config: Path) -> None:
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    connection = SshConnection("a", user="", port=None, timeout=1, accept_new=False)
    with pytest.raises(UnreachableError, match="more than 8 hosts, or in a circle"):
        connection.start("true")


def test_making_a_connection_contacts_nobody() -> None:
    connection = SshConnection("192.0.2.1", user="", port=None, timeout=1, accept_new=False)
    connection.close()


def test_the_cipher_that_is_done_in_one_pass_is_asked_for_first_and_the_others_stay() -> None:
    ours, theirs = socket.socketpair()
    transport = paramiko.ServiceRequestingTransport(ours)
    before = transport.get_security_options().ciphers
    ssh_hop._prefer(transport, [])
    after = transport.get_security_options().ciphers
    for end in (transport, ours, theirs):
        end.close()
    assert after[0] == "aes128-gcm@openssh.com"
    assert sorted(after) == sorted(before)


def test_what_fails_while_connecting_early_is_raised_once_and_tried_anew_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = socket.socket()  # bound, and nobody listens
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    tries: list[str] = []
    original = ssh.connect

    def counted(settings: SshSettings, *rest: object) -> object:
        tries.append(settings.peer)
        return original(settings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ssh, "connect", counted)
    connection = SshConnection("127.0.0.1", user="", port=port, timeout=1, accept_new=False)
    connection.connect_soon()
    until(lambda: connection._failed is not None)
    for expected in (1, 2):
        with pytest.raises(UnreachableError, match="refuses the connection"):
            connection.start("true")
        assert len(tries) == expected
    held.close()


def test_a_thread_that_finds_the_connection_broken_leaves_the_one_that_another_made_alone() -> None:
    closed: list[str] = []
    found: list[Any] = []

    class Transport:
        def is_active(self) -> bool:
            return True

        def open_session(self, timeout: float) -> paramiko.Channel:
            connection._path = list(found)
            raise paramiko.SSHException("it broke")

    class FakeHop:
        settings = look_up("192.0.2.1", user="", port=None)
        transport = Transport()

        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    connection = SshConnection("192.0.2.1", user="", port=None, timeout=1, accept_new=False)
    old, new = FakeHop("old"), FakeHop("new")
    for after, expected in (([new], []), ([old], ["old"])):
        found[:] = after
        connection._path = [old]  # type: ignore[list-item]
        with pytest.raises(ConnectionLostError, match="it broke"):
            connection.start("true")
        assert closed == expected


class BrokenChannel:
    """A channel of a connection that breaks while it is used: paramiko raises EOFError from deep inside."""

    eof_received = closed = False

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def settimeout(self, _seconds: float) -> None: ...

    def recv_ready(self) -> bool:
        return True

    def recv_stderr_ready(self) -> bool:
        return False

    def recv(self, _size: int) -> bytes:
        raise EOFError

    def send(self, _data: memoryview) -> int:
        raise EOFError


def test_a_connection_that_breaks_under_a_read_or_a_write_is_a_lost_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: Any = BrokenChannel(ours)
        process = SshProcess(channel, "box")
        with pytest.raises(ConnectionLostError, match="box: the connection broke"):
            process.receive(1.0)
        with pytest.raises(ConnectionLostError, match=r"box: cannot send to it \(the connection broke\)"):
            process.send(b"x")


class SlowChannel(BrokenChannel):
    """A channel whose other side takes nothing for a while, and then half of what it is given."""

    def __init__(self, end: socket.socket, stalls: int) -> None:
        super().__init__(end)
        self.stalls = stalls
        self.taken = b""
        self.ended = False

    def send(self, data: memoryview) -> int:
        if self.stalls:
            self.stalls -= 1
            raise TimeoutError
        half = (len(data) + 1) // 2
        self.taken += data[:half]
        return 0 if self.ended else half


def test_what_a_slow_command_takes_is_sent_once_and_a_limit_ends_the_wait_and_nothing_else() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: Any = SlowChannel(ours, stalls=100)
        data = os.urandom(100_000)
        SshProcess(channel, "box").send(data, limit_s=math.inf)
        assert channel.taken == data
        channel.stalls = 1
        with pytest.raises(ConnectionLostError, match=r"box: cannot send to it \(timed out\)"):
            SshProcess(channel, "box").send(data, limit_s=0.0)
        channel.ended = True
        with pytest.raises(ConnectionLostError, match=r"box: cannot send to it \(its stdin is closed\)"):
            SshProcess(channel, "box").send(data)
