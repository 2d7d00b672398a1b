"""The KV pool as a picture: a character for each block, and whose blocks are where."""

from __future__ import annotations

from pagec.runtime.kv.block_manager import BlockManager
from pagec.runtime.sequence import Request

FREE, CACHED, USED, SHARED, SCRATCH = b".cus#"


def block_map(blocks: BlockManager) -> str:
    """A character for each block, in order: "." free, "c" cached, "u" in one table, "s" in several, "#"
    scratch."""
    states = bytearray((FREE, USED)[count > 0] if count < 2 else SHARED for count in blocks.references)
    for block in blocks.cached:
        states[block] = CACHED
    states[0] = SCRATCH
    return states.decode()


def owned_blocks(request: Request) -> list[int]:
    """The blocks in a request's tables, ascending, each once."""
    tables = (table for sequence in request.sequences for table in sequence.block_tables)
    return sorted({block for table in tables for block in table} - {0})
