"""A picture of the TUI as SVG: `python -m tests.tui.picture healthy docs/tui.svg 132x40`.

Instead of a situation's name a mirror folder may stand; after the size, keys to press first. The clock stands
where the mirror was last written: a picture of last week's run shows it as it was.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from controller.tui.app import RunApp
from remote_payload import rundir
from tests.tui import golden


async def _picture(directory: Path, size: tuple[int, int], keys: list[str], now: float | None) -> str:
    mirror = rundir.read_whole(directory / "mirror.json") or {}
    now = float(mirror.get("t") or time.time()) if now is None else now
    app = RunApp(directory, clock=lambda: now, period_s=None)
    async with app.run_test(size=size) as pilot:
        for key in ["", *keys]:
            if key:
                await pilot.press(key)
            await pilot.pause()
            await pilot.pause()
        return app.export_screenshot(title="dflashctl tui")


def main(name: str, target: str, size: str = "132x40", *keys: str) -> None:
    """Write the picture."""
    os.environ["TEXTUAL_ANIMATIONS"] = "none"
    width, height = map(int, size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"  # nothing of this machine is in the picture
        built = golden.SITUATIONS.get(name)
        directory = built().write(Path(folder)) if built else Path(name)
        now = golden.NOW if built else None
        svg = asyncio.run(_picture(directory, (width, height), list(keys), now))
    # Fonts of the reader's own machine: a picture loads nothing from elsewhere.
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.S)
    svg = svg.replace("Fira Code", "Fira Code, DejaVu Sans Mono, Menlo, Consolas")
    Path(target).write_text(svg, "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
