import itertools

from hypothesis import given
from hypothesis import strategies as st

from controller.extents import Extents

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(ranges=RANGES, size=st.integers(0, 80))
def test_ranges_are_the_set_of_bytes_that_were_added(ranges: list[tuple[int, int]], size: int) -> None:
    extents, known = Extents(), set[int]()
    for start, length in ranges:
        extents.add(start, start + length)
        known |= set(range(start, start + length))
    assert {byte for start, stop in extents for byte in range(start, stop)} == known
    listed = extents.to_json()
    assert all(a < b < c for (a, b), (c, _) in itertools.pairwise(listed))
    assert Extents.from_json(listed) == extents
    assert extents.end == max(known, default=-1) + 1
    assert extents.missing == extents.end - len(known)
    assert extents.prefix == next(byte for byte in range(100) if byte not in known)
    first = min((byte for byte in known if byte >= size), default=None)
    found = extents.run_from(size)
    assert (found[0] if found else None) == first
    extents.clip(size)
    assert {byte for start, stop in extents for byte in range(start, stop)} == {b for b in known if b < size}


def test_what_is_no_range_in_a_record_is_left_out() -> None:
    record = [[0, 5], [7, 7], [9, 3], [-1, 4], ["a", 2], [1], None, [True, 9], [20, 30]]
    assert Extents.from_json(record).to_json() == [[0, 5], [20, 30]]
    assert Extents.from_json({"a": 1}).to_json() == []
