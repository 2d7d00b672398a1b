"""Measuring: workloads, the machine's limits in the same run, and each kernel beside its bound.

workloads.py   what is asked of an engine, and what is reported of it
run.py         workloads in turns on one engine, each beside the machine's limits
limits.py      read bandwidth and peak of dot products, by the artifact's probes
cost.py        bytes and FLOPs that a model needs: the numerators of all shares
kernels.py     each kernel alone, at several row counts
profile.py     each kernel within real steps
startup.py     from process start to the first token
summary.py     medians with their spread
"""
