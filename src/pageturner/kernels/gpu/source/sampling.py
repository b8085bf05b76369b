"""Sampling of tokens from logits: edits, masks, and the draw. The meaning is that of Ops.sample;
the noise comes from the host.

A row is cut into segments of the vocabulary whose bounds depend on the vocabulary alone. A program
has one segment of one row. Masses are summed within a segment in one order and then over the
segments in order, so that no other row matters. Four kernels run one behind the other:

best     the largest logit of each segment
scan     where tokens are cut off: counts of tokens by their distance from the best one, and masses.
         From both the range of distances follows in which the last token lies that stays. A second
         pass, in which the range is divided again, is for rows that have too many tokens there
collect  the tokens in that range, which the last program of a row sorts to find the last one that
         stays
draw     the mass of what stays, from which the last program of a row draws

A `pair` is a key and an id in one integer, larger for a larger logit and then for a smaller id.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import start_dependent


@triton.jit
def keys_of(x):
    """Integers in the order of the floats: equal for both zeros, NaN the largest of all."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, ordered)


@triton.jit
def edit(logits, entries, amounts, count, vocabulary, BLOCK: tl.constexpr):
    """entries [count, 4]: row, token, operation of kernels.edits, how often. No two have one token
    of a row. Each product is rounded before a sum. Grid: tiles of count."""
    start_dependent()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    row = tl.load(entries + i * 4, mask=there, other=0).to(tl.int64)
    token = tl.load(entries + i * 4 + 1, mask=there, other=0)
    operation = tl.load(entries + i * 4 + 2, mask=there, other=0)
    times = tl.load(entries + i * 4 + 3, mask=there, other=0).to(tl.float32)
    value = tl.load(amounts + i, mask=there, other=1.0)
    x = tl.load(logits + row * vocabulary + token, mask=there, other=0.0)
    repeated = tl.where(x > 0, tl.div_rn(x, value), x * value)
    x = tl.where(operation == 2, value, x)
    x = tl.where(operation == 3, x + value, x)
    x = tl.where(operation == 4, repeated, x)
    x = tl.where(operation == 5, x - value * times, x)
    x = tl.where(operation == 6, x - value, x)
    tl.store(logits + row * vocabulary + token, x, mask=there)


@triton.jit
def forbid(logits, bits, rows, words, vocabulary, BLOCK: tl.constexpr):
    """Minus infinity where row i of bits [n, words] (32 tokens a word, lowest first) has none, in
    row rows[i] of the logits. Grid: n, tiles of the vocabulary."""
    start_dependent()
    i = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i).to(tl.int64)
    word = tl.load(bits + i * words + token // 32, mask=token < vocabulary, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    at = logits + row * vocabulary + token
    tl.store(
        at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=forbidden & (token < vocabulary)
    )


@triton.jit
def pair_of(x, v):
    return (keys_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - v).to(tl.int64)


@triton.jit
def logit_of(pair):
    """The logit of a pair; plus zero for both zeros."""
    key = (pair >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(pair):
    return (0x7FFFFFFF - (pair & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def pairs_at(logits, base, v, vocabulary):
    """Logits and pairs of some tokens; the smallest pair behind the vocabulary's end."""
    x = tl.load(logits + base + v, mask=v < vocabulary, other=float("-inf"))
    return x, tl.where(v < vocabulary, pair_of(x, v), -0x8000000000000000)


@triton.jit
def weight_of(x, peak, temperature, least):
    """exp((x - peak) / temperature), 0 where that is under min_p."""
    weight = tl.exp(tl.div_rn(x - peak, temperature))
    return tl.where(weight < least, 0.0, weight).to(tl.float64)


@triton.jit
def draws(temperature, peak):
    """Return whether a row is drawn from: not if it is greedy, nor if its largest logit is not
    finite."""
    return (temperature > 0) & (peak == peak) & (tl.abs(peak) < float("inf"))


@triton.jit
def at_place(values, i, place):
    """The element of a vector at a place, or zero."""
    return tl.sum(tl.where(i == place, values, tl.zeros_like(values)), axis=0)


@triton.jit
def arrives_last(counter, programs):
    """Return whether all other programs of the row are done; what they stored can be read then."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1


@triton.jit
def best(
    logits, pairs, counts, state, vocabulary, chunks,
    BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, BINS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """The largest pair of each segment; the counts and the state of the row become zero.
    Grid: rows, segments."""
    start_dependent()
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = tl.full((), -0x8000000000000000, tl.int64)
    for chunk in range(0, chunks):
        v = (segment * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
        _, pair = pairs_at(logits, row * vocabulary, v, vocabulary)
        largest = tl.maximum(largest, tl.max(pair, axis=0))
    tl.store(pairs + row * SEGMENTS + segment, largest)
    if segment == 0:
        tl.store(counts + row * 2 * BINS + tl.arange(0, 2 * BINS), tl.zeros((2 * BINS,), tl.int32))
        tl.store(state + row * STATE + tl.arange(0, STATE), tl.zeros((STATE,), tl.int32))


@triton.jit
def best_of(pairs, row, segments, SEGMENTS: tl.constexpr):
    """The largest pair of a row."""
    i = tl.arange(0, SEGMENTS)
    mine = tl.load(pairs + row * SEGMENTS + i, mask=i < segments, other=-0x8000000000000000)
    return tl.max(mine, axis=0)


@triton.jit
def total_of(masses, row, segments, SEGMENTS: tl.constexpr):
    """The masses of a row's segments, added in order."""
    i = tl.arange(0, SEGMENTS)
    mine = tl.load(masses + row * SEGMENTS + i, mask=i < segments, other=0.0)
    return at_place(tl.cumsum(mine, axis=0), i, SEGMENTS - 1)


@triton.jit
def place_of(x, peak, temperature, state, level, BINS: tl.constexpr):
    """Return in which of BINS places a token lies by its distance from the best one. Level 0 has
    places of an eighth of a nat, the last of which has all that is further away. Level 1 divides
    the range that level 0 found; tokens before it are at -1, and tokens behind it at BINS."""
    distance = tl.div_rn(peak - x, temperature)
    coarse = tl.minimum(distance * 8.0, BINS - 1.0).to(tl.int32)
    if level == 0:
        place = coarse
    else:
        first, last = tl.load(state + 8), tl.load(state + 9)
        fine = tl.div_rn(distance - first * 0.125, (last + 1 - first) * (0.125 / BINS))
        place = tl.minimum(tl.maximum(fine, 0.0), BINS - 1.0).to(tl.int32)
        place = tl.where(coarse < first, -1, tl.where(coarse > last, BINS, place))
    return place


@triton.jit
def nucleus_places(
    counts, passed, total, top_p, least, low, width, WHOLE: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """The places between which the mass of the largest logits reaches top_p of the total. Each
    token of a place weighs what the bounds of the place say, and the sums are bounded from both
    ends of the row."""
    i = tl.arange(0, BINS)
    near, far = tl.exp(-(low + i * width)) * 1.0001, tl.exp(-(low + (i + 1) * width)) * 0.9999
    near = tl.where(near < least, 0.0, near).to(tl.float64) * counts
    far = tl.where((far < least) | (i == BINS - 1), 0.0, far).to(tl.float64) * counts
    near_sum, far_sum = tl.cumsum(near, axis=0), tl.cumsum(far, axis=0)
    fewest = passed + far_sum
    if WHOLE:  # else there are tokens behind the places
        fewest = tl.maximum(fewest, total - (tl.sum(near, axis=0) - near_sum))
    mass = tl.minimum(passed + near_sum, total - (tl.sum(far, axis=0) - far_sum))
    target, slack = top_p.to(tl.float64) * total, 1e-9 * total
    last = tl.minimum(tl.sum((fewest < target + slack).to(tl.int32), axis=0), BINS - 1)
    return tl.minimum(tl.sum((mass < target - slack).to(tl.int32), axis=0), last), last


@triton.jit
def scan(
    logits, temperatures, top_ks, top_ps, min_ps, pairs, masses, counts, state, vocabulary, chunks, most,
    LEVEL: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, BINS: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """The places in which the last token that stays may lie: of rows that cut tokens off, and on
    level 1 of those that have more than `most` tokens there. Grid: rows, segments."""
    start_dependent()
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = (
        tl.load(temperatures + row),
        tl.load(top_ks + row),
        tl.load(top_ps + row),
    )
    peak = logit_of(best_of(pairs, row, segments, SEGMENTS))
    state += row * STATE
    todo = draws(temperature, peak) & ((top_k > 0) | (top_p < 1))
    if LEVEL == 1:
        todo = todo & (tl.load(state + 1) > most)
    if todo:
        least = tl.load(min_ps + row)
        found = tl.zeros((BINS,), tl.int32)
        mass = tl.zeros((), tl.float64)
        for chunk in range(0, chunks):
            v = (segment * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
            x, _ = pairs_at(logits, row * vocabulary, v, vocabulary)
            place = place_of(x, peak, temperature, state, LEVEL, BINS)
            weight = weight_of(x, peak, temperature, least)
            if LEVEL == 1:  # of what surely stays; else of all
                weight = tl.where(place < 0, weight, 0.0)
            mass += tl.sum(weight, axis=0)
            counted = (v < vocabulary) & (place >= 0) & (place < BINS)
            found += tl.histogram(tl.where(counted, place, 0), BINS, mask=counted)
        i = tl.arange(0, BINS)
        mine = counts + (row * 2 + LEVEL) * BINS + i
        tl.atomic_add(mine, found, mask=found > 0, sem="relaxed")
        tl.store(masses + (row * 3 + LEVEL) * SEGMENTS + segment, mass)
        if arrives_last(state + 2 + LEVEL, segments):
            found = tl.load(mine)
            total = total_of(masses, row * 3, segments, SEGMENTS)
            passed, before, low, width = tl.zeros_like(total), 0, 0.0, 0.125
            if LEVEL == 1:
                passed = total_of(masses, row * 3 + 1, segments, SEGMENTS)
                before, low = tl.load(state), tl.load(state + 8) * 0.125
                width = (tl.load(state + 9) * 0.125 + 0.125 - low) / BINS
            upto = before + tl.cumsum(found, axis=0)
            if top_k > 0:
                last = tl.sum((upto < tl.minimum(top_k, vocabulary)).to(tl.int32), axis=0)
                first = tl.where(top_p < 1, 0, last)
            else:
                first, last = nucleus_places(
                    found, passed, total, top_p, least, low, width, LEVEL == 0, BINS
                )
            before = tl.maximum(at_place(upto, i, first - 1), before)
            tl.store(state, before)
            tl.store(state + 1, at_place(upto, i, last) - before)
            tl.store(state + 7, LEVEL)
            tl.store(state + 8 + 2 * LEVEL, first)
            tl.store(state + 9 + 2 * LEVEL, last)


@triton.jit
def above(logits, row, vocabulary, pair, peak, temperature, least, BLOCK: tl.constexpr):
    """Return how many tokens of a row have a larger pair, and their mass."""
    more = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for v0 in range(0, vocabulary, BLOCK):
        x, mine = pairs_at(logits, row * vocabulary, v0 + tl.arange(0, BLOCK), vocabulary)
        more += (mine > pair).to(tl.int32)
        mass += tl.where(mine > pair, weight_of(x, peak, temperature, least), 0.0)
    return tl.sum(more, axis=0), tl.sum(mass, axis=0)


@triton.jit
def smallest(
    logits, row, vocabulary, low, high, count, target, peak, temperature, least, BLOCK: tl.constexpr
):
    """The smallest pair from low to high than which fewer than `count` tokens with less than the
    target mass are larger, by bisection."""
    while low < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        more, mass = above(logits, row, vocabulary, middle, peak, temperature, least, BLOCK)
        enough = (more < count) & (mass < target)
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def cut_by_bisection(
    logits, row, vocabulary, highest, top_k, top_p, peak, temperature, least, BLOCK: tl.constexpr
):  # fmt: skip
    """The last pair that stays, whatever the row: for thousands of logits that are nearly equal."""
    cut = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
    every = tl.full((), float("inf"), tl.float64)
    if top_k > 0:
        cut = smallest(
            logits, row, vocabulary, cut, highest, top_k, every, peak, temperature, least, BLOCK
        )
    if top_p < 1:
        _, mass = above(logits, row, vocabulary, cut - 1, peak, temperature, least, BLOCK)
        target = tl.maximum(top_p.to(tl.float64) * mass, 1e-300)
        count = vocabulary + 1
        cut = smallest(
            logits, row, vocabulary, cut, highest, count, target, peak, temperature, least, BLOCK
        )
    return cut


@triton.jit
def cut_by_sorting(
    found, count, before, mass, total, top_k, top_p, peak, temperature, least, MOST: tl.constexpr
):  # fmt: skip
    """The last pair that stays among `count` pairs in any order. Larger ones: so many, of such a
    mass."""
    i = tl.arange(0, MOST)
    pairs = tl.sort(tl.load(found + i, mask=i < count, other=-0x8000000000000000), descending=True)
    weight = weight_of(logit_of(pairs), peak, temperature, least)
    running = mass + tl.cumsum(tl.where(i < count, weight, 0.0), axis=0)
    stay = count
    if top_k > 0:
        stay = tl.minimum(count, top_k - before)
        total = at_place(running, i, stay - 1)
    if top_p < 1:
        target = top_p.to(tl.float64) * total
        short = tl.sum(((running < target) & (i < stay)).to(tl.int32), axis=0)
        stay = tl.minimum(short + 1, stay)
    return at_place(pairs, i, stay - 1)


@triton.jit
def collect(
    logits, temperatures, top_ks, top_ps, min_ps, pairs, masses, found, cuts, state, vocabulary, chunks,
    BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, BINS: tl.constexpr, STATE: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """The last pair that stays, of rows that cut tokens off. Grid: rows, segments."""
    start_dependent()
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = (
        tl.load(temperatures + row),
        tl.load(top_ks + row),
        tl.load(top_ps + row),
    )
    highest = best_of(pairs, row, segments, SEGMENTS)
    peak = logit_of(highest)
    state += row * STATE
    if draws(temperature, peak) & ((top_k > 0) | (top_p < 1)):
        least = tl.load(min_ps + row)
        count, level = tl.load(state + 1), tl.load(state + 7)
        first, last = tl.load(state + 8 + 2 * level), tl.load(state + 9 + 2 * level)
        found += row * MOST
        mass = tl.zeros((), tl.float64)
        if count <= MOST:
            for chunk in range(0, chunks):
                v = (segment * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
                x, pair = pairs_at(logits, row * vocabulary, v, vocabulary)
                place = place_of(x, peak, temperature, state, level, BINS)
                inside = ((place >= first) & (place <= last) & (v < vocabulary)).to(tl.int32)
                weight = weight_of(x, peak, temperature, least)
                mass += tl.sum(tl.where(place < first, weight, 0.0), axis=0)
                mine = tl.sum(inside, axis=0)
                if mine > 0:
                    at = (
                        tl.atomic_add(state + 6, mine, sem="relaxed")
                        + tl.cumsum(inside, axis=0)
                        - 1
                    )
                    tl.store(found + at, pair, mask=inside != 0)
        tl.store(masses + (row * 3 + 2) * SEGMENTS + segment, mass)
        if arrives_last(state + 4, segments):
            if count <= MOST:
                total = total_of(masses, row * 3, segments, SEGMENTS)
                mass = total_of(masses, row * 3 + 2, segments, SEGMENTS)
                before = tl.load(state)
                cut = cut_by_sorting(
                    found, count, before, mass, total, top_k, top_p, peak, temperature, least, MOST
                )
            else:
                cut = cut_by_bisection(
                    logits, row, vocabulary, highest, top_k, top_p, peak, temperature, least, BLOCK
                )
            tl.store(cuts + row, cut)


@triton.jit
def kept_weights(logits, base, v, vocabulary, cut, peak, temperature, least):
    """Weights of tokens, 0 behind the last pair that stays and behind the vocabulary's end. By
    halves of the pair: whole ones take twice the registers."""
    x = tl.load(logits + base + v, mask=v < vocabulary, other=float("-inf"))
    key, last = keys_of(x), (cut >> 32).to(tl.int32)
    kept = (key > last) | ((key == last) & (v <= id_of(cut)))
    return tl.where(kept, weight_of(x, peak, temperature, least), 0.0)


@triton.jit
def draw(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, pairs, masses, cuts, state, ids, values,
    vocabulary, chunks, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """A token for each row and its logit: the best one, or the first one, by id, at which the
    running sum of what stays exceeds uniform * total. Grid: rows, segments."""
    start_dependent()
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperatures + row)
    highest = best_of(pairs, row, segments, SEGMENTS)
    peak = logit_of(highest)
    if draws(temperature, peak):
        least = tl.load(min_ps + row)
        cut = tl.full((), -0x8000000000000000, tl.int64)
        if (tl.load(top_ks + row) > 0) | (tl.load(top_ps + row) < 1):
            cut = tl.load(cuts + row)
        mass = tl.zeros((), tl.float64)
        if tl.load(pairs + row * SEGMENTS + segment) >= cut:  # else nothing of it stays
            for chunk in range(0, chunks):
                v = (segment * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
                weights = kept_weights(
                    logits, row * vocabulary, v, vocabulary, cut, peak, temperature, least
                )
                mass += tl.sum(weights, axis=0)
        tl.store(masses + row * 3 * SEGMENTS + segment, mass)
        if arrives_last(state + row * STATE + 5, segments):
            i = tl.arange(0, SEGMENTS)
            mine = tl.load(masses + row * 3 * SEGMENTS + i, mask=i < segments, other=0.0)
            running = tl.cumsum(mine, axis=0)
            target = tl.load(uniforms + row).to(tl.float64) * at_place(running, i, SEGMENTS - 1)
            some = tl.where(mine > 0, i, 0)
            here = tl.min(
                tl.where((running > target) & (mine > 0), i, tl.max(some, axis=0)), axis=0
            )
            before = at_place(running, i, here - 1)
            chosen = tl.full((), 0x7FFFFFFF, tl.int32)
            behind = tl.zeros((), tl.int32)
            for chunk in range(0, chunks):
                v = (here * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
                weights = kept_weights(
                    logits, row * vocabulary, v, vocabulary, cut, peak, temperature, least
                )
                over = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0)
                chosen = tl.minimum(chosen, tl.min(tl.where(over, v, 0x7FFFFFFF), axis=0))
                behind = tl.maximum(behind, tl.max(tl.where(weights > 0, v, 0), axis=0))
                before += tl.sum(weights, axis=0)
            chosen = tl.where(chosen == 0x7FFFFFFF, behind, chosen)
            tl.store(ids + row, chosen)
            tl.store(values + row, tl.load(logits + row * vocabulary + chosen))
    elif segment == 0:
        tl.store(ids + row, id_of(highest))
        tl.store(values + row, peak)
