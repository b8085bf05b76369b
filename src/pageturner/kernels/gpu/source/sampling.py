"""From logits to tokens: edits, masks, and the draw. One program reads a row in chunks from the first to the
last, so that nobody else's row can matter. The meaning is that of Ops.sample; the noise comes from the host.
"""

import triton
import triton.language as tl


@triton.jit
def keys_of(x):
    """Integers in the order of the floats: equal for both zeros, NaN the largest of all."""
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, ordered)


@triton.jit
def edit(logits, entries, amounts, count, vocabulary, BLOCK: tl.constexpr):
    """entries [count, 4]: row, token, operation of kernels.edits, how often. No two have one token of a row.
    Each product is rounded before a sum. Grid: tiles of count."""
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
    """Minus infinity where row i of bits [n, words] (32 tokens a word, lowest first) has none, in row rows[i]
    of the logits. Grid: n, tiles of the vocabulary."""
    i = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i).to(tl.int64)
    word = tl.load(bits + i * words + token // 32, mask=token < vocabulary, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    at = logits + row * vocabulary + token
    tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=forbidden & (token < vocabulary))


@triton.jit
def best_of(logits, base, vocabulary, BLOCK: tl.constexpr):
    """The largest (key, lowest id) of a row as one integer."""
    best = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for v0 in range(0, vocabulary, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        x = tl.load(logits + base + v, mask=v < vocabulary, other=0.0)
        pair = (keys_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - v).to(tl.int64)
        best = tl.maximum(best, tl.where(v < vocabulary, pair, -0x8000000000000000))
    return tl.max(best, axis=0)


@triton.jit
def weight_of(x, peak, temperature, least):
    """exp((x - peak) / temperature), 0 where that is under min_p."""
    weight = tl.exp(tl.div_rn(x - peak, temperature))
    return tl.where(weight < least, 0.0, weight)


@triton.jit
def above(logits, base, vocabulary, key, peak, temperature, least, BLOCK: tl.constexpr):
    """Of the tokens whose keys are larger than `key`, and of those equal to it: how many, and their mass."""
    more = tl.zeros((BLOCK,), tl.int32)
    ties = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float64)
    for v0 in range(0, vocabulary, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        x = tl.load(logits + base + v, mask=v < vocabulary, other=float("-inf"))
        mine = keys_of(x)
        larger = (mine > key) & (v < vocabulary)
        more += larger.to(tl.int32)
        ties += ((mine == key) & (v < vocabulary)).to(tl.int32)
        mass += tl.where(larger, weight_of(x, peak, temperature, least).to(tl.float64), 0.0)
    return tl.sum(more, axis=0), tl.sum(ties, axis=0), tl.sum(mass, axis=0)


@triton.jit
def float_of(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_key(logits, base, vocabulary, top_k, peak, temperature, least, BLOCK: tl.constexpr):
    """The smallest key of which fewer than top_k are larger, by bisection over all integers."""
    low = tl.full((), -0x80000000, tl.int64)
    high = tl.full((), 0x7FFFFFFF, tl.int64)
    for _ in range(0, 32):
        middle = (low + high) >> 1
        more, _t, _m = above(logits, base, vocabulary, middle.to(tl.int32), peak, temperature, least, BLOCK)
        enough = more < top_k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return high.to(tl.int32)


@triton.jit
def nucleus_key(
    logits, base, vocabulary, target, cut, peak, temperature, least, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest key >= cut with less than `target` mass among the larger ones."""
    low = cut.to(tl.int64)
    high = tl.full((), 0x7FFFFFFF, tl.int64)
    for _ in range(0, 32):
        middle = (low + high) >> 1
        _n, _t, mass = above(logits, base, vocabulary, middle.to(tl.int32), peak, temperature, least, BLOCK)
        enough = mass < target
        high = tl.where(enough, middle, high)
        low = tl.where(enough | (low >= high), low, middle + 1)
    return high.to(tl.int32)


@triton.jit
def kept_weights(
    logits, base, v0, vocabulary, cut, ties, seen, peak, temperature, least, BLOCK: tl.constexpr
):  # fmt: skip
    """Weights of a chunk, 0 for what is below the cut and for ties behind the first `ties`; ties so far."""
    v = v0 + tl.arange(0, BLOCK)
    x = tl.load(logits + base + v, mask=v < vocabulary, other=float("-inf"))
    mine = keys_of(x)
    equal = ((mine == cut) & (v < vocabulary)).to(tl.int32)
    place = seen + tl.cumsum(equal, axis=0)
    kept = (mine > cut) | ((equal == 1) & (place <= ties))
    weight = weight_of(x, peak, temperature, least).to(tl.float64)
    return tl.where(kept & (v < vocabulary), weight, 0.0), seen + tl.sum(equal, axis=0)


@triton.jit
def draw(
    logits, base, vocabulary, cut, ties, peak, temperature, least, uniform, BLOCK: tl.constexpr
):  # fmt: skip
    """The first token, by id, at which the running sum of what is kept exceeds uniform * total."""
    total = tl.zeros((), tl.float64)
    seen = tl.zeros((), tl.int32)
    for v0 in range(0, vocabulary, BLOCK):
        weights, seen = kept_weights(
            logits, base, v0, vocabulary, cut, ties, seen, peak, temperature, least, BLOCK
        )
        total += tl.sum(weights, axis=0)
    target = uniform.to(tl.float64) * total
    running = tl.zeros((), tl.float64)
    seen = tl.zeros((), tl.int32)
    chosen = tl.full((), 0x7FFFFFFF, tl.int32)
    behind = tl.zeros((), tl.int32)
    for v0 in range(0, vocabulary, BLOCK):
        weights, seen = kept_weights(
            logits, base, v0, vocabulary, cut, ties, seen, peak, temperature, least, BLOCK
        )
        v = v0 + tl.arange(0, BLOCK)
        over = (running + tl.cumsum(weights, axis=0) > target) & (weights > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(over, v, 0x7FFFFFFF), axis=0))
        behind = tl.maximum(behind, tl.max(tl.where(weights > 0, v, 0), axis=0))
        running += tl.sum(weights, axis=0)
    return tl.where(chosen == 0x7FFFFFFF, behind, chosen)


@triton.jit
def sample(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, ids, values, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """A token for each row and its logit. A row of minus infinities alone is drawn from as if it were zeros.
    Grid: rows."""
    row = tl.program_id(0)
    base = row.to(tl.int64) * vocabulary
    best = best_of(logits, base, vocabulary, BLOCK)
    chosen = (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
    peak = tl.load(logits + base + chosen)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (peak == peak) & (peak < float("inf")):
        uniform = tl.load(uniforms + row)
        if peak == float("-inf"):
            chosen = tl.minimum((uniform.to(tl.float64) * vocabulary).to(tl.int32), vocabulary - 1)
        else:
            least = tl.load(min_ps + row)
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            cut = tl.full((), -0x80000000, tl.int32)
            ties = tl.full((), 0x7FFFFFFF, tl.int32)
            if top_k > 0:
                cut = kth_key(logits, base, vocabulary, top_k, peak, temperature, least, BLOCK)
                more, _t, _m = above(logits, base, vocabulary, cut, peak, temperature, least, BLOCK)
                ties = top_k - more
            if top_p < 1:
                more, count, mass = above(logits, base, vocabulary, cut, peak, temperature, least, BLOCK)
                own = weight_of(float_of(cut), peak, temperature, least).to(tl.float64)
                own = tl.where(cut == -0x80000000, 0.0, own)
                whole = mass + tl.minimum(ties, count).to(tl.float64) * own
                target = top_p.to(tl.float64) * whole
                cut2 = nucleus_key(logits, base, vocabulary, target, cut, peak, temperature, least, BLOCK)
                more, count, mass = above(logits, base, vocabulary, cut2, peak, temperature, least, BLOCK)
                own = weight_of(float_of(cut2), peak, temperature, least).to(tl.float64)
                most = tl.where(cut2 == cut, tl.minimum(ties, count), count)
                needed = tl.ceil(((target - mass) / tl.where(own > 0, own, 1.0)).to(tl.float32)).to(tl.int32)
                ties = tl.minimum(tl.maximum(needed, 1), most)
                cut = cut2
            chosen = draw(logits, base, vocabulary, cut, ties, peak, temperature, least, uniform, BLOCK)
    tl.store(ids + row, chosen)
    tl.store(values + row, tl.load(logits + base + chosen))
