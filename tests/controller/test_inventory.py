"""hosts.toml: what it may say, where it is looked for, and how it is told that it is wrong."""

import sys
from pathlib import Path

import pytest

from controller.errors import InventoryError, UsageError
from controller.inventory import Host, choose, parse

FILE = """\
default = "gpubox"

[places.local]
kind = "local"

[places.gpubox]
kind = "proxmox"
address = "10.1.2.6"
container = 200

[places.gpubox.env]
B = "box"

[places.big]
kind = "ssh"
address = "big.example"
venv = "/home/me/venv"
workspace = "/data/me"

[env]
A = 1
B = "all"
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("DFLASHCTL_HOSTS", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_a_place_gets_the_defaults_of_its_kind_and_both_env_tables() -> None:
    host = parse(FILE, "hosts.toml").hosts["gpubox"]
    assert host == Host(
        name="gpubox",
        kind="proxmox",
        address="10.1.2.6",
        user="root",
        container=200,
        venv="/root/venv",
        workspace="/workspace",
        env={"A": "1", "B": "box"},
    )
    assert host.python == "/root/venv/bin/python"


def test_a_place_survives_place_json() -> None:
    for host in parse(FILE, "hosts.toml").hosts.values():
        assert Host.model_validate_json(host.model_dump_json()) == host


def test_the_projects_own_file_is_valid_and_local_by_default() -> None:
    path = Path(__file__).parents[2] / "hosts.toml"
    shipped = parse(path.read_text(), str(path))
    assert shipped.default == "local"


def test_the_projects_example_of_a_proxmox_place_is_valid_when_uncommented() -> None:
    text = (Path(__file__).parents[2] / "hosts.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines()]
    kept = "\n".join(line for line in lines if "=" in line or line.startswith("["))
    example = kept[kept.index("[places.gpubox]") : kept.index("[places.bigbox]")]
    box = parse(example, "x").hosts["gpubox"]
    assert (box.address, box.user, box.container, box.venv, box.workspace, box.connect_timeout) == (
        "10.1.2.6",
        "root",
        200,
        "/root/venv",
        "/workspace",
        10,
    )


def test_without_any_file_there_is_this_machine() -> None:
    host = choose(None)
    assert (host.name, host.kind, host.address) == ("local", "local", "local")
    assert host.workspace == str(Path.home() / ".local" / "share" / "dflashctl")
    assert host.python == sys.executable


def test_the_named_file_comes_before_the_folders_and_that_before_the_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, name: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'[places.{name}]\nkind = "local"\n')

    write(tmp_path / "config" / "dflashctl" / "hosts.toml", "third")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert choose(None).name == "third"
    write(tmp_path / "hosts.toml", "second")
    assert choose(None).name == "second"
    write(tmp_path / "mine.toml", "first")
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path / "mine.toml"))
    assert choose(None).name == "first"
    monkeypatch.setenv("DFLASHCTL_HOSTS", str(tmp_path / "absent.toml"))
    with pytest.raises(InventoryError, match=r"absent\.toml: there is no such file"):
        choose(None)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "container = 200",
            "container = 200\nprot = 22",
            "h:10: places.gpubox.prot: unknown key; did you mean port?",
        ),
        (
            "container = 200",
            'container = "200"',
            "h:9: places.gpubox.container = '200': expected a whole number",
        ),
        ("container = 200", "container = 0", "h:9: places.gpubox.container = 0: expected more than 0"),
        ("container = 200", "container = 200\nconnect_timeout = inf", "timeout = inf: expected at most 3600"),
        ("container = 200", 'container = 200\nvenv = "/a\\u0000"', "h:10: places.gpubox.venv: holds a NUL"),
        ("container = 200\n", "", "h:6: places.gpubox.container: is missing"),
        ('kind = "ssh"', 'kind = "shh"', "h:15: places.big.kind = 'shh': expected one of local, ssh,"),
        ('address = "big.example"\n', "", "h:14: places.big.address: is missing"),
        ('kind = "ssh"\n', "", "h:14: places.big.kind: is missing; expected one of local, ssh, proxmox"),
        ("[places.big]", '[places."my box"]', "name = 'my box': expected letters, digits and ._-"),
        ('address = "big.example"', 'address = "-oProxyCommand=x"', "h:16: places.big.address: "),
        ('"big.example"', '"me@big.example"', 'write `address = "big.example"` and `user = "me"`'),
        ('address = "big.example"', 'address = "big.example:22"', "write the port as `port = 22`"),
        (
            "/data/me",
            "data/me",
            "h:18: places.big.workspace: 'data/me' is relative; expected an absolute path",
        ),
        (
            'default = "gpubox"',
            'default = "gpubx"',
            "h:1: default = 'gpubx': is no place of this file; did you mean gp",
        ),
        ("default =", "defualt =", "h:1: defualt: unknown key; did you mean default?"),
        ("A = 1", "A = [1]", "h:21: env.A: expected a string in quotes"),
        ("A = 1", '"a-b" = 1', "h:21: env.a-b: is no name of a variable"),
        ("A = 1", "A = ", "h: is not TOML: Invalid value (at line 21, column 5)"),
    ],
)
def test_an_error_names_file_line_key_and_what_was_expected(old: str, new: str, text: str) -> None:
    assert old in FILE
    with pytest.raises(InventoryError) as caught:
        parse(FILE.replace(old, new, 1), "h")
    assert text in caught.value.message


def test_a_place_without_its_places_is_answered_with_how_it_is_written() -> None:
    with pytest.raises(InventoryError, match="h:1: gpubox: unknown key") as caught:
        parse('[gpubox]\nkind = "local"\n', "h")
    assert caught.value.hint == "A place is a table [places.gpubox]."


def test_no_error_shows_a_value_that_may_be_secret() -> None:
    for text in (
        FILE.replace('B = "all"', 'HF_TOKEN = ["hunter2"]'),
        FILE.replace("container = 200", 'container = 200\nindex = ["https://me:hunter2@x"]'),
        FILE.replace('B = "box"', '"HF TOKEN" = "hunter2"'),
    ):
        assert "hunter2" in text
        with pytest.raises(InventoryError) as caught:
            parse(text, "h")
        assert "hunter2" not in caught.value.message + caught.value.hint


def test_keys_of_setup_and_sudo_are_checked_as_the_others() -> None:
    def changed(line: str) -> str:
        return FILE.replace("container = 200", f"container = 200\n{line}")

    host = parse(changed('sudo = true\nwheels = "/w"\nbase_python = "python3.12"'), "h").hosts["gpubox"]
    assert (host.sudo, host.wheels, host.base_python, host.connect_timeout) == (
        True,
        "/w",
        "python3.12",
        None,
    )
    assert host.command_line("true") == "ssh root@10.1.2.6 sudo pct exec 200 -- true"
    with pytest.raises(InventoryError, match=r"wheels: 'w' is relative"):
        parse(changed('wheels = "w"'), "h")
    with pytest.raises(InventoryError, match=r"sudo = 'yes': expected true or false"):
        parse(changed('sudo = "yes"'), "h")
    with pytest.raises(InventoryError, match="sudo: kind local has none"):
        parse('[places.here]\nkind = "local"\nsudo = true\n', "h")


def test_a_place_is_found_by_name_or_address(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(FILE)
    assert choose("gpubox") == choose("10.1.2.6") == choose(None)
    assert choose("big", port=2222, user="me").port == 2222


def test_an_unknown_place_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(FILE)
    with pytest.raises(InventoryError, match=r"hosts\.toml: has no place .*'gpubix'; did you mean gpubox\?"):
        choose("gpubix")
    with pytest.raises(InventoryError, match="'root@gpubox'; did you mean gpubox") as caught:
        choose("root@gpubox")
    assert caught.value.hint == "Name the user apart: --host gpubox --user root"


def test_without_any_file_the_answer_says_where_one_would_be_read() -> None:
    with pytest.raises(InventoryError, match=r"the built-in places: has no place .*known: local") as caught:
        choose("gpubox")
    assert caught.value.hint.startswith("Add it to a hosts.toml, here or in ~/.config/dflashctl, or describe")


def test_an_address_of_two_places_is_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(
        FILE + FILE[FILE.index("[places.big]") : FILE.index("[env]")].replace("places.big", "places.twin")
    )
    with pytest.raises(InventoryError, match=r"several places have the address big\.example: big, twin"):
        choose("big.example")


def test_a_place_that_the_file_lacks_is_described_by_options(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(FILE)
    host = choose("10.9.9.9", container=300)
    assert (host.kind, host.address, host.container, host.user) == ("proxmox", "10.9.9.9", 300, "root")
    assert host.env == {"A": "1", "B": "all"}
    assert choose("fe80::1", kind="ssh").name == "fe80--1"
    with pytest.raises(UsageError, match="--host is empty"):
        choose("", kind="ssh")
    with pytest.raises(UsageError, match="--kind lcx: expected one of"):
        choose("10.9.9.9", kind="lcx")
    with pytest.raises(UsageError, match=r"the command line: container: is missing"):
        choose("10.9.9.9", kind="proxmox")
    with pytest.raises(UsageError, match=r"the command line: port = 70000: expected less than 65536"):
        choose("big", port=70000)


def test_a_command_line_is_what_a_person_can_paste() -> None:
    hosts = parse(FILE, "h").hosts
    assert hosts["local"].command_line("ls", "a b") == "ls 'a b'"
    assert hosts["gpubox"].command_line("true") == "ssh root@10.1.2.6 pct exec 200 -- true"
    assert hosts["big"].model_copy(update={"port": 22}).command_line("df", "/x y") == (
        "ssh -p 22 big.example 'df '\"'\"'/x y'\"'\"''"
    )
