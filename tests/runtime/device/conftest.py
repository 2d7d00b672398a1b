"""A library of kernels made by the C compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

# kernel add(x: int32[], num_rows, share, num_shares): share 0 adds num_shares to x[i] for i < num_rows;
# kernel fail refuses in the last share, and says why as TVM's do; kernel count adds 1 to x[16 * share];
# kernel wait does the same, but share 0 waits until all others are done
KERNEL = r"""
#include <sched.h>
#include <tvm/ffi/c_api.h>
int __tvm_ffi_add(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  DLTensor* x = (DLTensor*)args[0].v_ptr;
  if (args[2].v_int64 == 0)
    for (int64_t i = 0; i < args[1].v_int64; ++i) ((int32_t*)x->data)[i] += (int32_t)args[3].v_int64;
  return 0;
}
int __tvm_ffi_fail(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  const char* parts[] = {"x is", " no good"};
  if (args[2].v_int64 < args[3].v_int64 - 1) return 0;
  TVMFFIErrorSetRaisedFromCStrParts("ValueError", parts, 2);
  return -1;
}
int __tvm_ffi_count(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  ((int32_t*)((DLTensor*)args[0].v_ptr)->data)[16 * args[2].v_int64] += 1;
  return 0;
}
int __tvm_ffi_wait(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  _Atomic int32_t* x = (_Atomic int32_t*)((DLTensor*)args[0].v_ptr)->data;
  if (args[2].v_int64 == 0)
    for (int64_t i = 1; i < args[3].v_int64; ++i)
      while (!x[16 * i]) sched_yield();
  x[16 * args[2].v_int64] += 1;
  return 0;
}
"""


@pytest.fixture(scope="session")
def library(build_library: Callable[[Path, str], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like an artifact's, with one kernel made by the C compiler."""
    path = tmp_path_factory.mktemp("library")
    build_library(path, KERNEL)
    return path
