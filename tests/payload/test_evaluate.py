"""The evaluate tool: what it measures, prompts from any file, and shards that make one record again."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from remote_payload import rundir
from remote_payload.job import Job, JobError
from remote_payload.tools import evaluate as tool
from remote_payload.tools.evaluate import merge
from remote_payload.tools.export import export
from remote_payload.tools.prompt_files import read_prompt_ids
from remote_payload.tools.subject import shard_of
from remote_payload.train import checkpoint
from remote_payload.train.contract import target_identity
from remote_payload.train.decode import Decoder
from remote_payload.train.drafter import Drafter, DrafterConfig, initialise
from remote_payload.train.evaluation import HeldOutPrompt
from remote_payload.train.released import released_config
from remote_payload.train.target import Target, read_config
from remote_payload.train.tau import DecodedText, figures
from tests.payload.test_conversations import PLAIN, STRICT, WORDS, tokenizer
from tests.payload.tiny import MASK, random_samples, write_arrow, write_model

CPU = torch.device("cpu")
MOST = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples, lengths = random_samples(7, seed=9)
    return write_arrow(tmp_path_factory.mktemp("data") / "held.arrow", samples, lengths, list("abababa"))


@pytest.fixture(scope="module")
def drafter(target: Path, prompts: Path) -> Drafter:
    """Drafts one and the same token whatever it reads: the one that the target says most often."""
    config = DrafterConfig.for_target(
        read_config(target), layers=1, tap_layers=(1, 3), block_size=4, mask_token_id=MASK
    )
    model = Target.load(target, (1, 3), device=CPU, dtype=torch.float32)
    said: Counter[int] = Counter()
    for prompt in read_prompt_ids(prompts, lambda: None, vocabulary=97, log=print):
        said.update(Decoder(model, {1}, MOST).plain(torch.tensor(prompt.ids)).tokens)
    made = Drafter(config)
    initialise(made, torch.Generator().manual_seed(0))
    made.requires_grad_(False)
    made.layers[0].self_attn.o_proj.weight.zero_()
    made.layers[0].mlp.down_proj.weight.zero_()
    mask = model.embedding.weight[MASK]
    wanted = model.head[said.most_common(1)[0][0]]
    made.norm.weight.copy_(wanted / (mask / mask.pow(2).mean().sqrt()))
    return made


@pytest.fixture
def folder(tmp_path: Path, drafter: Drafter) -> Path:
    path = tmp_path / "drafter"
    path.mkdir()
    save_file(
        {name: value.clone() for name, value in drafter.state_dict().items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(released_config(drafter.config, "float32")))
    return path


def run(*words: object) -> dict[str, Any]:
    said: list[str] = []
    record, _ = tool.run([str(word) for word in words], said.append)
    return {**record, "said": said}


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what a clock said, or which process it was."""
    clocks = ("seconds", "plain_seconds")
    texts = [{key: value for key, value in text.items() if key not in clocks} for text in record["texts"]]
    left_out = (
        "said",
        "summary",
        "shards",
        "eval_s",
        "speedup",
        "tokens_per_s",
        "plain_tokens_per_s",
        "texts",
    )
    return {**{key: value for key, value in record.items() if key not in left_out}, "texts": texts}


@pytest.mark.slow
def test_shards_merge_to_the_record_of_one_process_to_the_last_round(
    folder: Path, target: Path, prompts: Path
) -> None:
    given = (folder, "--prompts", prompts, "--target", target, "--max-new-tokens", MOST, "--device", "cpu")
    whole = run(*given)
    assert (
        whole["prompts"] == 7
        and whole["tau"] > 1.2
        and len({r for t in whole["texts"] for r in t["rounds"]}) > 1
    )
    assert whole["text_equal"] == 7 and whole["by_kind"].keys() == {"a", "b"}
    parts = [run(*given, "--shard", f"{number}/3") for number in (2, 0, 1)]
    assert [part["prompts"] for part in parts] == [2, 3, 2]
    one = merge(json.loads(json.dumps(parts)))
    assert lasting(one) == lasting(whole)
    assert one["shards"] == ["0/3", "1/3", "2/3"] and whole["shards"] == ["0/1"]
    assert one["eval_s"] == max(part["eval_s"] for part in parts)
    seconds, plain = (sum(t[key] for p in parts for t in p["texts"]) for key in ("seconds", "plain_seconds"))
    tokens = sum(text["tokens"] for text in whole["texts"])
    assert one["tokens_per_s"] == pytest.approx(tokens / seconds, rel=1e-3)
    assert one["plain_tokens_per_s"] == pytest.approx(tokens / plain, rel=1e-3)
    assert one["speedup"] == pytest.approx(plain / seconds, rel=1e-2)
    assert merge([whole])["tau"] == whole["tau"]


def test_the_page_about_json_has_exactly_the_keys_of_a_record(run_dir: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    body = page.partition("\n## evaluate\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    record = run(run_dir, "--count", "1")
    del record["said"]
    assert {key for cell in cells for key in re.findall(r"`(\w+)`", cell)} == set(record)


def test_tau_is_what_the_rounds_say_and_every_token_but_the_first_came_from_one(
    folder: Path, target: Path, prompts: Path
) -> None:
    found = run(folder, "--prompts", prompts, "--target", target, "--max-new-tokens", MOST)
    rounds = [given for text in found["texts"] for given in text["rounds"]]
    assert found["rounds"] == len(rounds) and found["tau"] == round(sum(rounds) / len(rounds), 4)
    means = [sum(text["rounds"]) / len(text["rounds"]) for text in found["texts"] if text["rounds"]]
    assert found["tau_macro"] == round(sum(means) / len(means), 4)
    for text in found["texts"]:
        assert (
            0 <= 1 + sum(text["rounds"]) - text["tokens"] < 4
        )  # the last round may give more than is wanted
    for line in ("tau", "speed-up", "texts: 7 of 7", "position", "kind"):
        assert line in found["summary"]


def texts(*rounds: list[int], **changes: Any) -> list[dict[str, Any]]:
    return [
        dataclasses.asdict(DecodedText(n, "x", 1 + sum(given), 0.5, given, 1 + sum(given), 1.0, **changes))
        for n, given in enumerate(rounds)
    ]


def part(shard: str, found: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    about = dict.fromkeys(tool._SAME, "same") | {"block_size": 4, "device": "cpu", "eval_s": 1.0}
    return {**about, "shards": [shard], "texts": found, **changes}


def test_records_that_do_not_belong_together_are_refused_by_what_differs() -> None:
    zero, one = part("0/2", texts([2, 3])), part("1/2", texts([4]))
    assert merge([one, zero])["tau"] == 3.0
    with pytest.raises(ValueError, match=r"not whole: missing: 1/2$"):
        merge([zero])
    with pytest.raises(ValueError, match=r"missing: 1/2; twice: 0/2"):
        merge([zero, zero])
    with pytest.raises(ValueError, match=r"missing: 1/2; unknown: 1/3"):
        merge([zero, part("1/3", texts([4]))])
    with pytest.raises(ValueError, match=r"different evaluations: max_new_tokens is 'same' and 9"):
        merge([zero, part("1/2", texts([4]), max_new_tokens=9)])
    with pytest.raises(ValueError, match="no records"):
        merge([])


def test_a_text_that_just_ends_is_no_tie_after_its_record_was_json_either() -> None:
    """JSON has no infinity."""
    found = texts([2], differs_at=3, gap=float("inf"), most_gap=0.25)
    told = json.loads(rundir.encode(part("0/1", found)))
    assert told["texts"][0]["gap"] is None
    again = merge([told])
    assert (again["diverged"], again["diverged_allowed"], len(again["not_lossless"])) == (1, 0, 1)
    assert figures([DecodedText(**found[0])], 4)["diverged_allowed"] == 0


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def ids(path: Path, template: str = PLAIN, count: int | None = None) -> list[HeldOutPrompt]:
    return read_prompt_ids(path, lambda: tokenizer(template), vocabulary=97, count=count, log=print)


USER, BOT, END = (WORDS.index(word) for word in ("<user>", "<bot>", "<end>"))
W1, W2 = WORDS.index("w1"), WORDS.index("w2")


def test_texts_are_rendered_as_the_target_is_asked_and_answers_are_left_to_it(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        '"w1"',
        "",
        {"prompt": "w2", "kind": "z"},
        {"text": "w1 w2"},
        {"messages": [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w9"}]},
    )
    asked = [([USER, W1, END, BOT], "all"), ([USER, W2, END, BOT], "z"), ([USER, W1, W2, END, BOT], "all")]
    asked.append(([USER, W2, END, BOT], "all"))
    assert [(p.ids, p.kind) for p in ids(path)] == asked
    assert [(p.ids, p.kind) for p in ids(path, count=2)] == asked[:2]


def test_of_a_toml_file_the_held_out_topics_count_and_all_where_none_is(tmp_path: Path) -> None:
    text = '[prompts.say]\none = ["w1"]\ntwo = ["w2"]\n'
    (tmp_path / "a.toml").write_text(text)
    (tmp_path / "b.toml").write_text(f'held_out = ["two"]\n{text}')
    assert [(p.ids[1], p.kind) for p in ids(tmp_path / "a.toml")] == [(W1, "say"), (W2, "say")]
    assert [p.ids[1] for p in ids(tmp_path / "b.toml")] == [W2]


def test_arrow_and_parquet_give_the_same_prompts_without_a_tokenizer(tmp_path: Path) -> None:
    arrow = write_arrow(tmp_path / "a.arrow", [[5, 6, 7], [8, 9, 10, 11]], [2, 1])
    with pa.memory_map(str(arrow)) as source:
        pyarrow.parquet.write_table(pa.ipc.open_file(source).read_all(), tmp_path / "a.parquet")
    options: dict[str, Any] = {"vocabulary": 97, "cache": tmp_path / "cache", "log": print}
    found = [
        read_prompt_ids(tmp_path / f"a.{kind}", lambda: 1 / 0, **options) for kind in ("arrow", "parquet")
    ]
    assert found[0] == found[1] == [HeldOutPrompt([5, 6], "all"), HeldOutPrompt([8], "all")]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '"w1"\n{', r"a\.jsonl: line 2 is no JSON"),
        ("a.jsonl", "7", r"line 1: expected a string, \{\"prompt\""),
        ("a.jsonl", '{"prompt": " "}', "line 1: expected a string"),
        ("a.jsonl", '{"prompt": "w1", "kind": 3}', "line 1: expected a string"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "w1"}]}', "line 1: expected a string"),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "w1"}]}', "line 1: expected a string"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 1}]}', "line 1: expected a string"),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]}',
         "line 1: the target's chat template refuses it"),
        ("a.jsonl", "\n", "holds no prompts"),
        ("a.toml", "x", "is not TOML"),
        ("a.arrow", "x", r"a\.arrow"),
        ("b.arrow", "x", r"there is no such file; expected prompts: Arrow, Parquet, TOML or JSONL"),
        ("b.jsonl", "x", r"b\.jsonl: cannot be read: No such file"),
    ],
)  # fmt: skip
def test_a_prompts_file_that_cannot_be_used_is_refused_by_file_and_line(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name.replace("b.", "other.")).write_text(text)
    with pytest.raises(ValueError, match=said):
        ids(tmp_path / name, STRICT)


def test_a_target_that_the_drafter_cannot_draft_for_is_refused_by_its_sizes(
    folder: Path, prompts: Path, tmp_path: Path
) -> None:
    for changes, said in (
        ({"hidden_size": 64}, "has hidden_size = 64; .* drafts for one of 32"),
        ({"num_hidden_layers": 7}, "num_hidden_layers = 7; .* of 6"),
        ({"vocab_size": 98}, "vocab_size = 98; .* of 97"),
        ({"eos_token_id": MASK}, "mask_token_id = 96 is the target's eos_token_id"),
    ):
        other = write_model(tmp_path / str(len(said)), **changes)
        with pytest.raises(JobError, match=said):
            run(folder, "--prompts", prompts, "--target", other)


@pytest.fixture
def run_dir(tmp_path: Path, drafter: Drafter, target: Path, prompts: Path) -> Path:
    """A run of which a checkpoint is left."""
    path = tmp_path / "workspace" / "runs" / "a-run"
    path.mkdir(parents=True)
    values = {"target": str(target), "dataset": "x", "held_out": str(prompts), "mask_token_id": MASK}
    job = Job.from_mapping({**values, "eval_max_new_tokens": MOST, "cpu_threads": 1}, "test")
    (path / rundir.JOB).write_text(job.to_toml())
    record = {"steps": 9, "contract": target_identity(target)}
    weights = {name: value.clone() for name, value in drafter.state_dict().items()}
    checkpoint.save(path, 5, config=drafter.config, weights=weights, training={}, record=record)
    return path


@pytest.mark.slow
def test_a_run_and_its_export_have_the_same_tau_by_the_same_prompts(run_dir: Path, prompts: Path) -> None:
    of_run = run(run_dir)
    assert (of_run["step"], of_run["run"], of_run["max_new_tokens"]) == (5, "a-run", MOST)
    assert of_run["prompts_path"] == str(prompts) and of_run["tau"] > 1.2
    exported = export(run_dir, dtype="float32", log=print).path
    of_export = run(exported, "--prompts", prompts, "--max-new-tokens", MOST)
    assert lasting({**of_export, "drafter": ""}) == lasting({**of_run, "drafter": ""})
    assert not any("warning" in line for line in of_export["said"])


def test_another_target_of_the_same_sizes_is_told(run_dir: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", rms_norm_eps=1e-5)
    said = run(run_dir, "--target", other, "--count", "1")["said"]
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "is not the one that the drafter was trained for: target.config differ" in warning


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{folder}"], r"has no dflashctl.json that names its target; name it with --target"),
        (["{folder}", "--target", "/none"], "no such folder.* Another one can be named with --target"),
        (["{folder}", "--target", "{target}"], "no prompts to evaluate on; name a file with --prompts"),
        (["{folder}", "--checkpoint", "last"], "is no run directory, so it has no checkpoint 'last'"),
        (["{run}", "--checkpoint", "step-6"], "expected last, best or one of step-5"),
        (["{run}", "--shard", "7/8"], "--shard 7/8: .* has 7 prompts, none for it"),
        (["{run}", "--device", "cuda:5"], "device 'cuda:5' is not there"),
        (["/none"], "/none: there is no such folder"),
        (["--merge", "{folder}/config.json"], "is no record of an evaluation"),
        (["--merge", "/none"], "/none: cannot be read as a record"),
    ],
)
def test_what_a_user_got_wrong_is_one_sentence_and_exit_code_2(
    folder: Path, run_dir: Path, target: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"folder": folder, "run": run_dir, "target": target}
    assert tool.main([word.format(**known) for word in words]) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("evaluate: ") and re.search(said, last), last


def test_weights_that_are_not_what_the_run_wrote_are_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = run_dir / "checkpoints/step-5/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert tool.main([str(run_dir)]) == 2
    assert "step-5 is damaged (model.safetensors is not what was written" in capsys.readouterr().err


def test_records_of_shards_are_merged_by_the_command_as_well(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        assert tool.main([str(run_dir), "--json", "--count", "4", "--shard", f"{number}/2"]) == 0
        (tmp_path / f"{number}.json").write_text(capsys.readouterr().out)
    assert tool.main(["--merge", str(tmp_path / "0.json"), str(tmp_path / "1.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 4
    for words in (
        ["--shard", "2/2"],
        ["--shard", "x"],
        ["--device", "gpu0"],
        ["--count", "0"],
        ["--max-new-tokens", "1"],
    ):
        with pytest.raises(SystemExit) as ended:
            tool.main([str(run_dir), *words])
        assert ended.value.code == 2
    with pytest.raises(argparse.ArgumentTypeError, match="expected I/N"):
        shard_of("1/0")


def test_tools_let_waiting_threads_sleep_and_draw_no_bars_which_is_decided_before_torch_is_there() -> None:
    """A thread that spins keeps its core from the one it waits for: seen, 30 times slower beside others."""
    code = (
        "import remote_payload.tools, os, sys; assert 'torch' not in sys.modules;"
        " print(os.environ['OMP_WAIT_POLICY'], os.environ['TQDM_DISABLE'])"
    )
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "TQDM_DISABLE")}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PASSIVE", "1"]
