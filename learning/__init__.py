"""What is computed: the loss, FP8, schedules and optimizers, generation with a cache, the memory that training takes.
What could be checked against a formula belongs here; nothing here knows a file, a rank or a device policy.
"""
