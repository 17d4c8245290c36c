"""Graphics cards: the peak that their vendors state, found by the device's name.

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
OTHERS = {"Laptop", "Mobile", "MIG", "NVL", "Ti", "SUPER", "D"}  # another chip, or a slice of one, under the same name


def peak_of(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of a GPU by its name; None if it is unknown."""
    words = re.sub(r"[-_]", " ", device_name).split()
    for card, tflops in CARDS.items():  # the first that matches
        name = card.split()
        if any(words[i : i + len(name)] == name for i in range(len(words))):
            return None if OTHERS & set(words) else tflops * 1e12
    return None
