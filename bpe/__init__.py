"""Byte-pair encoding: `from bpe.tokenizer import Tokenizer`; minimal.py has the algorithm on one page, train.py and
try_tokenizer.py are scripts."""
