"""Sampling of tokens from logits: edits, masks, and the draw. The meaning is that of Ops.sample;
the noise comes from the host.

A row is cut into segments of the vocabulary whose bounds depend on the vocabulary alone. A program
has one segment of one row. Sums are made within a segment in one order and then over the segments
in order, so that no other row matters. Four kernels run one behind the other, the two in the
middle for rows that cut tokens off:

best     the largest logit of each segment; and how many tokens lie in each of some places, from
         large logits to small ones, from which follows in which places the last token may lie that
         stays
collect  the tokens of these places, and the masses that top-p is a share of
cut      the last token that stays, by bisection among those, and from all that stay the token
draw     the token of rows that cut nothing off, from the masses of all segments

A `pair` is a key and an id in one integer, larger for a larger logit and then for a smaller id.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import start_dependent

FORBIDDEN = tl.constexpr(-1e4)  # logits up to this one have no part in the mean
DRAWN = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # in place of the last pair that stays


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
def logit_of_key(key):
    """The float of a key; plus zero for both zeros."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def logit_of(pair):
    return logit_of_key((pair >> 32).to(tl.int32))


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
    """exp((x - peak) / temperature), 0 where that is under min_p. The quotient is rounded as that
    of a division (Markstein 1990), which would take four times as long."""
    divisor = tl.maximum(temperature, 1e-37)
    inverse = tl.div_rn(1.0, divisor)
    distance = x - peak
    near = distance * inverse
    exact = tl.fma(tl.fma(-near, divisor, distance), inverse, near)
    weight = tl.where(near < -128.0, 0.0, tl.exp(exact))
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
    """Return whether all other programs of the row are done; what they stored can be read then.
    The counter is 0 before and behind."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def best_of(pairs, row, segments, SEGMENTS: tl.constexpr):
    """The largest pair of a row."""
    i = tl.arange(0, SEGMENTS)
    mine = tl.load(pairs + row * SEGMENTS + i, mask=i < segments, other=-0x8000000000000000)
    return tl.max(mine, axis=0)


@triton.jit
def total_of(masses, row, segments, SEGMENTS: tl.constexpr):
    """The masses of a row's segments, added in one order."""
    i = tl.arange(0, SEGMENTS)
    return tl.sum(tl.load(masses + row * SEGMENTS + i, mask=i < segments, other=0.0), axis=0)


@triton.jit
def scale_of(logits, row, vocabulary, PLACES: tl.constexpr):
    """The logit at which places begin and their width, by 64 pieces of a row: from five deviations
    above the mean to two and a half below. They decide how long the rest takes, and not what comes
    out."""
    i = tl.arange(0, 512)
    v = i // 8 * (vocabulary // 64) + i % 8
    x = tl.load(logits + row * vocabulary + v, mask=v < vocabulary, other=float("-inf"))
    some = x > FORBIDDEN
    count = tl.maximum(tl.sum(some.to(tl.float32), axis=0), 1.0)
    mean = tl.sum(tl.where(some, x, 0.0), axis=0) / count
    apart = tl.where(some, x - mean, 0.0)
    deviation = tl.sqrt(tl.sum(apart * apart, axis=0) / count + 1e-30)
    return mean + 5.0 * deviation, deviation * (7.5 / (PLACES - 2))


@triton.jit
def distance_of(x, top, width, PLACES: tl.constexpr):
    """The place in which a token lies, with a fraction: all larger ones in the first, all smaller
    ones in the last."""
    return tl.minimum(tl.maximum((top - x) * (1.0 / width), 0.0), PLACES - 1.0)


@triton.jit
def nucleus_places(
    counts, upto, head, top_p, least, above, width, tight, PLACES: tl.constexpr
):  # fmt: skip
    """The places between which the mass of the largest logits reaches top_p of the whole. A token
    weighs what the bounds of its place say, or where `tight` is under 1, what is so much nearer to
    the middle of the place: then the cut may lie elsewhere. head: the mass of the first place, or a
    negative number where nobody knows it. above: by how many nats that place ends above the best
    token."""
    i = tl.arange(0, PLACES)
    edge, next_edge = tl.minimum(above - i * width, 0.0), tl.minimum(above - (i + 1) * width, 0.0)
    near, far = tl.exp(tl.where(i == 0, 0.0, edge)), tl.exp(next_edge)
    middle = tl.exp(tl.minimum(above - (i + 0.5) * width, 0.0))
    near, far = tl.where(near < least, 0.0, near), tl.where(far < least, 0.0, far)
    middle = tl.where(middle < least, 0.0, middle)
    behind = i == PLACES - 1
    most = tl.where(behind | (i == 0), near, middle + (near - middle) * tight) * 1.0001
    fewest = tl.where(i == 0, far, middle + (far - middle) * tight) * 0.9999
    fewest = tl.where(behind, 0.0, fewest).to(tl.float64) * counts
    most = most.to(tl.float64) * counts
    known = i == tl.where(head >= 0, 0, -1)
    most, fewest = tl.where(known, head * 1.0001, most), tl.where(known, head * 0.9999, fewest)
    most_sum, fewest_sum = tl.cumsum(most, axis=0), tl.cumsum(fewest, axis=0)
    rest = tl.sum(fewest, axis=0) - fewest_sum
    fewest_sum = tl.where(upto > 0, tl.maximum(fewest_sum, 0.9999), fewest_sum)  # the best one
    highest = fewest_sum + (tl.sum(most, axis=0) - most_sum)
    lowest = most_sum + rest
    share = top_p.to(tl.float64)
    last = tl.sum((fewest_sum < (share + 1e-9) * highest).to(tl.int32), axis=0)
    first = tl.sum((most_sum < (share - 1e-9) * lowest).to(tl.int32), axis=0)
    last = tl.minimum(last, PLACES - 1)
    return tl.minimum(first, last), last


@triton.jit
def places_of_cut(
    counts, places, head, row, segments, top_k, top_p, least, above, width,
    SEGMENTS: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Store the first and the last place in which the last token may lie that stays, how many
    tokens are before and in these places, and in those of the segments before each one. All places
    from the best token on where they have at most MOST. width: of a place, in nats; head and above
    as nucleus_places."""
    s, i = tl.arange(0, SEGMENTS), tl.arange(0, PLACES)
    at = counts + (row * SEGMENTS + s[:, None]) * PLACES + i[None, :]
    found = tl.sum(tl.load(at, mask=(s[:, None] < segments) & (i[None, :] >= 0), other=0), axis=0)
    upto = tl.cumsum(found, axis=0)
    if top_k > 0:
        last = tl.minimum(tl.sum((upto < top_k).to(tl.int32), axis=0), PLACES - 1)
        first = tl.where(top_p < 1, 0, last)
    else:
        first, last = nucleus_places(found, upto, head, top_p, least, above, width, 1.0, PLACES)
        if at_place(upto, i, last) - at_place(upto, i, first - 1) > MOST:
            first, last = nucleus_places(
                found, upto, head, top_p, least, above, width, 0.125, PLACES
            )
    all_of_it = at_place(upto, i, last)
    first = tl.where(all_of_it <= MOST, 0, first)
    before = at_place(upto, i, first - 1)
    inside = (i[None, :] >= first) & (i[None, :] <= last)
    # asked for again: all of them kept in registers would be too many
    again = tl.load(at, mask=inside & (s[:, None] < segments), other=0, volatile=True)
    mine = tl.sum(again, axis=1)
    places += row * (SEGMENTS + 4)
    tl.store(places, first)
    tl.store(places + 1, last)
    tl.store(places + 2, before)
    tl.store(places + 3, all_of_it - before)
    tl.store(places + 4 + s, tl.cumsum(mine, axis=0) - mine)


@triton.jit
def best(
    logits, temperatures, top_ks, top_ps, min_ps, pairs, counts, places, scales, masses, arrived,
    vocabulary, chunks,
    BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr,
    CUTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The largest pair of each segment. Where rows may cut tokens off: counts of its tokens in each
    place, and the places of the cut, by the last program of a row. Grid: rows, segments."""
    start_dependent()
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, BLOCK)
    largest, token = tl.full((BLOCK,), -0x80000000, tl.int32), tl.zeros((BLOCK,), tl.int32)
    temperature, top_k, top_p = (
        tl.load(temperatures + row),
        tl.load(top_ks + row),
        tl.load(top_ps + row),
    )
    cuts = CUTS & (temperature > 0) & ((top_k > 0) | (top_p < 1))
    top, width = 0.0, 1.0
    if cuts:
        top, width = scale_of(logits, row, vocabulary, PLACES)
    found = tl.zeros((PLACES,), tl.int32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        v = (segment * chunks + chunk) * BLOCK + lane
        x = tl.load(logits + row * vocabulary + v, mask=v < vocabulary, other=float("-inf"))
        key = tl.where(v < vocabulary, keys_of(x), -0x80000000)
        token = tl.where(key > largest, v, token)
        largest = tl.maximum(key, largest)
        if cuts:
            place = distance_of(x, top, width, PLACES).to(tl.int32)
            found += tl.histogram(place, PLACES, mask=x > float("-inf"))
    pair = (largest.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
    tl.store(pairs + row * SEGMENTS + segment, tl.max(pair, axis=0))
    if cuts:
        i = tl.arange(0, PLACES)
        tl.store(counts + (row * SEGMENTS + segment) * PLACES + i, found)
        mass = tl.zeros((), tl.float64)
        if at_place(found, i, 0) > 0:  # few tokens, whose bounds would say nothing
            own = logit_of(tl.max(pair, axis=0))
            for chunk in range(0, chunks):
                v = (segment * chunks + chunk) * BLOCK + lane
                x = tl.load(logits + row * vocabulary + v, mask=v < vocabulary, other=float("-inf"))
                weight = weight_of(x, own, temperature, 0.0)
                weight = tl.where(distance_of(x, top, width, PLACES) < 1.0, weight, 0.0)
                mass += tl.sum(weight, axis=0)
        tl.store(masses + row * 2 * SEGMENTS + segment, mass)
        if arrives_last(arrived + row, segments):
            peak = logit_of(best_of(pairs, row, segments, SEGMENTS))
            above = tl.minimum(tl.maximum(tl.div_rn(top - peak, temperature), -1e30), 1e30)
            nats = tl.minimum(tl.div_rn(width, temperature), 1e30)
            least = tl.load(min_ps + row)
            s = tl.arange(0, SEGMENTS)
            own = tl.load(pairs + row * SEGMENTS + s, mask=s < segments, other=0)
            heads = tl.load(masses + row * 2 * SEGMENTS + s, mask=s < segments, other=0.0)
            weights = weight_of(logit_of(own), peak, temperature, 0.0)
            head = tl.sum(tl.where(heads > 0, heads * weights, 0.0), axis=0)
            head = tl.where(least > 0, -1.0, head)
            tl.store(scales + row * 2, top)
            tl.store(scales + row * 2 + 1, width)
            places_of_cut(
                counts, places, head, row, segments, top_k, top_p, least, above, nats,
                SEGMENTS, PLACES, MOST,
            )  # fmt: skip


@triton.jit
def collect(
    logits, temperatures, top_ks, top_ps, min_ps, pairs, scales, places, masses, found,
    vocabulary, chunks,
    BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The tokens of the places of the cut; the mass before these places, and that of the whole,
    where they are asked for. Grid: rows, segments."""
    start_dependent()
    row, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = (
        tl.load(temperatures + row),
        tl.load(top_ks + row),
        tl.load(top_ps + row),
    )
    peak = logit_of(best_of(pairs, row, segments, SEGMENTS))
    mine = places + row * (SEGMENTS + 4)
    cuts = draws(temperature, peak) & ((top_k > 0) | (top_p < 1))
    if cuts & (tl.load(mine + 3) <= MOST):
        least = tl.load(min_ps + row)
        top, width = tl.load(scales + row * 2), tl.load(scales + row * 2 + 1)
        first, last = tl.load(mine), tl.load(mine + 1)
        near, far = first.to(tl.float32), last + 1.0
        weighs = (first > 0) | (top_k <= 0)
        lane = tl.arange(0, BLOCK)
        count = tl.zeros((BLOCK,), tl.int32)
        larger, whole = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
        for chunk in tl.range(0, chunks, num_stages=STAGES):
            v = (segment * chunks + chunk) * BLOCK + lane
            x = tl.load(logits + row * vocabulary + v, mask=v < vocabulary, other=float("-inf"))
            distance = distance_of(x, top, width, PLACES)
            inside = (distance >= near) & (distance < far) & (x > float("-inf"))
            count += inside.to(tl.int32)
            if weighs:
                weight = weight_of(x, peak, temperature, least)
                whole += weight
                larger += tl.where(distance < near, weight, 0.0)
        at = masses + row * 2 * SEGMENTS + segment
        tl.store(at, tl.sum(larger, axis=0))
        tl.store(at + SEGMENTS, tl.sum(whole, axis=0))
        if tl.sum(count, axis=0) > 0:
            place = row * MOST + tl.load(mine + 4 + segment) + tl.cumsum(count, axis=0) - count
            for chunk in range(0, chunks):
                v = (segment * chunks + chunk) * BLOCK + lane
                there = (v < vocabulary) & (count > 0)
                x = tl.load(logits + row * vocabulary + v, mask=there, other=float("-inf"))
                distance = distance_of(x, top, width, PLACES)
                inside = (distance >= near) & (distance < far) & (x > float("-inf"))
                tl.store(found + place, v, mask=inside)
                place += inside.to(tl.int64)


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
def smallest_key(keys, amounts, limit, low, high):
    """The smallest key from low to high of which all larger ones have less than the limit."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        enough = tl.sum(tl.where(keys > middle, amounts, tl.zeros_like(amounts)), axis=0) < limit
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def cut_among(keys, v, amounts, limit, low, high, vocabulary):
    """The key and the id of the last token that stays: the last one before which all together have
    less than the limit."""
    key = smallest_key(keys, amounts, limit, low, high)
    equal = keys == key
    last = tl.full((), 0x7FFFFFFF, tl.int32)
    if tl.sum(equal.to(tl.int32), axis=0) > 1:
        nothing = tl.zeros_like(amounts)
        rest = limit - tl.sum(tl.where(keys > key, amounts, nothing), axis=0)
        ties = tl.where(equal, amounts, nothing)
        last = 0x7FFFFFFF - smallest_key(0x7FFFFFFF - v, ties, rest, 0x7FFFFFFF - vocabulary, last)
    return key, last


@triton.jit
def kept_weights(logits, base, v, end, last, last_id, peak, temperature, least):
    """Weights of tokens, 0 behind the last one that stays and from `end` on."""
    x = tl.load(logits + base + v, mask=v < end, other=float("-inf"))
    kept = (x > last) | ((x == last) & (v <= last_id))
    return tl.where(kept, weight_of(x, peak, temperature, least), 0.0)


@triton.jit
def pick(
    logits, row, begin, end, running, target, last, last_id, peak, temperature, least,
    ids, values, vocabulary, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the first token of a segment at which the running sum exceeds the target, or the last
    one that weighs anything, and its logit."""
    chosen, behind = tl.full((), 0x7FFFFFFF, tl.int32), tl.zeros((), tl.int32)
    for v0 in range(begin, end, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        weights = kept_weights(
            logits, row * vocabulary, v, end, last, last_id, peak, temperature, least
        )
        over = (running + tl.cumsum(weights, axis=0) > target) & (weights > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(over, v, 0x7FFFFFFF), axis=0))
        behind = tl.maximum(behind, tl.max(tl.where(weights > 0, v, 0), axis=0))
        running += tl.sum(weights, axis=0)
    chosen = tl.where(chosen == 0x7FFFFFFF, behind, chosen)
    tl.store(ids + row, chosen)
    tl.store(values + row, tl.load(logits + row * vocabulary + chosen))


@triton.jit
def cut_row(
    logits, row, found, masses, count, before, temperature, top_k, top_p, least, noise, highest,
    ids, values, vocabulary, segments, length,
    SEGMENTS: tl.constexpr, MOST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Draw a row's token where the last one that stays is among `count` tokens, `before` larger
    ones of which are not there. Return whether it is."""
    peak = logit_of(highest)
    i, s = tl.arange(0, MOST), tl.arange(0, SEGMENTS)
    there = i < count
    v = tl.load(found + i, mask=there, other=0)
    x = tl.load(logits + row * vocabulary + v, mask=there, other=float("-inf"))
    weights = tl.where(there, weight_of(x, peak, temperature, least), 0.0)
    keys = tl.where(there, keys_of(x), -0x80000000)
    top = (highest >> 32).to(tl.int32)
    low, high = tl.min(tl.where(there, keys, top), axis=0), tl.max(keys, axis=0)
    key, final = low, tl.full((), 0x7FFFFFFF, tl.int32)
    good = count > 0
    if top_k > 0:
        limit = top_k - before
        key, final = cut_among(keys, v, there.to(tl.int32), limit, low, high, vocabulary)
        kept = (keys > key) | ((keys == key) & (v <= final))
        weights = tl.where(kept, weights, 0.0)
    larger = tl.load(masses + s, mask=s < segments, other=0.0)
    if top_p < 1:
        mass, passed = tl.sum(weights, axis=0), tl.sum(larger, axis=0)
        whole = mass
        if top_k <= 0:
            whole = total_of(masses, 1, segments, SEGMENTS)
        target = tl.maximum(top_p.to(tl.float64) * whole, 1e-300)
        good = (passed < target) & (target <= passed + mass)
        if good:
            key, final = cut_among(keys, v, weights, target - passed, key, high, vocabulary)
    if good:
        kept = (keys > key) | ((keys == key) & (v <= final))
        weights = tl.where(kept, weights, 0.0)
        target = noise.to(tl.float64) * (tl.sum(larger, axis=0) + tl.sum(weights, axis=0))
        low, high = tl.zeros_like(key), tl.zeros_like(key) + segments - 1
        while low < high:  # the first segment at whose end the running sum exceeds the target
            middle = (low + high) // 2
            running = tl.sum(tl.where(s <= middle, larger, 0.0), axis=0)
            running += tl.sum(tl.where(v < (middle + 1) * length, weights, 0.0), axis=0)
            low = tl.where(running > target, low, middle + 1)
            high = tl.where(running > target, middle, high)
        running = tl.sum(tl.where(s < low, larger, 0.0), axis=0)
        running += tl.sum(tl.where(v < low * length, weights, 0.0), axis=0)
        pick(
            logits, row, low * length, tl.minimum(low * length + length, vocabulary),
            running, target, logit_of_key(key), final, peak, temperature, least,
            ids, values, vocabulary, WIDE,
        )  # fmt: skip
    return good


@triton.jit
def cut(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, pairs, places, masses, found, cuts,
    ids, values, vocabulary, segments, length,
    SEGMENTS: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The token of each row that cuts tokens off, and its logit; DRAWN in `cuts`. Where too many
    tokens could be the last one, the last pair that stays. length: of a segment. Grid: rows."""
    start_dependent()
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p = (
        tl.load(temperatures + row),
        tl.load(top_ks + row),
        tl.load(top_ps + row),
    )
    highest = best_of(pairs, row, segments, SEGMENTS)
    if draws(temperature, logit_of(highest)) & ((top_k > 0) | (top_p < 1)):
        least, noise = tl.load(min_ps + row), tl.load(uniforms + row)
        before = tl.load(places + row * (SEGMENTS + 4) + 2)
        count = tl.load(places + row * (SEGMENTS + 4) + 3)
        good = count <= MOST
        found += row * MOST
        masses += row * 2 * SEGMENTS
        if count <= FEW:
            good = cut_row(
                logits, row, found, masses, count, before, temperature, top_k, top_p, least, noise,
                highest, ids, values, vocabulary, segments, length, SEGMENTS, FEW, WIDE,
            )  # fmt: skip
        elif good:
            good = cut_row(
                logits, row, found, masses, count, before, temperature, top_k, top_p, least, noise,
                highest, ids, values, vocabulary, segments, length, SEGMENTS, MOST, WIDE,
            )  # fmt: skip
        pair = tl.full((), DRAWN, tl.int64)
        if not good:
            pair = cut_by_bisection(
                logits, row, vocabulary, highest, top_k, top_p, logit_of(highest), temperature,
                least, WIDE,
            )  # fmt: skip
        tl.store(cuts + row, pair)


@triton.jit
def draw(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, pairs, masses, cuts, arrived, ids, values,
    vocabulary, chunks, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, STAGES: tl.constexpr,
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
        last, last_id = tl.full((), float("-inf"), tl.float32), 0x7FFFFFFF
        pair = tl.full((), -0x8000000000000000, tl.int64)
        if (tl.load(top_ks + row) > 0) | (tl.load(top_ps + row) < 1):
            pair = tl.load(cuts + row)
            last, last_id = logit_of(pair), id_of(pair)
        if pair != DRAWN:
            mass = tl.zeros((BLOCK,), tl.float64)
            if tl.load(pairs + row * SEGMENTS + segment) >= pair:  # else nothing of it stays
                for chunk in tl.range(0, chunks, num_stages=STAGES):
                    v = (segment * chunks + chunk) * BLOCK + tl.arange(0, BLOCK)
                    mass += kept_weights(
                        logits,
                        row * vocabulary,
                        v,
                        vocabulary,
                        last,
                        last_id,
                        peak,
                        temperature,
                        least,
                    )
            tl.store(masses + row * 2 * SEGMENTS + segment, tl.sum(mass, axis=0))
            if arrives_last(arrived + row, segments):
                i = tl.arange(0, SEGMENTS)
                mine = tl.load(masses + row * 2 * SEGMENTS + i, mask=i < segments, other=0.0)
                running = tl.cumsum(mine, axis=0)
                target = tl.load(uniforms + row).to(tl.float64) * at_place(running, i, SEGMENTS - 1)
                some = tl.where(mine > 0, i, 0)
                here = tl.min(
                    tl.where((running > target) & (mine > 0), i, tl.max(some, axis=0)), axis=0
                )
                begin = here * chunks * BLOCK
                pick(
                    logits, row, begin, tl.minimum(begin + chunks * BLOCK, vocabulary),
                    at_place(running, i, here - 1), target, last, last_id, peak, temperature, least,
                    ids, values, vocabulary, BLOCK,
                )  # fmt: skip
    elif segment == 0:
        tl.store(ids + row, id_of(highest))
        tl.store(values + row, peak)
