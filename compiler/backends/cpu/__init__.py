"""The CPU backend: fused graph nodes to TVMScript kernels, compiled by TVM and LLVM into one library.

tiles.py     tile sizes for a target
lower.py     a node -> the kernel that computes it and its arguments
probes.py    kernels that measure the machine, beside the program's own
rowwise.py   the code of a row-wise region
emit.py      a kernel -> its source
build.py     sources -> kernels.so (the only file that imports TVM)
"""
