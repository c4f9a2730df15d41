# mypy: disable-error-code="no-untyped-def"
"""The end of a step: adds up the parts of every program in fixed order, meets the positives, and writes the results.

One program takes one anchor and DS columns of its gradient. The last of them to be done (a counter tells) adds up the
anchors' losses, always in the same order.
"""

import triton
import triton.language as tl

from xbm.kernels.launch import await_others

from xbm.engine.triton.tiles import (  # isort: skip
    BALANCED, BOTH, CEILING, CONTRASTIVE, CROWD_NEGATIVES, CROWD_POSITIVES, CROWD_TRIPLETS, CROWD_VALUE, EASIEST_POSITIVE,
    EXTRA, FLOOR, HARDEST, HARDEST_POSITIVE, INF, LOSS, MEAN, MULTI_SIMILARITY, NEGATIVE_PEAK, NEGATIVES, NEWEST_ROWS,
    OF_NEGATIVE, OF_POSITIVE, POSITIVE_PEAK, PULL, SIZES, SOUND, SUM, TRIPLET, VALUE, counter_in, found_in,
    log_of_one_plus, own_slots, positives_among, similarities_of_one, sums_in,
)  # fmt: skip


@triton.jit
def is_sound(
    given, i, ids, sound, tolerance, D: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SOUND: tl.constexpr, BK: tl.constexpr
):
    """Whether an anchor is finite and of unit length, its id no less than 0, and not ruled out by the caller."""
    squares = tl.zeros((BK,), tl.float32)  # added up once, at the end: every sum over threads makes all of them wait
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        x = tl.load(given + i.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
        squares += x * x
    good = tl.abs(tl.sqrt(tl.sum(squares, 0)) - 1.0) <= tolerance  # False for NaN too
    if HAS_IDS:
        good = good & (tl.load(ids + i) >= 0)
    if HAS_SOUND:
        good = good & (tl.load(sound + i) != 0)
    return good


@triton.jit
def was_written_last(given, rows, row_labels, labels, pointer, latest, i, m, M, D: tl.constexpr, BK: tl.constexpr):
    """Whether the anchor is the row that the queue took at its place in the latest enqueue, or nothing was enqueued yet."""
    slot = own_slots(pointer, pointer, i, m, M, NEWEST_ROWS)
    at = tl.maximum(slot, 0)
    differ = tl.zeros((BK,), tl.int32)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        v = tl.load(rows + at.to(tl.int64) * D + d, mask=d < D, other=0.0)
        x = tl.load(given + i.to(tl.int64) * D + d, mask=d < D, other=0.0).to(v.dtype)
        differ += (x.to(tl.float32) != v.to(tl.float32)).to(tl.int32)
    same = (tl.sum(differ, 0) == 0) & (tl.load(row_labels + at) == tl.load(labels + i))
    newest = tl.load(latest)
    return ((same | (slot < 0)) & (newest == m)) | (newest == 0)


@triton.jit
def weigh_positives(s, good, ceiling, peak, alpha, base, KIND: tl.constexpr):
    """What listed positives add: value and weight (or mass, for a log-sum-exp measured from `peak`), and whether they count."""
    if KIND == MULTI_SIMILARITY:
        valid = good & (s < ceiling)
        w = tl.where(valid, tl.exp(-alpha * (s - base) - peak), 0.0)
        value = w
    else:
        valid = good
        w = tl.where(valid, 1.0, 0.0)
        value = tl.where(valid, 1.0 - s, 0.0)
    return value, w, valid


@triton.jit
def weigh_sides(negatives, positives, REDUCTION: tl.constexpr):
    """What a negative and a positive of the contrastive loss weigh, given how many there are of each."""
    of_negative = 1.0
    of_positive = 1.0
    if REDUCTION == MEAN:
        of_negative = 1.0 / tl.maximum(negatives, 1).to(tl.float32)
        of_positive = 1.0 / tl.maximum(positives, 1).to(tl.float32)
    elif REDUCTION == BALANCED:
        of_negative = tl.minimum(tl.maximum(positives, 1).to(tl.float32) / tl.maximum(negatives, 1).to(tl.float32), 1.0)
    return of_negative, of_positive


@triton.jit(do_not_specialize=SIZES)
def finish(
    given,  # (m, D), the anchors as they came: for the checks
    anchors, rows, row_labels, stamps, row_ids, labels, ids, own, pointer, latest, given_sound,
    totals, lowest, highest, listed, places, beaten, crowd, crowd_gradient,
    work, pulls,
    loss, gradient, valid_counts, extremes, unsound,  # out: (), (m, D), (2, m), (3, m), ()
    m, M, splits, cap, tolerance, margin, alpha, beta, base,
    KIND: tl.constexpr, REDUCTION: tl.constexpr, STATS: tl.constexpr, HAS_IDS: tl.constexpr, HAS_SOUND: tl.constexpr,
    BY_ID: tl.constexpr, BY_SLOT: tl.constexpr, D: tl.constexpr, DS: tl.constexpr, SP: tl.constexpr, BS: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, CROWDED: tl.constexpr,
):  # fmt: skip
    await_others()
    i = tl.program_id(0)
    d = tl.program_id(1) * DS + tl.arange(0, DS)
    inside = d < D
    sound = is_sound(given, i, ids, given_sound, tolerance, D, HAS_IDS, HAS_SOUND, BK)
    if BY_SLOT == NEWEST_ROWS:
        sound = sound & was_written_last(given, rows, row_labels, labels, pointer, latest, i, m, M, D, BK)

    # ---- what the pass over the bank found, split by split
    sums, found = sums_in(work, m, splits, D), found_in(work, m, splits, D)
    split = tl.arange(0, SP)
    have = split < splits
    field = m * splits
    of = sums + i * splits + split
    values = tl.load(of + VALUE * field, mask=have, other=0.0)
    extras = tl.load(of + EXTRA * field, mask=have, other=0.0)
    negatives = tl.sum(tl.load(of + NEGATIVES * field, mask=have, other=0.0).to(tl.int32), 0)
    hardest = tl.max(tl.load(of + HARDEST * field, mask=have, other=-INF), 0)
    negative_peak = 0.0
    if KIND == MULTI_SIMILARITY:
        negative_peak = tl.max(extras, 0)
        value = tl.sum(values * tl.exp(extras - negative_peak), 0)
    else:
        value = tl.sum(values, 0)
    extra = tl.sum(extras, 0)
    g = tl.zeros((DS,), tl.float32)
    p_g = tl.zeros((DS,), tl.float32)
    for start in range(0, splits, BS):
        part = start + tl.arange(0, BS)
        from_ = (part.to(tl.int64)[:, None] * m + i) * D + d[None, :]
        x = tl.load(work + from_, mask=(part < splits)[:, None] & inside[None, :], other=0.0)
        if KIND == BOTH and REDUCTION != SUM:
            p_g += tl.sum(tl.load(pulls + from_, mask=(part < splits)[:, None] & inside[None, :], other=0.0), 0)
        if KIND == MULTI_SIMILARITY:
            measured_from = tl.load(sums + EXTRA * field + i * splits + part, mask=part < splits, other=0.0)
            x = x * tl.exp(measured_from - negative_peak)[:, None]
        g += tl.sum(x, 0)
    g = g * (1.0 / SCALE)

    # ---- the positives
    of_negative = 1.0
    of_positive = 1.0
    positive_peak = 0.0
    floor = margin
    ceiling = INF
    active = sound
    if KIND == BOTH:
        positives = tl.sum(extras.to(tl.int32), 0)
        easiest_positive = tl.max(tl.load(of + EASIEST_POSITIVE * field, mask=have, other=-INF), 0)
        hardest_positive = tl.min(tl.load(of + HARDEST_POSITIVE * field, mask=have, other=INF), 0)
        loss_i = value
        if REDUCTION != SUM:
            p_value = tl.sum(tl.load(of + PULL * field, mask=have, other=0.0), 0)
            of_negative, of_positive = weigh_sides(negatives, positives, REDUCTION)
            loss_i = of_positive * p_value + of_negative * value
            g = of_negative * g - of_positive * p_g
    else:
        positives = 0
        all_positives = tl.load(totals + i)
        hardest_positive, easiest_positive = tl.load(lowest + i), tl.load(highest + i)
        if KIND == MULTI_SIMILARITY:
            ceiling = hardest + margin
            # the farthest positive has the largest logit, and counts if any does
            positive_peak = tl.where(hardest_positive < ceiling, tl.maximum(-alpha * (hardest_positive - base), 0.0), 0.0)
        if KIND >= MULTI_SIMILARITY:
            floor = hardest_positive - margin
        p_value = 0.0
        few = all_positives
        if CROWDED:  # more rows than a list holds, and so perhaps more positives
            few = tl.where(all_positives > cap, 0, all_positives)
        for start in range(0, few, BP):
            k = start + tl.arange(0, BP)
            good = k < few
            at = tl.load(places + i * cap + k, mask=good, other=0)
            if KIND == TRIPLET:
                w = tl.load(beaten + i * cap + k, mask=good, other=0).to(tl.float32)
                positives += tl.sum((w > 0).to(tl.int32), 0)
            else:
                s = tl.load(listed + i * cap + k, mask=good, other=INF)
                each, w, valid = weigh_positives(s, good, ceiling, positive_peak, alpha, base, KIND)
                p_value += tl.sum(each, 0)
                positives += tl.sum(valid.to(tl.int32), 0)
            v = tl.load(rows + at.to(tl.int64)[:, None] * D + d[None, :], mask=good[:, None] & inside[None, :], other=0.0)
            p_g += tl.sum(w[:, None] * v.to(tl.float32), 0)
        if CROWDED and KIND == TRIPLET:
            if all_positives > cap:
                value = tl.load(crowd + CROWD_VALUE * m + i)
                extra = tl.load(crowd + CROWD_TRIPLETS * m + i)
                negatives = tl.load(crowd + CROWD_NEGATIVES * m + i).to(tl.int32)
                positives = tl.load(crowd + CROWD_POSITIVES * m + i).to(tl.int32)
                g = tl.load(crowd_gradient + i.to(tl.int64) * D + d, mask=inside, other=0.0)
        elif CROWDED:  # noqa: SIM102 (the one is known when the kernel is compiled, the other is not)
            if all_positives > cap:  # find them again by their labels
                me = i + tl.arange(0, 1)
                slot = own_slots(own, pointer, me, m, M, BY_SLOT)
                anchor_id = tl.load(ids + me) if BY_ID else slot
                label = tl.load(labels + i)
                for start in range(0, M, BP):
                    j = start + tl.arange(0, BP)
                    here = j < M
                    good = positives_among(j, here, row_labels, stamps, row_ids, label, anchor_id, slot, BY_ID, BY_SLOT, False)
                    if tl.max(good.to(tl.int32), 0) > 0:
                        s = similarities_of_one(anchors, rows, i, j, good, D, BP, BK)
                        each, w, valid = weigh_positives(s, good, ceiling, positive_peak, alpha, base, KIND)
                        p_value += tl.sum(each, 0)
                        positives += tl.sum(valid.to(tl.int32), 0)
                        of_v = rows + j.to(tl.int64)[:, None] * D + d[None, :]
                        v = tl.load(of_v, mask=good[:, None] & inside[None, :], other=0.0)
                        p_g += tl.sum(w[:, None] * v.to(tl.float32), 0)

        # ---- one loss from both sides
        if KIND == CONTRASTIVE:
            of_negative, of_positive = weigh_sides(negatives, positives, REDUCTION)
            loss_i = of_positive * p_value + of_negative * value
        elif KIND == MULTI_SIMILARITY:
            active = sound & (positives > 0) & (negatives > 0)
            loss_i = log_of_one_plus(p_value, positive_peak) / alpha + log_of_one_plus(value, negative_peak) / beta
            of_negative = 1.0 / (tl.exp(-negative_peak) + value)
            of_positive = 1.0 / (tl.exp(-positive_peak) + p_value)
            positives = tl.where(active, positives, 0)
            negatives = tl.where(active, negatives, 0)
        else:
            if REDUCTION == MEAN:
                of_negative = 1.0 / tl.maximum(extra, 1.0)
            of_positive = of_negative
            loss_i = of_negative * value
        g = of_negative * g - of_positive * p_g

    g = tl.where(active, g / m, 0.0)
    tl.store(gradient + i.to(tl.int64) * D + d, g.to(gradient.dtype.element_ty), mask=inside)

    if tl.program_id(1) == 0:
        of_found = found + i
        tl.store(of_found + LOSS * m, tl.where(active, loss_i, 0.0))
        tl.store(of_found + SOUND * m, tl.where(sound, 1.0, 0.0))
        tl.store(of_found + OF_NEGATIVE * m, tl.where(active, of_negative / m, 0.0))
        tl.store(of_found + OF_POSITIVE * m, tl.where(active, of_positive / m, 0.0))
        tl.store(of_found + NEGATIVE_PEAK * m, negative_peak)
        tl.store(of_found + POSITIVE_PEAK * m, positive_peak)
        tl.store(of_found + FLOOR * m, floor)
        tl.store(of_found + CEILING * m, ceiling)
        if STATS:
            tl.store(valid_counts + i, tl.where(sound, positives, 0).to(tl.int64))
            tl.store(valid_counts + m + i, tl.where(sound, negatives, 0).to(tl.int64))
            tl.store(extremes + i, tl.where(sound, hardest, -INF))
            tl.store(extremes + m + i, tl.where(sound, easiest_positive, -INF))
            tl.store(extremes + 2 * m + i, tl.where(sound, hardest_positive, INF))
        tl.debug_barrier()
        if tl.atomic_add(counter_in(work, m, splits, D), 1, sem="acq_rel") == m - 1:
            whole = 0.0
            good = 0.0
            for start in range(0, m, 1024):
                k = start + tl.arange(0, 1024)
                whole += tl.sum(tl.load(found + LOSS * m + k, mask=k < m, other=0.0, cache_modifier=".cg"), 0)
                good += tl.sum(tl.load(found + SOUND * m + k, mask=k < m, other=0.0, cache_modifier=".cg"), 0)
            tl.store(loss, whole / m)
            if STATS:
                tl.store(unsound, m - good.to(tl.int64))
