"""`python -m tests.rig`: a rig to try things on, until Ctrl-C.

`python -m tests.rig --sweep` only takes down what killed rigs left behind.
"""

import shlex
import signal
import sys
from types import FrameType

from tests.rig import leftovers
from tests.rig.cgroups import RigError
from tests.rig.container import NVIDIA_HOME
from tests.rig.rig import Rig, unavailable

GUIDE = """\
The rig is up: sshd on {rig.host} port {rig.port}, container {rig.vmid} running, \
{rig.stopped_vmid} stopped.

On the host and in the container:
  ssh -F {rig.ssh_config} {rig.alias}
  ssh -F {rig.ssh_config} {rig.alias} pct list
  ssh -F {rig.ssh_config} {rig.alias} pct exec {rig.vmid} --keep-env 0 -- nvidia-smi

As a place of dflashctl, in a shell with a home of its own that goes with the rig:
  . {env}
  dflashctl launch --host {rig.host}

The same in a hosts.toml of yours (its key and known_hosts are in {rig.laptop}/.ssh):
{place}
nvidia-smi in the container does what a file there says (ok, busy, fail, hang, lost 1):
  echo busy | ssh -F {rig.ssh_config} {rig.alias} pct exec {rig.vmid} -- tee {mode}

Everything is in {rig.state}. Ctrl-C takes it down.
"""


def interrupted(number: int, _: FrameType | None) -> None:
    """A request to end counts as Ctrl-C, so that the way out is the same."""
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Exit code 0 after Ctrl-C, 1 where there can be no rig, 2 for a wrong argument."""
    if argv not in ([], ["--sweep"]):
        print(f"python -m tests.rig: unknown arguments {shlex.join(argv)}", file=sys.stderr)
        return 2
    if reason := unavailable():
        print(f"No rig: {reason}.", file=sys.stderr)
        return 1
    if argv:
        for state in leftovers.sweep():
            print(f"took down {state}")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        with Rig() as rig:
            env = rig.laptop / "env"
            variables = rig.laptop_env().items()
            env.write_text("".join(f"export {k}={shlex.quote(v)}\n" for k, v in variables))
            place = "".join(f"  {line}\n" for line in rig.hosts_toml().splitlines())
            mode = NVIDIA_HOME / "mode"
            print(GUIDE.format(rig=rig, env=env, place=place, mode=mode), flush=True)
            try:
                while True:
                    signal.pause()
            finally:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        print("\nThe rig is down; nothing of it is left.")
    except RigError as error:
        print(f"No rig: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
