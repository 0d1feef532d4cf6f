"""What a drafter takes from a target's Hugging Face text config, and what of its RoPE it does not.

A drafter has the target's width, heads and RoPE base, since its layers may begin as copies of the target's
and serving engines expect them of one kind. Its RoPE is full width and unscaled: the released layout has no
word for a part of a head (NeMo #3605: `partial_rotary_factor` leaked into a draft's config), and a scale
(yarn, llama3, linear) serves lengths that a drafter is not trained on. It learns its own attention from
features, which have the target's positions in them already.
"""

from __future__ import annotations

from typing import Any

from remote_payload.job import JobError


def size_of(config: Any, name: str) -> int | None:
    """A whole number of the config, or None; where it varies by layer, that of the first layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers 5.24 refuses to read a value that layers have of their own (Gemma 4)
        value = getattr(config.per_layer_config[0], name, None)
    if isinstance(value, list | tuple):
        value = value[0] if value else None
    return int(value) if value else None


def required_size(config: Any, name: str) -> int:
    """A size that a drafter cannot do without. Raises JobError naming the model_type."""
    size = size_of(config, name)
    if size is None:
        raise JobError(
            f"target of model_type {getattr(config, 'model_type', None)!r} has no {name} in its config; a"
            f" drafter is built of attention layers as wide as the target's, and cannot be made for it"
        )
    return size


def rope_theta(config: Any) -> float:
    """The target's RoPE base, wherever its version of transformers keeps it; 10000 where it has none."""
    parameters = _rope(config)
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def rope_differences(config: Any) -> list[str]:
    """In words, what of the target's RoPE its drafter does not take over; for the log."""
    parameters, found = _rope(config), []
    part = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if part != 1.0:
        found.append(f"The target rotates {part:.0%} of each head; the drafter rotates all of it")
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        factor = parameters.get("factor")
        scale = f" by {factor:g}" if isinstance(factor, int | float) else ""
        found.append(f"The target's RoPE is scaled{scale} ({kind}); the drafter's is not")
    return found


def _rope(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in parameters:  # one entry a layer type
        parameters = parameters["full_attention"]
    return dict(parameters)
