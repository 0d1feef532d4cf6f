"""Keeps a local copy of a run directory, across any number of lost connections.

One thread: take the lock (or wait until its holder is gone), connect, say what we have, write what comes,
and after any break do it again, with growing waits, for ever. Views never wait for this thread; they read
the folder (`mirror_reader`, `run_reader`). What is true of the connection stands in `mirror.json`, so a
view in another process sees it as well.

A socket that says nothing is no sign of life: the feed beats every 2 s, and 15 s without a byte end the
connection whatever the socket claims. A lost connection says nothing about the run. The mirror ends by
itself in two cases only: the run has ended and every byte of it is here, or the feed refuses for a reason
that trying again cannot change. A copy that is whole and ended asks once whether that is still so, since
another machine may have resumed the run; where nobody answers, not a byte of it changes.
"""

from __future__ import annotations

import collections
import random
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from controller import feed_command
from controller.connecting import Connecting
from controller.errors import (
    AuthenticationError,
    ConnectionLostError,
    DflashctlError,
    HostKeyError,
    LocalStateError,
    PayloadEnvironmentError,
    ProtocolError,
)
from controller.feed_command import FeedCommand
from controller.frames import Append, Beat, FeedRefusedError, Frame, FrameDecoder, Hello, Refusal, Replace
from controller.freed_memory import keep_freed_memory
from controller.health import Limits, judge
from controller.mirror_files import MirrorFiles
from controller.place import Place, Process
from controller.text import safe_line
from controller.timing import Timing, awake_and_asleep
from remote_payload import rundir

LOG_TAIL_BYTES: Final = 1 << 20
"""What is taken first of a train.log that is attached late; the rest only when it is asked for."""

LOG_HEAD_BYTES: Final = 1 << 18
"""What is taken as well of the beginning of a log of another program: there it says what it trains."""

NO_OLDER: Final = "the payload that the run was launched with sends no older bytes of its log"

FILLED_S: Final = 0.1
"""How often readers are told of older bytes while these arrive."""

WHOLE_LOG: Final = "whole-log"
"""In a mirror folder: a file that asks whoever writes the folder to fill the holes of train.log."""

_ONLY_A_PERSON_HELPS = (HostKeyError, AuthenticationError, PayloadEnvironmentError)


def ask_for_whole_log(directory: Path) -> None:
    """Have the holes of train.log filled, now and later, whoever writes the mirror in `directory`.

    Raises LocalStateError.
    """
    try:
        (directory / WHOLE_LOG).touch(0o600)
    except OSError as error:
        raise LocalStateError(f"{directory / WHOLE_LOG}: cannot be written ({error.strerror})") from error


class Mirror:
    """The mirror in the folder `directory`, whose `place.json` says where the run is.

    Any number of these may exist for one folder, in one process or many: one writes, the others wait. Whether
    the holes of train.log are filled stands in the folder (`ask_for_whole_log`). `once` ends after everything
    that the first beat announces has arrived, at the first failure, or when another mirror holds the folder.
    """

    def __init__(
        self,
        directory: Path,
        *,
        place_opener: Callable[[], Place],
        timing: Timing | None = None,
        once: bool = False,
    ) -> None:
        self._directory = directory
        self._opener = place_opener
        self._timing = timing or Timing.from_environment()
        self._once = once
        self._files = MirrorFiles(directory)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._news = threading.Condition()
        self._news_count = 0
        self._thread: threading.Thread | None = None
        self._process: Process | None = None
        self._asked: tuple[int, int | None] | None = None
        self._older_by = 0.0
        self._is_whole = False
        self._is_foreign = False
        self._tries = 0
        self._since: tuple[str, float] = ("", 0.0)
        self._next_save = 0.0
        self._next_telling = 0.0
        self._differences: collections.deque[float] = collections.deque(maxlen=30)
        self.error: DflashctlError | None = None
        """The newest trouble; None while connected."""
        self.holds_lock = False
        """Whether this mirror is the one that writes, and `mirror.json` its own."""
        self.reads_only = False
        """Whether another mirror was seen to hold the folder, and this one waits for its end."""

    def start(self) -> None:
        """Begin, in a thread of its own; after `stop`, begin again."""
        if self._thread is not None:
            assert self._stop.is_set() or not self.running
            self._thread.join()  # of a `stop` that could not wait long enough
        self._stop.clear()
        self._wake.clear()
        self.error = None
        self._files = MirrorFiles(self._directory)
        # A daemon: a place that hangs in its connection must not keep a view from ending.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End, and give the lock back; waits for that at most `timeout` seconds."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def poke(self) -> None:
        """Try to connect now instead of at the end of the wait."""
        self._wake.set()

    @property
    def running(self) -> bool:
        """Whether the thread lives: False when the run is here whole, refused, or after `stop`."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_asking(self) -> bool:
        """Whether it is not yet known if what the folder says of the run's end is still true."""
        return self.running and not (self.holds_lock or self.reads_only) and self.error is None

    @property
    def news_count(self) -> int:
        """Rises whenever something was written or the connection changed."""
        return self._news_count

    def wait_for_news(self, seen: int, timeout: float) -> int:
        """Wait until `news_count` is not `seen` any more, or `timeout` seconds; returns it."""
        with self._news:
            self._news.wait_for(lambda: self._news_count != seen or not self.running, timeout)
            return self._news_count

    def _announce(self) -> None:
        with self._news:
            self._news_count += 1
            self._news.notify_all()

    # the thread

    def _run(self) -> None:
        keep_freed_memory()
        try:
            while not self._stop.is_set():
                try:
                    if self._files.lock():
                        self.reads_only = False
                        self._hold()
                        return
                    self.error = None
                    self.reads_only = True
                    if self._once:
                        return
                    self._stop.wait(self._timing.lock_s)
                except LocalStateError as error:  # a full disk, a read-only folder: they may pass
                    self.error = error
                    self._announce()
                    self._files.close()
                    self._files = MirrorFiles(self._directory)
                    self.holds_lock = False
                    if self._once:
                        return
                    self._stop.wait(self._timing.backoff[-1])
        finally:
            self._files.close()
            self.holds_lock = False
            self._announce()

    def _hold(self) -> None:
        """All that the writer of the folder does, until there is nothing more to do."""
        left = self._files.load()
        for key in ("last_heard", "beat", "clock_difference_s"):  # still the newest that is known
            self._files.connection[key] = left.get(key)
        readable = rundir.read_whole(self._directory / rundir.STATUS) is not None  # else it is fetched anew
        lacks = self._wants_whole_log() and self._has_holes()
        self._is_whole = left.get("state") == "ended" and readable and not lacks
        if not self._is_whole:
            self._say("connecting")
            self.holds_lock = True
        while not self._stop.is_set():
            try:
                if self._follow():
                    return
                continue
            except LocalStateError:
                raise
            except DflashctlError as error:
                trouble = error
            except Exception as error:  # a defect: say so, and go on as after any break
                trouble = ConnectionLostError(
                    f"unexpected {type(error).__name__}: {error}", "this is a defect of dflashctl"
                )
            if self._is_whole:
                self.error = trouble
                return
            if self._once or isinstance(trouble, FeedRefusedError):
                self._say("refused" if isinstance(trouble, FeedRefusedError) else "reconnecting", trouble)
                return
            self._pause(trouble)

    def _pause(self, error: DflashctlError) -> None:
        timing = self._timing
        self._tries += 1
        if isinstance(error, _ONLY_A_PERSON_HELPS):
            state, wait = "refused", timing.refused_s
        else:
            state = "reconnecting"
            wait = timing.backoff[min(self._tries, len(timing.backoff)) - 1]
        wait *= 1 + timing.jitter * random.random()
        self._wake.clear()
        if self._stop.is_set():
            return
        self._say(state, error, next_try=time.time() + wait)
        until = time.monotonic() + wait
        while (left := until - time.monotonic()) > 0:
            if self._wake.wait(min(left, timing.beat_s)):
                return
            self._files.save()  # a sign of life of the writer

    def _say(self, state: str, error: DflashctlError | None = None, next_try: float | None = None) -> None:
        """Write `mirror.json` with a new state of the connection."""
        if state != self._since[0]:
            self._since = (state, time.time())
        self.error = error
        self._files.connection |= {
            "state": state,
            "complete": state == "ended",
            "since": round(self._since[1], 3),
            "tries": self._tries,
            "next_try": None if next_try is None else round(next_try, 3),
            "error": safe_line(error.message) if error else None,
            "hint": safe_line(error.hint) if error and error.hint else None,
        }
        self._save()

    def _save(self) -> None:
        self._files.save()
        self._next_save = time.monotonic() + self._timing.beat_s
        self._announce()

    def _wants_whole_log(self) -> bool:
        return (self._directory / WHOLE_LOG).exists()

    def _has_holes(self) -> bool:
        return bool(self._files.holes(rundir.TRAIN_LOG)[1])

    def _ask_for_holes(self) -> None:
        """Ask once a connection for the log's older bytes, as far as they are wanted."""
        stop = None if self._wants_whole_log() else LOG_HEAD_BYTES if self._is_foreign else 0
        generation, ranges = self._files.holes(rundir.TRAIN_LOG, stop)
        if ranges and self._asked != (generation, stop):
            self._asked = (generation, stop)
            self._older_by = time.monotonic() + self._timing.fill_s
            fill = {rundir.TRAIN_LOG: {"generation": generation, "ranges": ranges}}
            assert self._process is not None
            self._process.send(rundir.encode({"fill": fill}))
        elif ranges and time.monotonic() > self._older_by:
            self._files.connection["no_older"] = NO_OLDER

    def _follow(self) -> bool:
        """One connection, from its making to its end; True when nothing more is to be done."""
        nonce = secrets.token_hex(16)
        feed = FeedCommand.of(self._directory, nonce, self._timing)
        self._is_foreign = feed.is_foreign
        with Connecting(self._opener, feed.argv) as connecting:
            while not connecting.wait(self._timing.poll_s):
                if self._stop.is_set():
                    return True
                if time.monotonic() >= self._next_save and not self._is_whole:
                    self._save()
            self._process, self._asked = connecting.process, None
            self._files.connection["no_older"] = None
            request = {"have": self._files.have(), "log_tail": LOG_TAIL_BYTES}
            self._process.send(rundir.encode(request))
            return self._pump(self._process, FrameDecoder(nonce), feed.serves)

    def _pump(self, process: Process, decoder: FrameDecoder, serves: str) -> bool:
        timing = self._timing
        now = awake_and_asleep()
        next_ping = now + timing.ping_s
        dead_at = now + timing.hello_s
        greeted = False
        while not self._stop.is_set():
            data = process.receive(timing.poll_s)
            now = awake_and_asleep()
            if data == b"":
                raise feed_command.ended(process, decoder)
            if data and greeted:
                dead_at = now + timing.silence_s
            elif now >= dead_at:
                raise feed_command.silent(timing, decoder, greeted)
            if data:
                for frame in decoder.feed(data):
                    if isinstance(frame, Hello):
                        if frame.run != serves:
                            said = safe_line(frame.run)
                            raise FeedRefusedError(f"the feed serves {said!r}, not {serves!r}")
                        greeted = True
                        dead_at = now + timing.silence_s
                    self._files.connection["last_heard"] = round(time.time(), 3)
                    if self._take(frame, greeted):
                        return True
                if not self._files.filled:  # of older bytes readers are told below
                    self._announce()
            if now >= next_ping:
                process.send(b"{}\n")
                next_ping = now + timing.ping_s
            if time.monotonic() >= self._next_save and not self._is_whole:
                self._save()
            elif self._files.filled and time.monotonic() >= self._next_telling:
                self._next_telling = time.monotonic() + FILLED_S
                self._files.save(sync=False)
                self._announce()
        return True

    def _take(self, frame: Frame, greeted: bool) -> bool:
        """Act on one frame; True when it was the last one needed."""
        match frame:
            case Append():
                self._files.append(frame)
                if self._files.filled:
                    self._older_by = time.monotonic() + self._timing.fill_s
                    self._files.connection["no_older"] = None
            case Replace():
                self._files.replace(frame)
            case Hello():
                self._differences.clear()
                self._is_whole = False
                self._say("connected")
                self.holds_lock = True
            case Refusal():
                message = f"the feed says: {safe_line(frame.text)}"
                if greeted:
                    raise ProtocolError(message)
                raise FeedRefusedError(message, "what was copied of the run stays in its mirror folder")
            case Beat():
                return self._take_beat(frame)
        return False

    def _take_beat(self, beat: Beat) -> bool:
        self._tries = 0
        now = time.time()
        if beat.t is not None:
            # What a beat waited on its way makes the container look slow: the least late one is nearest.
            self._differences.append(beat.t - now)
            self._files.connection["clock_difference_s"] = round(max(self._differences), 3)
        self._files.connection |= {"beat": beat.record, "tries": 0}
        self._files.note(beat)
        self._ask_for_holes()
        whole = self._wants_whole_log() and not self._files.connection["no_older"]
        complete = self._files.complete(beat, whole_log=whole)
        self._files.connection["complete"] = complete
        if complete and self._over(beat):
            self._say("ended")
            return True
        self._save()
        return complete and self._once

    def _over(self, beat: Beat) -> bool:
        """Whether nothing will follow: nobody is there any more, and how it ended is known."""
        if "alive" in (beat.supervisor, beat.trainer):
            return False
        health = judge(
            status=rundir.read_whole(self._directory / rundir.STATUS),
            exit_record=rundir.read_whole(self._directory / rundir.EXIT),
            mirror=self._files.connection,
            progress_t=None,
            now=time.time(),
            limits=Limits().scaled(self._timing.scale),
        )
        return health.word.ended
