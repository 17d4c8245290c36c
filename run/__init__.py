"""What a run leaves behind and continues from: directory, records, log, checkpoints, spikes; and what people look at:
curves and the model card. What exists because machines fail belongs here; nothing here computes a loss or a gradient.
"""
