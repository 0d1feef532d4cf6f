"""Exports: what stands in them, what an independent reader makes of them, and what is never called done.

The independent reader is `Reader` below: written from the layout alone, of transformers' own Qwen3 modules,
and of nothing of this project.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from remote_payload import rundir
from remote_payload.job import Job, JobError
from remote_payload.tools import export as tool
from remote_payload.tools.export import export
from remote_payload.train import checkpoint
from remote_payload.train.drafter import Drafter
from remote_payload.train.released import read_released
from remote_payload.train.weights import FlatWeights
from tests.payload.test_drafter import CONFIG

EVALUATION = {
    "step": 8, "tau": 2.5, "tau_macro": 2.25, "acceptance": [0.8, 0.5, 0.2],
    "conditional_acceptance": [0.8, 0.625, None],
    "prompts": 9, "tokens": 90, "text_equal": 7, "diverged": 2, "diverged_allowed": 2, "tokens_per_s": 20.0,
    "plain_tokens_per_s": 10.0,
}  # fmt: skip


def masters(seed: int) -> FlatWeights:
    """A drafter's flat float32 weights, large enough that every part of it matters."""
    drafter = Drafter(CONFIG)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        spread = torch.randn(parameter.shape, generator=generator)
        parameter.data = spread * 0.3 + (1.0 if parameter.ndim == 1 else 0.0)
    return FlatWeights(drafter, torch.bfloat16, adjacent=drafter.adjacent())


class Made:
    """A run directory as a run leaves it, without a run: two checkpoints, the first one evaluated."""

    def __init__(self, workspace: Path, dtype: torch.dtype = torch.float32) -> None:
        self.run_dir = workspace / "runs" / "made-1"
        self.run_dir.mkdir(parents=True)
        values = {
            "target": "owner/model",
            "dataset": "train.arrow",
            "held_out": "held.arrow",
            "mask_token_id": 49,
        }
        job = Job.from_mapping({**values, "layers": 2, "block_size": 4, "learning_rate": 3e-4}, "made")
        (self.run_dir / rundir.JOB).write_text(job.to_toml())
        self.write(rundir.RUN, {"id": "made-1", "dflashctl": "9.8.7", "payload": "abcdef" * 8})
        self.flat = {step: masters(step) for step in (8, 16)}
        contract = {"target.config": "c0", "target.weights": "w0", "tokenizer": "t0"}
        for step, flat in self.flat.items():
            checkpoint.save(
                self.run_dir,
                step,
                config=CONFIG,
                weights=flat.named(flat.masters if dtype == torch.float32 else flat.values),
                training={"masters": flat.masters},
                record={"step": step, "steps": 20, "training_s": 61.4, "contract": contract},
            )
        self.evaluated(8)
        events = rundir.RecordWriter(self.run_dir / rundir.EVENTS, attempt=1)
        events.write("dataset", path="/w/train.arrow", samples=120, usable=119, tokens=4321)
        events.close()
        self.said: list[str] = []

    def write(self, name: str, values: dict[str, Any]) -> None:
        (self.run_dir / name).write_bytes(rundir.encode(values))

    def evaluated(self, step: int) -> None:
        folder = checkpoint.folder_of(self.run_dir, step)
        (folder / "evaluation.json").write_bytes(rundir.encode({**EVALUATION, "step": step}))

    def export(self, **options: Any) -> Path:
        return Path(export(self.run_dir, log=self.said.append, **options).path)

    def drafter(self, step: int, dtype: torch.dtype) -> Drafter:
        """The drafter of a checkpoint, by its masters and no file."""
        drafter = Drafter(CONFIG)
        drafter.load_state_dict(self.flat[step].named(self.flat[step].masters))
        return drafter.to(dtype).requires_grad_(False)

    def exports(self) -> list[str]:
        folder = self.run_dir / "exports"
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


class Reader(nn.Module):
    """A DFlash drafter as anybody would build it from `config.json` and the names in the file."""

    def __init__(self, folder: Path, *, theta: str = "rope_parameters") -> None:
        """`theta`: which of its two places a reader of one age or another looks at."""
        super().__init__()
        values = json.loads((folder / "config.json").read_text())
        assert values["architectures"] == ["DFlashDraftModel"] and values["model_type"] == "qwen3"
        if theta != "rope_parameters":
            values["rope_parameters"] = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        self.taps = values["dflash_config"]["target_layer_ids"]
        self.block_size = values["block_size"]
        config = Qwen3Config(**values)
        config._attn_implementation = "eager"
        width = config.hidden_size
        self.fc = nn.Linear(len(self.taps) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, n) for n in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert {value.dtype for value in tensors.values()} == {getattr(torch, values["dtype"])}
        self.load_state_dict(tensors, strict=True)
        self.rotary = Qwen3RotaryEmbedding(config)

    @torch.no_grad()
    def forward(self, features: Tensor, x: Tensor) -> Tensor:
        """Last hidden states [B, D] of the embedded block `x` [B, D] behind `features` [S, W]."""
        context, size = len(features), len(features) + len(x)
        injected = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(x[None], torch.arange(size)[None])
        for layer in self.layers:
            attention, residual = layer.self_attn, x
            block = layer.input_layernorm(x)
            both = torch.cat([injected, block])
            heads = (-1, attention.head_dim)
            q = attention.q_norm(attention.q_proj(block).unflatten(-1, heads)).transpose(0, 1)[None]
            k = attention.k_norm(attention.k_proj(both).unflatten(-1, heads)).transpose(0, 1)[None]
            v = attention.v_proj(both).unflatten(-1, heads).transpose(0, 1)[None]
            q, _ = apply_rotary_pos_emb(q, q, cos[:, context:], sin[:, context:])
            k, _ = apply_rotary_pos_emb(k, k, cos, sin)
            groups = attention.num_key_value_groups
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            shares = (q @ k.transpose(-1, -2) * attention.head_dim**-0.5).softmax(-1)
            x = residual + attention.o_proj((shares @ v)[0].transpose(0, 1).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def ours(drafter: Drafter, features: Tensor, x: Tensor) -> Tensor:
    positions = torch.arange(len(features) + len(x))
    context = drafter.context(features, positions[: len(features)])
    return drafter.blocks(x, positions[len(features) :], context, None)


def inputs(context: int = 23) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(context, 3 * CONFIG.width, generator=generator)
    return features, torch.randn(CONFIG.block_size, CONFIG.width, generator=generator)


def test_config_and_tensors_are_those_that_sglang_vllm_and_z_lab_read(made: Made) -> None:
    folder = made.export()
    assert folder == made.run_dir / "exports" / "step-8"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "dflashctl.json",
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 2, 4], "block_size": 4},
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "layer_types": ["full_attention", "full_attention"],
        "rope_theta": 5000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "max_position_embeddings": 512,
        "vocab_size": 50,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "is_causal": False,
        "dtype": "bfloat16",
    }
    layer = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer += ["input_layernorm", "post_attention_layernorm"]
    names = {f"layers.{n}.{name}.weight" for n in range(2) for name in layer}
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(tensors) == 11 * 2 + 3 and tensors["fc.weight"].shape == (24, 3 * 24)
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("theta", ["rope_parameters", "rope_theta"])
def test_an_independent_reader_gives_the_drafters_own_hidden_states(
    made: Made, dtype: str, theta: str
) -> None:
    folder = made.export(dtype=dtype)
    features, x = inputs()
    expected = ours(made.drafter(8, getattr(torch, dtype)).float(), features, x)
    found = Reader(folder, theta=theta).float()(features, x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, expected + 1e-3, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
        {"rms_norm_eps": 1e-2},
    ],
)
def test_the_independent_reader_notices_a_config_of_another_drafter(
    made: Made, wrong: dict[str, Any]
) -> None:
    folder = made.export(dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    features, x = inputs()
    assert not torch.allclose(
        Reader(folder)(features, x), ours(made.drafter(8, torch.float32), features, x), 1e-4
    )


def test_a_float32_export_of_a_bfloat16_run_has_the_masters_and_not_their_rounding(tmp_path: Path) -> None:
    made = Made(tmp_path, torch.bfloat16)
    flat = made.flat[8]
    exact = load_file(made.export(dtype="float32", name="exact") / "model.safetensors")
    assert all(exact[name].equal(value) for name, value in flat.named(flat.masters).items())
    rounded = load_file(made.export(name="rounded") / "model.safetensors")
    assert all(rounded[name].equal(value) for name, value in flat.named(flat.values).items())
    assert not exact["fc.weight"].equal(rounded["fc.weight"].float())
    assert "rounding" not in made.said[-1]  # the checkpoint's own type: nothing was rounded
    Path(made.run_dir, "exports", "exact").rename(made.run_dir / "exports" / "other")
    other = checkpoint.folder_of(made.run_dir, 8)
    wrong = {"masters": load_file(other / "training.safetensors")["masters"].flip(0)}
    weights = flat.named(flat.values)
    checkpoint.save(made.run_dir, 8, config=CONFIG, weights=weights, training=wrong, record={})
    with pytest.raises(
        JobError, match=r"masters of .* are not what model.safetensors was rounded from.*bfloat16"
    ):
        made.export(which="step-8", dtype="float32", name="exact")


def test_rounding_is_measured_and_more_of_it_than_the_bound_is_refused(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.export()
    (line,) = (line for line in made.said if line.startswith("Verified"))
    assert "25 tensors, complete; 800 logits of 4 blocks" in line
    share = float(line.partition("moves them by ")[2].partition("%")[0]) / 100
    features, x = inputs(64)
    exact = ours(made.drafter(8, torch.float32), features, x)
    rounded = ours(made.drafter(8, torch.bfloat16).float(), features, x)
    assert share == pytest.approx(float((rounded - exact).norm() / exact.norm()), rel=1.0)
    monkeypatch.setattr("remote_payload.tools.export_check.MOST_ROUNDED", {torch.bfloat16: share / 2})
    with pytest.raises(
        JobError, match=r"rounding to torch.bfloat16 moves its logits by .* export it as float32"
    ):
        made.export(name="again")
    assert made.exports() == ["step-8"]


def _lost(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name != "layers.1.self_attn.k_norm.weight"}


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in tensors.items()}


def _swapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    one, two = (f"layers.{n}.mlp.up_proj.weight" for n in (0, 1))
    return {**tensors, one: tensors[two], two: tensors[one]}


def _one_bit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    value = tensors["layers.0.self_attn.q_proj.weight"].clone()
    value.view(torch.int16)[3, 3] ^= 1
    return {**tensors, "layers.0.self_attn.q_proj.weight": value}


def _wider(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() for name, value in tensors.items()}


def _embedding(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "embed_tokens.weight": torch.zeros(50, 24, dtype=torch.bfloat16)}


@pytest.mark.parametrize("fault", [_lost, _prefixed, _swapped, _one_bit, _wider, _embedding])
def test_what_is_read_back_otherwise_than_it_was_meant_is_never_called_done(
    made: Made, monkeypatch: pytest.MonkeyPatch, fault: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    monkeypatch.setattr(tool, "save_file", lambda tensors, path, **_: save_tensors(fault(tensors), path))
    with pytest.raises(JobError, match=r"model\.safetensors"):
        made.export()
    assert made.exports() == []


def test_a_config_that_says_something_else_is_never_called_done(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = tool.released_config
    monkeypatch.setattr(
        tool, "released_config", lambda c, d: {**released(c, d), "max_position_embeddings": 64}
    )
    with pytest.raises(JobError, match=r"says another max_positions than the checkpoint"):
        made.export()
    assert made.exports() == []


def test_weights_that_are_not_finite_are_refused(made: Made) -> None:
    flat = made.flat[16]
    flat.masters[5] = float("nan")
    checkpoint.save(made.run_dir, 16, config=CONFIG, weights=flat.named(flat.masters), training={}, record={})
    with pytest.raises(JobError, match=r"not what was written|not finite"):
        made.export(which="last")
    assert made.exports() == []


def test_a_checkpoint_is_named_by_best_last_or_step_and_the_best_is_taken_by_itself(made: Made) -> None:
    made.evaluated(16)
    made.write("checkpoints/step-16/evaluation.json", {**EVALUATION, "tau": 1.5, "step": 16})
    assert made.export().name == "step-8"
    assert made.export(which="last").name == "step-16"
    assert (
        json.loads((made.export(which="16", name="x", force=True) / "dflashctl.json").read_text())["step"]
        == 16
    )
    with pytest.raises(JobError, match=r"checkpoint 'step-9'.*expected last, best or one of step-8, step-16"):
        made.export(which="step-9")
    for step in (8, 16):
        (checkpoint.folder_of(made.run_dir, step) / "evaluation.json").unlink()
    assert made.export(name="unevaluated").name == "unevaluated"
    assert "No checkpoint of this run was evaluated, so the last one is taken" in made.said
    card = (made.run_dir / "exports" / "unevaluated" / "README.md").read_text()
    assert "Step 16 was not evaluated during training." in card
    with pytest.raises(JobError, match=r"none of its 2 checkpoints was evaluated"):
        made.export(which="best", name="best")


def test_an_export_that_exists_stays_until_the_new_one_is_complete(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.export(name="first")
    with pytest.raises(JobError, match=r"exports/first exists already \(of step 8, bfloat16\).*--force"):
        made.export(name="first", which="last")
    with monkeypatch.context() as broken:
        broken.setattr(
            tool, "check_export", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(JobError, match=r"exports/first could not be written: .*No space left"):
            made.export(name="first", which="last", force=True)
    assert read_released(made.run_dir / "exports" / "first")[1]["norm.weight"].equal(
        made.flat[8].named(made.flat[8].values)["norm.weight"]
    )
    folder = made.export(name="first", which="last", force=True)
    assert json.loads((folder / "dflashctl.json").read_text())["step"] == 16
    assert made.exports() == ["first"]


def test_a_disk_that_is_full_is_said_before_anything_is_written(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(
        JobError, match=r"the export needs 1 MiB and .*exports has 1 MiB free; .*dflashctl prune"
    ):
        made.export()
    assert made.exports() == []


def test_what_a_killed_export_left_is_removed_and_what_a_living_one_writes_stays(made: Made) -> None:
    for pid in (2**22 + 1, os.getppid()):
        (made.run_dir / "exports" / f".x.{pid}.partial").mkdir(parents=True)
    made.export()
    assert made.exports() == [f".x.{os.getppid()}.partial", "step-8"]


@pytest.mark.parametrize("name", ["../x", ".x", "a/b", "-x", ""])
def test_a_name_stays_inside_the_folder_of_exports(made: Made, name: str) -> None:
    assert made.export(name="v1.0-best").name == "v1.0-best"
    with pytest.raises(JobError, match=r"--name .*expected letters"):
        made.export(name=name)


def test_a_damaged_checkpoint_and_a_folder_that_is_no_run_are_refused(made: Made, tmp_path: Path) -> None:
    path = checkpoint.folder_of(made.run_dir, 8) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        JobError, match=r"step-8 is damaged \(model.safetensors has .* bytes of .*\); name another"
    ):
        made.export()
    with pytest.raises(JobError, match=r"is no run directory: it has no job.toml"):
        export(tmp_path, log=made.said.append)


def test_a_run_that_trains_may_be_exported_and_it_is_said_at_which_step_it_is(made: Made) -> None:
    made.write(rundir.STATUS, {"state": "running"})
    made.write(rundir.PROGRESS, {"step": 19, "steps": 20})
    made.export()
    assert made.said[0] == (
        "Exporting step-8 (the run is training, at step 19 of 20) as exports/step-8, bfloat16..."
    )


def test_the_card_has_target_layout_rope_serving_measurement_data_recipe_and_versions(made: Made) -> None:
    folder = made.export(name="first")
    card = " ".join((folder / "README.md").read_text().split())
    for words in (
        "# A DFlash drafter for owner/model",
        "Licence: to be stated by whoever publishes it",
        "target.config `c0`, target.weights `w0`, tokenizer `t0`",
        "anchor first. A block is [anchor, MASK x 3] with MASK = 49",
        "no 1+N layout",
        "full width (all 10 numbers of a head), base 5000, not scaled",
        "--speculative-algorithm DFLASH \\ --speculative-draft-model-path <this folder>"
        " --speculative-num-draft-tokens 4",
        '{"method": "dflash", "model": "<this folder>", "num_speculative_tokens": 3}',
        "tau 2.500 over rounds (pooled), 2.250 over prompts (macro",
        "at step 8 by the run itself: real greedy speculative decoding of 9 held-out prompts (`held.arrow`)",
        "7 texts equal the target's own, 2 part from it at a tie",
        "| 2 | 0.500 | 0.625 | | 3 | 0.200 | - |",
        "Run `made-1`, step 8 of 20 in 61 s of training",
        "Data: `train.arrow`, 120 samples (119 used), 4321 tokens",
        "dflashctl 9.8.7, payload abcdefabcdef",
        f"torch {torch.__version__}",
        "learning_rate = 0.0003",
        "25 tensors, bfloat16",
    ):
        assert words in card, words
    origin = json.loads((folder / "dflashctl.json").read_text())
    assert (origin["target"], origin["run"], origin["tau"]) == ("owner/model", "made-1", 2.5)
    assert origin["target_identity"] == {"target.config": "c0", "target.weights": "w0", "tokenizer": "t0"}


def test_the_tool_prints_json_or_the_path_and_refuses_in_one_sentence(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(made.run_dir), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["name"], said["step"], said["tensors"], said["tau"]) == ("step-8", 8, 25, 2.5)
    assert said["bytes"] == sum(path.stat().st_size for path in Path(said["path"]).iterdir())
    assert tool.main([str(made.run_dir), "--device", "cuda:7"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("export: exports/step-8 exists already")


def test_a_run_of_an_older_version_that_knows_less_of_itself_is_exported_all_the_same(made: Made) -> None:
    flat = made.flat[16]
    checkpoint.save(made.run_dir, 16, config=CONFIG, weights=flat.named(flat.masters), training={}, record={})
    made.write(
        "checkpoints/step-16/evaluation.json", {"step": 16, "tau": 2.0, "tau_macro": 2.0, "acceptance": [0.5]}
    )
    (made.run_dir / rundir.EVENTS).unlink()
    (made.run_dir / rundir.RUN).unlink()
    card = (made.export(which="last") / "README.md").read_text()
    assert "identity not known" in card and "size not known" in card and "Run `made-1`, step 16.\n" in card
    assert "| 1 | 0.500 | - |" in card


def test_a_checkpoint_that_the_run_lets_go_of_meanwhile_is_said_to_be_gone(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = checkpoint.damage

    def too_late(folder: Path) -> str | None:
        shutil.rmtree(folder)
        return damage(folder)

    monkeypatch.setattr(checkpoint, "damage", too_late)
    with pytest.raises(JobError, match=r"step-8: cannot be read .*not there any more.* try again"):
        made.export()
    assert made.exports() == []
