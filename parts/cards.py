"""Graphics cards: the peak that their vendors state, found by the device's name; how fast they train GPT-2 124M.

This file knows nothing of torch, devices or models.
"""

import re

# Dense peak of the matrix units in TFLOP/s for 16-bit inputs with fp32 accumulation, from data sheets and whitepapers.
# GeForce data sheets give only fp32; their 16-bit tensor rate is twice that.
CARDS = {
    "B300": 2250,
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A40": 150,
    "A10G": 70,
    "A6000": 155,
    "RTX 6000 Ada": 364,
    "V100": 125,
    "T4": 65,
    "RTX 5090": 209,
    "RTX 5080": 113,
    "RTX 4090": 165,
    "RTX 4080": 97,
    "RTX 4070": 58,
    "RTX 3090": 71,
    "RTX 3080": 60,
    "MI300X": 1307,
    "MI325X": 1307,
}
OTHERS = "Laptop|Mobile|MIG|NVL|Ti|SUPER|D"  # another chip, or a slice of one, under the same name

# Tokens/s of GPT-2 124M on one card (docs/gpu.md): H200 and H100 measured, the others the middle of public runs
RATES = {
    "H200": 536_000,
    "H100": 548_000,
    "A100": 170_000,
    "L40S": 115_000,
    "RTX 4090": 108_000,
    "RTX 3090": 61_500,
}
FLOPS = 855_383_040  # per token, of that model with 1,024 tokens of context
LAUNCHES = 0.017  # seconds that a step takes at least, however small: those of `tiny` on an H100


def peak_of(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of a GPU by its name; None if it is unknown."""
    if not re.search(rf"\b({OTHERS})\b", device_name):
        for card, tflops in CARDS.items():  # the first that matches
            if re.search(rf"\b{card}\b", device_name):
                return tflops * 1e12
    return None
