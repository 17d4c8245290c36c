"""What is computed: the loss, schedules and optimizers, evaluation, generation with a cache. What could be checked
against a formula belongs here. Nothing here knows a file, or decides what differs between machines: machine.py is all
that it reads of one, and of ranks it knows that their sums are one and that a parameter may be sharded over them.
"""
