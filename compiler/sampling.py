"""How a step tells the sampling kernel what each row asks for; also what the op `sample` reads.

settings[R, 16]      one row of int32 words for each logit row, see Words; floats by their bits
edits[n, 2]          (token, bias as float bits), then (token, times it was generated) of the same row,
                     row after row; a token of the prompt alone has been generated 0 times
masks[m, words]      bit t % 32 of word t // 32: whether token t is allowed
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

# Words of a settings row. Unlike other rows, those of settings and masks lie without padding.
NUM_WORDS: Final = 16
# Edits of one row: beside every token that it may have seen, as many as this.
MAX_BIASES: Final = 2048


class Words(IntEnum):
    """Which word of a settings row holds what.

    `INVERSE_TEMPERATURE`: 1 / temperature, or 0 for greedy. `TOP_K`: 0 for all. Edits from BIAS_START on add
    biases, those from COUNT_START to COUNT_END are seen tokens. `MASK`: 1 + a row of masks, or 0 for none.
    `FLAGS`: 1 if the log probability is wanted. A row of zeros is greedy.
    """

    INVERSE_TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    TOP_K = 3
    REPETITION = 4
    PRESENCE = 5
    FREQUENCY = 6
    SEED = 7
    SEED_HIGH = 8
    POSITION = 9
    CHOICE = 10
    BIAS_START = 11
    COUNT_START = 12
    COUNT_END = 13
    MASK = 14
    FLAGS = 15


def mask_words(vocab: int) -> int:
    """Words of a mask row."""
    return -(-vocab // 32)
