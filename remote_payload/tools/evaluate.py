"""Evaluate a drafter: tau by real speculative decoding, and how much faster that is than plain decoding.

    python -m remote_payload.tools.evaluate RUN_DIR --json
    python -m remote_payload.tools.evaluate DRAFTER_DIR --prompts FILE --target TARGET --device cuda:0
    python -m remote_payload.tools.evaluate DRAFTER_DIR --prompts FILE --shard 0/4 --json > 0.json
    python -m remote_payload.tools.evaluate --merge 0.json 1.json 2.json 3.json

Both ways of decoding are measured in the same process on the same prompts, in turn, after a short warm-up;
one text at a time, both with a KV cache. `--shard I/N` takes the prompts whose number is I modulo N, and
`merge` makes one record of all of them: tau and acceptance are then what one process would have found, to
the last round. Speeds of shards that shared a device are those of a shared device, for both ways.

The record has what decoding gave in `texts`, prompt by prompt, and the figures made of it beside.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from remote_payload import rundir
from remote_payload.job import JobError
from remote_payload.tools.prompt_files import read_prompt_ids
from remote_payload.tools.subject import Subject, device_name, find_subject, resolved_target, shard_of
from remote_payload.train.devices import DTYPES, compute_dtype, dtype_name, on_device, resolve_devices
from remote_payload.train.evaluation import Evaluation, drafter_with
from remote_payload.train.released import read_released
from remote_payload.train.target import Target
from remote_payload.train.tau import DecodedText, figures

Log = Callable[[str], None]
Record = dict[str, Any]

WARM_UP_TOKENS = 8
_NEWS_S = 5.0
"""Seconds between two lines of progress."""

_SAME = (
    "drafter", "run", "step", "target", "prompts_path", "prompts_in_all", "max_new_tokens", "block_size",
    "dtype", "attention", "torch", "transformers",
)  # fmt: skip
"""What the shards of one evaluation have in common."""


def evaluate(subject: Subject, arguments: argparse.Namespace, log: Log) -> Record:
    """Decode the prompts both ways; the record. Raises ValueError for what a user gave."""
    device = torch.device(resolve_devices([arguments.device])[0])
    dtype = compute_dtype(arguments.dtype or subject.dtype, device)
    if subject.cpu_threads:
        torch.set_num_threads(subject.cpu_threads)
    config, weights = read_released(subject.folder)
    model, text, ends = resolved_target(subject, config, log)
    prompts_path = arguments.prompts or subject.held_out
    if prompts_path is None:
        raise JobError(f"{subject.folder}: no prompts to evaluate on; name a file with --prompts")
    prompts = read_prompt_ids(
        prompts_path,
        lambda: _tokenizer(subject.target, model, subject.trust_remote_code),
        vocabulary=text.vocab_size,
        count=arguments.count,
        cache=subject.cache / "datasets",
        log=log,
    )
    most = arguments.max_new_tokens or subject.max_new_tokens
    shard, shards = arguments.shard
    mine = prompts[shard::shards]
    if not mine:
        raise JobError(f"--shard {shard}/{shards}: {prompts_path} has {len(prompts)} prompts, none for it")
    log(f"Loading {subject.target} on {device} ({dtype_name(dtype)})...")
    with on_device(device):
        target = Target.load(
            model,
            config.tap_layers,
            device=device,
            dtype=dtype,
            attention=subject.attention,
            trust_remote_code=subject.trust_remote_code,
        )
        drafter = drafter_with(config, weights, device, dtype)
        evaluation = Evaluation(mine, ends, most, subject.logit_gap)
        evaluation.check(target)
        Evaluation(mine[:1], ends, min(most, WARM_UP_TOKENS)).run(target, drafter)
        log(f"Decoding {len(mine)} prompts twice, up to {most} tokens each...")
        began = time.monotonic()
        report = evaluation.run(target, drafter, subject.step or 0, _News(log).tell)
    assert report is not None
    texts = [dataclasses.replace(text, prompt=shard + shards * text.prompt) for text in report.texts]
    about = {
        "drafter": str(subject.folder),
        "run": subject.run,
        "step": subject.step,
        "target": subject.target,
        "prompts_path": str(prompts_path),
        "prompts_in_all": len(prompts),
        "max_new_tokens": most,
        "block_size": config.block_size,
        "dtype": dtype_name(dtype),
        "attention": target.attention,
        "device": _device_name(device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shards": [f"{shard}/{shards}"],
        "eval_s": round(time.monotonic() - began, 2),
    }
    return _with_figures(about, texts)


def merge(records: Sequence[Mapping[str, Any]]) -> Record:
    """One record of the records of all shards of an evaluation.

    Raises ValueError when they are of different evaluations, or a shard is missing or there twice.
    """
    if not records:
        raise ValueError("no records to merge")
    first = records[0]
    for record in records[1:]:
        for key in _SAME:
            if record.get(key) != first.get(key):
                raise ValueError(
                    f"records of different evaluations: {key} is {first.get(key)!r} and {record.get(key)!r}"
                )
    shards = [shard for record in records for shard in record["shards"]]
    count = int(shards[0].partition("/")[2])
    wanted = [f"{number}/{count}" for number in range(count)]
    if sorted(shards) != sorted(wanted):
        missing, twice = sorted(set(wanted) - set(shards)), sorted({s for s in shards if shards.count(s) > 1})
        other = sorted(set(shards) - set(wanted))
        said = [f"{word} {', '.join(which)}" for word, which in
                (("missing:", missing), ("twice:", twice), ("unknown:", other)) if which]  # fmt: skip
        raise ValueError(f"shards of an evaluation are not whole: {'; '.join(said)}")
    texts = sorted((_text(text) for record in records for text in record["texts"]), key=lambda t: t.prompt)
    about = {key: first.get(key) for key in _SAME} | {
        "device": ", ".join(sorted({str(record["device"]) for record in records})),
        "shards": wanted,
        "eval_s": max(float(record["eval_s"]) for record in records),
    }
    return _with_figures(about, texts)


def _with_figures(about: Mapping[str, Any], texts: Sequence[DecodedText]) -> Record:
    found = figures(texts, int(about["block_size"]))
    wrong = [text.not_lossless for text in texts if text.not_lossless]
    record = {
        **about,
        **found,
        "rounds": sum(len(text.rounds) for text in texts),
        "speedup": round(found["tokens_per_s"] / found["plain_tokens_per_s"], 3),
        "not_lossless": wrong,
        "texts": [dataclasses.asdict(text) for text in texts],
    }
    return dict(rundir.decode(rundir.encode(record)) or {})


def _text(values: Mapping[str, Any]) -> DecodedText:
    """A text as a record has it; JSON has no infinity, so a gap that is null where texts part is one."""
    text = DecodedText(**values)
    endless = text.differs_at is not None and text.gap is None
    return dataclasses.replace(text, gap=math.inf) if endless else text


def summary(record: Mapping[str, Any]) -> str:
    """A record in words."""
    places = range(1, len(record["acceptance"]) + 1)
    rows = {
        "position": [str(place) for place in places],
        "accepted": [f"{share:.3f}" for share in record["acceptance"]],
        "conditional": [
            "-" if share is None else f"{share:.3f}" for share in record["conditional_acceptance"]
        ],
    }
    tied = record["diverged_allowed"]
    kinds = record["by_kind"]
    lines = [
        f"tau {record['tau']:.3f} pooled over {record['rounds']} rounds, {record['tau_macro']:.3f} macro over"
        f" {record['prompts']} prompts (of at most {record['block_size']})",
        f"speed-up {record['speedup']:.2f}x: {record['tokens_per_s']:.1f} tokens/s with the drafter,"
        f" {record['plain_tokens_per_s']:.1f} without, same prompts, {record['device']}, {record['dtype']}",
        f"texts: {record['text_equal']} of {record['prompts']} equal the target's own"
        + (f", {tied} part at a tie" if tied else ""),
        *(f"{name:<12}" + "".join(f"{cell:>7}" for cell in cells) for name, cells in rows.items()),
    ]
    if len(kinds) > 1:
        lines += [f"{'kind':<24}{'tau':>8}{'macro':>8}{'prompts':>9}"]
        lines += [
            f"{name:<24}{of['tau']:>8.3f}{of['tau_macro']:>8.3f}{of['prompts']:>9}"
            for name, of in kinds.items()
        ]
    return "\n".join(lines)


class _News:
    """Lines of progress, not too many."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._began = self._told = time.monotonic()

    def tell(self, done: int, of: int) -> bool:
        """Say that `done` prompts of `of` are decoded; True: go on."""
        now = time.monotonic()
        if now - self._told > _NEWS_S or done == of:
            self._told, spent = now, now - self._began
            left = "" if done == of else f", about {spent / done * (of - done):.0f} s left"
            self._log(f"{done} of {of} prompts, {spent:.0f} s so far{left}")
        return True


def _tokenizer(target: str, model: Path, trust_remote_code: bool) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise JobError(
            f"target {target!r}: its tokenizer cannot be loaded ({error}); give prompts as token ids"
        ) from error
    if tokenizer.chat_template is None:
        raise JobError(f"target {target!r} has no chat template to ask with; give prompts as token ids")
    return tokenizer


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return number


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse itself ends with code 2 for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m remote_payload.tools.evaluate",
        description="tau by real speculative decoding, and the speed-up over plain decoding.",
    )
    add = parser.add_argument
    add("drafter", type=Path, nargs="?", help="a run directory, or the folder of a DFlash drafter")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="merge the records of all shards instead")
    add("--checkpoint", help="of a run: best, last or step-N (default: best, or last where none is)")
    add("--prompts", type=Path, help="Arrow, Parquet, TOML or JSONL (default for a run: its held_out)")
    add("--count", type=_at_least(1), help="at most so many prompts (default all)")
    add("--max-new-tokens", type=_at_least(2), help="longest text (default: the job's, or 256)")
    add("--target", help="folder, Hugging Face id or package:NAME (default: what it was trained for)")
    add("--device", type=device_name, default="auto", help="auto, cpu or cuda:N (default auto)")
    add("--dtype", choices=tuple(DTYPES), help="of target and drafter")
    add("--shard", type=shard_of, default=(0, 1), metavar="I/N", help="prompts I modulo N alone")
    add("--cache", type=Path, help="folder for converted models (default: the workspace's)")
    add("--trust-remote-code", action="store_true", help="let Python code that comes with the target run")
    add("--json", action="store_true", help="the record as JSON on stdout")
    arguments = parser.parse_args(argv)
    if (arguments.drafter is None) == (arguments.merge is None):
        parser.error("expected a run directory or a drafter's folder, or --merge FILE...")
    return arguments


def _read(path: Path) -> Record:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as a record of an evaluation ({error})") from error
    if not isinstance(record, dict) or "texts" not in record or "shards" not in record:
        raise ValueError(f"{path}: is no record of an evaluation; expected what --json prints")
    return record


def run(argv: Sequence[str], log: Log) -> tuple[Record, str]:
    """Do what a command line says: the record, and the same in words. Raises ValueError."""
    arguments = parse(argv)
    if arguments.merge is not None:
        record = merge([_read(path) for path in arguments.merge])
    else:
        subject = find_subject(
            arguments.drafter,
            checkpoint=arguments.checkpoint,
            target=arguments.target,
            cache=arguments.cache,
            log=log,
        )
        if arguments.trust_remote_code:
            subject = dataclasses.replace(subject, trust_remote_code=True)
        step = "" if subject.step is None else f" (step {subject.step})"
        log(f"Drafter: {subject.folder}{step}; target: {subject.target}")
        record = evaluate(subject, arguments, log)
    for sentence in record["not_lossless"]:
        log(f"warning: decoding is not lossless: {sentence}")
    text = summary(record)
    record["summary"] = text
    return record, json.dumps(record) if arguments.json else text


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code: 0, 2 after one sentence about bad input, 1 without memory."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def log(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        _, text = run(argv, log)
    except ValueError as error:
        log(f"evaluate: {error}")
        return 2
    except torch.OutOfMemoryError as error:
        log(f"evaluate: out of memory: {str(error).partition('.')[0]}; does a run train there? See --device")
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
