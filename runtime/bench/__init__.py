"""Measuring: workloads, the machine's limits in the same run, and each kernel beside its bound.

workloads.py   what is asked of an engine, and what is reported of it
run.py         workloads in turns on one engine, each beside the machine's limits
gemms.py       the matrix products of a workload's steps alone
limits.py      read bandwidth and peak of dot products; probes.py measures them
cost.py        bytes and FLOPs that a model needs: the numerators of all shares
bounds.py      bytes and FLOPs that a launch needs
kernels.py     each kernel alone, at several row counts
profile.py     each kernel within real steps
startup.py     from process start to the first token
summary.py     medians with their spread
"""
