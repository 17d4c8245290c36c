"""Graphics cards: what their vendors say about speed and memory bandwidth, found by the device's name.

This file knows nothing of torch, devices or models.
"""

import re

# Name: (dense peak of the matrix units in TFLOP/s for 16-bit inputs with fp32 accumulation, memory bandwidth in GB/s),
# from data sheets and whitepapers. GeForce data sheets give only fp32; their 16-bit tensor rate is twice that. An
# MI250X shows each of its two chips as a device. 0 is unknown. Longer names come first, as the first match counts.
CARDS = {
    "GB300": (2500, 8000),
    "B300": (2250, 8000),
    "GB200": (2500, 8000),
    "B200": (2250, 8000),
    "GH200": (989, 4000),
    "H200 NVL": (835, 4800),
    "H200": (989, 4800),
    "H100 NVL": (835, 3938),
    "H100 PCIe": (756, 2039),
    "H100": (989, 3352),
    "H800": (989, 3352),
    "H20": (148, 4000),
    "A100 SXM4 40GB": (312, 1555),
    "A100 PCIE 40GB": (312, 1555),
    "A100": (312, 2039),
    "A800": (312, 2039),
    "GB10": (125, 273),
    "L40S": (362, 864),
    "L40": (181, 864),
    "L4": (121, 300),
    "A40": (150, 696),
    "A30": (165, 933),
    "A10G": (70, 600),
    "A10": (125, 600),
    "A6000": (155, 768),
    "RTX 6000 Ada": (364, 960),
    "RTX PRO 6000 Blackwell Max Q": (439, 1792),
    "RTX PRO 6000 Blackwell Server": (468, 1597),
    "RTX PRO 6000": (504, 1792),
    "V100": (125, 900),
    "T4": (65, 320),
    "RTX 5090 D": (0, 1792),
    "RTX 5090": (209, 1792),
    "RTX 5080": (113, 960),
    "RTX 5070 Ti": (88, 896),
    "RTX 5070": (62, 672),
    "RTX 5060 Ti": (47, 448),
    "RTX 5060": (38, 448),
    "RTX 4090 D": (147, 1008),
    "RTX 4090": (165, 1008),
    "RTX 4080 SUPER": (104, 736),
    "RTX 4080": (97, 717),
    "RTX 4070 Ti SUPER": (88, 672),
    "RTX 4070 Ti": (80, 504),
    "RTX 4070 SUPER": (71, 504),
    "RTX 4070": (58, 504),
    "RTX 4060 Ti": (44, 288),
    "RTX 4060": (30, 272),
    "RTX 3090 Ti": (80, 1008),
    "RTX 3090": (71, 936),
    "RTX 3080 Ti": (68, 912),
    "RTX 3080": (60, 760),
    "MI300X": (1307, 5300),
    "MI325X": (1307, 6000),
    "MI355X": (2516, 8000),
    "MI350X": (2310, 8000),
    "MI250X": (191, 1638),
}


def peaks(device_name: str) -> tuple[float, float] | None:
    """(dense 16-bit FLOP/s, memory bandwidth in bytes/s) of a GPU by its name; None if it is unknown."""
    words = re.sub(r"[-_]", " ", device_name).split()
    if {"Laptop", "Mobile", "MIG"} & set(words):  # a smaller chip, or a slice of one, under the same name
        return None
    for card, (tflops, gb) in CARDS.items():
        name = card.split()
        if any(words[i : i + len(name)] == name for i in range(len(words))):
            return (tflops * 1e12, gb * 1e9) if tflops else None
    return None
