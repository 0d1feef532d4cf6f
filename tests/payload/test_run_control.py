"""What flows between threads: in order, bounded, and ended at once by a failure."""

from __future__ import annotations

import random
import threading
import time

from remote_payload.train.run_control import Aborted, Handover, OrderedQueue, RunControl


def test_a_queue_gives_items_by_number_whatever_order_they_came_in_and_holds_back_who_is_too_far_ahead() -> (
    None
):
    queue: OrderedQueue[int] = OrderedQueue(3, RunControl())
    numbers = list(range(60))
    random.Random(0).shuffle(numbers)

    def put(mine: list[int]) -> None:
        for number in sorted(mine):
            queue.put(number, number * 10)

    threads = [threading.Thread(target=put, args=(numbers[k::4],), daemon=True) for k in range(4)]
    for thread in threads:
        thread.start()
    found = []
    for _ in range(60):
        assert len(queue) <= 3
        found.append(queue.get())
    assert found == [n * 10 for n in range(60)]
    queue.close()
    assert queue.get() is None


def test_whoever_waits_on_a_queue_or_a_handover_is_woken_by_a_failure() -> None:
    control = RunControl()
    empty: OrderedQueue[int] = OrderedQueue(1, control)
    full: OrderedQueue[int] = OrderedQueue(1, control)
    full.put(0, 0)
    handover: Handover[int] = Handover(control)
    woken = []

    def wait(what: object) -> None:
        try:
            {"get": empty.get, "put": lambda: full.put(1, 1), "wait": handover.wait}[str(what)]()
        except Aborted:
            woken.append(what)

    threads = [threading.Thread(target=wait, args=(what,), daemon=True) for what in ("get", "put", "wait")]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert woken == []
    control.abort()
    for thread in threads:
        thread.join(60)
    assert sorted(map(str, woken)) == ["get", "put", "wait"]


def test_a_closed_queue_lets_putters_go_and_drops_what_nobody_will_fetch() -> None:
    queue: OrderedQueue[int] = OrderedQueue(1, RunControl())
    queue.put(0, 0)
    thread = threading.Thread(target=queue.put, args=(1, 1), daemon=True)
    thread.start()
    queue.close()
    thread.join(60)
    assert not thread.is_alive()
    queue.put(9, 9)
    assert queue.get() == 0 and queue.get() is None


def test_who_registers_after_the_failure_is_woken_too() -> None:
    control = RunControl()
    control.abort()
    woken = []
    control.on_abort(lambda: woken.append(True))
    assert woken == [True] and control.aborted
