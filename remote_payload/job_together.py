"""Keys of the job that bear on one another: values that are good alone and cannot be together.

`job.py` checks each key by itself first, and then all of them here. Standard library only.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from remote_payload.job_key import JobError

if TYPE_CHECKING:
    from remote_payload.job import Job

_READ_ONLY_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "kl_share": ("objective", ("forward_kl",)),
    "lk_eta": ("objective", ("lk",)),
    "dpace_alpha": ("objective", ("dpace",)),
    "focal_weight": ("objective", ("focal", "chain")),
    "chain_weight": ("objective", ("chain",)),
    "decay": ("schedule", ("wsd",)),
}
"""Keys that mean something with some values of another key alone: set without, they would do nothing."""


def check_together(job: Job, source: str) -> None:
    """Raise JobError, which names `source`, for the first keys of `job` that cannot be together."""
    for field in dataclasses.fields(job):
        owner, values = _READ_ONLY_BY.get(field.name, ("", ()))
        if owner and getattr(job, field.name) != field.default and getattr(job, owner) not in values:
            raise JobError(
                f"{source}: {field.name} = {getattr(job, field.name)!r} is read only with {owner} ="
                f" {' or '.join(map(repr, values))}, and it is {getattr(job, owner)!r}"
            )
    if job.schedule == "wsd" and job.warmup + job.decay > 1:
        raise JobError(
            f"{source}: warmup = {job.warmup:g} and decay = {job.decay:g}: expected no more than 1 together"
        )
    if job.roles == "auto":
        _check_measured_roles(job, source)
    if job.fp8 != "none" and job.compute_dtype == "float32":
        raise JobError(
            f"{source}: fp8 = {job.fp8!r} and compute_dtype = 'float32': expected 'bfloat16' or 'auto'"
            " with it"
        )
    replicas = len(job.drafters)
    if job.rows_per_step % replicas:
        raise JobError(
            f"{source}: rows_per_step = {job.rows_per_step}: expected a multiple of the"
            f" {replicas} drafter replicas"
        )
    if job.init_from_target and len(job.init_from_target) != job.layers:
        raise JobError(
            f"{source}: init_from_target names {len(job.init_from_target)} layers: expected one for"
            f" each of the drafter's {job.layers} layers"
        )
    if job.anchors < job.max_batch:
        raise JobError(
            f"{source}: anchors = {job.anchors} and max_batch = {job.max_batch}: expected a slot"
            " for each document of a row, or some are never learned from"
        )
    if job.init_from and job.init_from_target:
        raise JobError(
            f"{source}: init_from = {job.init_from!r} and init_from_target = {job.init_from_target}"
            " exclude each other; leave one out"
        )
    if job.bucket_edges[0] >= job.token_budget:
        raise JobError(f"{source}: token_budget = {job.token_budget}: no bucket fits into it")


def _check_measured_roles(job: Job, source: str) -> None:
    named = [name for name in ("targets", "drafters") if getattr(job, name) != ["auto"]]
    if named:
        raise JobError(
            f"{source}: roles = 'auto' chooses devices by a measurement, and {named[0]} ="
            f" {getattr(job, named[0])} names them; leave {named[0]} out, or set roles = 'propose'"
        )
    if not job.rows_per_step:
        raise JobError(
            f"{source}: roles = 'auto' needs rows_per_step: a measurement decides how many replicas there"
            " are, and must not decide how many rows a step has"
        )
    if job.features == "cached":
        raise JobError(
            f"{source}: roles = 'auto' and features = 'cached' exclude each other: targets work in the"
            " first pass alone, so no split suits the whole run; name the devices"
        )
