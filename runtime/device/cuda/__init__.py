"""One NVIDIA GPU: an artifact's compiled kernels, launched through the CUDA driver on memory of torch.

driver    the driver's functions, by ctypes
kernels   an artifact's kernels, loaded
launch    lists of launches, packed once
gpu       what is used of torch.cuda, in one class
device    the device itself: what the runtime sees
"""
