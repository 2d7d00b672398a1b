"""What a GPU does at most, measured by events: copies within its memory, products of matrices by torch."""

from __future__ import annotations

from typing import Final

import numpy as np

from pagec.compiler.packing import to_bf16
from pagec.runtime.device.cuda.device import CudaDevice

# Square matrices of bf16, large enough for all multiprocessors to be busy nearly all of the time.
PRODUCT_SIZE: Final = 8192
_RANDOM: Final = 1 << 20


class CudaProbes:
    """Holds twice `nbytes` and three matrices while it lives. Each time is of one run, after the ones before
    it have warmed the GPU up."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device = device
        self._source, self._target = device.allocate(nbytes), device.allocate(nbytes)
        size = PRODUCT_SIZE
        self._a, self._b, self._product = (device.allocate(2 * size * size) for _ in range(3))
        # Numbers as they come, not zeros: a GPU at its limit of power runs faster on zeros.
        numbers = to_bf16(np.random.default_rng(0).standard_normal(_RANDOM, np.float32))
        for matrix in (self._a, self._b):
            device.upload(matrix, np.resize(numbers, size * size))
        self.copy_bytes = 2 * nbytes
        self.product_flops = 2 * size**3
        self.copy_us()
        self.product_us()

    def copy_us(self) -> float:
        """Of a copy that reads and writes `copy_bytes` in all."""
        return self._device.time_us(lambda: self._device.copy(self._target, self._source))

    def product_us(self) -> float:
        """Of a product of `product_flops`."""
        a, b, product = self._a, self._b, self._product
        return self._device.time_us(lambda: self._device.multiply(a, b, product, PRODUCT_SIZE))

    def touch(self, nbytes: int) -> None:
        """Begins to read and write so many bytes, or what there is."""
        self._device.copy(self._target[: nbytes // 2], self._source[: nbytes // 2])
