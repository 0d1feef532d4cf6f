"""The other end of `ship`: run in the place as `python -I -c <this text> WORKSPACE DIGEST SIZE COMMAND...`.

Says whether the payload DIGEST is there; if not, takes SIZE bytes of tar from stdin, verifies, unpacks
beside and renames. Then it is `python <payload>/remote_payload COMMAND...`, which saves a round trip and an
interpreter's start. It prints one line of JSON a step. Nothing else is in the place yet, so this is standard
library only, and old enough Python that a wrong interpreter gets an answer instead of a syntax error.
"""

import errno
import json
import os
import runpy
import site
import sys
import time

OLDEST = (3, 11)
STALE_S = 24 * 3600


def say(**fields: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unpack(data: bytes, folder: str) -> None:
    """Write the files of the tar `data` below `folder`, each synced; nothing but plain files."""
    import io
    import shutil
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            path = os.path.join(folder, member.name)  # noqa: PTH118 - pathlib would be slower to import
            source = tar.extractfile(member)
            if source is None:
                continue
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            with open(path, "wb") as file:  # noqa: PTH123
                shutil.copyfileobj(source, file)
                file.flush()
                os.fsync(file.fileno())
    for parent, _, _ in os.walk(folder):
        sync_folder(parent)


def sweep(payloads: str) -> None:
    """Remove what transfers that broke off more than a day ago left."""
    import shutil

    for name in os.listdir(payloads):  # noqa: PTH208
        path = payloads + "/" + name
        try:
            stale = name.startswith(".incoming-") and time.time() - os.stat(path).st_mtime > STALE_S  # noqa: PTH116
        except FileNotFoundError:  # another launch removes it too
            continue
        if stale:
            shutil.rmtree(path, ignore_errors=True)


def receive(payloads: str, digest: str, size: int) -> None:
    """Take the payload from stdin into `payloads/<digest>`. Exits when it does not arrive whole."""
    import hashlib  # imported where they are needed: a payload that is there already needs none of them
    import shutil
    import signal
    import tempfile

    data = sys.stdin.buffer.read(size)
    if len(data) != size:
        say(error="digest", text="only %d of %d bytes arrived" % (len(data), size))  # noqa: UP031
        sys.exit(1)
    if hashlib.sha256(data).hexdigest() != digest:
        say(error="digest", text="the bytes that arrived have another sha256")
        sys.exit(1)
    sweep(payloads)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # whoever sends it has gone
    folder = tempfile.mkdtemp(prefix=".incoming-" + digest[:12] + "-", dir=payloads)
    try:
        unpack(data, folder)
        os.chmod(folder, 0o755)  # noqa: PTH101
        os.rename(folder, payloads + "/" + digest)  # noqa: PTH104
        sync_folder(payloads)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError) or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise  # else another launch was faster
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(workspace: str, digest: str, size: str, *command: str) -> None:
    """Receive when needed, then become `command` of the payload."""
    if sys.version_info < OLDEST:
        say(error="python", text=".".join(map(str, sys.version_info[:3])))
        sys.exit(1)
    payloads = workspace + "/payloads"
    try:
        new = not os.path.isdir(workspace)  # noqa: PTH112
        os.makedirs(payloads, exist_ok=True)  # noqa: PTH103
        have = os.path.isdir(payloads + "/" + digest)  # noqa: PTH112
        say(have=have, new_workspace=new)
        if not have:
            receive(payloads, digest, int(size))
        os.utime(payloads + "/" + digest)  # used now: pruning goes by it
    except OSError as error:
        say(error="workspace", text=str(error), errno=error.errno)
        sys.exit(1)
    say(arrived=True)
    if sys.prefix == sys.base_prefix and os.path.isdir(site.getusersitepackages()):  # noqa: PTH112
        site.addsitedir(site.getusersitepackages())  # which -I left out
    sys.argv = [payloads + "/" + digest + "/remote_payload", *command]
    runpy.run_path(sys.argv[0], run_name="__main__")  # no second start of an interpreter


if __name__ == "__main__":
    main(*sys.argv[1:])
