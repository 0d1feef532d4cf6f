"""Colours and layout of log lines, for any text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from controller.log_spans import Row
from controller.text import newest_state
from controller.tui.ansi import coloured
from controller.tui.lines import hanging, line, shortened
from controller.tui.log_layout import Layout, index_of, pieces
from controller.tui.log_prefix import prefix_of
from controller.tui.log_style import styled
from controller.tui.palette import OKABE_ITO, PLAIN
from controller.tui.traceback_lines import traceback_lines

PARTS = st.sampled_from(
    ["\x1b[31m", "\x1b[0m", "\x1b[1;44m", "\x1b[38;5;300m", "\x1b[38;2;1;2;3m", "\x1b[999999999m", "\x1b[",
     "\x1b", "\x1b]0;x\x07", "\t", "a", "é", "宽", "[/b]", "error", "\x07", "rank0: ", " "]
)  # fmt: skip
LINES = st.lists(PARTS | st.text(max_size=3)).map("".join)


@given(LINES)
def test_colours_change_no_character_and_let_no_code_through(line: str) -> None:
    row = Row(0, len(line), newest_state(line.replace("\n", " ")))
    text = coloured(row, PLAIN)
    if text is not None:
        assert text.plain == row.text
        for span in text.spans:
            assert not (span.style.blink or span.style.conceal or span.style.link)  # type: ignore[union-attr]
    shown = styled(row, None)
    assert shown.plain == row.text
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in shown.plain)


def test_the_sixteen_colours_are_of_the_set_of_okabe_and_ito_or_greys() -> None:
    for code in (*range(31, 37), *range(91, 97)):
        text = coloured(Row(0, 1, f"\x1b[{code}mx"), PLAIN)
        assert text is not None
        colour = text.spans[0].style.color.name  # type: ignore[union-attr]
        assert colour.upper() in OKABE_ITO


@given(LINES, st.integers(2, 40))
@example("\U0001f3fb", 2)  # a skin's colour alone takes no cell
def test_the_pieces_of_a_wrapped_line_are_the_line_and_fit(line: str, columns: int) -> None:
    text = Row(0, 1, newest_state(line.replace("\n", " "))).text
    parts = pieces(text, columns)
    assert "".join(text[a:b] for a, b in parts) == text
    assert all(cell_len(text[a:b]) <= columns for a, b in parts)


@given(st.text("ab宽🙂é-", max_size=60), st.integers(3, 40))
def test_a_shortened_name_fits_and_keeps_its_ends(name: str, columns: int) -> None:
    short = shortened(name, columns)
    assert cell_len(short) <= columns
    if cell_len(name) <= columns:
        assert short == name
    else:
        start, end = short.split("…")
        assert name.startswith(start)
        assert name.endswith(end)


@given(st.text("ab宽🙂é ", max_size=200), st.integers(24, 60))
def test_folded_text_fits_and_loses_no_word(text: str, width: int) -> None:
    rows = [row.plain for row in hanging(line("! "), line(text), width)]
    assert all(cell_len(row) <= width for row in rows)
    assert "".join(row[2:] for row in rows).replace(" ", "") == text.replace(" ", "")
    assert [row[:2] for row in rows] == ["! ", *["  "] * (len(rows) - 1)]


@given(st.lists(LINES, min_size=1, max_size=8), st.integers(2, 20) | st.none(), st.integers(1, 12), st.data())
def test_moving_down_and_up_again_comes_back_and_rows_follow_one_another(
    lines: list[str], columns: int | None, height: int, draws: st.DataObject
) -> None:
    rows = [Row(n * 10, n * 10 + 10, line.replace("\n", " ")) for n, line in enumerate(lines)]
    layout = Layout(rows, columns)
    every = layout.first((0, 0), 10**6)
    assert [n for n, _ in every] == sorted(n for n, _ in every)
    assert layout.last(height) == every[-height:]
    start = draws.draw(st.sampled_from(every))
    by = draws.draw(st.integers(0, 30))
    at = every.index(start)
    assert layout.moved(start, by) == every[min(len(every) - 1, at + by)]
    assert layout.moved(start, -by) == every[max(0, at - by)]
    assert layout.first(start, height) == every[at : at + height]
    assert all(
        index_of(rows, row.start) == n and index_of(rows, row.stop - 1) == n for n, row in enumerate(rows)
    )


@given(LINES, st.integers(20, 80))
def test_any_traceback_is_shown_whole(text: str, width: int) -> None:
    lines = traceback_lines(
        f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    {text}\nE', width
    )
    assert all(len(line) <= width for line in lines)
    assert lines[-1].plain == "E"


def test_a_prefix_is_found_where_loggers_put_it_and_nowhere_else() -> None:
    for text, name in (
        ("[rank0]: boom", "rank0"), ("[rank12]:[W930 12:00:00.1] x", "rank12"), ("[default1]: x", "default1"),
        ("12:00:01 drafter-1: x", "drafter-1"), ("2026-11-30 00:51:07,123 [rank0]: x", "rank0"),
        ("Target 3 on cuda:3...", "target-3"), ("the rank 0 said", ""), ("ranking is", ""),
        ("targets: 3", ""), ("step 12", ""),
    ):  # fmt: skip
        assert prefix_of(text) == name, text
