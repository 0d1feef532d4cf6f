"""nvidia-smi as the rig's container has it: a replay of what one printed on two H200s.

Installed beside `nvidia_smi_2xh200.txt` in the container, standard library only. A file `mode`
there says what it does, and is read again at every tick of a loop, so that a running loop changes
with it: `ok` (idle GPUs), `busy` (full load), `fail` (NVML does not come up), `hang` (never
answers, and only SIGKILL ends it, as a process in D state that even ignores that), `lost N`
(GPU N fell off the bus: every listing that includes it is replaced by one line).

Values are the recorded ones, except the timestamp, which is now. A field that was not recorded
is refused as nvidia-smi refuses one that it does not know. Errors go to stdout, as they do there.
"""

import re
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
BAD_ARGUMENT, NOT_FOUND, LOST, VERSION_MISMATCH = 2, 6, 15, 18
INVALID = "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"
NVML_FAILURE = "Failed to initialize NVML: Driver/library version mismatch\n"
OTHER_NAMES = {
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
    "clocks.current.sm": "clocks.sm",
    "clocks.current.memory": "clocks.mem",
    "gpu_uuid": "uuid",
    "gpu_name": "name",
}


class Answer(Exception):
    """Ends the program with a text on stdout and an exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.text, self.code = text, code


@dataclass
class Request:
    """What the command line asks for."""

    listing: bool = False
    kind: str = "plain"  # plain, gpu or compute-apps
    fields: list[str] = field(default_factory=list)
    form: set[str] = field(default_factory=set)
    gpus: list[str] | None = None
    interval: float | None = None


class Recording:
    """The recorded calls, and the tables that answers are cut from."""

    def __init__(self, path: Path) -> None:
        parts = re.split(r"^##### (\S+)\n", path.read_text(), flags=re.M)
        self.part = dict(zip(parts[1::2], parts[2::2], strict=True))
        call = re.search(r"--query-gpu=(\S+)", self.part["full_csv.rc"])
        assert call is not None
        names = call[1].split(",")
        headers = self.part["full_csv.out"].splitlines()[0].split(", ")
        self.header = dict(zip(names, headers, strict=True))
        self.rows = {
            mode: [dict(zip(names, line.split(", "), strict=True)) for line in self.part[part].splitlines()]
            for mode, part in (("ok", "full_csv_nounits.out"), ("busy", "busy_csv_nounits.out"))
        }
        self.bus = re.findall(r"\b[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.\d\b", self.part["plain.out"])


def parse(argv: list[str]) -> Request:
    """The command line; raises `Answer` for one that nvidia-smi would refuse."""
    request = Request()
    words = [part for word in argv for part in re.split(r"(?<=^--id)=|(?<=^--loop)=", word)]
    while words:
        word = words.pop(0)
        if word in ("-L", "--list-gpus"):
            request.listing = True
        elif match := re.fullmatch(r"--query-(gpu|compute-apps)=(.*)", word):
            request.kind, request.fields = match[1], [f.strip() for f in match[2].split(",")]
        elif word.startswith("--format="):
            request.form = set(word.partition("=")[2].split(","))
        elif word in ("-i", "--id") and words:
            request.gpus = words.pop(0).split(",")
        elif match := re.fullmatch(r"--loop-ms=(\d+)", word):
            request.interval = int(match[1]) / 1000
        elif word in ("-l", "--loop", "-lms") and words and words[0].isdigit():
            request.interval = int(words.pop(0)) / (1000 if word == "-lms" else 1)
        else:
            raise Answer(INVALID, BAD_ARGUMENT)
    if request.kind != "plain" and "csv" not in request.form:
        raise Answer(INVALID, BAD_ARGUMENT)
    return request


def chosen(recording: Recording, request: Request, lost: int | None) -> list[int]:
    """Indices of the GPUs asked for; raises `Answer` where one is missing or lost."""
    count = len(recording.rows["ok"])
    if request.gpus is None:
        gpus = list(range(count))
    else:
        names: dict[str, int] = {}
        for index, row in enumerate(recording.rows["ok"]):
            names |= {str(index): index, row["uuid"]: index, recording.bus[index]: index}
        if not all(gpu in names for gpu in request.gpus):
            raise Answer("No devices were found\n", NOT_FOUND)
        gpus = sorted({names[gpu] for gpu in request.gpus})
    if lost in gpus:
        bus = recording.bus[lost][4:]
        raise Answer(
            f"Unable to determine the device handle for GPU{bus}: GPU is lost.  "
            "Reboot the system to recover this GPU\n",
            LOST,
        )
    return gpus


def cell(header: str, value: str, units: bool) -> str:
    """One value as csv prints it, with the unit that the column's header names."""
    unit = re.search(r"\[(.+)\]$", header)
    return f"{value} {unit[1]}" if units and unit and not value.startswith("[") else value


def table(header: list[str], rows: list[list[str]], form: set[str]) -> str:
    """A csv listing: `header` unless `noheader`; units unless `nounits`."""
    units = "nounits" not in form
    lines = [] if "noheader" in form else [header if units else [h.split(" [")[0] for h in header]]
    lines += [[cell(h, v, units) for h, v in zip(header, row, strict=True)] for row in rows]
    return "".join(", ".join(line) + "\n" for line in lines)


def refuse_unknown(fields: list[str], known: dict[str, str]) -> None:
    """Raises `Answer` for the first field that is not in `known`."""
    for name in fields:
        if name not in known:
            raise Answer(f'Field "{name}" is not a valid field to query.\n\n', BAD_ARGUMENT)


def query_gpus(recording: Recording, request: Request, mode: str, gpus: list[int]) -> str:
    """The answer to --query-gpu."""
    fields = [OTHER_NAMES.get(name, name) for name in request.fields]
    refuse_unknown([n for n, f in zip(request.fields, fields, strict=True)
                    if f not in recording.header], recording.header)  # fmt: skip
    rows = []
    for gpu in gpus:
        now = datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
        row = recording.rows[mode][gpu] | {"timestamp": now}
        rows.append([row[name] for name in fields])
    return table([recording.header[name] for name in fields], rows, request.form)


def query_apps(recording: Recording, request: Request, mode: str, gpus: list[int]) -> str:
    """The answer to --query-compute-apps: host pids, none on idle GPUs."""
    header, *lines = [line.split(", ") for line in recording.part["busy_apps.out"].splitlines()]
    columns = {name.split(" [")[0]: name for name in header}
    columns["used_memory"] = columns.pop("used_gpu_memory")
    refuse_unknown(request.fields, columns)
    wanted = {recording.rows["ok"][gpu]["uuid"] for gpu in gpus}
    rows = []
    for line in lines if mode == "busy" else []:
        values = dict(zip(columns, [v.removesuffix(" MiB") for v in line], strict=True))
        if values["gpu_uuid"] in wanted:
            rows.append([values[name] for name in request.fields])
    return table([columns[name] for name in request.fields], rows, request.form)


def plain(recording: Recording, mode: str) -> str:
    """The picture for people; under load with the loaded rows' numbers in its cells."""
    text = recording.part["plain.out"]
    if mode != "busy":
        return text
    rows = iter(recording.rows["busy"])

    def filled(_: re.Match[str]) -> str:
        row = next(rows)
        power, limit = (round(float(row[name])) for name in ("power.draw", "power.limit"))
        return (
            f"| N/A  {row['temperature.gpu']:>3}C    P0            {power:>3}W / {limit:>4}W |"
            f" {row['memory.used']:>7}MiB / {row['memory.total']:>6}MiB |"
            f"    {row['utilization.gpu']:>3}%      Default |"
        )

    return re.sub(r"^\| N/A .*$", filled, text, flags=re.M)


def answer(recording: Recording, request: Request) -> str:
    """One listing in the present mode; raises `Answer` where nvidia-smi would give up."""
    mode, _, gpu = (HERE / "mode").read_text().strip().partition(" ")
    if mode == "hang":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    if mode == "fail":
        raise Answer(NVML_FAILURE, VERSION_MISMATCH)
    gpus = chosen(recording, request, int(gpu) if mode == "lost" else None)
    mode = "busy" if mode == "busy" else "ok"
    if request.listing:
        lines = recording.part["list.out"].splitlines(keepends=True)
        return "".join(lines[gpu] for gpu in gpus)
    if request.kind == "gpu":
        return query_gpus(recording, request, mode, gpus)
    if request.kind == "compute-apps":
        return query_apps(recording, request, mode, gpus)
    return plain(recording, mode)


def main(argv: list[str]) -> int:
    """Answers once, or at every tick of `-l`; returns the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    recording = Recording(HERE / "nvidia_smi_2xh200.txt")
    try:
        request = parse(argv)
        while True:
            sys.stdout.write(answer(recording, request))
            sys.stdout.flush()
            if request.interval is None:
                return 0
            time.sleep(request.interval)
            request.form.add("noheader")
    except Answer as end:
        sys.stdout.write(end.text)
        sys.stdout.flush()
        return end.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
