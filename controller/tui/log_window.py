"""A window on a log: it stands at a byte, the beginning of its top line, and never slides.

It has the lines around that place (`LogPage`) and asks its feed for others when it comes near their edge. So
nothing moves under a reader's eyes, whatever arrives below or above, and a log of gigabytes is no slower than
one of a screen. Only rows on the screen are styled.
"""

from __future__ import annotations

import re
from pathlib import Path

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from controller.tui import log_layout
from controller.tui.line_widgets import base_style, draw
from controller.tui.lines import line
from controller.tui.log_feed import LogFeed
from controller.tui.log_page import LogPage
from controller.tui.log_style import styled
from controller.tui.palette import LABEL, RULE_STYLE

_SELECTED = Style(reverse=True)
_THUMB = Style(color="#5A616B")
_SIDE_COLUMNS = 8


class LogWindow(Widget, can_focus=True):
    """The log of one run; `open` says which."""

    DEFAULT_CSS = "LogWindow { height: 1fr; }"

    class Changed(Message):
        """What the tab line says of the log has changed."""

    class OlderWanted(Message):
        """Bytes that are not here were asked for: somebody has to connect."""

    class Said(Message):
        """Something is to be told."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Came(Message):
        """A page came from the feed's thread."""

        def __init__(self, page: LogPage) -> None:
            super().__init__()
            self.page = page

        def can_replace(self, message: Message) -> bool:
            """A newer page replaces one that says nothing of its own."""
            return isinstance(message, LogWindow.Came) and self.page.goto is None and not self.page.note

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._feed: LogFeed | None = None
        self._log_name = "log"
        self._page = LogPage()
        self._ticket = 0
        self._following = True
        self._top = (0, 0)
        """Where the top line begins, and which of its wrapped rows is the first; -1: the gap above it, which
        may be filled meanwhile."""
        self._left = 0
        self._wrap = False
        self._mark: int | None = None
        """The line that a search found last."""
        self._selected: tuple[int, int] | None = None
        """The line where a selection began, and the one to which it reaches."""
        self._pattern: re.Pattern[str] | None = None
        self._filter = ""
        self._laid_out: list[log_layout.Place] = []

    def open(self, directory: Path, *, threaded: bool) -> None:
        """Show the log of the run that is mirrored in `directory`, from its end."""
        if self._feed is not None:
            self._feed.stop()
        self._page, self._mark, self._selected = LogPage(), None, None
        self._pattern, self._filter, self._following = None, "", True
        of_run = directory.parent.parent.name == "runs"  # runs/<run>/<host>, logs/<host>/<log>
        self._log_name = directory.parent.name if of_run else directory.name
        self._feed = LogFeed(
            directory,
            (lambda page: self.post_message(self.Came(page))) if threaded else self._take,
            threaded=threaded,
        )
        self._feed.start()

    def rest(self, resting: bool) -> None:
        """Whether nothing more is expected of this log: it is looked at rarely then."""
        if self._feed is not None:
            self._feed.resting = resting

    def tick(self) -> None:
        """Without a thread: look for new bytes now."""
        if self._feed is not None:
            self._feed.tick()

    def on_unmount(self) -> None:
        """End the thread."""
        if self._feed is not None:
            self._feed.stop()

    @property
    def following(self) -> bool:
        """Whether the view stays at the end."""
        return self._following

    @property
    def top(self) -> int:
        """The byte where the top line begins."""
        self._lay_out()
        return self._page.rows[self._laid_out[0][0]].start if self._laid_out else 0

    # pages

    @on(Came)
    def _on_came(self, message: Came) -> None:
        self._take(message.page)

    def _take(self, page: LogPage) -> None:
        """Show a page, unless it answers what is no longer asked."""
        if page.note:
            self.post_message(self.Said(page.note))
        if page.asked:
            self.post_message(self.OlderWanted())
        if page.ticket != self._ticket:
            return
        self._page = page
        if page.goto is not None:
            self._going_to(page.goto)
        self.refresh()
        self.post_message(self.Changed())

    def _going_to(self, place: int) -> None:
        """A place that was looked for stands in the upper third."""
        self._following = False
        if self._selected is not None:
            self._selected = (self._selected[0], place)
        if place:
            self._mark = place
        self._stand((log_layout.index_of(self._page.rows, place), 0))
        if place:
            self._stand(self._moved(-(self.size.height // 3)))

    def _ask(self, anchor: int | None) -> None:
        self._ticket += 1
        if self._feed is not None:
            self._feed.show(self._ticket, anchor)

    # standing and moving

    @property
    def _columns(self) -> int:
        return max(1, self.size.width - 1)

    def _layout(self) -> log_layout.Layout:
        return log_layout.Layout(self._page.rows, self._columns if self._wrap else None)

    def _lay_out(self) -> None:
        """Which row of the page, and which of its wrapped rows, stands in each row of the screen."""
        layout, height = self._layout(), self.size.height
        if self._following:
            self._laid_out = layout.last(height)
            if self._laid_out:
                self._stand(self._laid_out[0])
        else:
            self._laid_out = layout.first(self._place(), height)

    def _stand(self, place: log_layout.Place) -> None:
        rows, (index, sub) = self._page.rows, place
        if not rows:
            self._top = (0, 0)
        elif rows[index].gap:
            self._top = (rows[index].stop, -1)
        else:
            self._top = (rows[index].start, sub)

    def _place(self) -> log_layout.Place:
        start, sub = self._top
        index = log_layout.index_of(self._page.rows, start)
        return (index, sub) if sub >= 0 else (max(0, index - 1), 0)

    def _moved(self, rows: int) -> log_layout.Place:
        """Where the top is after moving by `rows` rows of the screen, as far as there are lines."""
        layout = self._layout()
        place = layout.moved(self._place(), rows)
        lowest = layout.last(self.size.height)
        return min(place, lowest[0]) if lowest and self._page.at_end else place

    def _move(self, rows: int) -> None:
        self._lay_out()
        if self._following and rows >= 0:
            return
        before = self._top
        self._stand(self._moved(rows))
        if self._following:
            if self._top == before:
                return
            self._set_following(False)
        layout = self._layout()
        lowest = layout.last(self.size.height)
        index = self._place()[0]
        at_lowest = self._page.at_end and lowest and self._place() >= lowest[0]
        if rows > 0 and at_lowest and not (self._pattern or self._selected or self._page.replaced):
            self.set_following(True)
            return
        near = 2 * self.size.height + 50
        below = len(self._page.rows) - index
        if (index < near and not self._page.at_start) or (below < near and not self._page.at_end):
            self._ask(self._top[0])
        self.refresh()
        self.post_message(self.Changed())

    def set_following(self, on: bool) -> None:
        """Follow the end, or stay where we are."""
        if on != self._following:
            self._lay_out()
            self._set_following(on)

    def _set_following(self, on: bool) -> None:
        self._following = on
        if on:
            self._selected = None
        self._ask(None if on else self._top[0])
        self.refresh()
        self.post_message(self.Changed())

    def action_follow_end(self) -> None:
        """Go to the end and follow it."""
        self._mark = None
        self.set_following(True)

    def action_to_start(self) -> None:
        """Go to the oldest line that is here."""
        self._ticket += 1
        if self._feed is not None:
            self._feed.show_start(self._ticket)

    def action_side(self, by: int) -> None:
        """Move long lines sidewards."""
        if not self._wrap:
            longest = max((cell_len(self._page.rows[n].text) for n, _ in self._laid_out), default=0)
            self._left = max(0, min(self._left + by * _SIDE_COLUMNS, longest - self._columns))
            self.refresh()

    def action_wrap(self) -> None:
        """Wrap long lines, or cut them."""
        self._lay_out()
        self._wrap, self._left = not self._wrap, 0
        self._top = (self._top[0], min(self._top[1], 0))
        self.post_message(
            self.Said(f"long lines are {'wrapped' if self._wrap else 'cut; arrows move sidewards'}")
        )
        self.refresh()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel."""
        event.stop()
        self._move(-3)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """The wheel."""
        event.stop()
        self._move(3)

    # drawing

    def render_line(self, y: int) -> Strip:
        """Row `y` of what is visible."""
        if y == 0 or not self._laid_out:
            self._lay_out()
        text: Text | None = None
        style: Style | None = None
        if y < len(self._laid_out):
            index, sub = self._laid_out[y]
            row = self._page.rows[index]
            text = styled(row, self._pattern)
            if self._wrap:
                start, stop = log_layout.pieces(text.plain, self._columns)[sub]
                text = text[start:stop]
            if self._selected is not None:
                low, high = sorted(self._selected)
                style = _SELECTED if low <= row.start <= high else None
        elif not self._page.rows and y == 0:
            said = "no line matches" if self._filter else "the log is empty so far"
            text = line((f"  {said}", LABEL))
        strip = draw(self, text, self._left, self._columns)
        if style is not None:
            strip = strip.apply_style(style)
        return Strip.join([strip, self._bar(y)])

    def _bar(self, y: int) -> Strip:
        """One cell of the bar at the right: where in the whole log the screen stands."""
        rows, end = self._page.rows, self._page.end
        cell, style = " ", Style()
        if self._laid_out and end and not (self._page.at_start and len(rows) <= self.size.height):
            height = self.size.height
            first, last = rows[self._laid_out[0][0]].start, rows[self._laid_out[-1][0]].stop
            length = max(1, round(height * (last - first) / end))
            begin = round((height - length) * min(1.0, first / max(1, end - (last - first))))
            cell, style = ("┃", _THUMB) if begin <= y < begin + length else ("│", RULE_STYLE)
        return Strip([Segment(cell, base_style(self) + style)], 1)
