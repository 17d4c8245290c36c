"""Text before it becomes a loss: documents of files and of the hub, token shards, and the order in which training reads
them. What only prepares or reads data belongs here; nothing here imports torch, and nothing knows of a model or a run.
"""
