"""What turns a base model into one that answers: LoRA, the chat format, rows of instructions and their batches.
What only finetuning and chat need belongs here; the loop itself is in lora_finetune.py.
"""
