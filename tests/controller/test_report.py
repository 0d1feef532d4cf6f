"""The report's page, as its source says it; tests/rig/test_report_in_chromium.py has it in a browser."""

from __future__ import annotations

import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller import paths
from controller.cli import main
from controller.errors import LocalStateError, UsageError
from controller.inventory import Host
from controller.report import style, writing
from controller.report.markup import Markup, el, text
from controller.report.page import report_page, traceback_markup
from controller.report.writing import page_of, write_report
from controller.run_place import RunPlace
from controller.run_state import News, RunState, reduce
from controller.tui.palette import GREY, INK, OKABE_ITO, PAPER
from tests.tui import golden

JOB = 'target = "/models/q"\ntoken_budget = 4096\nlayers = 5\n'


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails when a tag is not closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())


def page(run: golden.Run, folder: Path, job: str = JOB) -> str:
    directory = run.write(folder / "1129-a7f3" / "10.1.2.6")
    (directory / "job.toml").write_text(job)
    return page_of(directory, golden.NOW)


def test_a_time_that_no_calendar_has_breaks_no_page() -> None:
    gpu = tuple({"kind": "gpu", "t": t, "gpus": {"a": {"utilization_share": 0.5}}} for t in (1e300, 1e301))
    events = ({"kind": "recompile", "t": 1e300},)
    assert "recompiled" in report_page(reduce(RunState(), News(events=events, gpu=gpu), golden.NOW), ())


@pytest.mark.slow
@pytest.mark.parametrize("name", golden.SITUATIONS)
def test_every_situation_has_a_page_that_is_well_formed_and_loads_nothing(name: str, tmp_path: Path) -> None:
    source = page(golden.SITUATIONS[name](), tmp_path)
    found = Page(source)
    tags = {tag for tag, _ in found.tags}
    assert not tags & {"img", "link", "iframe", "object", "embed", "base", "form", "audio", "video", "a"}
    for tag, attributes in found.tags:
        assert not {"src", "href", "srcset", "action", "xlink:href", "onload", "onerror"} & set(attributes), (
            tag
        )
    assert len(re.findall("<script>", source)) == 1
    assert not re.search(r"url\(|@import", style.CSS)
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_page_says_what_the_terminal_says(tmp_path: Path) -> None:
    run = golden.dead_thread()
    run.log.append("the very last line")
    said = Page(page(run, tmp_path)).text
    for part in (
        "✗ FAILED rc=1", "1129-a7f3", "12,345", "How it died",
        "drafter-1 (cuda:7), step 12,345, bucket 4",
        "CUDA graph trees", "remote_payload/train/execution.py", "drafter-0 (cuda:6)", "[770, 1,216)",
        "NVIDIA H200", "Evaluations", "checkpoint of step 12,000", "token_budget", "4096", "32768",
        "the very last line", "Attempts", "loads nothing",
    ):  # fmt: skip
        assert part in said, part


def test_the_curves_are_those_of_the_terminal_and_a_gap_is_drawn_as_one(tmp_path: Path) -> None:
    source = page(golden.nan_loss(), tmp_path)
    titles = re.findall(r"<figcaption><b>([^<]+)</b>", source)
    assert titles[:5] == ["loss", "tau", "tok/s", "gradient norm", "learning rate"]
    assert "GPU memory" in titles
    assert 'class="gap"' in source
    assert "not a number, step 12," in source
    assert "nan" not in re.sub(r"<pre>.*?</pre>", "", source, flags=re.S).lower().replace("nan</b>", "")


def test_keys_that_are_not_the_default_are_marked_and_the_others_folded(tmp_path: Path) -> None:
    source = page(golden.healthy(), tmp_path)
    changed = re.findall(r'<tr class="changed"><td><code>(\w+)</code>', source)
    assert changed == ["target", "token_budget"]
    folded = source[source.index("keys that have their default") :]
    assert "<code>layers</code>" in folded


def test_the_colours_are_those_of_okabe_and_ito_and_greys() -> None:
    colours = {c.upper() for c in re.findall(r"#[0-9a-fA-F]{6}", style.CSS)}
    rest = colours - {c.upper() for c in (*OKABE_ITO, PAPER, INK, GREY)}
    for colour in rest:
        red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
        assert max(red, green, blue) - min(red, green, blue) <= 20, f"{colour} is no grey"


@given(st.text())
def test_no_text_becomes_markup(hostile: str) -> None:
    found = Page(el("p", hostile, title=hostile))
    assert [tag for tag, _ in found.tags] == ["p"]
    assert Page(f"<pre>{traceback_markup(hostile)}</pre>").tags[0][0] == "pre"
    assert "<" not in text(hostile).replace("&lt;", "")


@given(st.text(), st.text())
def test_a_state_of_anything_has_a_page(name: str, log: str) -> None:
    source = report_page(RunState(run_id=name, job_name=log, job={name: log, "layers": name}), [log, name])
    Page(source)
    assert source.count("<script>") == 1


def test_markup_is_made_of_markup_alone() -> None:
    assert el("b", Markup("<i>x</i>"), "<i>") == "<b><i>x</i>&lt;i&gt;</b>"


def test_it_is_written_whole_or_not_at_all_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = golden.healthy().write(tmp_path / "1129-a7f3" / "10.1.2.6")
    monkeypatch.chdir(tmp_path)
    target = write_report(directory, None)
    assert target.name == "1129-a7f3.html"
    before = target.read_text()
    with pytest.raises(UsageError, match="is a folder"):
        write_report(directory, tmp_path)
    with pytest.raises(LocalStateError, match="cannot be written"):
        write_report(directory, tmp_path / "absent" / "x.html")
    monkeypatch.setattr(writing, "report_page", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(directory, target)
    assert target.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1129-a7f3", "1129-a7f3.html"]
    shutil.rmtree(tmp_path / "1129-a7f3")


def test_a_page_takes_the_place_of_no_device_and_of_no_link(tmp_path: Path) -> None:
    golden.finished().write(tmp_path / "1129-a7f3" / "gpu1")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("page.html")
    with pytest.raises(UsageError, match="is no plain file"):
        write_report(tmp_path / "1129-a7f3" / "gpu1", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    written = write_report(tmp_path / "1129-a7f3" / "gpu1", tmp_path / "link")
    assert written == (tmp_path / "page.html").resolve()
    assert (tmp_path / "link").is_symlink() and "FINISHED" in written.read_text()


def test_the_command_writes_it_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = golden.finished()
    directory = paths.make_mirror_dir("1129-a7f3", "10.1.2.6")
    run.write(directory)
    host = Host(name="gpu1", kind="ssh", address="10.1.2.6")
    RunPlace(
        host=host, run_id="1129-a7f3", run_dir="/workspace/runs/x", payload_dir="/workspace/payloads/x",
        digest="5f" * 32, python="python3", created=golden.NOW, job_name="qwen3-8b",
    ).write(directory)  # fmt: skip
    target = tmp_path / "page.html"
    assert main(["report", "1129", "--out", str(target)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{target}\n"
    assert said.err.startswith("written, ")
    assert "✓ FINISHED" in Page(target.read_text()).text
    assert main(["report", "nothing-like-it"]) == UsageError.exit_code
