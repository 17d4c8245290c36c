"""What only pretraining needs besides the loop in train_gpt2.py: the plan of a run before it starts."""
