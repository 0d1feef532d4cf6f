"""Where blocks begin: what is eligible, what is drawn, and who gets how many slots."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remote_payload.train.anchors import RANDOM, UNIFORM, candidates, draw, eligible_places, share_slots

masks = st.lists(st.booleans(), min_size=1, max_size=60).map(np.asarray)
counts = st.lists(st.integers(0, 60), min_size=1, max_size=12)


def places_of(supervised: np.ndarray, *ends: int) -> np.ndarray:
    """Eligible places of a row whose documents end before `ends`; without any it is one document."""
    last = np.zeros(len(supervised), np.bool_)
    last[[end - 1 for end in ends or (len(supervised),)]] = True
    return eligible_places(supervised, last)


@given(masks, st.data())
def test_eligible_are_supervised_tokens_whose_next_is_supervised_and_of_their_own_document(
    supervised: np.ndarray, data: st.DataObject
) -> None:
    cuts = data.draw(st.sets(st.integers(1, len(supervised))))
    ends = sorted(cuts | {len(supervised)})
    pairs = enumerate(itertools.pairwise(supervised.tolist()))
    assert places_of(supervised, *ends).tolist() == [
        place for place, (this, after) in pairs if this and after and place + 1 not in ends
    ]


@given(masks, st.integers(0, 2**31))
def test_random_anchors_may_be_any_eligible_place(supervised: np.ndarray, seed: int) -> None:
    places = places_of(supervised)
    assert candidates(places, RANDOM, 4).tolist() == places.tolist()


@settings(max_examples=200)
@given(masks, st.integers(2, 9))
@example(np.asarray([True] * 9), 4)
@example(np.asarray([True] * 5 + [False] + [True] * 6), 3)
def test_uniform_anchors_cut_each_supervised_stretch_into_blocks_that_do_not_overlap(
    supervised: np.ndarray, block: int
) -> None:
    expected = []
    place = 0
    for value, run in itertools.groupby(supervised.tolist()):
        length = len(list(run))
        # The last token of a stretch predicts nothing, so no block begins there.
        expected += [place + k for k in range(0, length - 1, block)] if value else []
        place += length
    assert candidates(places_of(supervised), UNIFORM, block).tolist() == expected


@given(st.integers(0, 60), st.integers(0, 2**31), st.data())
def test_a_draw_is_so_many_different_places_in_order_and_more_of_them_only_add(
    size: int, seed: int, data: st.DataObject
) -> None:
    places = np.arange(7, 7 + size)
    fewer = data.draw(st.integers(0, size))
    more = data.draw(st.integers(fewer, size))
    drawn = [draw(places, count, (seed, 1, 2)).tolist() for count in (fewer, more)]
    assert [len(each) for each in drawn] == [fewer, more]
    assert all(each == sorted(set(each)) for each in drawn)
    assert set(drawn[0]) <= set(drawn[1]) <= set(places.tolist())


def test_what_is_drawn_is_a_function_of_seed_epoch_and_sample_alone() -> None:
    places = np.arange(40)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = [draw(places, 20, key).tolist() for key in keys]
    draw(places, 20, (9, 9, 9))
    assert drawn == [draw(places, 20, key).tolist() for key in keys]
    assert len({tuple(each) for each in drawn}) == 4


def test_every_eligible_place_is_as_likely_as_any_other() -> None:
    places, taken, epochs = np.arange(5, 36), 6, 3000
    count = np.zeros(31)
    for epoch in range(epochs):
        count[draw(places, taken, (0, epoch, 7)) - 5] += 1
    share = taken / 31
    deviation = math.sqrt(epochs * share * (1 - share))
    assert np.all(np.abs(count - epochs * share) < 4.5 * deviation)
    chi_square = float(((count - epochs * share) ** 2 / (epochs * share * (1 - share))).sum())
    assert chi_square < 70  # 30 degrees of freedom; 70 comes by chance once in 20,000 keys


@given(counts, st.integers(0, 200))
def test_sharing_gives_away_every_slot_that_somebody_can_use_and_favours_nobody(
    candidates: list[int], slots: int
) -> None:
    shares = share_slots(candidates, slots)
    assert all(0 <= share <= wanted for share, wanted in zip(shares, candidates, strict=True))
    assert sum(shares) == min(slots, sum(candidates))
    unsatisfied = [share for share, wanted in zip(shares, candidates, strict=True) if share < wanted]
    if unsatisfied:  # nobody who could use more has two less than anybody else
        assert max(shares) - min(unsatisfied) <= 1


@given(counts, st.integers(0, 200))
def test_every_document_gets_its_fair_share_of_the_slots_or_all_it_can_use(
    candidates: list[int], slots: int
) -> None:
    fair = slots // len(candidates)
    for share, wanted in zip(share_slots(candidates, slots), candidates, strict=True):
        assert share >= min(wanted, fair)


def test_a_short_document_beside_long_ones_is_not_starved() -> None:
    """speculators #1071: 187 supervised tokens got 28 of a row's anchors, counted per row."""
    assert share_slots([187, 3000, 3000, 3000], 512) == [128, 128, 128, 128]
    assert share_slots([20, 3000, 3000, 3000], 512) == [20, 164, 164, 164]
