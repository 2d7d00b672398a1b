"""The exact bytes that single tokens stand for, whatever their neighbours are.

Byte-level BPE writes each byte of a token as a character of its own (a space is "Ġ"); SentencePiece writes
"▁" for a space, and "<0x0A>" for a byte that has no token. A tokenizer's decoder says which of both it is.
"""

from __future__ import annotations

import re
from typing import Final

from pagec.runtime.text.tokenizer import Tokenizer

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes: of a special token its name, none of a token that the tokenizer does not have."""
    piece, decoders = tokenizer.piece(token), tokenizer.decoders
    if "ByteLevel" in decoders:
        is_bytes = all(character in _BYTE_OF for character in piece)
        return b"".join(_BYTE_OF[character] for character in piece) if is_bytes else piece.encode()
    if "ByteFallback" in decoders and (found := _BYTE.fullmatch(piece)):
        return bytes([int(found[1], 16)])
    if "Metaspace" in decoders:
        piece = piece.replace(decoders["Metaspace"].get("replacement", "▁"), " ")
    if "Replace" in decoders and "String" in decoders["Replace"]["pattern"]:
        piece = piece.replace(decoders["Replace"]["pattern"]["String"], decoders["Replace"]["content"])
    return piece.encode()


class TokenTexts:
    """Tokens for display."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        return token_bytes(self._tokenizer, token)

    def text(self, token: int) -> str:
        """A token's text: "bytes:\\xe2\\x82" if its bytes are none by themselves, which keeps such tokens
        apart, and "token_id:7" if it has no bytes."""
        found = self.bytes(token)
        try:
            return found.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _byte_characters() -> dict[str, bytes]:
    """The character of each byte in byte-level BPE: its own if that is printed, else one from 256 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printed]
    codes = {byte: byte for byte in printed} | {byte: 256 + i for i, byte in enumerate(others)}
    return {chr(code): bytes([byte]) for byte, code in codes.items()}


_BYTE_OF: Final = _byte_characters()
