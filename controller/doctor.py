"""The checks of a place, each with what was seen and what to do about it: pure functions of answers.

They judge what `remote_payload preflight` answered (and, for a container, `pct config`); nothing here
contacts anybody. A launch makes those that cost nothing; checkup.py asks for all of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from controller.errors import PayloadEnvironmentError
from controller.gpu_claims import lost_gpus
from controller.includes import PATHS, PREFIX
from controller.inventory import Host
from controller.requirements import OLDEST
from controller.text import safe_line
from remote_payload.job import Job

Level = Literal["ok", "warning", "failure"]

_LITTLE_GIB: Final = 5.0
_TOO_LITTLE_GIB: Final = 0.5
_LITTLE_MEMORY_GIB: Final = 8.0
_LITTLE_SHM_GIB: Final = 1.0
_SLOW_MIB_S: Final = 50.0
_SKEW_S: Final = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report; the field names are the keys of `doctor --json`."""

    name: str
    level: Level
    seen: str
    todo: str = ""


def question(job: Job | None, host: Host, *, deep: bool = False) -> dict[str, Any]:
    """What preflight is asked; it travels among arguments, so of the variables only folders go along."""
    wanted = [] if job is None else [getattr(job, key) for key in PATHS]
    env = {name: value for name, value in host.env.items() if name in ("HF_HOME", "HF_HUB_CACHE")}
    paths = [path for path in wanted if path and not path.startswith(PREFIX)]
    return {"paths": paths, "env": env, "deep": deep}


def examine(
    answer: Mapping[str, Any], job: Job | None, host: Host, *, received: float | None = None, config: str = ""
) -> list[Check]:
    """The checks of `host` for `job`, by preflight's `answer`; what it does not answer is left out.

    `received`: Unix seconds of the laptop when the answer came; `config`: `pct config` of the container.
    """
    return [
        Check("Python", "ok", f"{answer['python']} ({host.python})"),
        *_packages(answer["modules"], answer["gpus"], host),
        _gpus(answer["gpus"], job),
        *_lost(answer, job, host),
        *_driver(answer, host),
        *_nodes(answer, host, config),
        *_torch(answer, job),
        _workspace(answer["workspace"], host),
        *_speed(answer),
        *_memory(answer, host, config),
        *_paths(answer, job, host),
        *_clock(answer, received),
        *_ports(answer),
    ]


def require(checks: list[Check], host: Host) -> None:
    """Raise PayloadEnvironmentError for the failures among `checks`, all in one."""
    failures = [check for check in checks if check.level == "failure"]
    if failures:
        raise PayloadEnvironmentError(
            f"{host.name}: " + "; ".join(check.seen for check in failures),
            "\n".join(dict.fromkeys(check.todo for check in failures if check.todo)),
        )


def _packages(versions: Mapping[str, str | None], gpus: int | str, host: Host) -> Iterator[Check]:
    todo = f"Install what is missing: dflashctl setup --host {host.name}"
    if host.kind == "local" and not host.venv:
        wanted = [f"{name}>={oldest}" for name, oldest in OLDEST.items() if name in versions]
        todo = f"Install what is missing: {host.command_line(host.python, '-m', 'pip', 'install', *wanted)}"
    for name, version in versions.items():
        oldest = OLDEST[name]
        if version is None:
            yield Check(name, "failure", f"{name} is not installed in {host.python}", todo)
        elif _numbers(version) < _numbers(oldest):
            yield Check(name, "failure", f"{name} {version} is older than {oldest}", todo)
        elif name == "torch" and gpus and isinstance(gpus, int) and _crashes_on_gpus(version):
            other = f"dflashctl exec --host {host.name} -- python -m pip install 'torch>=2.11,!=2.13.0'"
            yield Check(
                name,
                "warning",
                f"torch {version} crashes on GPUs in inductor's static launcher (pytorch #190502)",
                f"Take another release: {other}",
            )
        else:
            yield Check(name, "ok", version)


def _crashes_on_gpus(torch: str) -> bool:
    """Whether it is the release of torch that must not compile for a GPU; one built for CPUs may be it."""
    return _numbers(torch) == (2, 13, 0) and "+cpu" not in torch


def _named(job: Job | None) -> set[str]:
    """The GPUs that the job names."""
    devices = () if job is None else (*job.targets, *job.drafters)
    return {device for device in devices if device.startswith("cuda:")}


def _gpus(seen: int | str, job: Job | None) -> Check:
    named = _named(job)
    needed = max((int(device[5:]) + 1 for device in named), default=0)
    if isinstance(seen, str):
        if "version mismatch" in seen:
            return Check(
                "GPUs",
                "failure" if needed else "warning",
                f"the driver's library and the kernel's module differ: {safe_line(seen)}",
                "Restart the host, or install the host's driver version in the container.",
            )
        if needed:
            return Check(
                "GPUs",
                "failure",
                f"the job names {', '.join(sorted(named))}, but {safe_line(seen)}",
                "Give the container its GPUs, or train on the CPU:"
                """ --set 'targets=["cpu"]' --set 'drafters=["cpu"]'""",
            )
        if "not installed" in seen:
            return Check("GPUs", "ok", f"none ({seen}); the CPU trains")
        return Check(
            "GPUs", "warning", f"no GPU can be used: {safe_line(seen)}", "Without one the CPU trains."
        )
    if needed > seen:
        return Check(
            "GPUs",
            "failure",
            f"the job names cuda:{needed - 1}, but nvidia-smi lists {seen} GPUs",
            "Change `targets` and `drafters` of the job.",
        )
    return Check("GPUs", "ok", f"{seen}")


def _lost(answer: Mapping[str, Any], job: Job | None, host: Host) -> Iterator[Check]:
    """A GPU that fell off its bus stops the jobs that name it, and no other."""
    for gpu, own in lost_gpus(answer.get("use", {}), job, host.env):
        yield Check(
            f"GPU {gpu.index}",
            "failure" if own else "warning",
            f"GPU {gpu.index} is not reached{', and the job names it' if own else ''}: {safe_line(gpu.lost)}",
            "Only a reset of that GPU or a restart of its host brings it back. Until then torch may count the"
            " others without it: CUDA_VISIBLE_DEVICES=GPU-... in the place's [env] names one for sure.",
        )


def _driver(answer: Mapping[str, Any], host: Host) -> Iterator[Check]:
    versions = answer.get("driver") or {}
    kernel, library = versions.get("kernel"), versions.get("library")
    if kernel is None and library is None:
        return
    if kernel and library and kernel != library:
        yield Check(
            "driver",
            "failure",
            f"the kernel's module is {kernel}, the library in the place {library}",
            f"Install the library of {kernel} there (without its kernel module), or restart the host.",
        )
    elif kernel and not library:
        yield Check(
            "driver",
            "warning",
            f"the kernel's module is {kernel}, but no libcuda was found",
            f"Install the driver's library {kernel} in the place, without its kernel module.",
        )
    else:
        yield Check("driver", "ok", kernel or f"library {library}")


def _nodes(answer: Mapping[str, Any], host: Host, config: str) -> Iterator[Check]:
    """Device files: those of another kernel start have stale numbers, and some may not be opened."""
    nodes, majors = answer.get("nodes"), answer.get("majors") or {}
    if nodes is None:
        return
    edit = (
        f"/etc/pve/lxc/{host.container}.conf" if host.kind == "proxmox" else "the container's configuration"
    )
    trouble = []
    allowed = {int(number) for number in re.findall(r"devices\.allow:\s*c (\d+):", config)}
    uvm = majors.get("nvidia-uvm")
    if allowed and uvm is not None and uvm not in allowed:
        numbers = ", ".join(map(str, sorted(allowed)))
        trouble.append(
            f"the container may use majors {numbers}, but nvidia-uvm is {uvm} since the last start"
        )
    for node in nodes:
        name = "nvidia-uvm" if "nvidia-uvm" in node["path"] else "nvidia"
        expected = [number for known, number in majors.items() if known.startswith(name)]
        if expected and node["major"] not in expected:
            now = " or ".join(map(str, expected))
            trouble.append(f"{node['path']} has major {node['major']}, but the kernel gave {name} {now}")
        elif node["why"]:
            trouble.append(f"{node['path']} cannot be opened ({node['why']})")
    if not nodes and majors:
        trouble.append("the kernel has NVIDIA's driver, but /dev has no nvidia*")
    if uvm is not None and nodes and not any("nvidia-uvm" in node["path"] for node in nodes):
        trouble.append("/dev/nvidia-uvm is missing: nvidia-smi would work, CUDA would not")
    if trouble:
        yield Check(
            "device files",
            "failure",
            "; ".join(trouble),
            f"In {edit} give the GPUs by `dev0: /dev/nvidia0` and so on, which follows the numbers,"
            " or correct lxc.cgroup2.devices.allow; then restart the container.",
        )
    elif nodes:
        yield Check("device files", "ok", ", ".join(node["path"].removeprefix("/dev/") for node in nodes))


def _torch(answer: Mapping[str, Any], job: Job | None) -> Iterator[Check]:
    said = answer.get("torch")
    if said is None or answer["modules"].get("torch") is None:
        return
    if "error" in said:
        yield Check("torch's GPUs", "failure", safe_line(str(said["error"])), "Reinstall it: dflashctl setup")
        return
    seen, listed = said["devices"], answer["gpus"]
    on_cpu = job is not None and {*job.targets, *job.drafters} == {"cpu"}
    if isinstance(listed, int) and seen != listed:
        why = "it is built without CUDA" if not said["cuda"] else f"it is built for CUDA {said['cuda']}"
        yield Check(
            "torch's GPUs",
            "failure" if seen < len(_named(job)) or not (seen or on_cpu) else "warning",
            f"torch {said['version']} sees {seen} GPUs, nvidia-smi lists {listed}; {why}",
            "Install a torch for this driver, and see the device files; CUDA_VISIBLE_DEVICES hides some too.",
        )
        return
    yield Check(
        "torch's GPUs", "ok", f"{seen} (CUDA {said['cuda']})" if said["cuda"] else "none: a CPU build"
    )


def _workspace(seen: Mapping[str, Any], host: Host) -> Check:
    path, free = seen["path"], seen["free_gib"]
    if not seen["writable"]:
        return Check(
            "workspace",
            "failure",
            f"the workspace {path} cannot be written",
            "Make it writable there, or name another `workspace` in hosts.toml.",
        )
    if free is not None and free < _LITTLE_GIB:
        todo = f"Remove old runs: dflashctl prune --host {host.name}"
        level: Level = "failure" if free < _TOO_LITTLE_GIB else "warning"
        return Check("workspace", level, f"only {free:.1f} GiB are free in {path}", todo)
    return Check("workspace", "ok", f"{path}" + ("" if free is None else f", {free:.0f} GiB free"))


def _speed(answer: Mapping[str, Any]) -> Iterator[Check]:
    if "write_mib_s" not in answer:
        return
    speed = answer["write_mib_s"]
    if speed is None:
        yield Check("write speed", "warning", "it could not be measured", "Is the disk full?")
    elif speed < _SLOW_MIB_S:
        yield Check(
            "write speed",
            "warning",
            f"{speed:.0f} MiB/s: a checkpoint of 5 GiB takes {5120 / speed / 60:.0f} min",
            "Put the workspace on a faster disk, or checkpoint less often.",
        )
    else:
        yield Check("write speed", "ok", f"{speed:.0f} MiB/s")


def _memory(answer: Mapping[str, Any], host: Host, config: str) -> Iterator[Check]:
    memory = answer.get("memory")
    if memory is None:
        return
    limit, used, machine = memory["limit_gib"], memory["used_gib"], memory["machine_gib"]
    if limit is None and (configured := re.search(r"^memory: (\d+)$", config, re.MULTILINE)):
        limit = int(configured[1]) / 1024  # not every container shows its control groups inside
    of = "" if limit is None or machine is None else f" of the machine's {machine:.0f}"
    in_use = "" if used is None else f"; {used:.1f} GiB are in use"
    size = limit if limit is not None else machine
    if size is None:
        yield Check("memory", "warning", "nobody says how much there is", "")
    elif size < _LITTLE_MEMORY_GIB:
        yield Check(
            "memory",
            "warning",
            f"{size:.1f} GiB{of} may be used{in_use}",
            "Loading a target passes through memory: give it more"
            + (f" (pct set {host.container} --memory MiB)." if host.container else "."),
        )
    else:
        limited = "limited to " if limit is not None else ""
        yield Check("memory", "ok", f"{limited}{size:.0f} GiB{of}{in_use}")
    shm = answer.get("shm_gib")
    if isinstance(answer["gpus"], int) and answer["gpus"] > 1 and shm is not None and shm < _LITTLE_SHM_GIB:
        yield Check(
            "/dev/shm",
            "warning",
            f"only {shm:.2f} GiB: NCCL may fail between GPUs or hosts",
            "Mount a larger tmpfs on /dev/shm in the container.",
        )


def _paths(answer: Mapping[str, Any], job: Job | None, host: Host) -> Iterator[Check]:
    missing: Level = "failure" if "torch" in answer else "warning"  # a launch leaves it to the trainer
    for name, found in (answer.get("paths") or {}).items():
        shown, seen = safe_line(name), safe_line(found["seen"])
        if found["there"]:
            yield Check(f"path {shown}", "ok", seen)
        elif found["there"] is None and job is not None and name == job.target:
            todo = "See that the place has internet, or put the model there and name its folder."
            yield Check(f"path {shown}", "warning", seen, todo)
        else:
            if found["there"] is None:  # `data/train` looks like a hub's name; only a target comes from there
                seen = f"{host.workspace}/{shown} is not there"
            todo = f"Put it there, or correct the job; a relative path starts at {host.workspace}."
            yield Check(f"path {shown}", missing, seen, todo)


def _clock(answer: Mapping[str, Any], received: float | None) -> Iterator[Check]:
    if received is None:
        return
    skew = float(answer["t"]) - received
    if abs(skew) > _SKEW_S:
        yield Check(
            "clock",
            "warning",
            f"it is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
            "Ages are corrected for it; for several hosts set the clocks (chrony, systemd-timesyncd).",
        )
    else:
        yield Check("clock", "ok", f"within {_SKEW_S:.0f} s of this machine's")


def _ports(answer: Mapping[str, Any]) -> Iterator[Check]:
    ports = answer.get("ports")
    if not ports:
        return
    taken = [port for port, free in ports.items() if not free]
    if taken:
        yield Check(
            "ports",
            "warning",
            f"taken: {', '.join(taken)}, which runs over several hosts would use",
            "See who has them: ss -ltnp; a run on one host does not mind.",
        )
    else:
        yield Check("ports", "ok", f"{', '.join(ports)} are free")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
