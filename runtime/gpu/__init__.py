"""Steps on a GPU: fixed buffers, launches resolved at load, graphs of decoding steps.

step      a batch's numbers, padded to a bucket, in one image of the step's arrays; no device here
memory    the areas of a program for a GPU
graphs    launches captured for each bucket
runner    submit and collect, with steps in flight
"""
