"""What a shell may complete: runs, places, jobs. Fast, since it runs at a key press, and never an error."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

WHAT = (
    "log", "events", "crash", "checkpoints", "checkpoints/best", "checkpoints/last", "exports", "all",
)  # fmt: skip
"""Words of `pull`."""


def runs(incomplete: str) -> list[tuple[str, str]]:
    """Known runs that begin so, newest first, each with its job."""
    from controller.paths import known_runs

    with suppress(Exception):
        return [
            (run.run_id, f"{run.job_name} on {run.host}")
            for run in known_runs()
            if run.run_id.startswith(incomplete)
        ]
    return []


def places(incomplete: str) -> list[tuple[str, str]]:
    """Places of hosts.toml that begin so, each with its address."""
    import tomllib

    from controller.hosts_file import find_file

    with suppress(Exception):
        path = find_file()
        table = tomllib.loads(path.read_text(encoding="utf-8"))["places"] if path else {"local": {}}
        return [
            (name, str(place.get("address", place.get("kind", ""))))
            for name, place in table.items()
            if name.startswith(incomplete)
        ]
    return []


def jobs(incomplete: str) -> list[str]:
    """The payload's jobs, and job files here, that begin so."""
    import remote_payload

    with suppress(Exception):
        folder = Path(remote_payload.__file__).parent / "jobs"
        own = sorted(path.stem for path in folder.glob("*.toml"))
        files = sorted(str(path) for path in Path().glob("*.toml") if path.name != "hosts.toml")
        return [name for name in (*own, *files) if name.startswith(incomplete)]
    return []


def what(incomplete: str) -> list[str]:
    """What `pull` can bring."""
    return [word for word in WHAT if word.startswith(incomplete)]
