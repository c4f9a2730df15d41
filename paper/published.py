"""The paper's own figures, in percent as printed, each with the table it stands in. Nothing here was measured by this project.

G, B, R: GoogLeNet, BN-Inception, ResNet-50; the number is the embedding's dimension. None: not given.
"""

Row = tuple[float | None, ...]

# Table 1, GoogLeNet, 512-d. Recall@K; the K of each data set stand in KS.
KS = {
    "sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 40, 50), "vehicleid": (1, 5), "cub": (1, 2, 4, 8, 16, 32),
    "cars": (1, 2, 4, 8, 16, 32), "deepfashion2": (1, 10, 20),
}  # fmt: skip
TABLE_1: dict[str, dict[str, Row]] = {
    "sop": {
        "contrastive": (64.0, 81.4, 92.1, 97.8),
        "contrastive w/ M": (77.8, 89.8, 95.4, 98.5),
        "triplet": (61.6, 80.2, 91.6, 97.7),
        "triplet w/ M": (74.2, 87.4, 94.2, 98.0),
        "MS": (69.7, 84.2, 93.1, 97.9),
        "MS w/ M": (76.2, 89.3, 95.4, 98.6),
    },
    "inshop": {
        "contrastive": (77.1, 93.0, 95.2, 96.1, 96.8, 97.1),
        "contrastive w/ M": (89.1, 97.3, 98.1, 98.4, 98.7, 98.8),
        "triplet": (79.8, 94.8, 96.5, 97.4, 97.8, 98.2),
        "triplet w/ M": (82.9, 95.7, 96.9, 97.4, 97.8, 98.0),
        "MS": (85.1, 96.7, 97.8, 98.3, 98.7, 98.8),
        "MS w/ M": (87.1, 97.1, 98.0, 98.4, 98.7, 98.9),
    },
}
# The same table's VehicleID: R@1, R@5 of small, medium, large.
TABLE_1_VEHICLEID: dict[str, Row] = {
    "contrastive": (79.5, 91.6, 76.2, 89.3, 70.0, 86.0),
    "contrastive w/ M": (94.1, 96.2, 93.1, 95.5, 92.5, 95.5),
    "triplet": (86.9, 94.8, 84.8, 93.4, 79.7, 91.4),
    "triplet w/ M": (93.3, 95.8, 92.0, 95.0, 91.3, 94.8),
    "MS": (91.0, 96.1, 89.4, 94.8, 86.7, 93.8),
    "MS w/ M": (94.1, 96.7, 93.0, 95.8, 92.1, 95.6),
}
# Supplementary, Table 3, GoogLeNet, 512-d.
S_TABLE_3: dict[str, dict[str, Row]] = {
    "cub": {
        "contrastive": (57.5, 69.0, 78.8, 86.3, 92.0, 96.0),
        "contrastive w/ M": (61.9, 72.9, 81.2, 88.6, 93.5, 96.5),
        "triplet": (58.1, 69.6, 79.7, 87.5, 92.8, 96.2),
        "triplet w/ M": (60.0, 71.1, 80.7, 88.0, 93.2, 96.4),
        "MS": (58.2, 69.8, 79.9, 87.3, 92.8, 96.0),
        "MS w/ M": (61.8, 72.3, 81.5, 88.5, 93.0, 96.1),
    },
    "cars": {
        "contrastive": (72.5, 81.3, 87.9, 92.4, 95.3, 97.5),
        "contrastive w/ M": (80.3, 87.1, 91.9, 95.1, 97.3, 98.2),
        "triplet": (72.4, 81.7, 88.1, 92.7, 95.5, 97.3),
        "triplet w/ M": (78.5, 86.4, 91.6, 94.8, 96.9, 98.4),
        "MS": (75.7, 84.6, 90.1, 94.4, 96.9, 98.4),
        "MS w/ M": (76.5, 84.1, 90.0, 93.8, 96.3, 98.0),
    },
}
# Tables 3, 4, 5: (method, trunk and dimension, recalls).
TABLE_3: tuple[tuple[str, str, Row], ...] = (
    ("HDC", "G384", (69.5, 84.4, 92.8, 97.7)),
    ("A-BIER", "G512", (74.2, 86.9, 94.0, 97.8)),
    ("ABE", "G512", (76.3, 88.4, 94.8, 98.2)),
    ("SM", "G512", (75.2, 87.5, 93.7, 97.4)),
    ("Clustering", "B64", (67.0, 83.7, 93.2, None)),
    ("ProxyNCA", "B64", (73.7, None, None, None)),
    ("HTL", "B512", (74.8, 88.3, 94.8, 98.4)),
    ("MS", "B512", (78.2, 90.5, 96.0, 98.7)),
    ("SoftTriple", "B512", (78.6, 86.6, 91.8, 95.4)),
    ("Margin", "R128", (72.7, 86.2, 93.8, 98.0)),
    ("Divide", "R128", (75.9, 88.4, 94.9, 98.1)),
    ("FastAP", "R128", (73.8, 88.0, 94.9, 98.3)),
    ("MIC", "R128", (77.2, 89.4, 95.6, None)),
    ("contrastive w/ M", "G512", (77.4, 89.6, 95.4, 98.4)),
    ("contrastive w/ M", "B512", (79.5, 90.8, 96.1, 98.7)),
    ("contrastive w/ M", "R128", (80.6, 91.6, 96.2, 98.7)),
)
TABLE_4: tuple[tuple[str, str, Row], ...] = (
    ("HDC", "G384", (62.1, 84.9, 89.0, 91.2, 92.3, 93.1)),
    ("A-BIER", "G512", (83.1, 95.1, 96.9, 97.5, 97.8, 98.0)),
    ("ABE", "G512", (87.3, 96.7, 97.9, 98.2, 98.5, 98.7)),
    ("HTL", "B512", (80.9, 94.3, 95.8, 97.2, 97.4, 97.8)),
    ("MS", "B512", (89.7, 97.9, 98.5, 98.8, 99.1, 99.2)),
    ("Divide", "R128", (85.7, 95.5, 96.9, 97.5, None, 98.0)),
    ("MIC", "R128", (88.2, 97.0, None, 98.0, None, 98.8)),
    ("FastAP", "R512", (90.9, 97.7, 98.5, 98.8, 98.9, 99.1)),
    ("contrastive w/ M", "G512", (89.4, 97.5, 98.3, 98.6, 98.7, 98.9)),
    ("contrastive w/ M", "B512", (89.9, 97.6, 98.4, 98.6, 98.8, 98.9)),
    ("contrastive w/ M", "R128", (91.3, 97.8, 98.4, 98.7, 99.0, 99.1)),
)
TABLE_5: tuple[tuple[str, str, Row], ...] = (
    ("GS-TRS", "", (75.0, 83.0, 74.1, 82.6, 73.2, 81.9)),
    ("BIER", "G512", (82.6, 90.6, 79.3, 88.3, 76.0, 86.4)),
    ("A-BIER", "G512", (86.3, 92.7, 83.3, 88.7, 81.9, 88.7)),
    ("VANet", "G2048", (83.3, 95.9, 81.1, 94.7, 77.2, 92.9)),
    ("MS", "B512", (91.0, 96.1, 89.4, 94.8, 86.7, 93.8)),
    ("Divide", "R128", (87.7, 92.9, 85.7, 90.4, 82.9, 90.2)),
    ("MIC", "R128", (86.9, 93.4, None, None, 82.0, 91.0)),
    ("FastAP", "R512", (91.9, 96.8, 90.6, 95.9, 87.5, 95.1)),
    ("contrastive w/ M", "G512", (94.0, 96.3, 93.2, 95.4, 92.5, 95.5)),
    ("contrastive w/ M", "B512", (94.6, 96.9, 93.4, 96.0, 93.0, 96.1)),
    ("contrastive w/ M", "R128", (94.7, 96.8, 93.7, 95.8, 93.0, 95.8)),
)
# Supplementary, Table 4: CUB, then Cars.
S_TABLE_4: tuple[tuple[str, str, Row, Row], ...] = (
    ("Smart Mining", "G64", (49.8, 62.3, 74.1, 83.3, None, None), (64.7, 76.2, 84.2, 90.2, None, None)),
    ("HDC", "G384", (53.6, 65.7, 77.0, 85.6, 91.5, 95.5), (73.7, 83.2, 89.5, 93.8, 96.7, 98.4)),
    ("A-BIER", "G512", (57.5, 68.7, 78.3, 86.2, 91.9, 95.5), (82.0, 89.0, 93.2, 96.1, 97.8, 98.7)),
    ("ABE", "G512", (60.6, 71.5, 79.8, 87.4, None, None), (85.2, 90.5, 94.0, 96.1, None, None)),
    ("Clustering", "B64", (48.2, 61.4, 71.8, 81.9, None, None), (58.1, 70.6, 80.3, 87.8, None, None)),
    ("ProxyNCA", "B64", (49.2, 61.9, 67.9, 72.4, None, None), (73.2, 82.4, 86.4, 87.8, None, None)),
    ("HTL", "B512", (57.1, 68.8, 78.7, 86.5, 92.5, 95.5), (81.4, 88.0, 92.7, 95.7, 97.4, 99.0)),
    ("MS", "B512", (65.7, 77.0, 86.3, 91.2, 95.0, 97.3), (84.1, 90.4, 94.0, 96.5, 98.0, 98.9)),
    ("SoftTriple", "B512", (65.4, 76.4, 84.5, 90.4, None, None), (84.5, 90.7, 94.5, 96.9, None, None)),
    ("contrastive w/ M", "G512", (61.9, 72.9, 81.2, 88.6, 93.5, 96.5), (80.3, 87.1, 91.9, 95.1, 97.3, 98.2)),
    ("contrastive w/ M", "B512", (65.8, 75.9, 84.0, 89.9, 94.3, 97.0), (82.0, 88.7, 93.1, 96.1, 97.6, 98.6)),
)
S_TABLE_5: tuple[tuple[str, str, Row], ...] = (
    ("Match RCNN", "", (26.8, 57.4, 66.5)),
    ("contrastive", "G512", (29.3, 51.9, 60.3)),
    ("contrastive w/ M", "G512", (40.5, 63.2, 69.4)),
    ("contrastive w/ M", "B512", (40.9, 63.3, 69.6)),
    ("contrastive w/ M", "R128", (41.9, 64.6, 70.7)),
)
# Supplementary, Tables 1 and 2: R@1 for m, and for α.
MOMENTA = ALPHAS = (0.0, 0.01, 0.1, 0.5, 0.9)
S_TABLE_1: dict[str, Row] = {
    "sop": (78.2, 77.4, 78.2, 76.8, 75.8),
    "inshop": (89.3, 88.9, 89.3, 87.0, 83.7),
    "cub": (60.3, 60.3, 60.0, 60.2, 61.8),
    "cars": (78.8, 79.1, 79.2, 78.3, 80.6),
}
S_TABLE_2: dict[str, Row] = {
    "sop": (78.2, 77.2, 77.6, 78.2, 78.2),
    "inshop": (89.3, 88.7, 89.0, 87.8, 88.4),
    "cub": (60.3, 60.2, 60.7, 60.0, 59.4),
    "cars": (78.8, 78.8, 79.3, 77.9, 77.8),
}
# Supplementary, Table 6: SOP, R@1, 10, 100, 1000.
S_TABLE_6: dict[int, Row] = {1: (77.4, 89.6, 95.4, 98.4), 10: (77.4, 89.8, 95.5, 98.5)}
# Supplementary, Table 7: learning rate, iteration of × 0.1, iterations, R_M (as ratios), α, m.
S_TABLE_7: dict[str, tuple[float, int | None, int, float | None, float, float]] = {
    "sop": (3e-4, 24_000, 34_000, 1, 0, 0),
    "inshop": (3e-4, 24_000, 34_000, 0.2, 0, 0),
    "vehicleid": (1e-4, 30_000, 50_000, 0.5, 0, 0),
    "deepfashion2": (3e-4, 20_000, 36_000, 1, 0, 0),
    "cub": (3e-5, None, 1_400, None, 0.2, 0.9),
    "cars": (1e-4, 1_400, 2_000, None, 0.1, 0.9),
}
# Table 2 ("Time, GPU Mem."), SOP: hours, gigabytes (the first in all, the others more than it), R@1.
TABLE_2: dict[str, tuple[float, float, float]] = {
    "batch 64": (2.10, 5.12, 63.9),
    "batch 256": (4.32, 15.7, 71.7),
    "batch 64, R_M = 0.01": (2.48, 0.01, 69.8),
    "batch 64, R_M = 1": (3.19, 0.20, 77.4),
}
# What the text says of figures whose points are not printed. All on SOP with contrastive unless said otherwise.
BATCH_GAIN = {"without": 25.1, "with": 3.2}  # section 4.3: R@1 gained from batch 16 to 256
SMALL_BATCH_WINS = (71.7, 78.2)  # section 4.3: batch 256 without memory, batch 16 with it
INSHOP_RATIO = (52.0, 79.4)  # section 4.3: In-shop, R_M = 0 and 0.01
VALID_NEGATIVES = (10, 1000)  # section 3.3: fewer than, about; per iteration from batch, from memory
STABLE_AFTER = 3000  # section 3.2: iterations after which large steps drift little
SOP_CONFLICT = (
    "The paper gives contrastive with memory on SOP, GoogLeNet, 512-d, three times: 77.4 (Tables 2 and 3, S-Table 6), 77.8 "
    "(Table 1) and 78.2 (S-Tables 1 and 2, and section 4.3 for batch size 16). It does not say what differs."
)
