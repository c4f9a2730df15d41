"""Sentence-transformers: the ranking loss of (anchor, positive) pairs, with negatives from past batches too."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xbm.distributed import GlobalLoss, Ranks, ReplicatedMemory, the_ranks
from xbm.engine.pairing import among
from xbm.errors import InputError
from xbm.losses import SupConLoss
from xbm.memory import CrossBatchMemory
from xbm.two_tower_loss import against_memory

OTHER_CONTENT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


class MemoryRankingLoss(nn.Module):
    """`MultipleNegativesRankingLoss` of sentence-transformers with a memory: anchors also meet the documents of past batches.

    The columns are (anchor, positive) or (anchor, positive, negative_1, ..., negative_n); there is no label column. While the
    memory is empty, and always in evaluation, the value is that of `MultipleNegativesRankingLoss`. In training each call
    enqueues the positives; negatives are not enqueued.

    A text is recognized by its tokens, without those of a prompt. A positive that occurs twice in a batch is a positive for
    both of its anchors. A row of the memory whose anchor or positive occurs in any column of the batch is left out, so that a
    text, or another answer to the same question, never becomes a false negative. Within the batch,
    `BatchSamplers.NO_DUPLICATES` does the rest.

    Pass `callback` to the trainer: it saves the memory with each checkpoint and restores it when training resumes; a checkpoint
    without it is refused. Without the callback, a resumed run starts with an empty memory and the first scale.

    In a process group the memory holds the documents of all processes and anchors meet the batches of all, as by
    `GlobalLoss`; on GPUs set `ddp_backend="cuda:nccl,cpu:gloo"` in the training arguments.

    Args:
        model: the SentenceTransformer.
        size: documents in memory.
        scale: what cosine similarities are multiplied by: 1/temperature.
        symmetric: whether documents rank anchors too, against a memory of anchors; the loss is the mean of both directions,
            as in `MultipleNegativesSymmetricRankingLoss`.
        learn_temperature: whether the scale is trained, from `scale` on. Trainers pass it to the optimizer; it needs a higher
            learning rate than the model: `learning_rate_mapping={"log_temperature": 1e-3}` in the training arguments.
        dtype: storage type of the memory.

    Raises:
        InputError: if an argument is invalid.

    Example:
        >>> from datasets import Dataset  # doctest: +SKIP
        >>> from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer  # doctest: +SKIP
        >>> model = SentenceTransformer("microsoft/mpnet-base")  # doctest: +SKIP
        >>> pairs = Dataset.from_dict({"anchor": ["Who wrote it?"], "positive": ["She did."]})  # doctest: +SKIP
        >>> loss = MemoryRankingLoss(model, size=8192)  # doctest: +SKIP
        >>> trainer = SentenceTransformerTrainer(
        ...     model, train_dataset=pairs, loss=loss, callbacks=[loss.callback]
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    token_kinds: Tensor  # (V + 1,), see `token_kinds`
    documents: ReplicatedMemory  # labels: the document's text; ids: the anchor's text
    anchors: ReplicatedMemory | None  # the anchors of the same pairs, with the same labels and ids

    def __init__(
        self,
        model: nn.Module,
        size: int,
        scale: float = 20.0,
        *,
        symmetric: bool = False,
        learn_temperature: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model must be a SentenceTransformer, got {model!r}: pass SentenceTransformer(...), the loaded model"
            )
        if not scale > 0:
            raise InputError(f"scale must be positive, got {scale}")
        self.model, self.symmetric, self._scale = model, symmetric, float(scale)
        self.loss_fn = SupConLoss(1 / scale, learn_temperature=learn_temperature)
        device = next((parameter.device for parameter in model.parameters()), None)
        dim = _dimension(model)
        self.documents = ReplicatedMemory(size, dim, dtype=dtype, device=device)
        self.size = self.documents.size
        self.anchors = ReplicatedMemory(size, dim, dtype=dtype, device=device) if symmetric else None
        self.loss_fn.to(device)
        self.register_buffer("token_kinds", token_kinds(getattr(model, "tokenizer", None)).to(device), persistent=False)
        self.register_state_dict_post_hook(_without_model)
        self.register_load_state_dict_pre_hook(_with_own_model)

    @property
    def temperature(self) -> float:
        """1/scale: the current one if it is learned."""
        return float(self.loss_fn.temperature)

    @property
    def scale(self) -> float:
        return self._scale if self.loss_fn.log_temperature is None else 1 / self.temperature

    @property
    def callback(self) -> Any:
        """A callback for the trainer, which would otherwise leave the memory and a learned scale out of its checkpoints."""
        from xbm.integrations.loss_checkpoint import LossCheckpoint

        return LossCheckpoint(self)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch.

        Args:
            sentence_features: the tokens of each column.
            labels: ignored.

        Raises:
            InputError: if there are fewer than two columns, or one that is not text.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise InputError(f"expected the columns (anchor, positive, ...), got {len(columns)}")
        texts = [
            text_hash(features, self.token_kinds) for features in columns
        ]  # first, because a model may write to the features
        embeddings = [self._normalized(v) for v in _embed(self.model, columns)]
        if not (self.model.training and torch.is_grad_enabled()):  # a trainer sets the mode of the model, not of the loss
            return self._mean_of_directions(self.loss_fn, embeddings, texts, None, None)
        ranks = the_ranks()  # scripts build the loss before the process group
        live = torch.cat(ranks.everyone(torch.cat(texts), "texts"))
        memories = [None if memory is None else others(memory, live) for memory in self._memories(ranks)]
        loss_fn = self.loss_fn if ranks.world == 1 else GlobalLoss(self.loss_fn, ranks)
        loss = self._mean_of_directions(loss_fn, embeddings, texts, *memories)
        for memory, v in zip(self._memories(ranks), (embeddings[1], embeddings[0])):
            if memory is not None:
                memory.enqueue(v.detach(), texts[1], texts[0])
        return loss

    def _mean_of_directions(
        self,
        loss_fn: nn.Module,
        embeddings: list[Tensor],
        texts: list[Tensor],
        documents: CrossBatchMemory | None,
        anchors: CrossBatchMemory | None,
    ) -> Tensor:
        labels, ids = texts[1], texts[0]
        forth, _ = against_memory(
            loss_fn, embeddings[0], labels, documents, ids=ids, references=torch.cat(embeddings[1:]),
            reference_labels=torch.cat(texts[1:]), reference_ids=torch.cat([ids, *texts[2:]]),
        )  # fmt: skip
        if not self.symmetric:
            return forth
        back, _ = against_memory(loss_fn, embeddings[1], labels, anchors, ids=ids, references=embeddings[0])
        return (forth + back) / 2

    def _memories(self, ranks: Ranks) -> tuple[ReplicatedMemory, ReplicatedMemory | None]:
        for memory in (self.documents, self.anchors):
            if memory is not None:
                memory.ranks = ranks
        return self.documents, self.anchors

    def _normalized(self, embeddings: Tensor) -> Tensor:
        if embeddings.shape[-1] != self.documents.dim:
            raise InputError(
                f"the memory is of dimension {self.documents.dim}, the embeddings are of {embeddings.shape[-1]}: do not wrap "
                "MemoryRankingLoss in a loss that truncates embeddings, such as MatryoshkaLoss"
            )
        return F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)))

    # ---------------------------------------------------------------- for model cards

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "scale": self.scale,
            "symmetric": self.symmetric,
            "learn_temperature": self.loss_fn.log_temperature is not None,
        }

    @property
    def citation(self) -> str:
        return """
@inproceedings{wang2020crossbatch,
    title = {Cross-Batch Memory for Embedding Learning},
    author = {Wang, Xun and Zhang, Haozhi and Huang, Weilin and Scott, Matthew R.},
    booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition},
    year = {2020},
}
"""


def others(memory: ReplicatedMemory, live: Tensor) -> ReplicatedMemory:
    """The memory without the rows of pairs that have a text among the live ones (n,); its buffers are shared."""
    gone = among(memory.row_labels, live) | among(memory.row_ids, live)
    view = copy(memory)
    view._buffers = {**memory._buffers, "stamps": torch.where(gone, -1, memory.stamps)}
    return view


def _embed(model: nn.Module, columns: list[dict[str, Tensor]]) -> list[Tensor]:
    """The embeddings of each column. From version 6 on, sentence-transformers embeds columns of the same kind in one pass."""
    if "sentence_transformers" in sys.modules:  # otherwise the model is not one of its own
        try:
            from sentence_transformers.base.losses.merged_forward import embed_columns
        except ImportError:
            pass
        else:
            return embed_columns(model, columns)
    return [model(features)["sentence_embedding"] for features in columns]


def _dimension(model: Any) -> int:
    """The length of the embeddings that the model returns in training, where it does not truncate them."""
    names = ("get_embedding_dimension", "get_sentence_embedding_dimension")  # the latter before 6
    name = next((name for name in names if hasattr(model, name)), None)
    with model.truncate_embeddings(None) if hasattr(model, "truncate_embeddings") else nullcontext():
        dim = None if name is None else getattr(model, name)()
    if dim is None:
        raise InputError("the model does not know its embedding dimension: add a module that does, such as Pooling or Dense")
    return dim


# ------------------------------------------------------------------ state: the memory and the scale; trainers save the model


def _without_model(loss: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}model.")]:
        del state[name]


def _with_own_model(loss: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.update(loss.model.state_dict(prefix=f"{prefix}model."))


# ------------------------------------------------------------------ which texts are the same


ORDINARY, OPENING, SPACED = range(3)


def token_kinds(tokenizer: Any) -> Tensor:
    """(V + 1,), int8: which tokens a tokenizer puts before a text (OPENING), and which begin with a space (SPACED).

    The last entry is that of tokens that are added later.
    """
    words = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
    words = words if isinstance(words, Mapping) else {}
    kinds = torch.full((max(words.values(), default=-1) + 2,), ORDINARY, dtype=torch.int8)
    kinds[[k for word, k in words.items() if word.startswith(("▁", "Ġ"))]] = SPACED
    opening = (getattr(tokenizer, name, None) for name in ("cls_token_id", "bos_token_id"))
    kinds[[k for k in opening if k is not None]] = OPENING
    return kinds


def text_hash(features: dict[str, Any], kinds: Tensor | None = None) -> Tensor:
    """(m,): a 63-bit hash of each text's tokens, the same on any side and for any length of padding; without a host sync.

    The tokens of a prompt do not count, nor does an opening token, which comes before the prompt or, without one, before the
    text. A prompt that ends with a space is counted with one token too many if that space is part of the text's first token:
    the last token of a prompt counts if it begins with a space.

    Args:
        features: `input_ids` (m, L) with `attention_mask` (m, L), or the tokens of all texts in a row with `offsets` (m,) or
            `cu_seq_lens_q` (m + 1,); and `prompt_length`, a number or a tensor (1,) or (m,), if there is a prompt.
        kinds: (V + 1,), the kinds of the tokenizer's tokens; by default all are ordinary.

    Raises:
        InputError: if there are no tokens, or other content beside them.

    Example:
        >>> right = {"input_ids": torch.tensor([[7, 8, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
        >>> left = {"input_ids": torch.tensor([[0, 0, 7, 8]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
        >>> bool(text_hash(right) == text_hash(left))
        True
    """
    other = [name for name in OTHER_CONTENT if name in features]
    if other or "input_ids" not in features:
        raise InputError(f"MemoryRankingLoss compares texts by their input_ids, got {', '.join(other or features)}: use text")
    tokens = features["input_ids"].long()
    starts = features["cu_seq_lens_q"][:-1] if "cu_seq_lens_q" in features else features.get("offsets")
    if starts is not None:
        tokens, starts = tokens.flatten(), starts.long()
        place = torch.arange(len(tokens), device=tokens.device)
        row = torch.searchsorted(starts, place, right=True) - 1
        place, prompt = place - starts[row] + 1, _prompt_lengths(features, starts)[row]
        before = _before_text(tokens, place, prompt, kinds)
        place = place - torch.zeros_like(starts).index_add_(0, row, before.long())[row]
        sums = torch.zeros_like(starts).index_add_(0, row, _mixed(tokens + place * GOLDEN) * ~before)
    else:
        counts = torch.ones_like(tokens) if "attention_mask" not in features else (features["attention_mask"] != 0).long()
        prompt = _prompt_lengths(features, tokens.new_zeros(len(tokens)))[:, None]
        counts = counts * ~_before_text(tokens, counts.cumsum(1), prompt, kinds)
        sums = (_mixed(tokens + counts.cumsum(1) * GOLDEN) * counts).sum(1)
    return _mixed(sums) & ((1 << 63) - 1)


def _prompt_lengths(features: dict[str, Any], like: Tensor) -> Tensor:
    """(m,): how many tokens of each text belong to its prompt, an opening token included; 0 without a prompt."""
    length = features.get("prompt_length")
    if isinstance(length, Tensor):
        return length.to(like.device).flatten().expand_as(like)
    return torch.full_like(like, length or 0)


def _before_text(tokens: Tensor, place: Tensor, prompt: Tensor, kinds: Tensor | None) -> Tensor:
    """Which tokens come before the text, given their places from 1 on."""
    if kinds is None:
        return place <= prompt
    kind = kinds[tokens.clamp(max=len(kinds) - 1)]
    return (place < prompt) | ((place == prompt) & (kind != SPACED)) | ((place == 1) & (kind == OPENING))


def _signed(x: int) -> int:
    return x - (1 << 64)


GOLDEN = _signed(0x9E3779B97F4A7C15)


def _mixed(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele et al. 2014), a bijection in which each bit affects all others."""
    for shift, factor in ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor  # int64 wraps; >> repeats the sign, which & removes
    return x
