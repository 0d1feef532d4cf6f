from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from textual import pilot as textual_pilot
from textual._wait import wait_for_idle
from textual.pilot import Pilot

from controller.tui import run_screen
from controller.tui.app import RunApp
from tests.tui import golden

Open = Callable[..., AbstractAsyncContextManager[Pilot[int]]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test to its end: eight lines instead of a plugin."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


async def settled(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """What a pause waits for: Textual takes a process for idle that a busy machine gave no time meanwhile."""
    await wait_for_idle(min_sleep, max_sleep)
    for _ in range(50):  # callbacks that ask for further ones go on, however long each of them took
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def frozen_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One time zone, no animation, colours, a state folder of our own, and notes that stay."""
    monkeypatch.setattr(textual_pilot, "wait_for_idle", settled)
    monkeypatch.setattr(run_screen, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setenv("TEXTUAL_ANIMATIONS", "none")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    monkeypatch.undo()
    time.tzset()


def app_of(run: golden.Run, directory: Path) -> RunApp:
    """The app on a golden run directory, its clock standing still."""
    return RunApp(run.write(directory), clock=lambda: golden.NOW, period_s=None)


@pytest.fixture
def open_run(tmp_path: Path) -> Open:
    """`async with open_run("healthy", (80, 24)) as pilot`: the app, after its first tick."""

    @asynccontextmanager
    async def opened(run: str | golden.Run, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Pilot[int]]:
        built = golden.SITUATIONS[run]() if isinstance(run, str) else run
        app = app_of(built, tmp_path / "run")
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await pilot.pause()
            yield pilot

    return opened


def screen_text(pilot: Pilot[int]) -> str:
    """What is on the screen, row by row, without colours."""
    strips = pilot.app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)
