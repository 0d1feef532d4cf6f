"""How a run died: what it is known to mean and what to do, above the traceback of the first thread.

A run that was killed or lost has no traceback; then the log's last lines stand in its place.
"""

from __future__ import annotations

import re
import textwrap

from rich.style import Style
from rich.text import Text

from controller.diagnose import Diagnosis
from controller.health import Word
from controller.run_state import RunState
from controller.text import safe_lines
from controller.tui import figures
from controller.tui.lines import line, remote
from controller.tui.palette import BAD, FAINT, HEADING, KEY, LABEL, ORANGE, PLAIN, VALUE

OWN_FRAMES = Style(color=ORANGE, bold=True)


def has_crash(state: RunState) -> bool:
    """Whether there is something to show."""
    dead = state.health.word in (Word.FAILED, Word.KILLED, Word.LOST)
    return bool(state.crashes) or dead


def crash_lines(state: RunState, width: int) -> list[Text]:
    """Title, diagnosis, and the traceback of the thread that failed first (or the log's end)."""
    crash = state.first_crash
    rows: list[Text] = []
    if crash is not None:
        where = " ".join(filter(None, (crash.role, crash.device)))
        title = line(("✗ ", BAD), remote(crash.thread or "a thread", BAD))
        title.append_text(remote(f" ({where})" if where else "", PLAIN))
        title.append(" failed first", style=BAD)
        if crash.step is not None:
            title.append(f", step {figures.count(crash.step)}", style=PLAIN)
        if crash.bucket is not None:
            title.append(f", bucket {crash.bucket}", style=PLAIN)
        others = len(state.crashes) - 1
        if others:
            title.append(f"; {others} more after it", style=LABEL)
        rows.append(title)
        rows.append(line("  ", remote(crash.error, BAD)))
    else:
        said = state.health.detail or "no thread wrote a traceback"
        rows.append(line(("✗ ", BAD), remote(f"{state.health.headline}: {said}", BAD)))
    rows += _diagnosis(state.diagnosis, width)
    if crash is not None:
        if crash.samples:
            rows.append(line(("samples ", LABEL), remote(crash.samples, PLAIN)))
        rows.append(line(("Traceback", HEADING), (f"  crash/{remote(crash.file).plain}", LABEL)))
        rows += _traceback(crash.traceback, width)
        if crash.memory:
            rows.append(line(("Memory at that moment", HEADING)))
            rows += [line("  ", Text(text, style=PLAIN)) for text in safe_lines(crash.memory)]
    elif state.last_words:
        rows.append(line(("The log's last lines", HEADING)))
        rows += [line("  ", remote(text, PLAIN)) for text in state.last_words]
    return rows


def _diagnosis(diagnosis: Diagnosis | None, width: int) -> list[Text]:
    if diagnosis is None:
        return []
    rows = []
    for label, text, style in (
        ("what", diagnosis.what, VALUE),
        ("why ", diagnosis.why, PLAIN),
        ("do  ", diagnosis.do, VALUE),
    ):
        parts = textwrap.wrap(text, max(20, width - 7)) or [""]
        rows.append(line((f"{label} ", KEY), (parts[0], style)))
        rows += [line("     ", (part, style)) for part in parts[1:]]
    return rows


_PAYLOAD = re.compile(r"/[^\s\"]*/payloads/[0-9a-f]{8,}/")
_PACKAGES = re.compile(r"/[^\s\"]*/(?:site|dist)-packages/|/[^\s\"]*/lib/python3[0-9.]*/")


def _traceback(text: str, width: int) -> list[Text]:
    """The traceback's lines; frames of this project stand out, those of libraries step back.

    Folders that say nothing (the payload's digest, site-packages) are left out, so that the line number
    is still on a narrow screen; what is still too long is folded.
    """
    rows = []
    own = False
    lines = safe_lines(text)
    if lines and lines[0].startswith("Traceback (most recent call last)"):
        del lines[0]  # the heading says so
    for number, content in enumerate(lines):
        frame = content.lstrip().startswith('File "')
        if frame:
            own = "/remote_payload/" in content
            content = _PACKAGES.sub("", _PAYLOAD.sub("", content))
        if number == len(lines) - 1 and content.strip():
            style = BAD
        elif not content.startswith(" "):
            own, style = False, PLAIN
        elif frame:
            style = OWN_FRAMES if own else LABEL
        else:
            style = VALUE if own else FAINT
        for start in range(0, max(1, len(content)), max(20, width)):
            part = content[start : start + max(20, width)]
            rows.append(Text(part, style=style, no_wrap=True, end=""))
    return rows
