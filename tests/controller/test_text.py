import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.text import MAX_COLUMNS, LineDecoder, aligned, safe_line, safe_lines


def lines_of(*chunks: bytes) -> list[str]:
    decoder = LineDecoder()
    return [line for chunk in chunks for line in decoder.feed(chunk)] + decoder.finish()


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bPq#0;2;0;0;0\x1b\\after", "after"),
        (b"\x1b[2J\x1b[Hhome", "home"),
        (b"\x1b[?1049h\x1bcreset\x1b(B", "reset"),
        (b"bell\x07 nul\x00 back\x08", "bell nul back"),
        (b"cut off \x1b[38;5", "cut off "),
        (b"cut off \x1b]0;never ended", "cut off "),
        (b"\xc2\x9b31mc1\xc2\x9b0m", "c1"),
        ("evil \u202egnp.exe\u2066".encode(), "evil gnp.exe"),
        (b"a\tb", "a       b"),
        (b"[rank0]: boom [/home/u]", "[rank0]: boom [/home/u]"),
        ("größe → 日本 🚀".encode(), "größe → 日本 🚀"),
        (b"bad \xff\xfe utf", "bad \ufffd\ufffd utf"),
    ],
)
def test_what_could_drive_a_terminal_is_removed(raw: bytes, safe: str) -> None:
    assert lines_of(raw + b"\n") == [safe]
    assert safe_line(raw.decode(errors="replace")) == safe


def test_a_progress_bar_is_one_line_in_its_last_state() -> None:
    bar = b"".join(b"\r%3d%%|####" % n for n in range(101))
    assert lines_of(bar + b"\n", b"next\r\n", b"a\r\rb\r\n") == ["100%|####", "next", "b"]
    decoder = LineDecoder()
    assert decoder.feed(b"\r 10%") == []
    assert decoder.partial == " 10%"
    assert decoder.feed(b"\r 20%\r") == []
    assert decoder.partial == " 20%"
    assert decoder.feed(b"\n") == [" 20%"]


def test_an_unfinished_line_is_given_only_at_the_end_and_restart_forgets_it() -> None:
    decoder = LineDecoder()
    assert decoder.feed(b"one\ntw") == ["one"]
    decoder.restart()
    assert decoder.feed(b"o\nthree") == ["o"]
    assert decoder.finish() == ["three"]
    assert decoder.finish() == []


@given(text=st.text(), sizes=st.lists(st.integers(1, 7), max_size=60))
@settings(max_examples=200, deadline=None)
def test_where_chunks_are_cut_does_not_matter_and_nothing_unsafe_leaves(text: str, sizes: list[int]) -> None:
    data = text.encode("utf-8", "replace")
    chunks, position = [], 0
    for size in sizes:
        chunks.append(data[position : position + size])
        position += size
    found = lines_of(*chunks, data[position:])
    assert found == lines_of(data)
    for line in found:
        assert all(c.isprintable() or c.isspace() or ord(c) >= 0xA0 for c in line)
        assert not {"\n", "\r", "\x1b", "\x07", "\x9b", "\u2028", "\u202e"} & set(line)


def test_a_line_of_a_megabyte_is_capped_and_says_what_is_left_out() -> None:
    chunks = [b"x" * 65536] * 16
    decoder = LineDecoder()
    assert [decoder.feed(chunk) for chunk in chunks] == [[]] * 16
    (line,) = decoder.feed(b"\n")
    assert len(line) == MAX_COLUMNS
    hidden = int(line.split("(+")[1].split(" ")[0])
    assert hidden == (1 << 20) - MAX_COLUMNS
    assert safe_line("y" * 5000).endswith(f"(+{5000 - MAX_COLUMNS} characters)")


def test_a_traceback_keeps_its_lines_and_a_field_becomes_one() -> None:
    assert safe_lines("a\n  b\x1b[1m\n\n") == ["a", "  b", ""]
    assert safe_line("one\ntwo\r\nthree\x00") == "one two three"
    assert safe_line("\ud800lone") == "lone"


@pytest.mark.parametrize("unit", [b"y\n", b"\r 12%|###", b"\x1b[31mx", b"z" * 1000])
def test_a_flood_is_decoded_at_a_pace_that_a_view_can_follow(unit: bytes) -> None:
    chunk = unit * (65536 // len(unit))
    decoder = LineDecoder()
    start = time.process_time()
    for _ in range(64):  # 4 MiB
        decoder.feed(chunk)
    assert time.process_time() - start < 2.0


def test_a_table_has_columns_as_wide_as_their_widest_cell_and_nothing_behind_the_last() -> None:
    assert aligned([("RUN", "STATE", ""), ("a-long-one", "LIVE", "x"), ("b", "", "")]) == [
        "RUN         STATE",
        "a-long-one  LIVE   x",
        "b",
    ]
