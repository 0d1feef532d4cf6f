"""Prompts to evaluate on, from whatever file they stand in, as token ids.

Token ids: a dataset as the trainer reads it (Arrow, Parquet, a folder of `save_to_disk`); a prompt is what
stands before the first answer. Texts, rendered by the target's own chat template: a TOML file as `prepare`
reads it, of which the held-out topics count (all of them where none is held out), or JSON lines, each a
string, `{"prompt": ...}` or `{"messages": [...]}`, with `kind` where they are of several. Of a conversation
only what stands before its first answer is a prompt, since the answers are to be the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from remote_payload.tools.prompts import read_prompts
from remote_payload.tools.text_files import json_lines
from remote_payload.train.dataset import Dataset
from remote_payload.train.evaluation import HeldOutPrompt, held_out_prompts, in_turn

Log = Callable[[str], None]
Message = dict[str, str]

_TEXTS = (".toml", ".jsonl", ".json", ".ndjson")


def read_prompt_ids(
    path: Path,
    tokenizer: Callable[[], Any],
    *,
    vocabulary: int,
    count: int | None = None,
    cache: Path | None = None,
    log: Log,
) -> list[HeldOutPrompt]:
    """The prompts in `path`, at most `count` of them, from all kinds in turn where there are several.

    Args:
        path: the file, or the folder of a dataset.
        tokenizer: gives the target's, with a chat template; asked for only when texts have to be rendered.
        vocabulary: rows of the target's embedding.
        cache: a folder for the Arrow copy of what cannot be mapped.
        log: hears of such a copy.

    Raises ValueError naming the file and the line, key or column.
    """
    if path.suffix.lower() not in _TEXTS:
        if not path.exists():
            raise ValueError(
                f"{path}: there is no such file; expected prompts: Arrow, Parquet, TOML or JSONL"
            )
        dataset = Dataset.open(path, cache, log)
        found = held_out_prompts(dataset, len(dataset) if count is None else count, vocabulary)
    else:
        asked = _toml(path) if path.suffix.lower() == ".toml" else _json_lines(path)
        found = in_turn(_rendered(path, asked, tokenizer()))[:count]
    if not found:
        raise ValueError(f"{path}: no sample has a prompt of ids below {vocabulary} before its answer")
    return found


def _toml(path: Path) -> list[tuple[str, str, list[Message]]]:
    prompts = read_prompts(path)
    chosen = [prompt for prompt in prompts if prompt.held_out] or prompts
    return [(f"prompts.{prompt.kind}.{prompt.topic}", prompt.kind, _user(prompt.text)) for prompt in chosen]


def _json_lines(path: Path) -> list[tuple[str, str, list[Message]]]:
    found = []
    for number, record in json_lines(path):
        kind, messages = _message_list(record)
        if messages is None:
            raise ValueError(
                f'{path}: line {number}: expected a string, {{"prompt": "..."}} or {{"messages": [{{"role":'
                f' ..., "content": ...}}, ...]}} with a turn of the user before any answer'
            )
        found.append((f"line {number}", kind, messages))
    if not found:
        raise ValueError(f"{path}: holds no prompts")
    return found


def _message_list(record: Any) -> tuple[str, list[Message] | None]:
    """Kind and turns up to the first answer of one line; None for what is no prompt."""
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        return "", None
    kind = record.get("kind", "all")
    text = record.get("prompt", record.get("text"))
    if isinstance(text, str) and text.strip() and isinstance(kind, str):
        return kind, _user(text)
    messages = record.get("messages")
    if not isinstance(messages, list) or not isinstance(kind, str):
        return "", None
    turns: list[Message] = []
    for message in messages:
        role, content = (
            message.get(key) if isinstance(message, dict) else None for key in ("role", "content")
        )
        if not isinstance(role, str) or not isinstance(content, str):
            return "", None
        if role == "assistant":
            break
        turns.append({"role": role, "content": content})
    return kind, turns if turns and turns[-1]["role"] != "system" else None


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _rendered(path: Path, asked: list[tuple[str, str, list[Message]]], tokenizer: Any) -> list[HeldOutPrompt]:
    found = []
    for where, kind, messages in asked:
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            raise ValueError(f"{path}: {where}: the target's chat template refuses it ({error})") from error
        found.append(HeldOutPrompt(list(ids), kind))
    return found
