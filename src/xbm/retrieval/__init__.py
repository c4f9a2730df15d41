"""Exact evaluation of embeddings: Recall@K, MAP@R, R-precision, mAP, curves, protocols and nearest neighbours.

Every function accepts torch tensors or numpy arrays of any float type, on any device. Similarity is the cosine, computed in
float32 on the device of the embeddings. Of two gallery items with equal similarity the one with the lower index comes first.
"""

from xbm.retrieval.metrics import cumulative, evaluate, evaluate_one_per_class, own_group_ids, score
from xbm.retrieval.ranking import nearest

__all__ = ["cumulative", "evaluate", "evaluate_one_per_class", "nearest", "own_group_ids", "score"]
