"""The model card of an export: what it drafts for, how it was trained and measured, and how to serve it."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Mapping
from typing import Any

import safetensors
import torch
import transformers

from remote_payload.job import Job
from remote_payload.job_key import toml
from remote_payload.tools.export_check import Check
from remote_payload.train.drafter import DrafterConfig

RECIPE_LEFT_OUT = ("targets", "drafters", "queue_depth", "cpu_threads", "crash_grace", "tensorboard")
"""Keys of the job that say where and not how it was trained."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Everything that the card and `dflashctl.json` say."""

    run: str
    name: str
    step: int
    steps: int | None
    dtype: str
    config: DrafterConfig
    job: Job
    launched: Mapping[str, Any]
    """run.json"""
    dataset: Mapping[str, Any]
    """The `dataset` event."""
    training_s: float | None
    evaluation: Mapping[str, Any] | None
    """Of this very checkpoint; None: it was not evaluated."""
    target_identity: Mapping[str, Any]
    check: Check

    @property
    def versions(self) -> dict[str, str]:
        """Of what the drafter was trained and exported with: both run in the same environment."""
        return {
            "dflashctl": str(self.launched.get("dflashctl") or "unknown"),
            "payload": str(self.launched.get("payload") or "unknown")[:12],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        }

    def origin(self) -> dict[str, Any]:
        """`dflashctl.json`."""
        evaluation = self.evaluation or {}
        return {
            "run": self.run,
            "step": self.step,
            "dtype": self.dtype,
            "target": self.job.target,
            "target_identity": dict(self.target_identity),
            "tau": evaluation.get("tau"),
            "tau_macro": evaluation.get("tau_macro"),
            "versions": self.versions,
            "check": dataclasses.asdict(self.check),
        }


def model_card(card: Card) -> str:
    """README.md of an export."""
    return "\n".join([*_head(card), *_serving(card), *_measured(card), *_training(card), *_files(card)])


def _head(card: Card) -> list[str]:
    c = card.config
    identity = ", ".join(f"{key} `{value}`" for key, value in card.target_identity.items())
    last = c.block_size - 1
    return [
        f"# A DFlash drafter for {card.job.target}",
        "",
        "Licence: to be stated by whoever publishes it; the terms of the target and of the data apply.",
        "",
        "A draft model for speculative decoding by block diffusion (DFlash, arXiv 2602.06036):"
        f" {c.layers} layers of width {c.width} that read the target's layers {list(c.tap_layers)} and fill a"
        f" block of {c.block_size} tokens in one pass. Embedding and head are the target's own.",
        "",
        f"- Target: `{card.job.target}`, {c.target_layers} layers, vocabulary {c.vocabulary};"
        f" {identity or 'identity not known'}.",
        f"- Layout: anchor first. A block is [anchor, MASK x {last}] with MASK = {c.mask_token_id}; the"
        f" anchor is the token that the target gave last, and positions 1 to {last} are drafted. It is no 1+N"
        f" layout, where {c.block_size} masks follow the anchor: served as that, it drafts next to nothing,"
        " without an error (SGLang #40144).",
        f"- RoPE: full width (all {c.head_dim} numbers of a head), base {c.rope_theta:g}, not scaled,"
        " whatever `partial_rotary_factor` or scaling the target has (NeMo #3605). Positions are absolute.",
        "- Attention: not causal inside a block; every block token sees the whole context before the anchor.",
        "",
    ]


def _serving(card: Card) -> list[str]:
    size = card.config.block_size
    options = json.dumps({"method": "dflash", "model": "<this folder>", "num_speculative_tokens": size - 1})
    return [
        "## Serving",
        "",
        "```",
        f"python -m sglang.launch_server --model-path {card.job.target} --speculative-algorithm DFLASH \\",
        f"    --speculative-draft-model-path <this folder> --speculative-num-draft-tokens {size}",
        "",
        f"vllm serve {card.job.target} --speculative-config '{options}'",
        "```",
        "",
        f"SGLang counts the anchor ({size}), vLLM does not ({size - 1}).",
        "",
    ]


def _measured(card: Card) -> list[str]:
    found = card.evaluation
    if found is None:
        return ["## Measured", "", f"Step {card.step} was not evaluated during training.", ""]
    places = range(1, len(found["acceptance"]) + 1)
    conditional = found.get("conditional_acceptance") or []
    told = [
        f"Measured at step {card.step} by the run itself: real greedy speculative decoding of"
        f" {found.get('prompts')} held-out prompts (`{card.job.held_out}`), up to"
        f" {card.job.eval_max_new_tokens} new tokens each, {found.get('tokens')} in all."
    ]
    if "text_equal" in found:
        ties = found.get("diverged_allowed")
        more = f", {ties} part from it at a tie of its two best logits" if ties else ""
        told.append(f"{found['text_equal']} texts equal the target's own{more}.")
    if "plain_tokens_per_s" in found:
        told.append(
            f"One text at a time, beside training: {found['tokens_per_s']:.1f} tokens/s, and"
            f" {found['plain_tokens_per_s']:.1f} by plain decoding."
        )
    return [
        "## Measured",
        "",
        f"tau {found['tau']:.3f} over rounds (pooled), {found['tau_macro']:.3f} over prompts (macro, the"
        " paper's): the mean number of tokens that one pass of the target gives, of at most"
        f" {card.config.block_size}.",
        "",
        " ".join([*told, "`dflashctl evaluate` measures anew."]),
        "",
        "| position | accepted | of those that accepted the one before |",
        "|---|---|---|",
        *(
            f"| {place} | {share:.3f} | {_share(given)} |"
            for place, share, given in zip(
                places, found["acceptance"], [*conditional, *[None] * len(places)], strict=False
            )
        ),
        "",
    ]


def _training(card: Card) -> list[str]:
    data = card.dataset
    recipe = [
        f"{field.name} = {toml(getattr(card.job, field.name))}"
        for field in dataclasses.fields(Job)
        if field.name not in RECIPE_LEFT_OUT
    ]
    size = "size not known"
    if data:
        size = f"{data.get('samples')} samples ({data.get('usable')} used), {data.get('tokens')} tokens"
    steps = "" if card.steps is None else f" of {card.steps}"
    seconds = "" if card.training_s is None else f" in {card.training_s:,.0f} s of training"
    return [
        "## Training",
        "",
        f"- Run `{card.run}`, step {card.step}{steps}{seconds}.",
        f"- Data: `{card.job.dataset}`, {size}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in card.versions.items())}.",
        "",
        "```toml",
        *recipe,
        "```",
        "",
    ]


def _files(card: Card) -> list[str]:
    return [
        "## Files",
        "",
        f"`config.json` and `model.safetensors` ({card.check.tensors} tensors, {card.dtype}), as z-lab's"
        " reader, SGLang and vLLM expect them; `dflashctl.json` says where they come from. Verified when"
        f" written: {card.check.sentence}.",
        "",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
