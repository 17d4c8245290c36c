"""Byte-pair encoding: `from bpe.tokenizer import Tokenizer`; train.py and try_tokenizer.py beside it are scripts."""
