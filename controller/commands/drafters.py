"""The commands about a trained drafter: `export`, `evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controller import completion
from controller.commands.options import (
    HostOption,
    JsonOption,
    PlaceOptions,
    Run,
    check_device,
    show_upload,
    with_place_options,
)
from controller.errors import UsageError
from controller.narration import say

if TYPE_CHECKING:
    from controller.inventory import Host

DTYPES = ("bfloat16", "float32", "float16")

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="WHICH",
        help="best, last or step-N. The best if not given, or the last where none was evaluated.",
    ),
]


def export(
    run: Run = None,
    checkpoint: CheckpointOption = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the folder in exports/. [step-N]")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="TYPE", help="bfloat16, float32 or float16.")
    ] = "bfloat16",
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", readable=False, help="Folder for the export. [./RUN]"),
    ] = None,
    pull: Annotated[bool, typer.Option("--pull/--no-pull", help="Whether to bring it here.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an export of that name.")] = False,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where the check computes: cpu, auto, cuda:N.")
    ] = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Write a run's drafter for SGLang and vLLM, and bring it here.

    The layout is that of the released DFlash drafters. It is written where the run is, complete or not at
    all, and read back before it is called done: its logits equal the checkpoint's. A model card has data,
    recipe, tau and how to serve it. The run may go on training meanwhile.

    \b
    dflashctl export
    dflashctl export demo-1130 --checkpoint step-400 --name first --to ~/drafters
    """
    from controller.commands.pull import Meter
    from controller.exporting import export as export_run
    from controller.paths import find_run

    _check(dtype, device)
    if to is not None and not pull:
        raise UsageError("--to and --no-pull exclude each other")
    directory = find_run(run)
    meter = Meter()
    try:
        done = export_run(
            directory,
            checkpoint=checkpoint,
            name=name,
            dtype=dtype,
            device=device,
            force=force,
            to=(to or Path(directory.parent.name)) if pull else None,
            say=say,
            upload=show_upload,
            progress=meter.show,
        )
    finally:
        meter.clear()
    if as_json:
        import dataclasses

        print(json.dumps(dataclasses.asdict(done)))
    else:
        print(done.directory or f"{done.path} on {done.place}")
    return 0


@with_place_options
def evaluate(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run's id, or the folder of a drafter. The newest run if not given.",
            autocompletion=completion.runs,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Arrow or Parquet of token ids, TOML or JSONL of texts. [a run's held-out ones]",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="MODEL", help="For a DIR: folder there, Hugging Face id, package:NAME."
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, metavar="N", help="At most so many prompts.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=2, metavar="N", help="Longest text. [the job's, or 256]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu or cuda:N.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="TYPE", help="Of target and drafter. [the job's, or by the device]"),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="For a DIR: let the target's own code run.")
    ] = False,
    host: HostOption = None,
    *,
    where: PlaceOptions,
    as_json: JsonOption = False,
) -> int:
    """Measure a drafter: tau by real decoding, and the speed-up.

    A RUN is evaluated where it is, a DIR on this machine or on --host. Speculative and plain decoding are
    measured on the same prompts in the same process, and their texts are compared.

    \b
    dflashctl evaluate demo-1130
    dflashctl evaluate demo-1130 --prompts questions.jsonl --max-new-tokens 128
    dflashctl evaluate drafters/exports/first --prompts questions.jsonl --target Qwen/Qwen3-4B --host gpubox
    """
    from controller.evaluating import Question, evaluate_folder, evaluate_run, is_folder
    from controller.text import safe_lines

    _check(dtype, device)
    question = Question(
        prompts=prompts, count=count, max_new_tokens=max_new_tokens, device=device, dtype=dtype
    )
    if what is not None and is_folder(what):
        if checkpoint is not None:
            raise UsageError(f"--checkpoint is of a run, and {what} is a folder")
        here = host is None and not where.is_given
        record = evaluate_folder(
            Path(what),
            question,
            _this_machine() if here else where.chosen(host),
            target=target,
            trust_remote_code=trust_remote_code,
            say=say,
            progress=show_upload,
            accept_new_host_key=where.accept_new_host_key,
        )
    else:
        from controller.paths import find_run

        if host is not None or where.is_given or target is not None or trust_remote_code:
            raise UsageError("a run is evaluated where it is; --host, --target and their like are for a DIR")
        record = evaluate_run(find_run(what), question, checkpoint=checkpoint, say=say, progress=show_upload)
    if as_json:
        print(json.dumps(record))
    else:
        print("\n".join(safe_lines(str(record.get("summary", "")))))
    return 0


def _check(dtype: str | None, device: str) -> None:
    """Refuse what the tools would refuse, before anybody is asked. Raises UsageError."""
    if dtype not in (None, *DTYPES):
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    check_device(device)


def _this_machine() -> Host:
    """This machine, as hosts.toml describes it or not at all."""
    from controller.inventory import choose

    return choose("local", kind="local")
