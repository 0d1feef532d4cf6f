"""What is kept of a defect of dflashctl itself: a file, so that the terminal stays clean."""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from controller import __version__, paths
from controller.errors import LocalStateError


def write_report(error: BaseException, about: Mapping[str, str]) -> Path | None:
    """Write what `error` was into the state folder, below versions and `about`; None when that cannot be.

    Local variables are left out: they hold the log.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    head = {
        "dflashctl": __version__,
        "python": f"{platform.python_version()} on {platform.system()}",
        **about,
    }
    text = "".join(f"{name}: {value}\n" for name, value in head.items())
    text += "\n" + "".join(traceback.format_exception(error))
    try:
        return paths.kept(paths.state_root() / "crashes" / name, text)
    except LocalStateError:
        return None
