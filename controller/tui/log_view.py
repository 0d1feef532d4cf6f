"""The log: its end while following, and perfectly still while somebody reads.

The view stands at a byte of the log, the beginning of its top line, and has the lines around it (`LogPage`);
it asks its feed for others when it comes near their edge. So nothing slides under a reader's eyes, whatever
arrives below or above, and a log of gigabytes is no slower than one of a screen. Only rows on the screen are
styled; what a log brought along of colours is shown, everything else of its escape codes is left out.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual import events, on
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from controller import paths
from controller.log_spans import Row
from controller.tui import log_layout
from controller.tui.ansi import coloured
from controller.tui.lines import draw, line
from controller.tui.log_feed import AROUND, PREFIX, LogFeed, amount, prefix_of
from controller.tui.log_page import Found, LogPage
from controller.tui.palette import BAD, GOOD, LABEL, PLAIN, RULE_STYLE, SKY, TAB_ON, WARN

BAD_LINE = re.compile(
    r"\b(error|exception|traceback|fatal|killed|out of memory|nan)\b|\w+(Error|Exception)\b", re.IGNORECASE
)
_WARN_LINE = re.compile(r"\b(warn(ing)?|deprecated|skipp(ed|ing)|retry(ing)?|recompil\w+)\b", re.IGNORECASE)
_GOOD_LINE = re.compile(r"\b(ready|checkpoint|finished|evaluation)\b", re.IGNORECASE)
_CLOCK = re.compile(r"\[?(\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d([.,]\d+)?\]? ")

_NAME = Style(color=SKY)
_SELECTED = Style(reverse=True)
_THUMB = Style(color="#5A616B")
_SIDE_COLUMNS = 8


class LogView(Widget, can_focus=True):
    """The log of one run; `open` says which."""

    DEFAULT_CSS = "LogView { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "line up", show=False, tooltip="log: a line up"),
        Binding("down,j", "move(1)", "line down", show=False, tooltip="log: a line down"),
        Binding("pageup,b", "page(-1)", "page up", show=False, tooltip="log: a screen up"),
        Binding("pagedown,space", "page(1)", "page down", show=False, tooltip="log: a screen down"),
        Binding("home,g", "to_start", "start", show=False, tooltip="log: to its oldest line that is here"),
        Binding("end,G", "follow_end", "end", show=False, tooltip="log: to its end, and follow it"),
        Binding("left", "side(-1)", "left", show=False, tooltip="log: a long line to the left"),
        Binding("right", "side(1)", "right", show=False, tooltip="log: a long line to the right"),
        Binding("e", "error(False)", "next error", show=False, tooltip="log: next line of an error"),
        Binding("E", "error(True)", "previous error", show=False, tooltip="log: previous line of an error"),
        Binding(
            "t", "ask_filter", "filter", show=False, tooltip="log: only lines of a rank, thread or regex"
        ),
        Binding("w", "wrap", "wrap", show=False, tooltip="log: wrap long lines, or cut them"),
        Binding("v", "select", "select", show=False, tooltip="log: select lines; arrows extend, y copies"),
        Binding("s", "save", "save", show=False, tooltip="log: save what is selected, or filtered, or all"),
        Binding("o", "older", "older", show=False, tooltip="log: copy older lines that are not here"),
    ]

    class Changed(Message):
        """What the tab line says of the log has changed."""

    class AskFilter(Message):
        """The user wants to say which lines to show."""

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
            return isinstance(message, LogView.Came) and self.page.goto is None and not self.page.note

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
        self._selected: tuple[int, int] | None = None
        """The line where a selection began, and the one to which it reaches."""
        self._pattern: re.Pattern[str] | None = None
        self._filter = ""
        self._laid_out: list[tuple[int, int]] = []

    def open(self, directory: Path, *, threaded: bool) -> None:
        """Show the log of the run that is mirrored in `directory`, from its end."""
        if self._feed is not None:
            self._feed.stop()
        self._page, self._mark, self._selected = LogPage(), None, None
        self._pattern, self._filter, self._following = None, "", True
        self._log_name = directory.parent.name
        self._feed = LogFeed(
            directory,
            (lambda page: self.post_message(self.Came(page))) if threaded else self._take,
            threaded=threaded,
        )
        self._feed.start()

    def tick(self) -> None:
        """Without a thread: look for new bytes now."""
        if self._feed is not None:
            self._feed.tick()

    def on_unmount(self) -> None:
        """End the thread."""
        if self._feed is not None:
            self._feed.stop()

    # what others ask

    @property
    def following(self) -> bool:
        """Whether the view stays at the end."""
        return self._following

    @property
    def waiting(self) -> int:
        """Lines that came since the view stopped following."""
        return self._page.new_lines

    @property
    def found(self) -> Found | None:
        """How many lines match the search."""
        return self._page.search

    @property
    def top(self) -> int:
        """The byte where the top line begins."""
        self._lay_out()
        return self._page.rows[self._laid_out[0][0]].start if self._laid_out else 0

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Ranks and threads that lines begin with."""
        return self._page.prefixes

    def visible_text(self) -> str:
        """What is on the screen, for copying; the selected lines when some are."""
        if self._selected is not None:
            low, high = sorted(self._selected)
            rows = [row for row in self._page.rows if low <= row.start <= high]
            self._select(None)
        else:
            self._lay_out()
            rows = [self._page.rows[n] for n in dict.fromkeys(n for n, _ in self._laid_out)]
        return "\n".join(self._gap_text(row) if row.gap else row.text for row in rows)

    def status_text(self, width: int) -> Text:
        """How the view stands, in at most `width` columns: the least important is left out first."""
        page = self._page
        parts = []
        if self._following:
            parts.append(line(("follow ", LABEL), ("ON", PLAIN)))
        else:
            text = line(("follow ", LABEL), ("OFF", WARN))
            if page.replaced:
                text.append(" the log began anew", style=WARN)
            elif page.new_lines:
                text.append(f" +{page.new_lines:,} line{'s' * (page.new_lines != 1)}", style=WARN)
            parts.append(text)
        if self._selected is not None:
            parts.insert(0, line(("selecting: y copies, s saves", WARN)))
        if page.search is not None:
            parts.insert(0, line((_counted(page.search), WARN)))
        if page.filter is not None:
            parts.append(line((f"only {self._filter}: ", LABEL), (_counted(page.filter), PLAIN)))
        if page.restarts and not page.replaced:
            parts.append(line((f"began anew {page.restarts}×", LABEL)))
        if not self._following and page.end:
            parts.append(line((f"{self.top / page.end:.0%}", LABEL)))
        shown = line()
        for part in parts:
            if shown.cell_len + part.cell_len + 3 > width and shown.cell_len:
                break
            if shown.cell_len:
                part.append(" · ", style=RULE_STYLE)
            part.append_text(shown)
            shown = part
        return shown

    # pages

    @on(Came)
    def _on_came(self, message: Came) -> None:
        self._take(message.page)

    def _take(self, page: LogPage) -> None:
        """Show a page, unless it answers what is no longer asked."""
        if page.note:
            self.post_message(self.Said(page.note))
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

    def action_move(self, rows: int) -> None:
        """Move, or extend the selection."""
        if self._selected is not None:
            self._extend(rows)
        else:
            self._move(rows)

    def action_page(self, screens: int) -> None:
        """Move by a screen but for one line."""
        self.action_move(screens * max(1, self.size.height - 1))

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

    # searching and filtering

    def search(self, text: str) -> None:
        """Mark what the regular expression `text` finds (a wrong one is taken literally), and go to the
        last line that matches from here upwards; none: forget the search.
        """
        self._pattern = _pattern(text)
        if self._feed is not None:
            self._feed.search(self._pattern.search if self._pattern else None)
        if self._pattern is not None:
            self._seek(self._pattern, back=True, start=self._bottom() + 1, what="match")
        self.refresh()

    def next_match(self, *, back: bool) -> None:
        """Go to the next match below, or above."""
        if self._pattern is not None:
            self._seek(self._pattern, back=back, start=self._here(back=back), what="match")

    def action_error(self, back: bool) -> None:
        """Go to the next line that looks like an error below, or above."""
        self._seek(BAD_LINE, back=back, start=self._here(back=back), what="line of an error")

    def _seek(self, pattern: re.Pattern[str], *, back: bool, start: int, what: str) -> None:
        self._ticket += 1
        if self._feed is not None:
            self._feed.seek(self._ticket, pattern.search, start, back=back, what=what)

    def _here(self, *, back: bool) -> int:
        """Where a search goes on from: the line it found last, if that is on the screen."""
        self._lay_out()
        shown = [self._page.rows[index].start for index, _ in self._laid_out]
        if self._selected is not None:
            return self._selected[1]
        if self._mark is not None and self._mark in shown:
            return self._mark
        if back and self._following:
            return self._page.end
        return shown[0] if shown else 0

    def _bottom(self) -> int:
        self._lay_out()
        return self._page.rows[self._laid_out[-1][0]].start if self._laid_out else 0

    def action_ask_filter(self) -> None:
        """Ask which lines to show."""
        self.post_message(self.AskFilter())

    def filter(self, text: str) -> None:
        """Show only lines of the rank or thread `text`, or those that match it; none: show all."""
        self._lay_out()
        pattern = _pattern(text)
        name = text.strip().strip("[]:").lower().replace(" ", "-")
        if name in self._page.prefixes:
            text, matches = name, lambda shown: prefix_of(shown) == name
        else:
            matches = pattern.search if pattern else None  # type: ignore[assignment]
        self._filter = text
        self._ticket += 1
        if self._feed is not None:
            self._feed.filter(
                self._ticket, matches if text else None, None if self._following else self._top[0]
            )

    def escape(self) -> None:
        """Leave the selection, or forget the search, or show all lines again."""
        if self._selected is not None:
            self._select(None)
        elif self._pattern is not None:
            self._mark = None
            self.search("")
        elif self._filter:
            self.filter("")

    # selecting, saving, older bytes

    def action_select(self) -> None:
        """Begin to select at the line found last, or at the lowest; or leave it."""
        if self._selected is not None:
            self._select(None)
            return
        self._lay_out()
        shown = [self._page.rows[index].start for index, _ in self._laid_out]
        if shown:
            self._select(self._mark if self._mark in shown else shown[-1])

    def _select(self, place: int | None) -> None:
        if place is not None:
            self.set_following(False)
        self._selected = None if place is None else (place, place)
        self.refresh()
        self.post_message(self.Changed())

    def _extend(self, rows: int) -> None:
        assert self._selected is not None
        begun, place = self._selected
        index = log_layout.index_of(self._page.rows, place) + rows
        index = max(0, min(len(self._page.rows) - 1, index))
        if abs(index - log_layout.index_of(self._page.rows, begun)) >= AROUND - 1:
            self.post_message(self.Said(f"a selection has at most {AROUND} lines; s without one saves more"))
            return
        self._selected = (begun, self._page.rows[index].start)
        self._lay_out()
        shown = [n for n, _ in self._laid_out]
        if index < shown[0]:
            self._move(index - shown[0])
        elif index > shown[-1]:
            self._move(index - shown[-1])
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """A click selects a line; with shift the selection reaches to it."""
        self._lay_out()
        if event.y < len(self._laid_out):
            place = self._page.rows[self._laid_out[event.y][0]].start
            if event.shift and self._selected is not None:
                self._selected = (self._selected[0], place)
                self.refresh()
            elif self._selected is not None:
                self._select(None)
            else:
                self._select(place)

    def action_save(self) -> None:
        """Save the selected lines, or all that the filter shows, or all that are here."""
        span = None
        if self._selected is not None:
            low, high = sorted(self._selected)
            span = (low, high + 1)
        path = paths.state_root() / "saved" / f"{self._log_name}-{time.strftime('%Y%m%d-%H%M%S')}.log"
        if self._feed is not None:
            self._feed.save(path, span)
        self._select(None)

    def action_older(self) -> None:
        """Ask for the bytes that a late attachment left out."""
        if self._feed is not None:
            self._feed.older()

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
            text = self._styled(row)
            if self._wrap:
                start, stop = log_layout.pieces(text.plain, self._columns)[sub]
                text = text[start:stop]
            if self._selected is not None:
                low, high = sorted(self._selected)
                style = _SELECTED if low <= row.start <= high else None
        elif not self._page.rows and y == 0:
            said = "no line matches" if self._filter else "the log is empty so far"
            text = line((f"  {said}", LABEL))
        strip = draw(self, text, self._left).crop(0, self._columns)
        strip = strip.adjust_cell_length(self._columns, self.rich_style)
        if style is not None:
            strip = strip.apply_style(style)
        return Strip.join([strip, self._bar(y)])

    def _bar(self, y: int) -> Strip:
        """One cell of the bar at the right: where in the whole log the screen stands."""
        rows, end = self._page.rows, self._page.end
        text = Text(" ", end="")
        if self._laid_out and end and not (self._page.at_start and len(rows) <= self.size.height):
            height = self.size.height
            first, last = rows[self._laid_out[0][0]].start, rows[self._laid_out[-1][0]].stop
            length = max(1, round(height * (last - first) / end))
            begin = round((height - length) * min(1.0, first / max(1, end - (last - first))))
            text = Text("┃" if begin <= y < begin + length else "│", end="")
            text.stylize(_THUMB if begin <= y < begin + length else RULE_STYLE)
        return Strip(text.render(self.app.console, end="")).apply_style(self.rich_style)

    def _gap_text(self, row: Row) -> str:
        return f"⋯ {amount(row.stop - row.start)} older bytes are not on this machine: o copies them ⋯"

    def _styled(self, row: Row) -> Text:
        if row.gap:
            return line((self._gap_text(row), WARN))
        content = row.text
        if BAD_LINE.search(content):
            style = BAD
        elif _WARN_LINE.search(content):
            style = WARN
        elif _GOOD_LINE.search(content):
            style = GOOD
        else:
            style = PLAIN
        text = coloured(row, PLAIN)
        if text is None:
            text = Text(content, style=style, no_wrap=True, end="")
            if clock := _CLOCK.match(content):
                text.stylize(LABEL, 0, clock.end())
            if named := PREFIX.match(content[:80]):
                text.stylize(_NAME, named.start(1), named.end(1))
        if self._pattern is not None:
            text.highlight_regex(self._pattern, TAB_ON)
        return text


def _pattern(text: str) -> re.Pattern[str] | None:
    if not text:
        return None
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error:
        return re.compile(re.escape(text), re.IGNORECASE)


def _counted(found: Found) -> str:
    words = f"{found.count:,} line{'s' * (found.count != 1)} match{'es' * (found.count == 1)}"
    return words if found.done else f"{words} so far"
