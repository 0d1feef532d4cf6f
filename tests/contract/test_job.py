from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_payload import job
from remote_payload.job import Job, JobError, differences, resumable_keys

LEAST: dict[str, Any] = {"target": "models/x", "dataset": "data/x.arrow", "mask_token_id": 4}
FIELDS = {field.name: field for field in dataclasses.fields(Job)}
TYPES = get_type_hints(Job)

# TOML knows no surrogates; everything else a string may hold has to survive.
text = st.text(st.characters(exclude_categories=["Cs"]))
words = text.filter(bool)
devices = st.lists(
    st.one_of(st.just("cpu"), st.integers(0, 63).map(lambda n: f"cuda:{n}")), min_size=1, max_size=8
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    drafters = draw(devices)
    layers = draw(st.integers(1, 6))
    edges = draw(st.lists(st.integers(0, 8000), min_size=2, max_size=8, unique=True).map(sorted))
    values = {
        "target": draw(words),
        "dataset": draw(words),
        "held_out": draw(text),
        "mask_token_id": draw(st.integers(0, 200_000)),
        "targets": draw(devices),
        "drafters": drafters,
        "token_budget": draw(st.integers(edges[0] + 16, 65_536)),
        "bucket_edges": edges,
        "layers": layers,
        "init_from_target": draw(st.sampled_from([[], list(range(layers))])),
        "tap_layers": draw(st.lists(st.integers(0, 40), max_size=5)),
        "rows_per_step": len(drafters) * draw(st.integers(0, 4)),
        "learning_rate": draw(st.floats(1e-12, 10)),
        "warmup": draw(st.floats(0, 1)),
        "betas": draw(st.lists(st.floats(0, 0.999), min_size=2, max_size=2)),
        "epochs": draw(st.floats(1e-12, 1e9)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "execution": draw(st.sampled_from(["auto", "graph", "compiled", "eager", "reduce-overhead"])),
    }
    return Job.from_mapping(values, "test")


@given(jobs())
def test_a_job_written_out_is_the_same_job_again(made: Job) -> None:
    values = tomllib.loads(made.to_toml())
    assert set(values) == set(FIELDS), "every key is written out"
    assert Job.from_mapping(values, "job.toml") == made


@given(words)
def test_any_string_survives_toml(name: str) -> None:
    made = Job.from_mapping(LEAST | {"target": name}, "test")
    assert tomllib.loads(made.to_toml())["target"] == name


def test_every_key_stands_under_its_text() -> None:
    lines = Job.from_mapping(LEAST, "test").to_toml().splitlines()
    for name, field in FIELDS.items():
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{name} = "))
        assert lines[at - 1] == f"# {field.metadata['text']}"


def test_every_key_has_a_text_of_one_line_that_ends_like_a_sentence() -> None:
    for name, field in FIELDS.items():
        sentence = field.metadata["text"]
        assert sentence and "\n" not in sentence and sentence.endswith("."), name


def test_every_default_passes_its_own_check() -> None:
    made = Job.from_mapping(LEAST, "test")
    for name, field in FIELDS.items():
        check = field.metadata["check"]
        assert check is None or check(getattr(made, name)) is None, name


def test_two_jobs_share_no_list() -> None:
    one, two = Job.from_mapping(LEAST, "test"), Job.from_mapping(LEAST, "test")
    one.bucket_edges.append(9000)
    one.targets.append("cpu")
    assert two.bucket_edges[-1] == 8193 and two.targets == ["auto"]


# Errors name the source and the key, and what was expected.

# For every checked key one value of the right type that the check refuses.
REFUSED: dict[str, Any] = {
    "target": "",
    "targets": ["gpu0"],
    "target_dtype": "float8",
    "target_attention": "fast",
    "target_execution": "fast",
    "drafters": ["cuda:²"],
    "roles": "best",
    "compute_dtype": "float16",
    "fp8": "both",
    "attention": "fast",
    "dataset": "",
    "token_budget": 15,
    "max_batch": 0,
    "bucket_edges": [10, 5],
    "features": "offline",
    "layers": 0,
    "block_size": 1,
    "mask_token_id": -1,
    "taps": 0,
    "tap_layers": [-1],
    "init_from_target": [-1],
    "anchors": 0,
    "anchor_choice": "grid",
    "gamma": -0.5,
    "objective": "mse",
    "kl_share": 1.5,
    "lk_eta": -1.0,
    "dpace_alpha": 1.5,
    "focal_weight": -0.1,
    "chain_weight": -1.0,
    "learning_rate": 0.0,
    "schedule": "step",
    "decay": 1.5,
    "warmup": 1.5,
    "betas": [0.9, 1.0],
    "weight_decay": -1.0,
    "clip": 0.0,
    "nonfinite_limit": -1,
    "epochs": 0.0,
    "steps": -1,
    "rows_per_step": -1,
    "seed": -1,
    "execution": "fast",
    "reduction": "ring",
    "queue_depth": 0,
    "cpu_threads": -1,
    "eval_every": -1,
    "eval_prompts": 0,
    "eval_max_new_tokens": 1,
    "eval_logit_gap": -1.0,
    "checkpoint_every": -1,
    "tau_alarm_ratio": 0.5,
    "checkpoint_keep": 0,
    "checkpoint_keep_every": -1,
    "crash_grace": 0.0,
    "restart": "always",
    "restart_limit": 0,
    "restart_wait": -1.0,
}


def error(values: dict[str, Any]) -> str:
    with pytest.raises(JobError) as caught:
        Job.from_mapping(LEAST | values, "my.toml")
    return str(caught.value)


def test_every_checked_key_is_tried_below() -> None:
    assert {name for name, field in FIELDS.items() if field.metadata["check"]} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_value_is_named_with_source_key_value_and_what_was_expected(name: str) -> None:
    said = error({name: REFUSED[name]})
    assert said.startswith(f"my.toml: {name} = {REFUSED[name]!r}: expected ")
    assert len(said.split("expected ")[1]) > 3


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("wrong", ["text", 1, 1.5, True, ["x"], [1], {"a": 1}])
def test_a_value_of_another_type_is_refused_by_name(name: str, wrong: Any) -> None:
    wanted = TYPES[name]
    fits = type(wrong) is wanted or (wanted is float and type(wrong) is int)
    if get_origin(wanted) is list and isinstance(wrong, list):
        inner = get_args(wanted)[0]
        fits = type(wrong[0]) is inner or (inner is float and type(wrong[0]) is int)
    if fits:
        return
    said = error({name: wrong})
    assert said.startswith(f"my.toml: {name} = ")
    assert ": expected a" in said or ": expected true or false" in said


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", [name for name in FIELDS if TYPES[name] is float])
def test_what_is_not_a_number_is_refused_by_name(name: str, value: float) -> None:
    assert error({name: value}).startswith(f"my.toml: {name} = ")


NUMBERS = [name for name, wanted in TYPES.items() if {wanted, *get_args(wanted)} & {int, float}]
WHOLE = [name for name in NUMBERS if {TYPES[name], *get_args(TYPES[name])} & {int}]


def as_given(name: str, value: float) -> Any:
    return [value] if get_origin(TYPES[name]) is list else value


HUGE = {"10**22": 10**22, "-10**22": -(10**22), "10**400": 10**400, "2**20000": 1 << 20_000, "1e300": 1e300}


@pytest.mark.parametrize("value", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_nobody_means_is_refused_by_name(name: str, value: float) -> None:
    said = error({name: as_given(name, value)})
    assert said.startswith(f"my.toml: {name} = ") and ": expected " in said and len(said) < 600


@given(
    st.sampled_from(NUMBERS),
    st.one_of(st.integers(), st.integers(10**9), st.floats(), st.floats(min_value=1e9, allow_nan=False)),
)
def test_any_number_is_refused_by_its_key_or_a_number_that_a_run_can_have(name: str, value: float) -> None:
    try:
        made = Job.from_mapping(LEAST | {name: as_given(name, value)}, "my.toml")
    except JobError as refused:
        assert str(refused).startswith("my.toml: ") and name in str(refused)
        return
    taken = getattr(made, name)
    for number in taken if isinstance(taken, list) else [taken]:
        assert math.isfinite(number) and 0 <= number < 2**32
    assert Job.from_mapping(tomllib.loads(made.to_toml()), "job.toml") == made


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_too_much_is_said_in_figures_that_can_be_read(name: str) -> None:
    assert re.search(r"at most [\d,]+$|between|from 0 to 999|rising", error({name: as_given(name, 10**22)}))


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000], ids=["decimal", "hexadecimal"])
def test_a_number_of_thousands_of_digits_ends_nothing_as_a_defect(file: Path, digits: str) -> None:
    with pytest.raises(JobError, match="steps"):
        job.load(file, [f"steps={digits}"])
    file.write_text(f"steps = {digits}\n" + file.read_text())
    with pytest.raises(JobError) as caught:
        job.load(file)
    assert str(caught.value).startswith(str(file)) and "digits" in str(caught.value)


@pytest.mark.parametrize("name", LEAST)
def test_a_missing_key_is_named_with_its_meaning(name: str) -> None:
    values = {key: value for key, value in LEAST.items() if key != name}
    with pytest.raises(JobError) as caught:
        Job.from_mapping(values, "my.toml")
    assert f"my.toml: {name} is missing. {FIELDS[name].metadata['text']}" == str(caught.value)


@pytest.mark.parametrize(
    ("key", "nearest"), [("learning_rat", "learning_rate"), ("layer", "layers"), ("Target", "target")]
)
def test_an_unknown_key_is_named_with_the_nearest_valid_ones(key: str, nearest: str) -> None:
    said = error({key: 1})
    assert f"my.toml: unknown key '{key}'" in said and nearest in said


def test_a_key_like_no_other_is_answered_with_all_there_are() -> None:
    said = error({"zzzzzzzz": 1})
    assert all(name in said for name in FIELDS)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"drafters": ["cuda:0", "cuda:1"], "rows_per_step": 3}, "rows_per_step = 3"),
        ({"init_from_target": [1, 2], "layers": 5}, "init_from_target"),
        ({"token_budget": 16, "bucket_edges": [16, 32]}, "token_budget = 16"),
        ({"anchors": 63, "max_batch": 64}, "anchors = 63 and max_batch = 64"),
    ],
)
def test_keys_that_do_not_fit_together_are_named(values: dict[str, Any], key: str) -> None:
    said = error(values)
    assert said.startswith("my.toml: ") and key in said


def test_a_whole_number_passes_for_a_number_and_comes_back_as_one() -> None:
    made = Job.from_mapping(LEAST | {"epochs": 3, "betas": [0, 0.5]}, "test")
    assert (made.epochs, made.betas) == (3.0, [0.0, 0.5])
    assert type(made.epochs) is float and type(made.betas[0]) is float


# Files and --set


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('target = "x"\ndataset = "y"\nmask_token_id = 4\n', encoding="utf-8")
    return path


def test_a_file_is_read_and_changes_win(file: Path) -> None:
    made = job.load(file, ["learning_rate=3e-3", 'drafters=["cpu", "cpu"]', "target=Qwen/Qwen3-8B"])
    assert (made.learning_rate, made.drafters) == (3e-3, ["cpu", "cpu"])
    assert made.target == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"target = ", "is not TOML"),
        (b"a = 1\na = 2\n", "is not TOML"),
        (b'target = "\xff"', "is not UTF-8"),
        (b"layers = 0", "layers"),
        (b"lairs = 1", "lairs"),
    ],
)
def test_a_bad_file_is_named(file: Path, content: bytes, said: str) -> None:
    file.write_bytes(content if b"target" in content else file.read_bytes() + content)
    with pytest.raises(JobError) as caught:
        job.load(file)
    assert str(caught.value).startswith(f"{file}: ") and said in str(caught.value)


def test_the_line_of_a_mistake_in_the_toml_is_named(file: Path) -> None:
    file.write_text('target = "x"\n\ndataset = [\n')
    with pytest.raises(JobError, match="line"):
        job.load(file)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file") as caught:
        job.load(tmp_path / "none.toml")
    assert str(tmp_path / "none.toml") in str(caught.value)
    with pytest.raises(JobError, match="cannot be read"):
        job.load(tmp_path)


def test_an_error_in_a_change_says_that_it_may_come_from_there(file: Path) -> None:
    with pytest.raises(JobError) as caught:
        job.load(file, ["layers=0"])
    assert str(caught.value).startswith(f"{file} with --set: layers = 0: expected at least 1")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("steps=5", ("steps", 5)),
        ("learning_rate = 3e-4", ("learning_rate", 3e-4)),
        ("target=Qwen/Qwen3-8B", ("target", "Qwen/Qwen3-8B")),
        ('target="a=b"', ("target", "a=b")),
        ("target=a=b", ("target", "a=b")),
        ("drafters=['cpu']", ("drafters", ["cpu"])),
        ("held_out=", ("held_out", "")),
        ("x=true", ("x", True)),
    ],
)
def test_a_change_is_toml_or_else_a_plain_string(typed: str, expected: tuple[str, Any]) -> None:
    assert job.parse_change(typed) == expected


@pytest.mark.parametrize("typed", ["steps", "=5", "", "  =  "])
def test_a_change_without_key_or_value_is_refused_as_it_was_typed(typed: str) -> None:
    with pytest.raises(JobError) as caught:
        job.parse_change(typed)
    assert repr(typed) in str(caught.value) and "key=value" in str(caught.value)


def test_a_resumed_run_may_train_longer_and_report_more_but_not_train_otherwise() -> None:
    before = Job.from_mapping(LEAST, "my.toml")
    after = Job.from_mapping(LEAST | {"steps": 900, "seed": 3, "checkpoint_every": 50}, "my.toml")
    found = {
        change.key: (change.before, change.after, change.allowed) for change in differences(before, after)
    }
    assert found == {"steps": (0, 900, True), "seed": (0, 3, False), "checkpoint_every": (0, 50, True)}
    assert differences(before, before) == []
    assert not {"target", "dataset", "learning_rate", "layers", "block_size", "rows_per_step"} & set(
        resumable_keys()
    )


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        ({"drafters": ["cuda:0", "cuda:1"]}, {"drafters": ["cuda:2", "cuda:3"]}, [True]),
        ({"drafters": ["cuda:0", "cuda:1"]}, {"drafters": ["cuda:2"]}, [False]),
        ({"drafters": ["cuda:0", "cuda:1"]}, {"drafters": ["cuda:2"], "rows_per_step": 2}, [True, True]),
        (
            {"drafters": ["cuda:0", "cuda:1"], "rows_per_step": 4},
            {"drafters": ["cuda:0"], "rows_per_step": 4},
            [True],
        ),
        ({"rows_per_step": 4}, {"rows_per_step": 8}, [False]),
        ({"drafters": ["auto"]}, {"drafters": ["cuda:0"]}, [False]),
    ],
)
def test_replicas_on_other_devices_are_the_same_training_while_a_step_has_as_many_rows(
    before: dict[str, object], after: dict[str, object], allowed: list[bool]
) -> None:
    jobs = [Job.from_mapping({**LEAST, **values}, "my.toml") for values in (before, after)]
    assert [change.allowed for change in differences(*jobs)] == allowed
