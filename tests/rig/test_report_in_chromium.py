"""The report's page as a browser has it: nothing is asked of any network, nothing of the remote is code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.report.writing import page_of
from tests.rig.chromium import Chromium, chromium, found
from tests.tui import golden
from tests.waiting import until

pytestmark = pytest.mark.rig

HOSTILE = (
    "<img src='http://192.0.2.1/x.png' onerror='document.title=1'>",
    "</pre><script>document.title='owned'</script>",
    "'\"><svg onload=document.title='owned'>",
)


@pytest.fixture
def browser() -> Iterator[Chromium]:
    if found() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("CI=true and there is no Chromium: tests/rig/install.sh installs it")
        pytest.skip("there is no Chromium: tests/rig/install.sh installs it")
    with chromium() as one:
        yield one


def written(run: golden.Run, folder: Path) -> Path:
    directory = run.write(folder / "1129-a7f3" / "10.1.2.6")
    (directory / "job.toml").write_text(
        'target = "</code><script>1</script>"\nlayers = 5\ntoken_budget = 4096\n'
    )
    page = folder / "report.html"
    page.write_text(page_of(directory, golden.NOW), "utf-8")
    return page


@pytest.mark.parametrize(("dark", "paper"), [(False, "rgb(255, 255, 255)"), (True, "rgb(16, 19, 23)")])
def test_the_page_is_whole_quiet_and_follows_the_readers_colours(
    dark: bool, paper: str, browser: Chromium, tmp_path: Path
) -> None:
    run = golden.dead_thread()
    run.log += HOSTILE
    run.crashes[0]["error"] = HOSTILE[1]
    run.run["job"] = HOSTILE[0]
    page = written(run, tmp_path)
    browser.open(page, dark=dark)
    assert browser.js("getComputedStyle(document.body).backgroundColor") == paper
    assert browser.js("document.querySelectorAll('figure svg').length") >= 8
    assert browser.js("document.querySelectorAll('img, iframe, link, object, form').length") == 0
    assert browser.js("document.scripts.length") == 1
    assert "owned" not in browser.js("document.title")
    for text in HOSTILE:
        assert browser.js("document.body.innerText").count(text) >= 1
    assert browser.js("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut at the right"
    asked = [
        e["params"]["request"]["url"]
        for e in browser.events
        if e.get("method") == "Network.requestWillBeSent"
    ]
    assert asked == [page.as_uri()]
    said = [
        e["params"]
        for e in browser.events
        if e.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown")
    ]
    assert said == []


def test_values_stand_under_the_pointer(browser: Chromium, tmp_path: Path) -> None:
    browser.open(written(golden.healthy(), tmp_path), dark=False)
    box = browser.js(
        "(b=>[b.x,b.y,b.width,b.height])(document.querySelector('svg[data-lines]').getBoundingClientRect())"
    )
    browser.point_at(box[0] + box[2] * 0.6, box[1] + box[3] / 2)
    values = "document.querySelector('.values').textContent"
    said = until(lambda: browser.js(values))
    assert said.startswith("step 7,")
    assert "raw 2." in said
    assert "ema 2." in said
    browser.point_at(2, 2)
    until(lambda: browser.js(values) == "", seen=lambda: browser.js(values))


def test_a_narrow_screen_has_one_column_and_no_sideways_page(browser: Chromium, tmp_path: Path) -> None:
    browser.open(written(golden.sixteen_gpus(), tmp_path), dark=False, width=390)
    assert browser.js("document.documentElement.scrollWidth") <= 390
    lefts = browser.js("[...document.querySelectorAll('figure')].map(f=>f.getBoundingClientRect().x)")
    assert len(set(lefts)) == 1
