"""What exists because machines fail and differ: run directory, log, checkpoint, card, device, sharding.
What would be superfluous on one machine that never fails belongs here; nothing here computes a loss or a gradient.
"""
