"""Work that takes long (a connection, a launch) in a thread of its own, never on the thread of the screen.

The thread is a daemon: a place that hangs must not keep the view from ending. What it says and how it ends
arrive as messages at the screen that asked; when that is gone, nobody hears them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from textual.message import Message
from textual.message_pump import MessagePump

from controller.errors import DflashctlError
from controller.narration import Say


class Told(Message):
    """A line of narration of the work called `work`."""

    def __init__(self, work: str, text: str) -> None:
        super().__init__()
        self.work, self.text = work, text


class Done(Message):
    """The work called `work` has ended: with a result, or with an error and what to do about it."""

    def __init__(self, work: str, result: Any, error: str = "", hint: str = "") -> None:
        super().__init__()
        self.work, self.result, self.error, self.hint = work, result, error, hint


def begin(asker: MessagePump, work: str, function: Callable[[Say], Any]) -> None:
    """Run `function(say)` in a thread; `asker` gets `Told` for every line said and one `Done`."""

    def say(text: str) -> None:
        asker.post_message(Told(work, text))

    def run() -> None:
        try:
            result = function(say)
        except DflashctlError as error:
            asker.post_message(Done(work, None, error.message, error.hint))
        except Exception as error:  # a defect of ours must be seen, and must not take the screen along
            said = f"{type(error).__name__}: {error}"
            asker.post_message(Done(work, None, said, "this is a defect of dflashctl"))
        else:
            asker.post_message(Done(work, result))

    threading.Thread(target=run, name=f"tui-{work}", daemon=True).start()
