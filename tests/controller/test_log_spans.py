"""The lines of a log against the plainest way to find them, for random bytes, splits and gaps."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller import log_scan, log_spans
from controller.extents import Extents
from controller.log_scan import Containing, LogScan, matching
from controller.log_spans import Span, row_of, span_start, spans_before, spans_from

LOGS = st.lists(
    st.sampled_from([b"\n", b"a", b"step 1", b"\r", b"\x1b[31m", b"\xc3\xa9", b"\xff", b"error"])
).map(b"".join)


@st.composite
def logs_with_gaps(draw: st.DrawFn) -> tuple[bytes, Extents]:
    data = draw(LOGS)
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=4)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    return data, Extents([(a, b) for a, b in pairs]) if draw(st.booleans()) else Extents([(0, len(data))])


def reader(data: bytes, extents: Extents) -> log_spans.Read:
    def read(start: int, stop: int) -> bytes:
        assert not start < stop or any(a <= start and stop <= b for a, b in extents), (
            "a byte that is not here"
        )
        return data[start:stop]

    return read


def plain(data: bytes, extents: Extents) -> list[Span]:
    spans, at = [], 0
    for start, stop in extents:
        if start > at:
            spans.append(Span(at, start, gap=True))
        at = start
        for line in data[start:stop].split(b"\n"):
            length = min(len(line) + 1, stop - at)
            if length:
                spans.append(Span(at, at + length))
            at += length
    return spans


@given(logs_with_gaps(), st.integers(1, 9), st.integers(1, 5))
def test_lines_and_gaps_are_those_of_the_plainest_reading_in_both_directions_and_any_portion(
    log: tuple[bytes, Extents], block: int, most: int
) -> None:
    data, extents = log
    expected = plain(data, extents)
    read = reader(data, extents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_spans, "_BLOCK", block)
        assert spans_from(read, extents, 0, 10**6) == expected
        assert spans_before(read, extents, extents.end, 10**6) == expected
        for number, span in enumerate(expected):
            assert spans_from(read, extents, span.start, most) == expected[number : number + most]
            assert (
                spans_before(read, extents, span.stop, most)
                == expected[max(0, number + 1 - most) : number + 1]
            )
            for offset in (span.start, span.stop - 1):
                assert span_start(read, extents, offset) == span.start


@given(LOGS, st.integers(1, 4), st.integers(1, 8))
def test_a_stretch_without_a_newline_is_cut_and_still_no_byte_is_lost_or_twice(
    data: bytes, block: int, longest: int
) -> None:
    extents = Extents([(0, len(data))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_spans, "_BLOCK", block)
        patch.setattr(log_spans, "LONGEST", longest)
        for spans in (
            spans_from(reader(data, extents), extents, 0, 10**6),
            spans_before(reader(data, extents), extents, len(data), 10**6),
        ):
            assert b"".join(data[s.start : s.stop] for s in spans) == data
            assert all(s.stop - s.start < longest + 2 * 4**8 for s in spans)


@given(logs_with_gaps(), st.integers(1, 9))
def test_a_scan_finds_the_matching_whole_lines_and_no_others(log: tuple[bytes, Extents], size: int) -> None:
    data, extents = log
    pattern = re.compile("step|é|aa")
    read = reader(data, extents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_scan, "SLICE", size)
        scan = LogScan(pattern.search)
        for _ in range(len(data) * 20 + 50):
            if not scan.step(read, extents):
                break
        assert scan.done
    whole = [
        span
        for span in plain(data, extents)
        if not span.gap
        and data[span.stop - 1 : span.stop] == b"\n"
        and (span.start == 0 or data[span.start - 1 : span.start] == b"\n")
        and (span.start == 0 or not any(a == span.start for a, _ in extents))
    ]
    expected = [span.start for span in whole if pattern.search(row_of(read, span).text)]
    assert list(scan.found) == expected


@given(LOGS, st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 3)), max_size=5))
def test_a_scan_of_a_log_that_arrives_in_any_order_finds_what_a_scan_of_the_whole_finds(
    data: bytes, arrivals: list[tuple[int, int, int]]
) -> None:
    whole, parts = LogScan(re.compile("step|a").search), LogScan(re.compile("step|a").search)
    all_of_it, here = Extents([(0, len(data))]), Extents()
    while whole.step(reader(data, all_of_it), all_of_it):
        pass
    for start, length, steps in arrivals:
        here.add(min(start, len(data)), min(start + length, len(data)))
        for _ in range(steps):
            parts.step(reader(data, here), here)
    here.add(0, len(data))
    while parts.step(reader(data, here), here):
        pass
    assert parts.found == whole.found


def test_of_a_very_long_line_its_beginning_is_kept_and_of_a_bar_its_newest_state() -> None:
    line = b"x" * 1_000_000 + b"\n"
    row = row_of(lambda a, b: line[a:b], Span(0, len(line)))
    assert len(row.text) == 4096
    assert row.text.endswith(" characters)")
    bar = b"".join(b"\r%3d%%|%s" % (n % 100, b"#" * 50) for n in range(2000)) + b"\n"
    assert row_of(lambda a, b: bar[a:b], Span(0, len(bar))).text.startswith(" 99%|###")


@given(LOGS, st.text("astep 1éE\n", min_size=1, max_size=3))
def test_lines_that_contain_a_text_are_those_of_the_slow_way(data: bytes, text: str) -> None:
    data += b"\n"
    quick = matching(data, Containing(text))
    slow = matching(data, lambda line: text.lower() in line.lower())
    assert quick == slow
