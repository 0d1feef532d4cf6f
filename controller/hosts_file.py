"""Which hosts.toml counts. Apart from `inventory`, which is slow to import, for a shell's completion."""

from __future__ import annotations

import os
from pathlib import Path

from controller.errors import InventoryError
from controller.paths import home


def find_file() -> Path | None:
    """The hosts.toml that counts, or None. Raises InventoryError when $DFLASHCTL_HOSTS has none."""
    named = os.environ.get("DFLASHCTL_HOSTS")
    if named:
        if not Path(named).is_file():
            raise InventoryError(
                f"{named}: there is no such file", "DFLASHCTL_HOSTS names it; mend or unset that."
            )
        return Path(named)
    configuration = os.environ.get("XDG_CONFIG_HOME", "")
    if not configuration.startswith("/"):
        configuration = str(home() / ".config")
    for path in (Path("hosts.toml"), Path(configuration) / "dflashctl" / "hosts.toml"):
        if path.is_file():
            return path
    return None
