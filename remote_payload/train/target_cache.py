"""What a target remembers of one text while it is decoded, and how it forgets what was drafted wrongly.

Most caches can be cropped: keys and values of the refused tokens are cut off. A sliding window can be only
when it records what would fall out of it, so recording begins after the prompt. The state of a linear
attention layer (Qwen3-Next, Mamba hybrids) holds no single tokens, and transformers' `crop` leaves it as it
is, silently wrong: such a cache is copied before every block, and when some of the block is refused the
copy is taken and reads the accepted part again. That costs one more pass a round and is right for every
cache, whatever its layers are.

`check` proves it for a loaded model before anything is trained.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import DynamicCache

from remote_payload.crash import one_line
from remote_payload.job import JobError
from remote_payload.train.target import Target

SHORT_WINDOW = 64
"""Tokens; `check` reads past a sliding window of no more than this."""

_FAR = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Share of the logits' size by which two readings of one text may part, at the median token.

In 16 bits a mixture of experts may send a token elsewhere for a rounding; a wrong state changes every token.
What slips through here is found by every evaluation's comparison of texts.
"""


class TargetCache:
    """The cache of one text that one target reads."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._cache = DynamicCache(config=target.model.config)
        self._croppable: bool | None = None
        self._before: DynamicCache | None = None
        self._block: Tensor | None = None

    def read(self, ids: Tensor, last: int = 0) -> Tensor:
        """Logits [n, V] of the next tokens `ids` [n], or of the `last` ones of them."""
        return self._target.logits(ids[None], self._cache, last)[0]

    def read_block(self, block: Tensor) -> Tensor:
        """The same for a drafted `block` [B], of which `keep` then says how much stays."""
        if self._croppable is None:
            self._croppable = self._cache.is_croppable  # known only after the prompt was read
            if self._croppable:
                self._cache.activate_past_recording()  # type: ignore[no-untyped-call]
        if not self._croppable:
            self._before = copy.deepcopy(self._cache)
        self._block = block
        return self.read(block)

    def keep(self, tokens: int) -> None:
        """Forget the last block but for its first `tokens`."""
        assert self._block is not None and 0 < tokens <= len(self._block)
        refused = len(self._block) - tokens
        if self._croppable:
            # Also when nothing was refused: recording windows let go of what fell out of them only here, and
            # in transformers 5.17 the next pass fails otherwise. A positive size means another thing there.
            self._cache.crop(-refused)
        elif refused:
            assert self._before is not None
            self._cache = self._before
            self.read(self._block[:tokens], last=1)
            self._target.forget_taps()


@torch.no_grad()
def check(target: Target) -> None:
    """Read a text with blocks taken back, and compare with the same text read at once.

    Raises JobError naming the model_type when they part: decoding would not be lossless, and its tau a lie.
    """
    window = getattr(target.model.config.get_text_config(decoder=True), "sliding_window", None) or 0
    prompt = 12 if window > SHORT_WINDOW else 12 + window
    generator = torch.Generator().manual_seed(0)
    vocabulary = target.embedding.num_embeddings
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (prompt + 15,), generator=generator)
    ids = ids.to(target.device)
    try:
        whole = target.model(input_ids=ids[None], use_cache=False).logits[0, prompt:-1].float()
        cache = TargetCache(target)
        cache.read(ids[:prompt], last=1)
        found = []
        for start, kept in ((prompt, 2), (prompt + 2, 6), (prompt + 8, 1), (prompt + 9, 5)):
            block = ids[start : start + 6].clone()
            block[kept:] = ids[0]  # drafted wrongly
            found.append(cache.read_block(block)[:kept].float())
            cache.keep(kept)
        target.forget_taps()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise JobError(_refusal(target, f"its cache fails ({one_line(error)})")) from error
    parted = ((torch.cat(found) - whole).norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-9)).median()
    if not float(parted) < _FAR[target.dtype]:
        raise JobError(_refusal(target, f"afterwards its logits are {float(parted):.0%} off"))


def _refusal(target: Target, why: str) -> str:
    return (
        f"target of model_type {target.model_type!r} cannot take back tokens that it has read: {why}. Real"
        f" speculative decoding would not give its own text; leave held_out out of the job to train without"
        f" evaluation, or take another version of transformers"
    )
