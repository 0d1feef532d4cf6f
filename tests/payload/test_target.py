"""The frozen target: its taps, its heads, and what a mask token must not be."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from remote_payload.job import JobError
from remote_payload.train import target as target_module
from remote_payload.train.features import pack
from remote_payload.train.target import Target, check_mask_token, read_config, special_ids

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text"]


def write_target(folder: Path, family: str = "Qwen3", **changes: Any) -> Path:
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, taps: tuple[int, ...] = (0, 2, 3)) -> Target:
    return Target.load(folder, taps, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_the_hidden_states_after_their_layers_and_the_head_is_the_one_in_use(
    tmp_path: Path, family: str, tied: bool
) -> None:
    target = load(write_target(tmp_path, family, tie_word_embeddings=tied))
    ids = torch.randint(3, 67, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = target.model(input_ids=ids, output_hidden_states=True)
    target.tapped()
    expected = torch.cat([whole.hidden_states[k + 1] for k in (0, 2, 3)], -1)
    found = target.features(ids)
    assert found.shape == (2, 9, 3 * 24)
    torch.testing.assert_close(found, expected)
    saved = load_file(tmp_path / "model.safetensors")
    table = next(value for name, value in saved.items() if name.endswith("embed_tokens.weight"))
    assert target.embedding.weight.equal(table)
    assert target.head.equal(table if tied else saved["lm_head.weight"])
    logits = torch.nn.functional.linear(whole.hidden_states[-1], target.head)
    if family == "Gemma2":
        logits = torch.tanh(logits / 30) * 30  # its soft cap keeps the order
    torch.testing.assert_close(whole.logits, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tap_of_the_last_layer_is_its_own_output_and_not_what_follows_the_final_norm(
    tmp_path: Path, family: str
) -> None:
    """The last entry of `hidden_states` is after the norm; a drafter is served the layer's own output."""
    target = load(write_target(tmp_path, family), taps=(3, 4))
    ids = torch.randint(3, 67, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = target.model(input_ids=ids, output_hidden_states=True)
        target.tapped()
        earlier, last = target.features(ids).split(24, -1)
        normed = target.model.get_decoder().norm(last)
    torch.testing.assert_close(earlier, whole.hidden_states[-2])
    torch.testing.assert_close(normed, whole.hidden_states[-1])
    assert not last.allclose(whole.hidden_states[-1], atol=0.1)


def test_a_wrapped_model_whose_keys_have_another_prefix_is_tapped_all_the_same(tmp_path: Path) -> None:
    """A vision-language model around the text decoder (SpecForge #560)."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=SIZES | {"sliding_window": 8},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert not any(name.startswith("model.embed") for name in load_file(tmp_path / "model.safetensors"))
    target = load(tmp_path)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = target.model(input_ids=ids, output_hidden_states=True)
    target.tapped()
    expected = torch.cat([whole.hidden_states[k + 1] for k in (0, 2, 3)], -1)
    torch.testing.assert_close(target.features(ids), expected)
    assert target.head is not None and target.head.equal(target.embedding.weight)
    assert read_config(tmp_path).vocab_size == 67


def test_the_embedding_is_what_the_first_layer_sees_in_a_model_that_scales_it(tmp_path: Path) -> None:
    target = load(write_target(tmp_path, "Gemma3Text"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        first = target.model(input_ids=ids, output_hidden_states=True).hidden_states[0]
        torch.testing.assert_close(target.embedding(ids), first)
        assert not target.embedding.weight[ids].allclose(first)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_row_has_the_features_of_the_same_row_alone(tmp_path: Path, family: str) -> None:
    target = load(write_target(tmp_path, family))
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 67, (n,), generator=generator) for n in (11, 4)]
    ids = torch.zeros(2, 11, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    packed = pack(target.features(ids), [11, 4])
    alone = torch.cat([target.features(row[None])[0] for row in rows])
    assert packed.shape == alone.shape
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_taps_of_two_threads_on_one_target_do_not_mix(tmp_path: Path) -> None:
    target = load(write_target(tmp_path))
    inputs = [torch.full((1, 6), 5 + n) for n in range(2)]
    expected = [target.features(ids) for ids in inputs]
    wrong: list[int] = []

    def many(number: int) -> None:
        for _ in range(60):
            if not target.features(inputs[number]).equal(expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_target_is_frozen(tmp_path: Path) -> None:
    target = load(write_target(tmp_path))
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.features(torch.tensor([[3, 4]])).requires_grad


def test_a_checkpoint_that_lacks_a_weight_is_refused_and_never_filled_in_at_random(tmp_path: Path) -> None:
    write_target(tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match=r"lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"no safetensors", bytes(64)], ids=["empty", "text", "zeros"])
def test_damaged_weights_are_refused_by_name(tmp_path: Path, damage: bytes) -> None:
    write_target(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(JobError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"model_type": "nothing-like-it"}',
        "[]",
        "{}",
        '{"model_type": "qwen3", "hidden_size": "wide"}',
        '{"model_type": "qwen3", "hidden_size": null}',
    ],
)
def test_a_damaged_config_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(JobError, match=str(tmp_path)):
        read_config(tmp_path)


def test_special_ids_come_from_config_and_generation_config(tmp_path: Path) -> None:
    write_target(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9], "pad_token_id": 5}))
    found = special_ids(tmp_path, read_config(tmp_path))
    assert found == {"eos_token_id": {1, 9}, "pad_token_id": {0, 5}, "bos_token_id": {2}}


def test_a_target_of_the_hub_has_the_special_ids_of_its_generation_config_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen's pad and second end of text stand there alone, and a mask token must be neither."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept = tmp_path / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    write_target(kept / "snapshots" / "abc")
    generation = kept / "snapshots" / "abc" / "generation_config.json"
    config = read_config(Path("org/name"))
    generation.write_text(json.dumps({"eos_token_id": [1, 9], "pad_token_id": 5}))
    assert special_ids(Path("org/name"), config)["eos_token_id"] == {1, 9}
    assert special_ids(Path("org/name"), config)["pad_token_id"] == {0, 5}
    generation.unlink()
    assert special_ids(Path("org/name"), config)["eos_token_id"] == {1}


def test_a_damaged_generation_config_is_refused_by_name(tmp_path: Path) -> None:
    write_target(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(JobError, match=r"generation_config\.json"):
        special_ids(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (1, r"mask_token_id = 1 is the target's eos_token_id \(1, 9\)"),
        (9, r"mask_token_id = 9 is the target's eos_token_id \(1, 9\)"),
        (0, r"mask_token_id = 0 is the target's pad_token_id \(0\)"),
        (67, r"mask_token_id = 67: the target's embedding has 67 rows"),
        (10**9, r"mask_token_id = 1000000000: the target's embedding has 67 rows"),
    ],
)
def test_a_mask_token_that_means_something_or_has_no_row_is_refused_naming_both_ids(
    tmp_path: Path, mask: int, expected: str
) -> None:
    config = read_config(write_target(tmp_path))
    special = special_ids(tmp_path, config)
    special["eos_token_id"].add(9)
    with pytest.raises(JobError, match=expected):
        check_mask_token(mask, config, special)
    check_mask_token(66, config, special)


def bring_code(folder: Path) -> Path:
    """A model that comes with Python code of its own, which leaves a file behind when it runs."""
    write_target(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "architectures": ["HomemadeForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "homemade.HomemadeConfig",
        "AutoModelForCausalLM": "homemade.HomemadeForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    code = f"""
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
Path({str(folder / "it_ran")!r}).touch()
class HomemadeConfig(Qwen3Config):
    model_type = "homemade"
class HomemadeForCausalLM(Qwen3ForCausalLM):
    config_class = HomemadeConfig
"""
    (folder / "homemade.py").write_text(code)
    return folder


def test_code_that_comes_with_a_model_runs_only_when_the_job_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody may be asked"))
    folder = bring_code(tmp_path / "model")
    for refuse in (read_config, load):
        with pytest.raises(JobError, match=r"Python code of its own.*trust_remote_code = true"):
            refuse(folder)
    assert not (folder / "it_ran").exists()
    trusted = Target.load(
        folder, (1,), device=torch.device("cpu"), dtype=torch.float32, trust_remote_code=True
    )
    assert trusted.model_type == "homemade" and (folder / "it_ran").exists()
    assert trusted.features(torch.tensor([[3, 4]])).shape == (1, 2, 24)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_job_may_say_how_the_target_attends(tmp_path: Path, attention: str) -> None:
    folder, cpu = write_target(tmp_path), torch.device("cpu")
    target = Target.load(folder, (1, 3), device=cpu, dtype=torch.float32, attention=attention)
    assert target.attention == attention
    ids = torch.randint(3, 67, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(target.features(ids), load(folder, (1, 3)).features(ids))


def test_an_attention_that_is_not_there_is_refused_by_its_key(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    with pytest.raises(JobError, match=r"target_attention = 'flash_attention_2': .*Flash"):
        Target.load(
            folder,
            (1,),
            device=torch.device("cpu"),
            dtype=torch.float32,
            attention="flash_attention_2",
        )


class Scaled(torch.nn.Linear):
    """A head that does something of its own to its logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.linspace(0.5, 2.0, self.out_features)


def test_a_head_whose_logits_are_made_in_an_unknown_way_is_refused_naming_the_model_type(
    tmp_path: Path,
) -> None:
    """Without this, a loss against the target's distribution would be against another one."""
    target = load(write_target(tmp_path, tie_word_embeddings=False))
    target.check()
    target.model.lm_head.__class__ = Scaled
    with pytest.raises(JobError, match="model_type 'qwen3': its logits are not those of its head"):
        target.check()


def test_layers_that_hand_on_something_else_than_one_vector_a_token_are_refused(tmp_path: Path) -> None:
    """Gemma 3n hands four streams from layer to layer."""
    target = load(write_target(tmp_path))
    target.layers[2].register_forward_hook(lambda _m, _i, out: torch.stack([out] * 4), prepend=True)
    with pytest.raises(JobError, match=r"model_type 'qwen3': its layers"):
        target.check()


def test_a_tap_that_is_never_reached_is_refused(tmp_path: Path) -> None:
    target = load(write_target(tmp_path))
    target.tap_layers = (0, 4)
    with pytest.raises(JobError, match="cannot be tapped"):
        target.check()


def test_a_model_that_reads_both_ways_is_refused_although_it_loads_as_a_causal_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=67, hidden_size=24, num_hidden_layers=5, num_attention_heads=4, intermediate_size=40
    )
    model = transformers.BertLMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(tmp_path)
    with pytest.raises(JobError, match="model_type 'bert' is not causal"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_config_without_a_size_that_is_needed_is_refused_by_the_name_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_hidden_layers": 5, "hidden_size": 24, "vocab_size": 67} | {name: None}
    config: Any = SimpleNamespace(model_type="odd", **sizes)
    config.get_text_config = lambda **_: config
    monkeypatch.setattr(target_module, "load_config", lambda *_: config)
    with pytest.raises(JobError, match=f"model_type 'odd' has no {name} in its config"):
        read_config("anywhere")
