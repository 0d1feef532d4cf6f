"""A prompts file: what the target will be asked, by kind and topic, and what is held out.

    held_out = ["tides"]

    [prompts.explain]
    tides = ["Why does the sea rise and fall?"]
    "black holes" = ["What is a black hole?", "Could one swallow the Earth?"]

The split is by topic and not by prompt, because two prompts about one topic get answers that share
half their words; a held-out prompt whose topic was trained on would measure memory. TOML, because
prompts are written by hand and a rewrite or a summary brings a text of several lines along.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remote_payload.tools.text_files import read_text


@dataclass(frozen=True)
class Prompt:
    """One user turn, and where it belongs."""

    kind: str
    topic: str
    text: str
    held_out: bool


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of the file, in the file's order.

    Raises ValueError that names the file and the line or key: unreadable, not TOML, a wrong type,
    an empty or repeated prompt, a held-out topic that no prompt has, nothing left to train on.
    """
    try:
        document = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML: {error}") from error
    for key in document:
        if key not in ("held_out", "prompts"):
            raise ValueError(f"{path}: unknown key {key!r}; expected held_out and [prompts.KIND]")
    held_out = _strings(path, "held_out", document.get("held_out", []))
    prompts = [
        Prompt(kind, topic, text, topic in held_out)
        for kind, topics in _tables(path, "prompts", document.get("prompts"))
        for topic, texts in _tables(path, f"prompts.{kind}", topics, leaf=True)
        for text in _strings(path, f"prompts.{kind}.{topic}", texts)
    ]
    _check(path, prompts, held_out)
    return prompts


def _tables(path: Path, key: str, value: Any, leaf: bool = False) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        inside = 'topic = ["prompt", ...] lines' if leaf else "[prompts.KIND] tables"
        raise ValueError(f"{path}: {key}: expected {inside}")
    return list(value.items())


def _strings(path: Path, key: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{path}: {key}: expected a list of strings")
    texts = [text.strip() for text in value]
    if not all(texts):
        raise ValueError(f"{path}: {key}: holds an empty string")
    return texts


def _check(path: Path, prompts: list[Prompt], held_out: list[str]) -> None:
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        twin = seen.setdefault(prompt.text, prompt)
        if twin is not prompt:
            raise ValueError(
                f"{path}: prompts.{prompt.kind}.{prompt.topic}: the same prompt stands under "
                f"prompts.{twin.kind}.{twin.topic}: {prompt.text[:60]!r}"
            )
    unused = [topic for topic in held_out if topic not in {prompt.topic for prompt in prompts}]
    if unused:
        raise ValueError(f"{path}: held_out: no prompt has the topic {unused[0]!r}")
    if all(prompt.held_out for prompt in prompts):
        raise ValueError(f"{path}: held_out: every topic is held out, nothing is left to train on")
