"""Keys and values of requests: blocks of the pool, who shares them, and what lies below the pool.

block_manager, free_blocks, prefix_index    blocks in device memory: plain Python over integers
tiers, store, fetch, swap                   host memory and files for what is cold
setup, stats, map                           how an engine opens them, and what people see
"""
