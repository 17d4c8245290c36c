"""The comparisons behind the figures of docs/benchmarks.md, one file each; `bench.py` is their door.

Each file opens with what is compared, on which work, and what makes the comparison fair or unfair; then its Config and
`run(config, rt)`, which measures and yields rows. measure.py is shared, and ideas.py is what lab.py tries. (This file
also keeps Python from finding an installed package of the same name instead of this folder.)
"""
