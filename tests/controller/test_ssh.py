"""Host keys against known_hosts files; what needs a server is in tests/rig/test_place.py."""

import base64
import socket
from pathlib import Path

import paramiko
import pytest

from controller.errors import HostKeyError, UnreachableError
from controller.known_hosts import KnownHosts, fingerprint
from controller.ssh import SshConnection

NAME = "[127.0.0.1]:2222"


@pytest.fixture
def key() -> paramiko.PKey:
    return paramiko.ECDSAKey.generate()


def policy(path: Path, *, accept_new: bool = False, **ssh_config: str) -> KnownHosts:
    config = {"userknownhostsfile": str(path), "globalknownhostsfile": "none"} | ssh_config
    return KnownHosts(config, accept_new=accept_new, login="-p 2222 me@127.0.0.1")


def test_an_unknown_key_is_refused_with_fingerprint_and_command(tmp_path: Path, key: paramiko.PKey) -> None:
    with pytest.raises(HostKeyError) as caught:
        policy(tmp_path / "known").missing_host_key(None, NAME, key)
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
    strict = {} if how == "flag" else {"stricthostkeychecking": how}
    known = policy(path, accept_new=how == "flag", **strict)
    known.missing_host_key(None, NAME, key)
    first, added = path.read_text().splitlines()
    assert first == "# without a last newline"
    assert added == f"{NAME} {key.get_name()} {key.get_base64()}"
    with paramiko.SSHClient() as client:
        policy(path).install(client)
        assert client.get_host_keys().check(NAME, key)


def test_the_line_of_a_changed_key_is_found_also_when_its_name_is_hashed(
    tmp_path: Path, key: paramiko.PKey
) -> None:
    path = tmp_path / "known"
    hashed = paramiko.HostKeys.hash_host(NAME)
    path.write_text(
        f"# comment\n\nnonsense\n@revoked other x y\nother,10.0.0.1 {key.get_name()} {key.get_base64()}\n"
        f"{hashed} {key.get_name()} {key.get_base64()}\n"
    )
    error = policy(path).changed(NAME, paramiko.ECDSAKey.generate())
    assert f"line 6 of {path}" in error.message
    assert f"ssh-keygen -f {path} -R '{NAME}'" in error.hint


def test_a_fingerprint_is_the_one_that_openssh_prints(tmp_path: Path) -> None:
    line = "AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
    key = paramiko.Ed25519Key(data=base64.b64decode(line))
    assert fingerprint(key) == "SHA256:+DiY3wvvV6TuJJhbpZisF/zLDA0zPMSvHdkr4UvCOqU"  # github.com's


def test_lines_that_are_no_keys_do_no_harm(tmp_path: Path, key: paramiko.PKey) -> None:
    path = tmp_path / "known"
    path.write_bytes(
        b"\xff\xfe\nhost ssh-rsa !!!notbase64\nhost ssh-ed25519 AAAA\nhost\n"
        + f"{NAME} {key.get_name()} {key.get_base64()}\n".encode()
    )
    with paramiko.SSHClient() as client:
        policy(path).install(client)
        assert client.get_host_keys().check(NAME, key)


@pytest.mark.parametrize("text", ["Port many\n", "nonsense\n"])
def test_a_broken_ssh_config_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
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


def test_making_a_connection_contacts_nobody() -> None:
    connection = SshConnection("192.0.2.1", user="", port=None, timeout=1, accept_new=False)
    connection.close()
