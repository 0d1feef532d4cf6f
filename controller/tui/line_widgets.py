"""Two widgets that show lines of `rich.text.Text`, and nothing else.

`Lines` is a panel of fixed lines, `LineView` a scrolling one. Both draw through Textual's line interface,
only the lines that are on the screen, and only when they have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

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

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
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

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
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
