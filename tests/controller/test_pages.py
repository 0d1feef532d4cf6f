"""The README and the pages of docs/: what a reader would copy is right by the code of this tree."""

import inspect
import os
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer

from controller.commands.table import app
from controller.inventory import parse
from remote_payload.job import Job

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_group(app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[list[str]]:
    """The words behind `dflashctl` in each line of code, up to a pipe; without synopses such as `[RUN]`."""
    lines = re.findall(r"^ {4}(?:.*[ |(])??(dflashctl .*)$", text, re.MULTILINE)
    words = [shlex.split(line, comments=True)[1:] for line in lines]
    typed = [line[: line.index("|")] if "|" in line else line for line in words]
    return [line for line in typed if not any(word.startswith("[") for word in line)]


def check(words: list[str]) -> None:
    """Read the words of a command line as the program does, and run nothing."""
    name, *rest = words[1:] if words[0] == "-q" else words
    GROUP.commands[name].make_context(name, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_can_be_typed(page: Path) -> None:
    for words in commands(page.read_text()):
        check(words)


def test_every_command_that_a_help_text_shows_can_be_typed() -> None:
    for info in app.registered_commands:
        assert info.callback is not None
        # From Python 3.13 on the compiler takes away the indentation of docstrings.
        shown = commands(textwrap.indent(inspect.getdoc(info.callback) or "", 4 * " "))
        assert shown
        for words in shown:
            check(words)


def test_the_map_of_the_controller_names_every_module_of_it_and_no_other() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("## The controller's modules")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+(?:\.py|/))`", section)
    folder = ROOT / "controller"
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    packages = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]
    assert sorted(named) == sorted([*modules, *packages])


def test_what_is_to_be_written_anew_need_not_be_readable_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.html").touch()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # as for who is not root
    check(["report", "demo", "--out", str(tmp_path / "run.html")])
    for command in ("pull", "export"):
        check([command, "demo", "--to", str(tmp_path)])
    with pytest.raises(Exception, match="not readable"):
        check(["evaluate", "demo", "--prompts", str(tmp_path / "run.html")])


def test_a_command_that_does_not_exist_is_noticed() -> None:
    for line in ("lunch", "logs --folow", "python", "runs demo"):
        with pytest.raises(Exception, match=r"lunch|No such option|Missing|unexpected extra"):
            check(line.split())


def test_the_readmes_place_and_job_are_valid() -> None:
    place, job = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (host,) = parse(place, "README.md").hosts.values()
    assert (host.kind, host.user, host.container) == ("proxmox", "root", 200)
    assert Job.from_mapping(tomllib.loads(job), "README.md").drafters == ["cuda:1"]
