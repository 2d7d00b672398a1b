"""The op `sample`: a token of each row of logits. Its shape rule and its meaning, by sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagec.compiler.dims import DType
from pagec.compiler.ir import Type, ValueType
from pagec.compiler.ops.op import Attrs, ShapeError
from pagec.compiler.sampling import NUM_WORDS, Words, mask_words

if TYPE_CHECKING:
    import torch

_MASK_32 = 0xFFFFFFFF


def shape(types: Sequence[ValueType], attrs: Attrs) -> Sequence[Type]:  # noqa: ARG001
    """x[R,V], settings[R,16], edits (flat pairs), masks[R, V / 32] -> token, logprob."""
    x = types[0]
    if not isinstance(x, Type) or len(x.inner) != 1 or x.dtype != "f32":
        raise ShapeError(f"sample takes rows of float32 logits, not {x}")
    inner: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("settings", (NUM_WORDS,)),
        ("edits", (2,)),
        ("masks", (mask_words(x.inner[0]),)),
    )
    for (name, size), t in zip(inner, types[1:], strict=True):
        if t != Type(x.rows, size, "i32"):
            raise ShapeError(f"sample's {name} must be {Type(x.rows, size, 'i32')}, not {t}")
    results: tuple[DType, DType] = ("i32", "f32")
    return [Type(x.rows, (), dtype) for dtype in results]


def sample(
    x: torch.Tensor, settings: torch.Tensor, edits: torch.Tensor, masks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See compiler/sampling.py for what the arguments hold. Token -1: no token of the row is allowed."""
    import torch

    tokens, logprobs = [], []
    for row, logits in enumerate(x):
        words = settings[row].int()
        token = _draw(weights(logits, words, edits, masks), words)
        wanted = words[Words.FLAGS] > 0 and token >= 0
        tokens.append(token)
        logprobs.append(float(logits.double().log_softmax(-1)[token]) if wanted else 0.0)
    device = x.device
    return (
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(logprobs, dtype=torch.float32, device=device),
    )


def _real(words: torch.Tensor, word: Words) -> float:
    """A word that holds a float's bits."""
    import torch

    return float(words[word : word + 1].contiguous().view(torch.float32))


def _edited(y: torch.Tensor, words: torch.Tensor, edits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Logits after mask, biases and penalties."""
    import torch

    if (mask := int(words[Words.MASK])) > 0:
        tokens = torch.arange(len(y), device=y.device)
        allowed = (masks[mask - 1][tokens // 32] >> (tokens % 32).int()) & 1
        y = y.masked_fill(allowed == 0, -torch.inf)
    bias, counts, end = (int(words[w]) for w in (Words.BIAS_START, Words.COUNT_START, Words.COUNT_END))
    pairs = edits[: len(edits) // 2 * 2].reshape(-1, 2)
    added = pairs[bias:counts]
    values = added[:, 1].contiguous().view(torch.float32).double()
    y = y.index_add(0, added[:, 0].long(), values)
    seen, times = pairs[counts:end, 0].long(), pairs[counts:end, 1]
    before, factor = y[seen], _real(words, Words.REPETITION)
    after = torch.where(before > 0, before / factor, before * factor)
    after = after - _real(words, Words.FREQUENCY) * times - _real(words, Words.PRESENCE) * (times > 0)
    return y.index_put((seen,), after)


def weights(
    logits: torch.Tensor, words: torch.Tensor, edits: torch.Tensor, masks: torch.Tensor
) -> torch.Tensor:
    """What each token of a row counts in the draw, float64: 0 for those that may not come."""
    import torch

    y = _edited(logits.double(), words, edits.flatten().int(), masks.int())
    if not bool((y > -torch.inf).any()):
        return torch.zeros_like(y)
    y = y.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if (inverse := _real(words, Words.INVERSE_TEMPERATURE)) == 0:
        return (torch.arange(len(y), device=y.device) == (y == y.max()).nonzero()[0]).double()
    found = ((y - y.max()) * inverse).exp()
    kept = found >= _real(words, Words.MIN_P)
    if 0 < (k := int(words[Words.TOP_K])) < len(y):
        kept &= y >= y.sort(descending=True).values[k - 1]
    found = found * kept
    if (p := _real(words, Words.TOP_P)) < 1:
        ordered = found.sort(descending=True).values
        # What is greater than each weight, equals left out.
        before = ordered.cumsum(0) - ordered
        first = torch.searchsorted(-ordered, -found)
        found = found * (before[first] < p * ordered.sum())
    return found


def _draw(found: torch.Tensor, words: torch.Tensor) -> int:
    """The token up to which more than the row's uniform number of all weights lies; -1 if there are none."""
    sums = found.cumsum(0)
    if sums[-1] == 0:
        return -1
    chosen = (sums > uniform(words.tolist()) * sums[-1]).nonzero()
    return int(chosen[0]) if len(chosen) else int(found.nonzero()[-1])


def outside(
    token: int, logits: torch.Tensor, words: torch.Tensor, edits: torch.Tensor, masks: torch.Tensor
) -> float:
    """How far the row's uniform number lies outside of a token's piece of the distribution: 0 for what the
    row draws, little for what another rounding of the weights may draw, infinite for what may not come."""
    found = weights(logits, words, edits, masks)
    if not 0 <= token < len(found) or found[token] == 0:
        return 0.0 if token == -1 and not bool(found.any()) else float("inf")
    sums = found.cumsum(0) / found.sum()
    number, end = uniform(words.tolist()), float(sums[token])
    return max(0.0, end - float(found[token] / found.sum()) - number, number - end)


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (high >> 32) ^ b ^ k0, high & _MASK_32, (low >> 32) ^ d ^ k1, low & _MASK_32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK_32, (k1 + 0xBB67AE85) & _MASK_32
    return a, b, c, d


def uniform(words: Sequence[int]) -> float:
    """The uniform number in [0, 1) of a settings row, from its seed, position and choice: 53 bits."""
    counter = (words[Words.POSITION] & _MASK_32, words[Words.CHOICE] & _MASK_32, 0, 0)
    key = (words[Words.SEED] & _MASK_32, words[Words.SEED_HIGH] & _MASK_32)
    first, second, *_ = philox(counter, key)
    return float((first << 21) | (second >> 11)) * 2.0**-53
