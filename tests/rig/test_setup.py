"""`setup` of a container without internet: from a folder of wheels in it."""

import sys
from pathlib import Path

import pytest

from controller.errors import PayloadEnvironmentError
from controller.inventory import load
from controller.venv import set_up
from tests.controller.test_venv import UV, make_wheel, payload
from tests.dflashctl import dflashctl
from tests.rig.rig import Rig

__all__ = ["payload"]


def test_a_containers_venv_is_made_offline_and_the_wheels_that_lack_are_named(
    rig: Rig,
    payload: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in rig.laptop_env().items():
        monkeypatch.setenv(name, value)
    there = rig.container_path("/usr/local/lib/rig-uv")
    there.mkdir(exist_ok=True)
    program = rig.container_path("/usr/local/bin/uv")
    program.write_text(UV.format(python=Path(sys.executable).resolve(), here="/usr/local/lib/rig-uv"))
    program.chmod(0o755)
    make_wheel(rig.container_path(f"{rig.workspace}/wheels"))
    host = (
        load()
        .hosts["rig"]
        .model_copy(
            update={
                "venv": "/root/made-venv",
                "wheels": f"{rig.workspace}/wheels",
                "base_python": str(Path(sys.executable).resolve()),
            }
        )
    )
    try:
        said: list[str] = []
        assert set_up(host, payload, said.append)["changed"] is True  # type: ignore[arg-type]
        made = rig.container_run(["/root/made-venv/bin/python", "-c", "import tiny; print(tiny.VERSION)"])
        assert made.stdout == b"1.2\n"
        assert any(line.startswith("+ /usr/local/bin/uv venv") for line in said)
        (there / "fail").write_text("error: No matching distribution found for tiny")
        again = host.model_copy(update={"venv": "/root/other-venv"})
        with pytest.raises(PayloadEnvironmentError, match="No matching distribution"):
            set_up(again, payload, said.append)  # type: ignore[arg-type]
    finally:
        program.unlink()
    dry = dflashctl("setup", "--dry-run", env=rig.laptop_env())
    assert "install torch>=2.11" in dry.stdout
