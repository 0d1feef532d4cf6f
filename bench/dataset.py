"""How long a large dataset takes to index, and how much memory: `python -m bench.dataset`.

Writes synthetic samples (int32 ids, mean 256 tokens, an int8 loss_mask) as `save_to_disk` would: shards of
Arrow streams in record batches of 1,000 rows, named by `state.json`, in a temporary directory that is removed
afterwards. A fresh process then does what a run does before its first batch (map the shards, read all
lengths, tell what they show to be unusable, assign buckets, plan the first epoch) with the default job's
keys, and prints its findings as one JSON object:

- `samples`, `tokens`, `batches` (of the first epoch), `gib` (of the shards)
- `index_s`: seconds of the above in a process that has imported pyarrow and numpy. The files were just
  written, so they are in the page cache: a cold disk adds the time to read about 8 bytes a sample.
- `index_cpu_s`: processor seconds of the same: what an idle machine would take, also where this one was busy
- `import_s`: seconds to import them, and our modules
- `rss_mib`: the most memory that process held from start to end (VmHWM): Python, pyarrow, numpy, and every
  page of the mapped shards that was touched. torch is not imported; if it were, this would fail.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAMPLES = 1_095_082
MEAN_TOKENS = 256
BATCH_ROWS = 1_000
SHARD_ROWS = 100_000
VOCABULARY = 151_936


def write(folder: Path, samples: int) -> None:
    """Write a dataset of `samples` into `folder`, laid out as Hugging Face's save_to_disk does."""
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(0)
    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    shards = -(-samples // SHARD_ROWS)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    left = samples
    for name in names:
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            in_shard = min(left, SHARD_ROWS)
            left -= in_shard
            while in_shard:
                rows = min(in_shard, BATCH_ROWS)
                in_shard -= rows
                lengths = np.clip(random.gamma(2.0, MEAN_TOKENS / 2, rows), 8, 8192).astype(np.int32)
                offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
                place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
                ids = random.integers(0, VOCABULARY, offsets[-1], dtype=np.int32)
                mask = (place >= np.repeat(lengths // 4, lengths)).astype(np.int8)
                lists = [pa.ListArray.from_arrays(offsets, values) for values in (ids, mask)]
                writer.write_batch(pa.record_batch(lists, schema=schema))
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "bench",
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(state))


def index(folder: Path) -> dict[str, float | int]:
    """Index the dataset in `folder` as a run would; what it took."""
    began = time.perf_counter()
    from remote_payload.job import Job
    from remote_payload.train.buckets import bucket_of, plan_epoch
    from remote_payload.train.dataset import Dataset, Skipped

    imported, cpu = time.perf_counter(), time.process_time()
    job = Job(target="", dataset=str(folder), mask_token_id=0)
    dataset = Dataset.open(folder)
    longest = min(job.bucket_edges[-1] - 1, job.token_budget)
    usable = dataset.usable(job.bucket_edges[0], longest, Skipped())
    buckets = bucket_of(dataset.lengths, job.bucket_edges)
    buckets[~usable] = -1
    plan = plan_epoch(
        dataset.lengths,
        buckets,
        token_budget=job.token_budget,
        max_batch=job.max_batch,
        seed=job.seed,
        epoch=0,
    )
    done, cpu = time.perf_counter(), time.process_time() - cpu
    assert "torch" not in sys.modules, "indexing must not need torch"
    return {
        "samples": len(dataset),
        "tokens": dataset.tokens,
        "batches": len(plan.batches),
        "gib": round(sum(file.stat().st_size for file in dataset.files) / 2**30, 3),
        "index_s": round(done - imported, 3),
        "index_cpu_s": round(cpu, 3),
        "import_s": round(imported - began, 3),
        "rss_mib": round(_peak_kib() / 1024, 1),
    }


def _peak_kib() -> int:
    """The most memory this process held, in KiB. (ru_maxrss would count that of the process before exec.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Index a large synthetic dataset; prints one JSON object.")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="how many (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the dataset where it is and say where")
    parser.add_argument("--index", type=Path, metavar="FOLDER", help="index this one; write none")
    options = parser.parse_args(arguments)
    if options.index:
        from remote_payload.train.unusable import DataError

        try:
            print(json.dumps(index(options.index)))
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    if options.samples < 1:
        parser.error("--samples must be at least 1")
    folder = Path(tempfile.mkdtemp(prefix="dflash-dataset-"))
    try:
        write(folder, options.samples)
        command = [sys.executable, "-m", "bench.dataset", "--index", str(folder)]
        return subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode
    finally:
        if options.keep:
            print(f"kept: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
