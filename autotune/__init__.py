"""The tuner, one for both backends: it chooses kernels' knobs and keeps the choices in tables.

problem, model           what is to be tuned: shapes, and those that a model has
space, cpu_space         the knobs' values; which of them a target can hold
prefill, decode, linear  the cost model of GPUs, on clocks, occupancy and prediction
search, entries          candidates ranked, a choice for each bucket of rows
compiled                 what the compiler says of them
cpu, cpu_bench, measure  schedules measured on this CPU
bundle_choice, bundle_prepare    what is worth timing on a GPU, compiled into a bundle
bundle, bundle_arrays, bundle_run        the bundle; timed where pagec's compiler is not
gpu_rounds               runs that take turns on a GPU, each after the caches were emptied
bundle_merge             results become measured entries
table, database, fingerprint, shipped    choices on disk: whose, and whether they still hold
kernels, compare, report, report_page    what people see
"""
