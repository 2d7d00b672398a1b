"""What the kernel tests share: the targets that this machine can run, and how hypothesis is to run them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

from pagec.compiler.backends.targets import PREFERENCE, load_cpu_target
from pagec.compiler.dims import DType
from pagec.compiler.packing import from_bf16, to_bf16
from pagec.compiler.target import host

U = 2.0**-24
RUNNABLE = [name for name in PREFERENCE if host().flags.issuperset(load_cpu_target(name).requires)]
few = settings(
    max_examples=6,
    deadline=None,  # an example compiles kernels, so shrinking one would take minutes
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
targets = pytest.mark.parametrize("target", RUNNABLE)
dtypes = pytest.mark.parametrize("dtype", ["bf16", "f32"])


def rounded(x: Any, dtype: DType) -> Any:
    """The values of an array that a data type holds, as float32."""
    return from_bf16(to_bf16(x)) if dtype == "bf16" else np.asarray(x, np.float32)
