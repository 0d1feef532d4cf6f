"""The remote places against a real sshd and a real container."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.errors import (
    AuthenticationError,
    ConnectionLostError,
    ContainerError,
    DflashctlError,
    HostKeyError,
    PctError,
    UnreachableError,
    UsageError,
)
from controller.inventory import Host, load
from controller.place import Place, open_place
from controller.remote import Proxmox
from controller.ship import pack, ship
from tests.controller.test_place import NASTY, TEXT, crossed
from tests.rig.rig import Rig
from tests.waiting import until


@pytest.fixture(autouse=True)
def _laptop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for name, value in rig.laptop_env().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def container() -> Host:
    return load().hosts["rig"]


@pytest.fixture
def machine(container: Host) -> Host:
    return container.model_copy(update={"kind": "ssh", "container": None})


@pytest.fixture(params=["proxmox", "ssh", "older pct", "sudo"])
def place(request: pytest.FixtureRequest, rig: Rig, container: Host, machine: Host) -> Iterator[Place]:
    if request.param == "older pct":
        rig.older_pct()
    changes = {"sudo": True} if request.param == "sudo" else {}
    chosen = machine if request.param == "ssh" else container
    with open_place(chosen.model_copy(update=changes)) as opened:
        yield opened


def test_arguments_cross_ssh_pct_and_shells_unharmed(place: Place) -> None:
    assert crossed(place, NASTY) == NASTY


@given(st.lists(TEXT, min_size=100, max_size=400))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_crosses_all_layers_unharmed(place: Place, texts: list[str]) -> None:
    assert crossed(place, texts) == texts


BYTES = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape"))


@given(st.lists(BYTES, min_size=100, max_size=400))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes_that_are_no_text_cross_too_as_file_names_may_hold_them(place: Place, texts: list[str]) -> None:
    assert crossed(place, texts) == texts


def test_arguments_that_are_too_long_are_refused_with_a_way_out(place: Place) -> None:
    with pytest.raises(UsageError, match="KiB as they travel; 120 KiB fit"):
        place.start(["echo", "x" * 130_000])
    assert crossed(place, ["x" * 100_000]) == ["x" * 100_000]


def test_a_container_without_bash_needs_nothing_but_sh_and_python(rig: Rig, container: Host) -> None:
    with rig.without("/bin/bash", "/usr/bin/setsid"):
        assert rig.container_run(["/bin/bash", "-c", "true"]).returncode == 127
        with open_place(container) as place:
            assert crossed(place, NASTY) == NASTY
            shipped = ship(place, pack(), ["preflight", place.workspace])
            assert shipped.status == 0, shipped.stderr
            command = place.start(["sh", "-c", "trap 'exit 9' INT; echo set; while :; do sleep 0.1; done"])
            assert command.receive(60) == b"set\n"
            place.signal(command, "INT")
            assert command.wait(60) == 9


def test_a_signal_reaches_all_that_a_command_started_and_nothing_else(place: Place) -> None:
    other = place.start(["sleep", "600"])
    command = place.start(["sh", "-c", "sleep 600 & sleep 601 & echo begun; wait"])
    assert command.receive(60) == b"begun\n"
    place.signal(command, "TERM")
    assert command.wait(60) == 143
    assert other.wait(0.1) is None
    look = ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]
    until(lambda: b"sleep 601" not in place.run(look, timeout=60).stdout, "what it started to end")
    place.signal(other, "KILL")
    assert other.wait(60) == 137


def test_both_streams_come_apart_as_they_are_written(place: Place) -> None:
    script = "for i in 1 2 3; do echo out$i; echo err$i >&2; sleep 0.05; done; exit 3"
    command = place.start(["sh", "-c", script])
    out = err = b""
    while (got := command.receive_streams(60)) != (b"", b""):
        assert got is not None
        out, err = out + got[0], err + got[1]
    assert (out, err) == (b"out1\nout2\nout3\n", b"err1\nerr2\nerr3\n")
    assert command.wait(60) == 3


def test_sudo_that_wants_a_password_is_said_with_the_line_that_allows_it(rig: Rig, container: Host) -> None:
    by_sudo = container.model_copy(update={"sudo": True, "user": rig.user})
    for mode, text in (("password", "a password is required"), ("refused", "is not allowed to execute")):
        rig.sudo(mode)  # type: ignore[arg-type]
        error = failure(by_sudo)
        assert isinstance(error, AuthenticationError)
        assert text in error.message
        assert "NOPASSWD: /usr/sbin/pct" in error.hint
        assert isinstance(
            failure(by_sudo.model_copy(update={"kind": "ssh", "container": None})), AuthenticationError
        )


def test_sudo_runs_pct_and_nothing_else_as_root(rig: Rig, container: Host) -> None:
    log = rig.state / "log" / "sudo.log"
    log.write_text("")
    by_sudo = container.model_copy(update={"sudo": True})
    with open_place(by_sudo) as place:
        assert place.run(["id", "-u"], timeout=60).stdout == b"0\n"
        assert isinstance(place, Proxmox)
        assert b"hostname: dflash-ct" in place.on_host(["pct", "config", str(rig.vmid)]).stdout
    assert isinstance(failure(by_sudo.model_copy(update={"container": rig.absent_vmid})), ContainerError)
    assert [line.split()[:2] for line in log.read_text().splitlines()] == [
        ["pct", "exec"], ["pct", "config"], ["pct", "exec"], ["pvesh", "get"],
    ]  # fmt: skip


@pytest.mark.parametrize("sudo", [False, True])
def test_a_container_of_another_node_is_found_in_the_cluster(rig: Rig, container: Host, sudo: bool) -> None:
    away = container.model_copy(update={"container": rig.absent_vmid, "sudo": sudo})
    rig.cluster([{"vmid": rig.absent_vmid, "node": "pve2", "type": "lxc"}])
    error = failure(away)
    assert isinstance(error, ContainerError)
    assert error.message.endswith("is on another node of the cluster: pve2, and not rig")
    assert "address" in error.hint and "pve2" in error.hint
    rig.cluster([{"vmid": rig.absent_vmid, "node": "rig", "type": "qemu"}])
    error = failure(away)
    assert "is no container but a virtual machine" in error.message
    (rig.state / "cluster.json").write_text("nonsense")
    assert "does not exist (on its node rig)" in failure(away).message


def test_a_session_too_many_is_refused_and_harms_no_other(machine: Host) -> None:
    with open_place(machine) as place:
        ten = [place.start(["cat"]) for _ in range(10)]
        with pytest.raises(ConnectionLostError, match="no further session"):
            place.start(["cat"])
        for process in ten:
            process.send(b"alive\n")
            assert process.receive(60) == b"alive\n"
            process.close()


def test_both_streams_and_the_exit_status_arrive(place: Place) -> None:
    done = place.run(["sh", "-c", "echo out; echo err >&2; exit 7"], timeout=60)
    assert (done.status, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_death_by_a_signal_is_told_as_128_plus_its_number(place: Place) -> None:
    assert place.run(["sh", "-c", "kill -KILL $$"], timeout=60).status == 137


def test_login_noise_is_not_output(rig: Rig, place: Place) -> None:
    rig.login_noise("Welcome to $HOST\nbegin-\n")
    assert place.run(["echo", "hello"], timeout=60).stdout == b"hello\n"


def test_megabytes_go_both_ways_at_once(place: Place) -> None:
    data = bytes(range(256)) * (8 << 12)
    done = place.run(["sh", "-c", "head -c 3000000 /dev/zero >&2; cat"], stdin=data, timeout=60)
    assert done.status == 0
    assert done.stdout == data


def test_the_environment_inside_is_bare_and_utf8(rig: Rig, container: Host) -> None:
    for older in (False, True):
        rig.older_pct(older)
        with open_place(container) as place:
            lines = place.run(["env"], timeout=60).stdout.decode().splitlines()
        env = dict(line.split("=", 1) for line in lines)
        assert env["LC_ALL"] == "C.UTF-8"
        assert env["PATH"].startswith("/usr/local/sbin:")
        assert env["HOME"] == "/root"
        assert not [name for name in env if name.startswith(("SSH_", "RIG"))], env


def test_an_older_pct_is_asked_the_new_way_only_once(rig: Rig, container: Host) -> None:
    rig.older_pct()
    before = len(rig.pct_calls())
    with open_place(container) as place:
        assert place.run(["true"], timeout=60).status == 0
        assert place.run(["true"], timeout=60).status == 0
    asked = ["--keep-env" in call for call in rig.pct_calls()[before:]]
    assert asked == [True, False, False]


def failure(host: Host) -> DflashctlError:
    with open_place(host) as place, pytest.raises(DflashctlError) as caught:
        place.run(["true"], timeout=60)
    return caught.value


def test_a_stopped_an_absent_and_no_container_are_told_apart(
    rig: Rig, container: Host, machine: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = failure(container.model_copy(update={"container": rig.stopped_vmid}))
    assert isinstance(stopped, ContainerError)
    assert stopped.message == f"container {rig.stopped_vmid} on 127.0.0.1 is stopped"
    assert stopped.hint == (f"Start it: ssh -p {rig.port} {rig.user}@127.0.0.1 pct start {rig.stopped_vmid}")
    absent = failure(container.model_copy(update={"container": rig.absent_vmid}))
    assert isinstance(absent, ContainerError)
    assert "does not exist" in absent.message
    assert absent.hint.endswith("pct list")


def test_a_host_without_pct_is_said_to_be_none(rig: Rig, container: Host, tmp_path: Path) -> None:
    pct = rig.state / "bin" / "pct"
    pct.rename(tmp_path / "pct")
    try:
        error = failure(container)
    finally:
        shutil.move(tmp_path / "pct", pct)
    assert isinstance(error, PctError)
    assert "no pct" in error.message


def test_a_refused_port_a_mute_server_and_an_unknown_name_are_unreachable(machine: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        mute = failure(machine.model_copy(update={"port": port, "connect_timeout": 0.3}))
        threading.Thread(target=chatter, args=(server,), daemon=True).start()
        web = failure(machine.model_copy(update={"port": port}))
    refused = failure(machine.model_copy(update={"port": port}))
    unknown = failure(machine.model_copy(update={"address": "no-such-host.invalid"}))
    for error, text in (
        (mute, "not as an SSH server"),
        (web, "not as an SSH server"),
        (refused, "refuses the connection"),
        (unknown, "no such host name"),
    ):
        assert isinstance(error, UnreachableError), error
        assert text in error.message
        assert error.hint


def chatter(server: socket.socket) -> None:
    for _ in range(2):  # the first one is the mute connection's, still in the backlog
        peer, _ = server.accept()
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        peer.close()


def test_an_unknown_host_key_is_refused_with_the_command_that_accepts_it(rig: Rig, machine: Host) -> None:
    rig.known_hosts.write_text("")
    error = failure(machine)
    assert isinstance(error, HostKeyError)
    assert "SHA256:" in error.message
    assert f"ssh -p {rig.port} {rig.user}@127.0.0.1 true" in error.hint
    with open_place(machine, accept_new_host_key=True) as place:
        assert place.run(["true"], timeout=60).status == 0
    with open_place(machine) as place:
        assert place.run(["true"], timeout=60).status == 0


def test_a_changed_host_key_is_refused_with_its_line_also_when_new_ones_are_accepted(
    rig: Rig, machine: Host
) -> None:
    rig.known_hosts.write_text("# a comment\n" + rig.known_hosts.read_text())
    rig.rotate_host_key()
    for accept in (False, True):
        with (
            open_place(machine, accept_new_host_key=accept) as place,
            pytest.raises(HostKeyError) as caught,
        ):
            place.run(["true"], timeout=60)
        assert f"{rig.known_hosts}:2" in caught.value.message
        assert f"-R '[127.0.0.1]:{rig.port}'" in caught.value.hint


def test_a_key_that_the_server_does_not_know_is_an_authentication_error(
    rig: Rig, machine: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / ".ssh"
    ssh.mkdir(mode=0o700)
    shutil.copy(rig.known_hosts, ssh / "known_hosts")
    monkeypatch.setenv("HOME", str(tmp_path))
    error = failure(machine)
    assert isinstance(error, AuthenticationError)
    assert "ssh-copy-id" in error.hint


def test_an_alias_of_ssh_config_is_an_address(rig: Rig, machine: Host) -> None:
    by_alias = machine.model_copy(update={"address": rig.alias, "port": None, "user": ""})
    with open_place(by_alias) as place:
        assert place.run(["true"], timeout=60).status == 0


@pytest.mark.parametrize("trouble", ["kill", "stop the server"])
def test_a_broken_connection_is_a_lost_one_and_never_an_end(rig: Rig, container: Host, trouble: str) -> None:
    with open_place(container) as place:
        process = place.start(["cat"])
        process.send(b"x\n")
        assert process.receive(60) == b"x\n"
        breaks: Callable[[], object] = rig.kill_connections if trouble == "kill" else rig.stop_sshd
        breaks()
        with pytest.raises(ConnectionLostError):
            process.receive(60)
        with pytest.raises(ConnectionLostError):
            process.wait(60)
        with pytest.raises(ConnectionLostError):
            process.send(b"y")
        if trouble == "kill":
            assert place.run(["echo", "again"], timeout=60).stdout == b"again\n"


def test_a_silent_connection_and_a_frozen_container_are_given_up_in_time(
    rig: Rig, container: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.remote.BEGIN_GRACE_S", 1.0)
    impatient = container.model_copy(update={"connect_timeout": 8.0})
    with open_place(impatient) as place:
        assert place.run(["true"], timeout=60).status == 0
        rig.freeze_connections()
        begun = time.monotonic()
        with pytest.raises(ConnectionLostError):
            place.run(["true"], timeout=3)
        rig.thaw_connections()
    with open_place(impatient) as place:
        rig.freeze_container()
        with pytest.raises(UnreachableError, match="did not begin"):
            place.start(["true"])
    assert time.monotonic() - begun < 100  # a frozen process would never be given up


def test_a_jump_host_is_gone_through_with_its_key_verified_too(rig: Rig, machine: Host) -> None:
    config = rig.laptop / ".ssh" / "config"
    before = config.read_text()
    config.write_text(
        before + f"\nHost inner\n  HostName 127.0.0.1\n  Port {rig.port}\n  ProxyJump {rig.alias}\n"
        f"  IdentityFile {rig.identity}\n  UserKnownHostsFile {rig.known_hosts}\n"
    )
    try:
        inner = machine.model_copy(update={"address": "inner", "port": None, "user": rig.user})
        with open_place(inner) as place:
            assert place.run(["echo", "through"], timeout=60).stdout == b"through\n"
            assert len(rig.sshd_children()) >= 2
        rig.known_hosts.write_text("")
        assert isinstance(failure(inner), HostKeyError)
    finally:
        config.write_text(before)
