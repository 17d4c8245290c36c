"""What exists because machines fail and differ: run directory, log, checkpoint, card, device, sharding.
What a single machine that never fails would not need belongs here; nothing here computes a loss or a gradient.
"""
