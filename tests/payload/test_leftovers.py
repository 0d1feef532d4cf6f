from __future__ import annotations

import os
import time
from pathlib import Path

from remote_payload.leftovers import left_behind


def test_what_nobody_has_changed_for_long_was_left_behind_and_what_goes_meanwhile_was_not(
    tmp_path: Path,
) -> None:
    for name, age in (("old", 100.0), ("new", 0.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / "gone").symlink_to("as one that its owner renames meanwhile")
    assert [path.name for path in left_behind(sorted(tmp_path.iterdir()), 50.0)] == ["old"]
