"""docs/training.md against the job: every key has its word there, and what it says of keys is so."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from remote_payload.job import Job
from remote_payload.job_key import typed
from remote_payload.job_together import _READ_ONLY_BY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
PAGES = ("training.md", "rundir.md", "export.md", "demo.md", "runs.md")
"""Those that speak of keys of the job."""
KEYS = {field.name: field for field in dataclasses.fields(Job)}


def choices(key: str) -> list[str]:
    """The values of a key that takes some words alone."""
    refusal = KEYS[key].metadata["check"]("?")
    return re.findall(r"'([^']+)'", refusal)


def table(title: str) -> list[list[str]]:
    """The cells of the rows, without its head, of the table whose first column has this title."""
    found = re.search(rf"(?m)^\| {re.escape(title)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE)
    assert found is not None
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in found[1].splitlines()]


def test_every_key_of_the_job_has_its_word() -> None:
    assert [key for key in KEYS if not re.search(rf"`{key}\b", PAGE)] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_sets_is_a_key_with_a_value_that_it_takes(page: str) -> None:
    types = get_type_hints(Job)
    for key, value in re.findall(r"`([a-z0-9_]+) = ([^`]+)`", (ROOT / "docs" / page).read_text()):
        assert key in KEYS, f"{key} = {value}"
        given = typed(tomllib.loads(f"value = {value}")["value"], types[key], key)
        check: Any = KEYS[key].metadata["check"]
        assert check is None or check(given) is None, f"{key} = {value}"


@pytest.mark.parametrize("key", ["objective", "execution", "target_execution", "fp8"])
def test_a_table_of_choices_has_a_row_for_each(key: str) -> None:
    title = {"execution": "rung"}.get(key, f"`{key}`" if key != "objective" else key)
    described = {row[0].strip("`") for row in table(title)}
    undescribed = {"execution": {"auto", "reduce-overhead"}, "fp8": {"none"}}  # in the text around it
    assert described == set(choices(key)) - undescribed.get(key, set())


def test_an_objectives_own_keys_are_those_that_it_alone_reads() -> None:
    for objective, _, _, keys in table("objective"):
        own = {
            key
            for key, (owner, by) in _READ_ONLY_BY.items()
            if owner == "objective" and objective.strip("`") in by
        }
        assert set(re.findall(r"`(\w+)`", keys)) - {"gamma"} == own
