"""What is checked and measured on a GPU: `tests/gpu/check.sh quick|bench|tune`.

Needs the standard library, numpy and torch: everything is compiled beforehand, where there need be no GPU, by
`make gpu-artifacts` (build.py) into build/gpu. Weights are random and made on the device.

artifacts   which artifacts there are
build       compiles them, and the tuner's bundle
device      an artifact on a GPU, with random weights
steps       steps of chosen sequences, in chosen chunks, and the logits that they give
watch       whether anything is compiled or loaded
quick       the checks, in order; kernels, models
bench       the rows, in order; rows, peers, timing
results     what was found, kept line by line
fake        the same on a fake GPU, for the tests beside it
"""
