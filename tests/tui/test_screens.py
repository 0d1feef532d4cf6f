"""What is on the screen in each situation, at the three sizes that the design names and below them."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.diagnose import RECOMPILING, TAU_GAP
from controller.run_reader import RunReader
from controller.run_state import RunState
from controller.tui.app import RunApp
from controller.tui.arrangement import arrange
from controller.tui.overview import learning_line, status_line
from controller.tui.palette import OKABE_ITO
from tests.tui import golden
from tests.tui.conftest import Open, app_of, screen_text


def reduced(run: golden.Run) -> RunState:
    with tempfile.TemporaryDirectory() as folder:
        return RunReader(run.write(Path(folder)), scale=1.0).poll(golden.NOW)


LONG_NAMES = reduced(golden.Run(step=12_345))

SNAPSHOTS = [
    ("healthy", (60, 20)), ("healthy", (80, 24)), ("healthy", (160, 48)), ("dead_thread", (80, 24)),
    ("dead_thread", (160, 48)), ("no_news", (60, 20)), ("lost", (60, 20)), ("reconnecting", (80, 24)),
    ("no_gpu", (80, 24)), ("first_minute", (80, 24)), ("nan_loss", (160, 48)), ("gpu_lost", (80, 24)),
    ("sixteen_gpus", (80, 24)), ("mig", (80, 24)), ("two_hosts", (80, 24)), ("stale_heartbeat", (80, 24)),
    ("wide_text", (160, 48)),
]  # fmt: skip
QUICK = {("healthy", (80, 24)), ("healthy", (160, 48)), ("dead_thread", (80, 24)), ("no_news", (60, 20))}
"""Those that `make check` looks at; a second or two each."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, id=f"{name}-{size[0]}x{size[1]}", marks=[] if quick else [pytest.mark.slow])
        for name, size in SNAPSHOTS
        for quick in [(name, size) in QUICK]
    ],
)
def test_the_screen_is_as_it_was_approved(
    name: str, size: tuple[int, int], snap_compare: Any, tmp_path: Path
) -> None:
    app = app_of(golden.SITUATIONS[name](), tmp_path / "run")

    async def settle(pilot: Any) -> None:
        await pilot.pause()
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=settle)


RECORDED = Path(__file__).parent / "recorded/h200"
RECORDED_AT = 1_796_012_882.9


@pytest.mark.parametrize(("size", "keys"), [((80, 24), []), ((132, 40), []), ((160, 48), ["2"])], ids=str)
def test_a_run_recorded_on_h200s_is_shown_as_it_was_approved(
    size: tuple[int, int], keys: list[str], snap_compare: Any
) -> None:
    app = RunApp(RECORDED, clock=lambda: RECORDED_AT, period_s=None)

    async def press(pilot: Any) -> None:
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=press)


def test_records_of_an_earlier_form_are_read_and_what_they_lack_is_not_known() -> None:
    state = RunReader(RECORDED, scale=1.0).poll(RECORDED_AT)
    assert state.state == "LIVE"
    assert not state.unparsable
    assert [gpu.roles for gpu in state.gpus] == [
        ("target-0", "drafter-0", "evaluator"), ("target-1", "drafter-1"),
    ]  # fmt: skip
    assert len(state.history.evaluations) == 3
    assert state.curves["loss"].points
    assert not state.curves["queue_batches"].points
    assert state.history.conditional_accuracy == ()


KEYS = [
    ("curves", (80, 24), ["2"]), ("curves", (160, 48), ["2"]),
    ("cursor_zoom_log", (80, 24), ["2", "plus", "left", "left", "left", "L", "enter"]),
    ("light", (160, 48), ["ctrl+t"]), ("stop", (80, 24), ["S"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "size", "keys"), KEYS, ids=[f"{what}-{size[0]}x{size[1]}" for what, size, _ in KEYS]
)
def test_what_keys_show_is_as_it_was_approved(
    what: str, size: tuple[int, int], keys: list[str], snap_compare: Any, tmp_path: Path
) -> None:
    app = app_of(golden.healthy(), tmp_path / "run")

    async def press(pilot: Any) -> None:
        await pilot.pause()
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        app._run_screen._note = ""  # a note would go by itself, at some moment
        app._run_screen.draw()
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=press)


FIRST_WORDS = {
    "healthy": "● LIVE 1.2s", "first_minute": "● LIVE 1.2s", "nan_loss": "● LIVE 1.2s",
    "dead_thread": "✗ FAILED rc=1", "killed": "✗ KILLED SIGKILL", "lost": "† LOST",
    "no_news": "○ STALE 40s", "reconnecting": "↻ RECONNECTING #3 next 8s", "stalled": "▲ STALLED 75s",
    "no_gpu": "● LIVE 1.2s", "gpu_lost": "● LIVE 1.2s", "sixteen_gpus": "● LIVE 1.2s",
    "mig": "● LIVE 1.2s", "stale_heartbeat": "▲ STALLED 45s", "two_hosts": "● LIVE 1.2s",
    "wide_text": "● LIVE 1.2s", "finished": "✓ FINISHED",
    "stopped": "■ STOPPED", "hostile_text": "● LIVE 1.2s",
}  # fmt: skip


@pytest.mark.parametrize("name", golden.SITUATIONS)
def test_state_and_age_come_first_in_every_situation(name: str, tmp_path: Path) -> None:
    golden.SITUATIONS[name]().write(tmp_path)
    state = RunReader(tmp_path, scale=1.0).poll(golden.NOW)
    assert status_line(state, 60).plain.startswith(f" {FIRST_WORDS[name]} ")


SMALL_AND_LARGE = [(1, 1), (10, 4), (40, 10), (79, 23), (220, 60)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy", "dead_thread"])
async def test_no_terminal_is_too_small_or_too_large(name: str, open_run: Open) -> None:
    async with open_run(name) as pilot:
        for width, height in SMALL_AND_LARGE:
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            rows = screen_text(pilot).split("\n")
            first = f" {FIRST_WORDS[name]} "
            assert len(rows) == height
            assert rows[0].startswith(first if width > len(first) else first[: width - 1])


@given(
    st.integers(1, 400), st.integers(1, 120), st.integers(0, 16), st.integers(0, 12), st.integers(0, 24),
    st.integers(0, 3), st.booleans(), st.integers(0, 60),
)  # fmt: skip
def test_every_size_has_an_arrangement_that_fits_and_leaves_a_log(
    width: int, height: int, gpus: int, buckets: int, threads: int, detail: int, zoomed: bool, crash: int
) -> None:
    one = arrange(width, height, gpus=gpus, buckets=buckets, threads=threads, detail=detail,
                  zoomed=zoomed, crash=crash)  # fmt: skip
    lines = 1 + one.learning + one.speed + one.detail_rows + one.tabs + one.footer
    taken = lines + one.middle_rows + one.crash_rows
    assert taken <= height
    assert height < 3 or height - taken >= 1, "a row of the log stays"
    assert one.panel_columns + one.curves_columns <= width


def test_a_bigger_terminal_never_shows_less() -> None:
    def shown(height: int) -> list[int]:
        one = arrange(80, height, gpus=8, buckets=6, threads=10, detail=0, zoomed=False, crash=0)
        return [one.learning, one.tabs, one.speed, one.footer, one.gpu_rows, one.flow, one.bucket_rows]

    for height in range(1, 60):
        assert all(a <= b for a, b in zip(shown(height), shown(height + 1), strict=True)), height


async def test_dead_and_no_news_differ_in_word_and_shape_without_colours(open_run: Open) -> None:
    firsts = []
    for name in ("lost", "no_news"):
        async with open_run(name, (60, 20)) as pilot:
            firsts.append(screen_text(pilot).split()[:2])
    assert firsts == [["†", "LOST"], ["○", "STALE"]]


async def test_without_news_the_last_known_state_and_the_age_of_each_panel_are_said(open_run: Open) -> None:
    async with open_run("no_news") as pilot:
        shown = screen_text(pilot)
        assert "was running" in shown
        assert shown.count("○ stale") == 3
        assert "nobody on this machine is connected" in shown


async def test_the_traceback_of_the_first_failed_thread_stands_under_its_diagnosis(open_run: Open) -> None:
    async with open_run("dead_thread", (160, 48)) as pilot:
        shown = screen_text(pilot)
        order = [
            "drafter-1", "failed first", "what CUDA graph trees", "why", "do", "crash/thread-drafter-1.json",
            "remote_payload/train/execution.py", "assert torch._C._is_key_in_tls", "AssertionError",
        ]  # fmt: skip
        places = [shown.index(order[0])]
        for text in order[1:]:
            places.append(shown.index(text, places[-1]))
        assert "BrokenBarrierError" not in shown


@pytest.mark.parametrize("name", ["lost", "killed", "dead_thread"])
async def test_a_run_that_died_says_how_to_go_on_from_which_step(name: str, open_run: Open) -> None:
    async with open_run(name) as pilot:
        shown = screen_text(pilot)
        assert "then `dflashctl resume 1129-a7f3` goes on from the checkpoint of step 12,000" in shown
        assert "S stop" not in shown, "there is nothing to stop"


async def test_a_crash_of_a_run_that_is_restarted_by_itself_asks_for_nothing(open_run: Open) -> None:
    run = golden.dead_thread()
    assert run.status is not None and run.mirror is not None
    restart = {"next": golden.NOW + golden.AHEAD + 8, "count": 2, "limit": 5}
    run.status |= {"state": "restarting", "restart": restart}
    run.mirror["state"] = "connected"
    run.mirror["beat"] |= {"supervisor": "alive", "trainer": "none"}
    run.status_age = 1.2
    async with open_run(run) as pilot:
        shown = screen_text(pilot)
        assert shown.startswith(" ⟳ RESTARTING 2/5 in 8s")
        assert "failed first" in shown
        assert "dflashctl resume" not in shown


async def test_an_alarm_is_shown_with_all_of_its_advice_and_the_others_below_it(open_run: Open) -> None:
    run = golden.healthy()
    assert run.progress is not None
    run.progress |= {"alarm": {"reason": "leak_or_misalignment"}, "recompiles": 2}
    said = f"! {TAU_GAP.what} {TAU_GAP.do} Also: {RECOMPILING.what}"
    async with open_run(run) as pilot:
        rows = screen_text(pilot).split("\n")[1:4]
        assert " ".join(row.strip() for row in rows) == said
    async with open_run(run, (60, 20)) as pilot:
        *rows, learning = screen_text(pilot).split("\n")[1:4]
        assert said.startswith(" ".join(row.strip() for row in rows).removesuffix(" …"))
        assert rows[-1].endswith(" …")
        assert learning.startswith("loss ")


async def test_a_stalled_run_says_where_to_look(open_run: Open) -> None:
    async with open_run("stalled") as pilot:
        shown = " ".join(screen_text(pilot).split())
    assert "no progress for 75 s: 3 shows where each thread was. `dflashctl stacks RUN` shows" in shown


def test_an_evaluation_after_the_last_step_says_how_far_it_is_in_the_place_of_an_eta() -> None:
    run = golden.healthy()
    assert run.progress is not None
    run.progress |= {"phase": "evaluating", "eta_s": 0.0}
    run.progress["threads"].append(
        golden._thread("evaluator", "evaluator", "cuda:6", "evaluating 12/64", 12_345, None)
    )
    text = status_line(reduced(run), 100).plain
    assert text.endswith("│ evaluating 12/64")
    assert "ETA" not in text


def test_what_is_loaded_says_since_when() -> None:
    run = golden.first_minute()
    run.supervisor.insert(0, {"kind": "start", "pid": 700, "t": golden.NOW + golden.AHEAD - 27})
    assert learning_line(reduced(run), 80).plain.startswith("loading since 27s: 6 × loading, 2 × waiting")


@given(st.integers(1, 100), st.integers(60, 200))
def test_a_name_of_any_length_is_on_the_first_line_and_keeps_its_ends(length: int, width: int) -> None:
    state = dataclasses.replace(LONG_NAMES, run_id=f"1130{'-long' * length}-a7f3")
    text = status_line(state, width)
    assert text.cell_len <= width
    assert "1130-" in text.plain
    assert "-a7f3" in text.plain
    assert "step 12,345" in text.plain


async def test_a_machine_without_gpus_says_so_and_why(open_run: Open) -> None:
    async with open_run("no_gpu") as pilot:
        shown = screen_text(pilot)
        assert "none: nvidia-smi is not installed" in shown
        assert "stale" not in shown, "it is said once, when the run begins"


async def test_a_gpu_in_trouble_has_its_word_in_the_place_of_its_bar(open_run: Open) -> None:
    async with open_run("gpu_lost") as pilot:
        rows = screen_text(pilot).split("\n")
        assert any("3 T" in row and "LOST" in row and "GPU is lost" in row for row in rows)
        assert any("6 D  HOT " in row and "91C" in row for row in rows)
        assert any("7 D  FULL " in row for row in rows)


async def test_a_busy_gpu_at_its_power_cap_shows_no_word(open_run: Open) -> None:
    async with open_run("sixteen_gpus", (80, 40)) as pilot:
        shown = screen_text(pilot)
        assert "16 × H200" in shown
        assert not any(word in shown for word in ("THROTTLED", "HOT", "IDLE", "FULL"))


async def test_a_loss_that_is_no_number_is_said_in_the_first_lines_and_is_a_gap(open_run: Open) -> None:
    async with open_run("nan_loss", (160, 48)) as pilot:
        shown = screen_text(pilot)
        assert "loss NaN" in shown
        assert "gap" in shown
        assert "The loss or its gradient is not a number." in shown
        await pilot.press("4")
        await pilot.pause()
        assert "not finite at step 12,300, bucket 5, samples 10442, 91007" in screen_text(pilot)


@pytest.mark.slow
async def test_text_of_the_remote_is_shown_as_it_is_and_does_nothing(open_run: Open) -> None:
    async with open_run("hostile_text", (100, 40)) as pilot:
        shown = screen_text(pilot)
        assert "[/home/u]" in shown
        assert "[rank0]: boom [/home/u] [bold]not bold[/bold]" in shown
        assert "red and plain" in shown
        assert "100%|####################| 100/100" in shown
        assert shown.count("/100 [00:01") == 1
        assert "the last line is only ha" in shown
        assert "\x1b" not in shown
        for key, text in (("3", "[/red]"), ("4", "L['x'] [/bold] changed")):
            await pilot.press(key)
            await pilot.pause()
            assert text in screen_text(pilot)
        assert "2 lines hold no record: events.jsonl" in screen_text(pilot)


async def test_a_finished_run_says_what_it_achieved(open_run: Open) -> None:
    async with open_run("finished") as pilot:
        shown = screen_text(pilot)
        assert "loss 10.900 → 2.210  tau 1.02 → 3.31  in 11h16m  checkpoints/step-50000" in shown


async def test_curves_stand_beside_from_100_columns_on(open_run: Open) -> None:
    async with open_run("healthy", (100, 30)) as pilot:
        assert " loss " in screen_text(pilot).split("\n")[3]
        await pilot.resize_terminal(99, 30)
        await pilot.pause()
        await pilot.pause()
        assert " loss " not in screen_text(pilot).split("\n")[3]


async def test_no_color_leaves_no_colour(open_run: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with open_run("dead_thread") as pilot:
        assert pilot.app.no_color
        svg = pilot.app.export_screenshot()
        assert not [colour for colour in OKABE_ITO[1:] if colour.lower() in svg.lower()]


async def test_the_light_theme_uses_only_colours_of_okabe_and_ito_and_greys_and_is_remembered(
    open_run: Open, tmp_path: Path
) -> None:
    async with open_run("nan_loss", (160, 48)) as pilot:
        dark = colours(pilot.app.export_screenshot())
        await pilot.press("ctrl+t")
        await pilot.pause()
        light = colours(pilot.app.export_screenshot())
        for found, paper in ((dark, "#101317"), (light, "#fbfbf8")):
            assert paper in found
            assert not {c for c in found if not is_grey(c)} - {c.lower() for c in OKABE_ITO}
        assert "#56b4e9" in dark, "headings"
        assert "#0072b2" in light, "headings that can be read on paper"
    assert (tmp_path / "state-home/dflashctl/tui-theme").read_text() == "okabe-ito-light\n"
    assert app_of(golden.healthy(), tmp_path / "again").theme == "okabe-ito-light"


def colours(svg: str) -> set[str]:
    """Of the terminal's cells; those of the window around it are none of ours."""
    return {c.lower() for c in re.findall(r"fill[:=]\s*\"?(#[0-9a-fA-F]{6})", svg)} - WINDOW


WINDOW = {"#ff5f57", "#febc2e", "#28c840", "#292929", "#c5c8c6"}


def is_grey(colour: str) -> bool:
    """Whether red, green and blue are nearly the same."""
    parts = [int(colour[n : n + 2], 16) for n in (1, 3, 5)]
    return max(parts) - min(parts) < 24


@pytest.mark.slow
async def test_sixteen_gpus_scroll_and_those_out_of_sight_are_said_when_in_trouble(open_run: Open) -> None:
    run = golden.sixteen_gpus()
    for record in run.gpu[-6:]:
        record["gpus"][golden._uuid(15)] |= {"utilization_share": 0.1}
    async with open_run(run, (80, 24)) as pilot:
        shown = screen_text(pilot)
        assert "rows 1-5 of 8 [ ]  ! IDLE 15" in shown
        assert "Buckets" in shown
        await pilot.press(*["right_square_bracket"] * 9)
        await pilot.pause()
        shown = screen_text(pilot)
        assert "rows 4-8 of 8 [ ] ─" in shown
        assert "15 D  IDLE" in shown
        await pilot.press("left_square_bracket")
        await pilot.pause()
        assert "rows 3-7 of 8" in screen_text(pilot)


async def test_a_gpu_in_slices_says_so_and_has_its_role(open_run: Open) -> None:
    async with open_run("mig") as pilot:
        shown = screen_text(pilot)
        assert "2 × H200 (MIG)" in shown
        assert "0 T  MIG" in shown
        assert "1 D  MIG" in shown


async def test_a_host_of_a_run_of_two_says_which_it_is(open_run: Open) -> None:
    async with open_run("two_hosts") as pilot:
        assert "1129-wide host 2/2" in screen_text(pilot).split("\n")[0]


async def test_what_goes_when_the_screen_gets_narrower_goes_in_the_order_of_its_importance() -> None:
    def parts(width: int) -> list[bool]:
        text = learning_line(state, width).plain
        return [word in text for word in ("loss", "tau", "est", "ema", "best", "gnorm", "lr", "epoch")]

    state = reduced(golden.healthy())
    before = [True] * 8
    assert parts(120) == before
    for width in range(119, 3, -1):
        now = parts(width)
        assert all(b or not n for b, n in zip(before, now, strict=True)), f"something came back at {width}"
        assert now == sorted(now, reverse=True), f"out of order at {width}: {now}"
        before = now


async def test_the_lines_of_a_stale_run_say_so_at_every_width() -> None:
    state = reduced(golden.no_news())
    for width in range(30, 200):
        text = learning_line(state, width)
        assert text.plain.endswith("○ stale 41s")
        assert text.cell_len <= width


async def test_the_states_use_the_colours_of_okabe_and_ito(open_run: Open) -> None:
    async with open_run("healthy") as pilot:
        svg = pilot.app.export_screenshot().lower()
        assert "#009e73" in svg
        assert "#f0e442" in svg
