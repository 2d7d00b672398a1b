"""The NVIDIA backend: fused graph nodes to Triton kernels, compiled ahead of time, without a GPU.

attention.py, linear.py, experts.py, rowwise.py, kv_write.py, sample.py, tokens.py
                 a template's shape and knobs -> its kernel
values.py        element-wise work and reductions as lines of Triton
space.py         the knobs' values, and which of them a target can hold
defaults.py      knobs where nothing has been tuned
fuse_write.py    rope and the KV write into the linear before them
fuse_norm.py     a norm into the linear behind it, for few rows
lower.py         a node -> its kernels and their arguments
emit.py          a kernel -> its source
build.py         sources -> cubins (the only file that imports Triton)
resources.py     what a compiled kernel occupies, and what is refused
"""
