"""The log: its end while following, and perfectly still while somebody reads.

While the view does not follow, new lines wait outside it, so that nothing slides under a reader's eyes even
when the buffer is full; the tab line says how many wait. Only rows on the screen are styled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from controller.tui.lines import LineView, draw
from controller.tui.log_tail import LogNews
from controller.tui.palette import BAD, GOOD, LABEL, PLAIN, TAB_ON, WARN

KEPT = 10_000
"""Lines held; older ones are in the mirror."""

_BAD_LINE = re.compile(r"\b(error|exception|traceback|fatal|killed|out of memory|nan)\b|\w+Error\b", re.I)
_WARN_LINE = re.compile(r"\b(warn(ing)?|deprecated|skipp(ed|ing)|retry(ing)?|recompil\w+)\b", re.I)
_GOOD_LINE = re.compile(r"\b(ready|checkpoint|finished|evaluation)\b", re.I)


class LogView(LineView):
    """The log's lines, from `LogNews`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("end,G", "follow_end", "end", show=False),
        Binding("home,g", "to_start", "start", show=False),
    ]

    class FollowChanged(Message):
        """The view began to follow, or stopped."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._buffer: list[str] = []
        self._partial = ""
        self._waiting: list[str] = []
        self._pattern: re.Pattern[str] | None = None
        self._following = True

    @property
    def following(self) -> bool:
        """Whether the view stays at the end."""
        return self._following

    @property
    def waiting(self) -> int:
        """New lines that are held back for a reader."""
        return len(self._waiting)

    @property
    def text_lines(self) -> Sequence[str]:
        """The lines held, oldest first."""
        return [*self._buffer, self._partial] if self._partial else self._buffer

    def add(self, news: Sequence[LogNews]) -> None:
        """Take what a reader found; while not following it waits outside the view."""
        new: list[str] = []
        for one in news:
            if one.restarted:
                new.append("⋯ the log began anew here ⋯")
            if one.missing_bytes:
                new.append(f"⋯ {one.missing_bytes:,} bytes are not here: dflashctl logs ⋯")
            if one.skipped_bytes:
                amount = one.skipped_bytes / 2**20
                new.append(f"⋯ {amount:.1f} MiB came faster than a screen shows: dflashctl logs ⋯")
            new.extend(one.lines)
            self._partial = one.partial
        self._waiting = [*self._waiting, *new][-KEPT:]
        if self._following:
            self._take_waiting()

    def set_following(self, on: bool) -> None:
        """Follow the end, or stay where we are."""
        if on == self._following:
            return
        self._following = on
        if on:
            self._take_waiting()
        self.post_message(self.FollowChanged())

    def _take_waiting(self) -> None:
        self._buffer = [*self._buffer, *self._waiting][-KEPT:]
        self._waiting = []
        self._resize()
        self._to_end()
        self.refresh()

    def _resize(self) -> None:
        lines = self.text_lines
        width = max((len(text) for text in lines[-500:]), default=0)
        self.virtual_size = Size(min(width, 4096), len(lines))

    def _to_end(self) -> None:
        """Scroll to the end once the new size is known."""
        self.call_after_refresh(self._scroll_if_following)

    def _scroll_if_following(self) -> None:
        if self._following:
            self.scroll_end(animate=False, immediate=True)

    def on_resize(self) -> None:
        """A follower stays at the end of another size."""
        self._scroll_if_following()

    # reading

    def action_follow_end(self) -> None:
        """Go to the end and follow it."""
        self.set_following(True)
        self.scroll_end(animate=False, immediate=True)

    def action_to_start(self) -> None:
        """Go to the oldest line held."""
        self.set_following(False)
        self.scroll_home(animate=False, immediate=True)

    def watch_scroll_y(self, old: float, new: float) -> None:
        """A reader who scrolls up is left alone from then on; one who comes to the end follows again."""
        super().watch_scroll_y(old, new)
        if new < old and self._following and new < self.max_scroll_y:
            self.set_following(False)
        elif new > old and not self._following and new >= self.max_scroll_y and not self._pattern:
            self.set_following(True)

    # searching

    def search(self, text: str) -> int:
        """Mark what the regular expression `text` finds; a wrong one is taken literally.

        Returns how many lines match, and goes to the last of them.
        """
        if not text:
            self._pattern = None
            self.refresh()
            return 0
        try:
            self._pattern = re.compile(text, re.I)
        except re.error:
            self._pattern = re.compile(re.escape(text), re.I)
        found = self.matches()
        if found:
            self._go_to(found[-1])
        self.refresh()
        return len(found)

    def matches(self) -> list[int]:
        """Numbers of the lines that match."""
        if self._pattern is None:
            return []
        search = self._pattern.search
        return [number for number, text in enumerate(self.text_lines) if search(text)]

    def next_match(self, *, back: bool) -> None:
        """Go to the next match below, or above."""
        top = self.scroll_offset.y
        found = self.matches()
        ahead = [n for n in found if (n < top if back else n > top)]
        if ahead:
            self._go_to(ahead[-1] if back else ahead[0])

    def _go_to(self, number: int) -> None:
        self.set_following(False)
        self.scroll_to(y=max(0, number), animate=False, immediate=True)

    # drawing

    def visible_text(self) -> str:
        """What is on the screen, for copying."""
        top = self.scroll_offset.y
        return "\n".join(self.text_lines[top : top + self.size.height])

    def render_line(self, y: int) -> Strip:
        """Row `y` of what is visible."""
        left, top = self.scroll_offset
        lines = self.text_lines
        number = top + y
        text: Text | None = None
        if number < len(lines):
            text = self._styled(lines[number])
        elif not lines and y == 0:
            text = Text("  the log is empty so far", style=LABEL, end="", no_wrap=True)
        return draw(self, text, left)

    def _styled(self, content: str) -> Text:
        if content.startswith("⋯"):
            style = WARN
        elif _BAD_LINE.search(content):
            style = BAD
        elif _WARN_LINE.search(content):
            style = WARN
        elif _GOOD_LINE.search(content):
            style = GOOD
        else:
            style = PLAIN
        text = Text(content, style=style, no_wrap=True, end="")
        if self._pattern is not None:
            text.highlight_regex(self._pattern, TAB_ON)
        return text
