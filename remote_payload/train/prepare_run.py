"""From a job to a run that is ready to start: dataset, buckets, target config, queues.

Everything that can be refused is refused here, before a model is loaded, with one sentence each.
"""

from __future__ import annotations

import functools
import queue
from pathlib import Path

import numpy as np
import torch

from remote_payload.job import Job, JobError
from remote_payload.job_paths import locate
from remote_payload.rundir import RecordWriter
from remote_payload.train.alarm import TauWatch
from remote_payload.train.batch import BatchMaker, RowShape
from remote_payload.train.buckets import EpochPlan, bucket_of, plan_epoch
from remote_payload.train.checkpoint_index import CheckpointIndex
from remote_payload.train.contract import contract_of, dataset_identity
from remote_payload.train.dataset import Dataset
from remote_payload.train.devices import compute_dtype, resolve_devices
from remote_payload.train.drafter import DrafterConfig, choose_taps, fp8_sizes
from remote_payload.train.evaluation import Evaluation, held_out_prompts
from remote_payload.train.features import FeatureCache
from remote_payload.train.fp8 import check_fp8
from remote_payload.train.init_from import check_initial
from remote_payload.train.model_source import resolve_model
from remote_payload.train.objective import default_gamma, needs_teacher
from remote_payload.train.progress import Progress
from remote_payload.train.resume import check_resume, find_resume, go_on
from remote_payload.train.role_choice import settle_roles
from remote_payload.train.role_times import RoleSources, measure_roles
from remote_payload.train.run import Log, Run
from remote_payload.train.run_control import Handover, OrderedQueue, RunControl
from remote_payload.train.saver import Saver
from remote_payload.train.statistics import Statistics
from remote_payload.train.sync import Reduction
from remote_payload.train.target import check_mask_token, read_config, special_ids
from remote_payload.train.target_config import rope_differences
from remote_payload.train.unusable import DataError, Findings, Skipped
from remote_payload.train.useful_work import UsefulWork, ceiling_of

DATASET_CACHE = Path("cache", "datasets")
"""Where in the workspace converted datasets lie."""

FINDINGS = "samples-{}.seen"
"""The file of a run directory that keeps what content said of each sample; {} is the dataset's
fingerprint."""


def prepare(
    job: Job,
    run_dir: Path,
    events: RecordWriter,
    progress: Progress,
    control: RunControl,
    log: Log,
    *,
    resuming: bool,
) -> Run:
    """Read what the job names and set the run up; `resuming`: to go on from its newest checkpoint.

    Raises JobError or DataError for what cannot be used.
    """
    workspace = run_dir.parent.parent
    job.targets, job.drafters = resolve_devices(job.targets), resolve_devices(job.drafters)
    dataset = Dataset.open(locate(job.dataset, workspace), workspace / DATASET_CACHE, log)
    log(f"{len(dataset)} samples loaded (Arrow-backed, lazy access)")
    skipped = Skipped()
    longest = min(job.bucket_edges[-1] - 1, job.token_budget)
    usable = dataset.usable(job.bucket_edges[0], longest, skipped)
    buckets = np.where(usable, bucket_of(dataset.lengths, job.bucket_edges), -1)
    if not usable.any():
        raise DataError(f"{dataset.path}: none of its {len(dataset)} samples can be used: {skipped}")
    plan = functools.lru_cache(maxsize=2)(
        lambda epoch: plan_epoch(
            dataset.lengths,
            buckets,
            token_budget=job.token_budget,
            max_batch=job.max_batch,
            seed=job.seed,
            epoch=epoch,
        )
    )
    report_dataset(job, dataset, skipped, int((buckets >= 0).sum()), plan(0), events, log)

    try:
        model = resolve_model(job.target, workspace / "cache", log)
    except ValueError as error:
        raise JobError(str(error)) from error
    text = read_config(model, job.trust_remote_code)
    check_mask_token(job.mask_token_id, text, special_ids(model, text))
    taps = tuple(job.tap_layers) or choose_taps(text.num_hidden_layers, job.taps)
    if max(taps) >= text.num_hidden_layers or min(taps) < 0:
        raise JobError(f"tap_layers = {list(taps)}: the target has layers 0 to {text.num_hidden_layers - 1}")
    if len(set(taps)) < len(taps):
        raise JobError(f"tap_layers = {list(taps)}: names a layer twice; expected each once")
    config = DrafterConfig.for_target(
        text, layers=job.layers, tap_layers=taps, block_size=job.block_size, mask_token_id=job.mask_token_id
    )
    check_fp8(job.fp8, job.drafters, fp8_sizes(config))
    for line in rope_differences(text):
        log(line)
    if beyond := int((dataset.lengths[buckets >= 0] > config.max_positions).sum()):
        log(
            f"{beyond} samples are longer than the {config.max_positions} tokens that the target is made for"
            " (max_position_embeddings): what it says of later ones may be worth nothing; the last of"
            " bucket_edges leaves them out"
        )
    rows_per_step = job.rows_per_step or len(job.drafters)
    batches = len(plan(0).batches)
    shape = RowShape(
        token_budget=job.token_budget,
        anchors=job.anchors,
        block_size=job.block_size,
        mask_token_id=job.mask_token_id,
        gamma=job.gamma or default_gamma(job.block_size),
        anchor_choice=job.anchor_choice,
    )
    steps = job.steps or max(1, round(job.epochs * batches / rows_per_step))
    contract = contract_of(job, model=model, config=config, dataset=dataset, rows_per_step=rows_per_step)
    resume = find_resume(run_dir, log) if resuming else None
    if resume is not None:
        check_resume(resume, contract, steps)
    first = 0 if resume is None else resume.step * rows_per_step
    events.write(
        "start", steps=steps, rows_per_step=rows_per_step, steps_per_epoch=round(batches / rows_per_step, 2)
    )
    progress.update(steps=steps, skipped=dict(skipped.count))
    maker = BatchMaker(
        dataset,
        shape,
        seed=job.seed,
        vocabulary=text.vocab_size,
        pad_id=0,
        skipped=skipped,
        findings=Findings(len(dataset), run_dir / FINDINGS.format(dataset.fingerprint)),
    )
    statistics = Statistics(job.block_size, len(job.bucket_edges) - 1)
    cache = open_cache(job, dataset, model, config, workspace, log)
    evaluation = open_evaluation(
        job, workspace, dataset, special_ids(model, text)["eos_token_id"], text.vocab_size, log
    )
    init_from = find_initial(job, config, workspace, log) if resume is None else None
    sources = RoleSources(
        model=model,
        config=config,
        shape=shape,
        statistics=statistics,
        plan=plan(0),
        maker=BatchMaker(dataset, shape, seed=job.seed, vocabulary=text.vocab_size, pad_id=0),
    )
    measured = functools.partial(measure_roles, job, sources, control=control)
    loaded = settle_roles(job, run_dir, events, log, measured, resuming=resuming)
    run = Run(
        job=job,
        run_dir=run_dir,
        model=model,
        config=config,
        shape=shape,
        statistics=statistics,
        steps=steps,
        rows_per_step=rows_per_step,
        plan=plan,
        batches_per_epoch=batches,
        maker=maker,
        cache=cache,
        evaluation=evaluation,
        events=events,
        progress=progress,
        control=control,
        log=log,
        batches=OrderedQueue(job.queue_depth, control, first),
        features=[OrderedQueue(job.queue_depth, control, first // len(job.drafters)) for _ in job.drafters],
        targets=[Handover(control) for _ in job.targets],
        ready=[Handover(control) for _ in job.drafters],
        reduction=Reduction([torch.device(name) for name in job.drafters], control, job.reduction),
        to_evaluate=queue.SimpleQueue(),
        checkpoints=CheckpointIndex(
            run_dir,
            keep=job.checkpoint_keep,
            keep_best=job.checkpoint_best and bool(job.held_out),
            keep_every=job.checkpoint_keep_every,
        ),
        contract=contract,
        watch=TauWatch(job.tau_alarm_ratio),
        saver=Saver(control),
        init_from=init_from,
        loaded=loaded,
        useful=UsefulWork(ceiling_of([*job.targets, *job.drafters])),
    )
    if resuming:
        go_on(run, resume)
    progress.queues = {"batches": [run.batches], "features": list(run.features)}
    return run


def report_dataset(
    job: Job, dataset: Dataset, skipped: Skipped, usable: int, plan: EpochPlan, events: RecordWriter, log: Log
) -> None:
    """Dataset and buckets, in the log as its readers know them, and as events."""
    for reason, count in skipped.count.items():
        log(f"Left out {count} samples: {reason} (the first: {skipped.first[reason]})")
    sizes = [len(batch) for batch in plan.batches]
    least, most, mean = min(sizes), max(sizes), sum(sizes) / len(sizes)
    log(f"Batches per epoch: {len(sizes)} (min={least} max={most} avg={mean:.1f})")
    events.write(
        "dataset",
        path=str(dataset.path),
        samples=len(dataset),
        usable=usable,
        tokens=dataset.tokens,
        skipped={reason: {"count": n, "first": skipped.first[reason]} for reason, n in skipped.count.items()},
        batches=len(sizes),
        batch_min=least,
        batch_max=most,
        batch_mean=round(mean, 2),
    )
    edges = job.bucket_edges
    for number, count in enumerate(plan.counts(len(edges) - 1)):
        low, high, share = edges[number], edges[number + 1], count / len(sizes)
        log(f"Bucket {number} [{low:4d}, {high:4d}): {count:6d} batches ({100 * share:5.1f}%)")
        events.write("bucket", bucket=number, low=low, high=high, batches=count, share=round(share, 5))


def find_initial(job: Job, config: DrafterConfig, workspace: Path, log: Log) -> Path | None:
    """The released drafter that the job begins with, checked against what it is to become."""
    if not job.init_from:
        return None
    path = locate(job.init_from, workspace)
    check_initial(path, config)
    log(f"Weights begin as those of {path}")
    return path


def open_cache(
    job: Job, dataset: Dataset, model: Path, config: DrafterConfig, workspace: Path, log: Log
) -> FeatureCache | None:
    """The feature cache, when the job wants one."""
    if job.features != "cached":
        return None
    dtype = compute_dtype(job.target_dtype, torch.device(job.targets[0]))
    last_hidden = needs_teacher(job)
    key = FeatureCache.key(dataset.files, model, config, dtype, last_hidden)
    columns = (len(config.tap_layers) + last_hidden) * config.width
    cache = FeatureCache(workspace / "cache" / "features" / key, dataset, columns)
    log(f"Features are kept in {cache.path} ({100 * cache.present_share:.0f}% there already)")
    return cache


def open_evaluation(
    job: Job, workspace: Path, trained: Dataset, ends: set[int], vocabulary: int, log: Log
) -> Evaluation | None:
    """The evaluation on held-out prompts, when the job names some that are not those `trained` on."""
    if not job.held_out:
        log("No held_out in the job: tau will be training's estimate only")
        return None
    dataset = Dataset.open(locate(job.held_out, workspace), workspace / DATASET_CACHE, log)
    if dataset_identity(dataset) == dataset_identity(trained):
        raise DataError(
            f"{dataset.path}: held_out has the very samples of dataset, and tau on what was trained on says"
            f" nothing; keep some samples apart, or leave held_out out"
        )
    prompts = held_out_prompts(dataset, job.eval_prompts, vocabulary)
    if not prompts:
        raise DataError(
            f"{dataset.path}: no sample has a prompt of ids below {vocabulary} before its answer; nothing to"
            f" evaluate on"
        )
    log(f"{len(prompts)} held-out prompts of {len({prompt.kind for prompt in prompts})} kinds")
    return Evaluation(prompts, ends, job.eval_max_new_tokens, job.eval_logit_gap)
