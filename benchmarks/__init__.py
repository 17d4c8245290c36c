"""The comparisons behind the figures of docs/benchmarks.md, one file each; `bench.py` is their door.

Each file opens with what is compared, on which work, and what makes the comparison fair or unfair. Its
`run(config, rt)` measures, prints a table and returns the rows for `--json`. (This file also keeps Python from finding
some installed package of the same name instead of this folder.)
"""
