"""Two towers, such as query and document or image and caption: both directions, with a memory of each side."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from xbm.checks import check_embeddings, check_integers, plain_integer, sound_rows
from xbm.distributed import GlobalLoss, Ranks, ReplicatedMemory
from xbm.distributed.ranks import the_ranks
from xbm.errors import InputError
from xbm.losses import MetricLearningLoss, PairLoss, PairStats
from xbm.memory import CrossBatchMemory

NO_LABEL = torch.iinfo(torch.int64).min  # of a mined negative: nobody's positive, because no pair may have it
FIRST_NEGATIVE_ID = 1 << 62  # ids of mined negatives; pairs never get that far


class TwoTowerLoss(nn.Module):
    """The mean of a pair loss from queries to documents and from documents to queries, each against a memory too.

    Queries meet the documents of the batch and of past batches; documents meet the queries. In train mode each call enqueues
    the batch; in eval mode nothing is enqueued.

    A row has two roles: it is an anchor, and one of the references that the anchors of the other side meet. As a reference
    it gets the gradient of the loss within the batch only; `against_memory` says why.

    Pass `labels=`, for example the index of each document in the data set: all rows of a label are positives, so that a
    document that occurs twice is never a negative for its own query. Without labels, each call makes every pair a class of its
    own: a pair that is seen again while its old row is in memory becomes a negative for itself. So leave them out only if no
    document occurs twice in a batch or within `size` pairs. Pass labels always or never.

    `state_dict()` contains both memories, their number of pairs and a learned temperature: save it in your checkpoint.

    In a process group, build it after `init_process_group` and call it on every rank with the rank's own pairs: both memories
    then hold the pairs of all ranks, the value is that of a single process with all pairs, and gradients are scaled for
    DistributedDataParallel, as by `GlobalLoss`. Keep it outside DistributedDataParallel: its state is the same on every rank.

    Args:
        loss: the pair loss, for example `SupConLoss(0.07)`. A learned temperature is shared by both directions.
        size: pairs per memory; 0: no memory, so that queries and documents meet those of the batch only.
        dim: length of an embedding.
        dtype: storage type of the memories.
        device: of the memories; move them later with `.to(device)`, as any module.
        ranks: the processes; by default all of the default process group.

    Example:
        >>> from xbm import SupConLoss
        >>> criterion = TwoTowerLoss(SupConLoss(temperature=0.07), size=1000, dim=8)
        >>> queries, documents = (torch.nn.functional.normalize(torch.randn(4, 8)).requires_grad_() for _ in range(2))
        >>> labels = torch.tensor([7, 2, 7, 5])  # the index of each document
        >>> criterion(queries, documents, labels=labels).backward()
        >>> len(criterion.queries), len(criterion.documents), documents.grad.shape
        (4, 4, torch.Size([4, 8]))
    """

    pairs: Tensor  # (), pairs enqueued so far: the number of the next one

    def __init__(
        self,
        loss: PairLoss,
        size: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(loss, PairLoss):
            wrapped = isinstance(loss, MetricLearningLoss)
            hint = "; or call it once for each direction, with references and a memory" if wrapped else ""
            raise InputError(f"loss must be a pair loss of xbm, such as SupConLoss(0.07), got {type(loss).__name__}{hint}")
        if loss.exclude not in (None, "none"):
            raise InputError(
                f"a row of the other tower is never the anchor itself: build the loss without exclude={loss.exclude!r}"
            )
        pairs, width = plain_integer(size), plain_integer(dim)
        if pairs is None or pairs < 0:
            raise InputError(f"size must be a whole number of pairs, or 0 for no memory, got {size!r}")
        if width is None or width < 1:
            raise InputError(f"dim must be a positive integer, got {dim!r}")
        self.loss, self.dim = loss, width
        self.ranks = the_ranks() if ranks is None else ranks
        self.queries, self.documents = (self._new_memory(pairs, width, dtype, device) for _ in range(2))
        self.register_buffer("pairs", torch.zeros((), dtype=torch.int64, device=device))
        self.labelled: bool | None = None  # whether the pairs enqueued so far had labels

    def _new_memory(self, size: int, dim: int, dtype: torch.dtype, device: Any) -> CrossBatchMemory | None:
        if size == 0:
            return None
        if self.ranks.world == 1:
            return CrossBatchMemory(size, dim, dtype=dtype, device=device)
        return ReplicatedMemory(size, dim, ranks=self.ranks, dtype=dtype, device=device)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(-1 if self.labelled is None else int(self.labelled))

    def set_extra_state(self, state: Tensor) -> None:
        self.labelled = None if int(state) < 0 else bool(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}pairs" in state_dict:  # before a part of it is loaded
            saved, own = state_dict.get(f"{prefix}queries.rows"), None if self.queries is None else self.queries.rows
            there, here = ("size=0" if x is None else f"size={len(x)}, dim={x.shape[1]}" for x in (saved, own))
            if there != here:
                raise InputError(f"the state is of a TwoTowerLoss with {there}, this one has {here}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(
        self,
        queries: Tensor,
        documents: Tensor,
        *,
        labels: Tensor | None = None,
        negatives: Tensor | None = None,
        negative_labels: Tensor | None = None,
        keys: tuple[Tensor, Tensor] | None = None,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[PairStats, PairStats]]:
        """The loss of pairs (queries[i], documents[i]).

        Args:
            queries: (m, D), unit rows.
            documents: (m, D), unit rows.
            labels: (m,), what makes pairs the same, for example the index of the document; by default each pair is its own.
                Any integers but -2**63, which marks mined negatives; a GPU, where looking takes time, does not refuse it.
            negatives: (m, h, D) or (n, D), unit rows: mined negatives. Each is a negative for every query of the batch, unless
                `negative_labels` says otherwise. They count from queries to documents only and are not enqueued.
            negative_labels: (m, h) or (n,), to be compared with labels: a negative with a query's label is its positive.
            keys: (m, D) twice: what to enqueue instead of the queries and documents, from a `MomentumEncoder`.
            return_stats: whether to return the statistics of both directions too.

        Raises:
            InputError: if an argument is invalid.
        """
        self._check_rows(queries, "queries")
        self._check_rows(documents, "documents")
        if len(queries) != len(documents):
            raise InputError(f"{len(queries)} queries but {len(documents)} documents: pass one document per query, in order")
        if keys is not None:
            if len(keys) != 2 or any(not isinstance(key, Tensor) or key.shape != queries.shape for key in keys):
                raise InputError(f"keys must be two tensors of shape {tuple(queries.shape)}, for queries and documents")
            self._check_rows(keys[0], "keys of the queries")
            self._check_rows(keys[1], "keys of the documents")
        if labels is not None:
            labels = check_integers(labels, "labels", queries)
            _check_labels(labels)
        if self.labelled not in (None, labels is not None):
            before, now = ("with", "without") if self.labelled else ("without", "with")
            raise InputError(f"earlier pairs had been passed {before} labels, these are {now}: pass labels always or never")
        ids, total = self._number(queries)
        classes = ids if labels is None else labels
        if negative_labels is not None and (labels is None or negatives is None):
            raise InputError("negative_labels are compared with labels: pass labels and negatives too")
        live, live_labels, live_ids = self._with_negatives(documents, classes, ids, negatives, negative_labels)
        loss_fn = self.loss if self.ranks.world == 1 else GlobalLoss(self.loss, self.ranks)
        named = {"references": live, "reference_labels": live_labels, "reference_ids": live_ids}
        forth, stats = against_memory(loss_fn, queries, classes, self.documents, ids=ids, return_stats=return_stats, **named)
        back, back_stats = against_memory(
            loss_fn, documents, classes, self.queries, ids=ids, references=queries, return_stats=return_stats
        )
        if self.training and self.queries is not None and self.documents is not None:
            self.queries.enqueue((queries if keys is None else keys[0]).detach(), classes, ids)
            self.documents.enqueue((documents if keys is None else keys[1]).detach(), classes, ids)
            self.pairs += total
            self.labelled = labels is not None
        loss = (forth + back) / 2
        return (loss, (stats, back_stats)) if return_stats else loss

    def _check_rows(self, rows: Tensor, what: str) -> None:
        check_embeddings(rows, what)
        if rows.shape[1] != self.dim:
            width = rows.shape[1]
            raise InputError(
                f"expected {what} of dimension {self.dim}, got {width}: create the loss with TwoTowerLoss(dim={width})"
            )
        if rows.device != self.pairs.device:
            raise InputError(
                f"the {what} are on {rows.device}, the memories on {self.pairs.device}: move the TwoTowerLoss with "
                f".to({str(rows.device)!r})"
            )
        if rows.device.type == "cpu" and len(rows) and self.ranks.world == 1:  # before anything is enqueued, naming the tower
            sound_rows(rows.detach(), torch.ones(len(rows), dtype=torch.bool), None, 0, what)

    def _number(self, queries: Tensor) -> tuple[Tensor, int]:
        """(m,): a number for each pair, different on all ranks and from all that were enqueued; and the pairs of all ranks."""
        m, before, total = len(queries), 0, len(queries)
        if self.ranks.world > 1:
            sizes = self.ranks.stack(torch.tensor([m]), "sizes").flatten().tolist()
            before, total = sum(sizes[: self.ranks.rank]), sum(sizes)
        return self.pairs + before + torch.arange(m, device=queries.device), total

    def _with_negatives(
        self, documents: Tensor, labels: Tensor, ids: Tensor, negatives: Tensor | None, negative_labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if negatives is None:
            return documents, labels, ids
        if isinstance(negatives, Tensor) and negatives.dim() == 3:
            shape = tuple(negatives.shape[:2])
            if shape[0] != len(documents):
                raise InputError(
                    f"{len(documents)} queries but negatives for {shape[0]}: pass (m, h, D), or (n, D) for all queries"
                )
            if isinstance(negative_labels, Tensor):
                if negative_labels.shape != shape:
                    raise InputError(f"negative_labels must have the shape {shape}, got {tuple(negative_labels.shape)}")
                negative_labels = negative_labels.flatten()
            negatives = negatives.flatten(0, 1)
        self._check_rows(negatives, "negatives")
        own = FIRST_NEGATIVE_ID + torch.arange(len(negatives), device=ids.device)
        if negative_labels is None:
            negative_labels = torch.full_like(own, NO_LABEL)
        else:
            negative_labels = check_integers(negative_labels, "negative_labels", negatives)
        return torch.cat([documents, negatives]), torch.cat([labels, negative_labels]), torch.cat([ids, own])


def _check_labels(labels: Tensor) -> None:
    """On a CPU, where looking costs nothing: refuses the label of mined negatives, which would all be positives."""
    if labels.device.type == "cpu" and not torch.compiler.is_compiling() and bool((labels == NO_LABEL).any()):
        row = int((labels == NO_LABEL).nonzero()[0])
        raise InputError(f"row {row} has the label {NO_LABEL}, which marks mined negatives: pass any other integer")


def against_memory(
    loss_fn: nn.Module,
    anchors: Tensor,
    labels: Tensor,
    memory: CrossBatchMemory | None,
    *,
    references: Tensor,
    return_stats: bool = False,
    **named: Any,
) -> tuple[Tensor, Any]:
    """The loss of anchors against live references and a memory, safe to train both sides with; and its statistics, or None.

    The anchors get the gradient of this loss, the references that of the loss without the memory. Otherwise the references
    would be pulled to their anchors with the full weight of the positives, but pushed away by the batch's share of the
    negatives only. They would move towards the anchors' mean, the anchors would follow them away from the memory, and in the
    end all embeddings would be at one point.
    """
    both = memory is not None and references.requires_grad and torch.is_grad_enabled()
    live = references.detach() if both else references
    found = loss_fn(anchors, labels, memory, references=live, return_stats=return_stats, **named)
    value, stats = found if return_stats else (found, None)
    if both:
        frozen = {name: parameter.detach() for name, parameter in loss_fn.named_parameters()}
        in_batch = functional_call(loss_fn, frozen, (anchors.detach(), labels), {"references": references, **named})
        value = value + (in_batch - in_batch.detach())
    return value, stats
