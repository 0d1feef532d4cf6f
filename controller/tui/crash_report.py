"""What is kept of a failure of the view itself: a file, so that the terminal stays clean."""

from __future__ import annotations

import platform
import time
import traceback
from pathlib import Path

from controller import __version__
from controller.run_state import RunState


def write_report(folder: Path, error: BaseException, state: RunState) -> Path | None:
    """Write the report into `folder`; None when that cannot be done.

    Local variables are left out: they hold the log.
    """
    from importlib import metadata  # 10 ms that a start need not wait for

    path = folder / time.strftime("tui-crash-%Y%m%d-%H%M%S.txt")
    about = {
        "dflashctl": __version__,
        "textual": metadata.version("textual"),
        "python": f"{platform.python_version()} on {platform.system()}",
        "run": f"{state.run_id or '?'}, {state.health.headline}, attempt {state.attempt}",
    }
    text = "".join(f"{name}: {value}\n" for name, value in about.items())
    text += "\n" + "".join(traceback.format_exception(error))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError:
        return None
    return path
