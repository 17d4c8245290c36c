"""The comparisons behind the figures of docs/benchmarks.md, one file each; `bench.py` runs them.

The docstring of each says what it compares, on which work, and how fair that is; then come its Config and
`run(config, rt)`, which measures and yields rows. measure.py is shared. (This file also keeps
Python from finding an installed package of the same name instead of this folder.)
"""
