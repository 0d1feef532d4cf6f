"""The log as one works with it: following, searching, filtering, selecting, copying and saving.

Where it stands and how it moves is `LogWindow`'s. Every search is of what the filter shows, and of the whole
log that is here, not of the lines on the screen; it runs in the feed's thread and says how far it is.
"""

from __future__ import annotations

import re
import time
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType

from controller import paths
from controller.log_scan import Containing, Matches
from controller.tui import log_layout
from controller.tui.lines import line
from controller.tui.log_feed import AROUND
from controller.tui.log_page import Found
from controller.tui.log_prefix import prefix_of
from controller.tui.log_style import BAD_LINE, gap_text
from controller.tui.log_window import LogWindow
from controller.tui.palette import LABEL, PLAIN, RULE_STYLE, WARN


class LogView(LogWindow):
    """The log, and its keys."""

    _matches: Matches | None = None

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
        Binding("t", "screen.ask_filter", "filter", show=False, tooltip="log: only lines of a rank or regex"),
        Binding("w", "wrap", "wrap", show=False, tooltip="log: wrap long lines, or cut them"),
        Binding("v", "select", "select", show=False, tooltip="log: select lines; arrows extend, y copies"),
        Binding("s", "save", "save", show=False, tooltip="log: save what is selected, or filtered, or all"),
        Binding("o", "older", "older", show=False, tooltip="log: copy older lines that are not here"),
    ]

    # what others ask

    @property
    def selecting(self) -> bool:
        """Whether lines are selected."""
        return self._selected is not None

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
        return "\n".join(gap_text(row) if row.gap else row.text for row in rows)

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

    # moving

    def action_move(self, rows: int) -> None:
        """Move, or extend the selection."""
        if self._selected is not None:
            self._extend(rows)
        else:
            self._move(rows)

    def action_page(self, screens: int) -> None:
        """Move by a screen but for one line."""
        self.action_move(screens * max(1, self.size.height - 1))

    # searching and filtering

    def search(self, text: str) -> None:
        """Mark what the regular expression `text` finds (a wrong one is taken literally), and go to the
        last line that matches from here upwards, or to the first below; none: forget the search.
        """
        self._pattern, self._matches = _pattern(text), _matches(text)
        if self._feed is not None:
            self._feed.search(self._matches)
        if self._matches is not None:
            self._ticket += 1
            if self._feed is not None:
                self._feed.seek_around(self._ticket, self._matches, self._bottom())
        self.refresh()

    def next_match(self, *, back: bool) -> None:
        """Go to the next match below, or above."""
        if self._matches is not None:
            self._seek(self._matches, back=back, start=self._here(back=back), what="match")

    def action_error(self, back: bool) -> None:
        """Go to the next line that looks like an error below, or above."""
        self._seek(BAD_LINE.search, back=back, start=self._here(back=back), what="line of an error")

    def _seek(self, matches: Matches, *, back: bool, start: int, what: str) -> None:
        self._ticket += 1
        if self._feed is not None:
            self._feed.seek(self._ticket, matches, start, back=back, what=what)

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

    def filter(self, text: str) -> None:
        """Show only lines of the rank or thread `text`, or those that match it; none: show all."""
        self._lay_out()
        matches = _matches(text)
        name = text.strip().strip("[]:").lower().replace(" ", "-")
        if name in self._page.prefixes:
            text, matches = name, lambda shown: prefix_of(shown) == name
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


def _pattern(text: str) -> re.Pattern[str] | None:
    if not text:
        return None
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error:
        return re.compile(re.escape(text), re.IGNORECASE)


def _matches(text: str) -> Matches | None:
    pattern = _pattern(text)
    if pattern is None:
        return None
    literal = pattern.pattern != text or not re.search(r"[\\.^$*+?{}\[\]|()]", text)
    return Containing(text) if literal else pattern.search


def _counted(found: Found) -> str:
    words = f"{found.count:,} line{'s' * (found.count != 1)} match{'es' * (found.count == 1)}"
    return words if found.done else f"{words} so far"
