"""Kernel templates: Jinja2 over plain source. `cpu/*.py.jinja` give TVMScript, `cuda/*.py.jinja` Triton.

`render` fills one in; the result is what an artifact carries in `kernels/`, readable by itself.
"""

from __future__ import annotations

import functools
import struct
from importlib import resources

import jinja2


def _llvm_float(value: float) -> str:
    """A float32 constant as LLVM spells it: the bits of the float64 of the same value."""
    rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


@functools.cache
def _environment() -> jinja2.Environment:
    root = str(resources.files(__package__))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["f32"] = _llvm_float
    return environment


def render(template: str, **params: object) -> str:
    """The source that a template gives: `template` is its path below templates/, without ".jinja"."""
    return _environment().get_template(f"{template}.jinja").render(**params)


def render_text(text: str, /, **params: object) -> str:
    """The same for a template given as text; it may extend and import those below templates/."""
    return _environment().from_string(text).render(**params)
