"""The payload's commands: `python <folder of this file> COMMAND ...`, or `python -m remote_payload`.

Each answers with JSON on stdout, for the controller; a wrong command line is one sentence on stderr and
exit code 64. Imports are made by the command that needs them: `feed` and `supervise` start in a few
hundredths of a second and know nothing of the trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__:
    # Run as a folder, Python puts the folder itself in front, where `job`, `batch` and others would
    # shadow modules of those names; the package is to be found in the folder above.
    _folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _folder]
    sys.path.insert(0, str(_folder.parent))

USAGE = 64


def _preflight(workspace: str = "", question: str = "{}") -> int:
    from remote_payload.preflight import preflight
    from remote_payload.rundir import decode

    # <workspace>/payloads/<digest>/remote_payload
    folder = Path(workspace) if workspace else Path(__file__).resolve().parents[3]
    _answer(preflight(folder, decode(question.encode())))
    return 0


def _gpu_use(workspace: str) -> int:
    from remote_payload.gpu_use import gpu_use

    _answer(gpu_use(Path(workspace)))
    return 0


def _gpus(workspace: str, every: str = "") -> int:
    from remote_payload.gpu_listing import list_gpus

    return list_gpus(Path(workspace), float(every) if every else None)


def _listen(port: str) -> int:
    from remote_payload.reaching import listen

    return listen(int(port))


def _reach(addresses: str, port: str) -> int:
    from remote_payload.reaching import reach

    _answer(reach([address for address in addresses.split(",") if address], int(port)))
    return 0


def _session(first: str = "") -> int:
    from remote_payload.session import serve

    return serve(main, first)


def _prune(workspace: str) -> int:
    from remote_payload.pruning import main as prune

    return prune(workspace)


def _include(workspace: str) -> int:
    from remote_payload.includes import main as include

    return include(workspace)


def _setup() -> int:
    from remote_payload.venv_setup import main as setup

    return setup()


def _start(workspace: str, run_id: str) -> int:
    from remote_payload.rundir import decode
    from remote_payload.start import StartError, start

    order = decode(sys.stdin.buffer.read()) or {}
    run, job, known = order.get("run"), order.get("job"), order.get("known")
    if not isinstance(run, dict) or not isinstance(job, str):
        return _refuse('stdin: expected one JSON object {"run": {...}, "job": "text of job.toml"}')
    try:
        run_dir, pid = start(
            Path(workspace),
            run_id,
            run,
            job,
            known=known if isinstance(known, list) else None,
            include=order.get("include") or (),
        )
    except StartError as error:
        return _refuse(str(error))
    _answer({"ok": True, "run_dir": str(run_dir), "pid": pid})
    return 0


def _resume(run_dir: str) -> int:
    from remote_payload.resume import resume
    from remote_payload.rundir import decode
    from remote_payload.start import StartError

    order = decode(sys.stdin.buffer.read()) or {}
    run, changes, by = order.get("run", {}), order.get("changes", {}), order.get("by")
    if not isinstance(run, dict) or not isinstance(changes, dict):
        return _refuse('stdin: expected one JSON object {"run": {...}, "changes": {...}}')
    try:
        resumed = resume(Path(run_dir).absolute(), run, changes, by if isinstance(by, str) else None)
    except StartError as error:
        return _refuse(str(error))
    _answer(
        {
            "ok": True,
            "attempt": resumed.attempt,
            "pid": resumed.pid,
            "changes": {change.key: [change.before, change.after] for change in resumed.changes},
            "payload_before": resumed.payload_before,
            "checkpoint": resumed.checkpoint,
        }
    )
    return 0


def _supervise(run_dir: str) -> int:
    from remote_payload.supervisor import SupervisorError, supervise

    try:
        return supervise(Path(run_dir).absolute())
    except SupervisorError as error:
        print(error, file=sys.stderr)
        return 1


def _feed(run_dir: str, nonce: str) -> int:
    from remote_payload.feed import feed

    return feed(Path(run_dir), nonce)


def _feed_log(path: str, nonce: str) -> int:
    from remote_payload.feed import feed_log

    return feed_log(Path(path), nonce)


def _send(run_dir: str) -> int:
    from remote_payload.send import send

    return send(Path(run_dir))


def _export(workspace: str) -> int:
    from remote_payload.tool_process import serve_tool

    return serve_tool("export", Path(workspace))


def _evaluate(workspace: str) -> int:
    from remote_payload.tool_process import serve_tool

    return serve_tool("evaluate", Path(workspace))


def _probe(device: str = "auto", fp8: str = "none") -> int:
    from remote_payload.tools.probe import main as probe

    return probe(device, fp8)


def _probe_mode(mode: str, device: str) -> int:
    from remote_payload.tools.probe import try_mode

    _answer(try_mode(mode, device))
    return 0


def _log_status(path: str) -> int:
    from remote_payload.log_file import log_status

    answer = log_status(Path(path))
    _answer(answer)
    return 0 if answer["ok"] else 1


def _control(run_dir: str, request: str) -> int:
    from remote_payload.control import ControlError, place_request

    content = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        place_request(Path(run_dir), request, content)
    except ControlError as error:
        return _refuse(str(error))
    _answer({"ok": True})
    return 0


def _runs(workspace: str) -> int:
    from remote_payload.listing import list_runs

    for run in list_runs(Path(workspace)):
        _answer(run)
    return 0


def _train(run_dir: str, attempt: str) -> int:
    if not attempt.isdecimal():
        return _usage(f"train: ATTEMPT {attempt!r} is no whole number")
    from remote_payload.train.main import main as train

    return train(Path(run_dir), int(attempt))


COMMANDS: dict[str, tuple[Callable[..., int], str]] = {
    "preflight": (_preflight, "[WORKSPACE] [QUESTION]"),
    "gpu-use": (_gpu_use, "WORKSPACE"),
    "gpus": (_gpus, "WORKSPACE [SECONDS]"),
    "listen": (_listen, "PORT"),
    "reach": (_reach, "ADDRESSES PORT"),
    "session": (_session, "[ORDER]"),
    "setup": (_setup, ""),
    "prune": (_prune, "WORKSPACE"),
    "include": (_include, "WORKSPACE"),
    "start": (_start, "WORKSPACE RUN_ID"),
    "resume": (_resume, "RUN_DIR"),
    "supervise": (_supervise, "RUN_DIR"),
    "feed": (_feed, "RUN_DIR NONCE"),
    "feed-log": (_feed_log, "FILE NONCE"),
    "export": (_export, "WORKSPACE"),
    "evaluate": (_evaluate, "WORKSPACE"),
    "probe": (_probe, "[DEVICE] [FP8]"),
    "probe-mode": (_probe_mode, "MODE DEVICE"),
    "log-status": (_log_status, "FILE"),
    "send": (_send, "RUN_DIR"),
    "control": (_control, "RUN_DIR REQUEST"),
    "runs": (_runs, "WORKSPACE"),
    "train": (_train, "RUN_DIR ATTEMPT"),
}


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        said = f"unknown command {arguments[0]!r}" if arguments else "no command"
        return _usage(f"{said}: expected one of {', '.join(COMMANDS)}")
    name, *given = arguments
    command, expected = COMMANDS[name]
    words = expected.split()
    least = sum(not word.startswith("[") for word in words)
    if not least <= len(given) <= len(words):
        return _usage(f"{name}: expected {expected}, got {len(given)} arguments")
    return command(*given)


def _answer(value: object) -> None:
    import json

    print(json.dumps(value), flush=True)


def _refuse(error: str) -> int:
    _answer({"ok": False, "error": error})
    return 1


def _usage(sentence: str) -> int:
    print(f"remote_payload: {sentence}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
