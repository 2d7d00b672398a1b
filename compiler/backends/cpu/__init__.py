"""The CPU backend: fused graph nodes to TVMScript kernels, compiled by TVM and LLVM into one library.

tiles.py     tile sizes for a target
calls.py     what lowering shares
lower.py     a node -> the kernel that computes it and its arguments
lower_experts.py   the same for mixtures of experts, and for ops with a template of their own
probes.py    kernels that measure the machine, beside the program's own
rowwise.py   the code of a row-wise region
scalar.py     the code of a user's scalar expression
emit.py      a kernel -> its source
build.py     sources -> kernels.so (the only file that imports TVM)
"""
