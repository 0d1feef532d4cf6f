"""Two widgets that show lines of `rich.text.Text`, and nothing else: no markup is ever parsed here.

`Lines` is a panel of fixed lines, `LineView` a scrolling one. Both draw through Textual's line interface,
only the lines that are on the screen, and only when they have changed. Text of the remote must have
passed `controller.text` before it becomes a `Text` (`remote`).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from rich import get_console
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from controller.health import age_text
from controller.text import safe_line
from controller.tui.palette import HEADING, LABEL, RULE_STYLE, WARN


def remote(text: str, style: Style | str = "") -> Text:
    """Text that came from the other machine, as one safe line without markup."""
    return Text(safe_line(text), style=style, no_wrap=True, end="")


def line(*parts: str | tuple[str, Style | str] | Text) -> Text:
    """One line assembled of plain, styled and ready parts. Only our own words go in as plain ones."""
    assembled = Text(no_wrap=True, end="")
    for part in parts:
        if isinstance(part, tuple):
            assembled.append(*part)
        else:
            assembled.append(part)
    return assembled


def shortened(text: str, columns: int) -> str:
    """`text` in at most `columns` cells: its middle is left out, since names differ at their ends."""
    if cell_len(text) <= columns:
        return text
    end = ""
    for character in reversed(text):
        if cell_len(character + end) > (columns - 1) // 2:
            break
        end = character + end
    return set_cell_size(text, max(0, columns - 1 - cell_len(end))).rstrip() + "…" + end


def hanging(lead: Text, body: Text, width: int) -> list[Text]:
    """`body` in `width` columns, broken at spaces into as many lines as it needs; `lead` stands before the
    first, and the others begin below the first's body.
    """
    room = max(20, width - lead.cell_len)
    if body.cell_len <= room:
        return [line(lead, body)]
    parts = body.wrap(get_console(), room, overflow="fold", no_wrap=False)
    for part in parts:
        part.rstrip()
    return [line(lead if not n else " " * lead.cell_len, part) for n, part in enumerate(parts)]


Part = tuple[int, str, Text]
"""A part of a line: how soon it goes when the line is too long (0 never, 9 first), what stands before it,
and its text.
"""


def fitted(parts: Sequence[Part], width: int, right: Text | None = None) -> Text:
    """One line of the parts that fit into `width`, the least important left out; `right` at its end.

    `right` goes before any part does, unless it is in `WARN`'s style, which says that the parts are old.
    """
    kept = list(parts)
    end = right if right is not None else Text()
    urgent = any(span.style == WARN for span in end.spans)

    def cells() -> int:
        return sum(len(lead) + text.cell_len for _, lead, text in kept) - (len(kept[0][1]) if kept else 0)

    while kept and cells() + (1 + end.cell_len if end.plain and urgent else 0) > width:
        worst = max(range(len(kept)), key=lambda n: (kept[n][0], n))
        if not kept[worst][0]:
            break
        del kept[worst]
    text = line()
    for place, (_, lead, part) in enumerate(kept):
        if place:
            text.append(lead, style=RULE_STYLE)
        text.append_text(part)
    if urgent:
        text.truncate(max(0, width - 1 - end.cell_len), overflow="ellipsis")
    if end.plain and text.cell_len + 1 + end.cell_len <= width:
        text.append(" " * (width - text.cell_len - end.cell_len))
        text.append_text(end)
    return text


def heading(title: str, width: int, age_s: float | None, stale_s: float) -> Text:
    """A panel's heading: its title, a rule, and how old its data is; old data is said to be so."""
    if age_s is None:
        age = Text("no data yet", style=LABEL)
    elif age_s > stale_s:
        age = Text(f"○ stale {age_text(age_s)}", style=WARN)
    else:
        age = Text(age_text(age_s), style=LABEL)
    start = line((f"{title} ", HEADING))
    rule = max(1, width - start.cell_len - age.cell_len - 1)
    return line(start, ("─" * rule, RULE_STYLE), " ", age)


_BASES: WeakKeyDictionary[Widget, tuple[object, Style]] = WeakKeyDictionary()


def base_style(widget: Widget) -> Style:
    """The widget's own style. Textual asks every widget above for it, each time; here only after the screen
    has got other colours, as by another theme.
    """
    styles = widget.screen.styles
    key = (styles.background, styles.color)
    kept = _BASES.get(widget)
    if kept is None or kept[0] != key:
        kept = _BASES[widget] = (key, widget.rich_style)
    return kept[1]


def draw(widget: Widget, text: Text | None, left: int = 0, width: int | None = None) -> Strip:
    """The strip that shows `text` in a row of `widget`, scrolled `left` columns; None is an empty row.

    It has `width` columns, all of the widget's without one; what goes on beyond them is marked with `…`.
    """
    base = base_style(widget)
    if width is None:
        width = widget.scrollable_content_region.width
    if text is None:
        return Strip.blank(width, base)
    if text.cell_len > left + width:
        text = text.copy()
        text.truncate(left + width, overflow="ellipsis")
    # Rich leaves a Text's own style out where the Text has no spans.
    own = text.style if isinstance(text.style, Style) else Style.parse(text.style)
    strip = Strip(text.render(widget.app.console, end="")).apply_style(base + own)
    if left:
        strip = strip.crop(left, left + width)
    return strip.adjust_cell_length(width, base)


def changed_rows(before: Sequence[Text], after: Sequence[Text], top: int, size: Size) -> list[Region]:
    """The rows on a widget of `size`, whose first row is line `top`, that differ between two equally long
    lists: an age that ticks must not have its whole panel drawn again.
    """
    pairs = zip(before[top : top + size.height], after[top : top + size.height], strict=True)
    return [Region(0, y, size.width, 1) for y, (old, new) in enumerate(pairs) if old != new]


class Lines(Widget):
    """A panel of lines without scrolling; what is beyond its size is cut."""

    DEFAULT_CSS = "Lines { height: auto; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._lines: list[Text] = []

    @property
    def lines(self) -> Sequence[Text]:
        """The lines shown."""
        return self._lines

    def set_lines(self, lines: Sequence[Text]) -> None:
        """Show `lines`; nothing is drawn when they are what is shown already."""
        lines = list(lines)
        if lines == self._lines:
            return
        before, self._lines = self._lines, lines
        if len(lines) != len(before):
            self.refresh(layout=True)
        elif rows := changed_rows(before, lines, 0, self.size):
            self.refresh(*rows)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many rows as lines."""
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        """Row `y` of the panel."""
        text = self._lines[y] if y < len(self._lines) else None
        return draw(self, text)


class LineView(ScrollView, can_focus=True):
    """Lines that scroll. A reader at the end stays at the end; one who scrolled up is left alone."""

    DEFAULT_CSS = "LineView { height: 1fr; scrollbar-size-vertical: 1; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._shown: list[Text] = []
        self.stick_to_end = False

    @property
    def lines(self) -> Sequence[Text]:
        """The lines shown."""
        return self._shown

    def set_lines(self, lines: Sequence[Text]) -> None:
        """Show `lines`; at the end before, at the end after, when `stick_to_end` is set."""
        lines = list(lines)
        if lines == self._shown:
            return
        at_end = self.scroll_offset.y >= self.max_scroll_y
        before, self._shown = self._shown, lines
        if len(lines) == len(before) and not self.scroll_offset.x:
            rows = changed_rows(before, lines, self.scroll_offset.y, self.size)
            if rows:
                self.refresh(*rows)
            return
        self._resize()
        if self.stick_to_end and at_end:
            self.call_after_refresh(self.scroll_end, animate=False, immediate=True)
        self.refresh()

    def _resize(self) -> None:
        width = max((text.cell_len for text in self._shown), default=0)
        self.virtual_size = Size(width, len(self._shown))

    def render_line(self, y: int) -> Strip:
        """Row `y` of what is visible."""
        left, top = self.scroll_offset
        number = top + y
        text = self._shown[number] if number < len(self._shown) else None
        return draw(self, text, left)
