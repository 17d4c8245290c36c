"""The machine that a run has: device, precision, ranks, compilation, sharding, batches on their way to the device, and
what is tried before a run. What differs between machines belongs here; nothing here knows GPT-2, data or a run.
"""
