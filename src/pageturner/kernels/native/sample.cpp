// Choosing tokens from logits, one row at a time, without sorting the vocabulary.
//
// The order of tokens is (logit descending, id ascending). The leading tokens that hold a wanted count
// (top-k) or a wanted mass (top-p) are found by radix selection on the bits of the logits, a digit at a time
// within the one bucket where the boundary lies, among the few tokens that the largest logit of each block
// of ids leaves in question.
//
// NaN counts as larger than every number, as in numpy's argmax: a row with a NaN gives its first NaN away as
// its largest logit and as its token, so that whoever looks at that logit sees it. Everything behind `sample`
// and `top_logprobs` works on rows whose largest logit is a finite number.
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kBlock = kMaxBlock;

uint32_t order_key(float x) {  // larger float, larger key; -0 counts as 0
  const uint32_t u = float_to_bits(x + 0.0f);
  return u & 0x80000000 ? ~u : u | 0x80000000;
}

constexpr int kDigit = 8;     // bits of a key that are told apart at a time
constexpr int kFew = 24;      // so many tokens are sorted
constexpr int kHalvings = 4;  // of the range of logits in which the edge of top-p lies

// Tokens under consideration, by ascending id.
struct Candidates {
  int n;
  float* logit;
  float* weight;
  int32_t* id;
};

// The leading tokens: those with a larger key, and the first `equal` ones with this key.
struct Cut {
  uint32_t key;
  int equal;
};

template <class Mass>
Cut leading(const Candidates& c, double target, Mass mass, const SampleScratch& s) {
  const auto key = [&](int i) { return order_key(c.logit[i]); };
  if (!(target > 0)) target = 1e-300;  // the leading set is never empty
  uint32_t low = UINT32_MAX, high = 0;
  for (int i = 0; i < c.n; i++) {
    s.bucket[i] = i;
    low = key(i) < low ? key(i) : low, high = key(i) > high ? key(i) : high;
  }
  int n = c.n;  // those in s.bucket are in question, with keys from low to high
  double above = 0;
  while (n > kFew && low < high) {
    const int bits = 32 - __builtin_clz(high - low), shift = bits > kDigit ? bits - kDigit : 0;
    const uint32_t last = (high - low) >> shift;
    std::memset(s.mass, 0, sizeof(double) << kDigit);
    for (int i = 0; i < n; i++) s.mass[(high - key(s.bucket[i])) >> shift] += mass(s.bucket[i]);
    uint32_t b = 0;
    for (; b < last && above + s.mass[b] < target; b++) above += s.mass[b];
    int kept = 0;
    for (int i = 0; i < n; i++) {
      const int at = s.bucket[i];
      s.bucket[kept] = at;
      kept += ((high - key(at)) >> shift) == b;
    }
    n = kept, high -= b << shift;
    if ((high - low) >> shift) low = high - ((1u << shift) - 1);
  }
  for (int i = 1; low < high && i < n; i++) {  // by insertion; equal ones keep their order
    const int at = s.bucket[i];
    int j = i;
    for (; j > 0 && key(s.bucket[j - 1]) < key(at); j--) s.bucket[j] = s.bucket[j - 1];
    s.bucket[j] = at;
  }
  Cut cut{high, 0};
  for (int i = 0; i < n && above < target; i++) {
    const int at = s.bucket[i];
    above += mass(at);
    cut = {key(at), key(at) == cut.key ? cut.equal + 1 : 1};
  }
  return cut;
}

// Those of which `in` is true, in place; it is asked once about each, in order.
template <class In>
void filter(Candidates& c, In in) {
  int n = 0;
  for (int i = 0; i < c.n; i++) {
    const bool stays = in(i);
    c.logit[n] = c.logit[i], c.weight[n] = c.weight[i], c.id[n] = c.id[i];
    n += stays;
  }
  c.n = n;
}

void keep(Candidates& c, Cut cut) {
  int equal = 0;
  filter(c, [&](int i) {
    const uint32_t key = order_key(c.logit[i]);
    const bool same = key == cut.key;
    equal += same;
    return (key > cut.key) | (same & (equal <= cut.equal));
  });
}

// The larger one; NaN if either is.
inline float larger(float a, float b) { return a > b || a != a ? a : b; }

inline bool any(VI v) {
#if defined(__AVX2__)
  return _mm256_movemask_ps((__m256)v);
#else
  int some = 0;
  for (int i = 0; i < W; i++) some |= v[i];
  return some;
#endif
}

bool equals(float a, float b) { return a == b || (a != a && b != b); }

// The largest of n logits and `most`; NaN if any of them is.
inline float largest(const float* x, int n, float most) {
  VF m = set1(most);
  VI nan = {};
  int i = 0;
  for (; i + W <= n; i += W) {
    const VF v = load(x + i);
    m = vmax(v, m), nan |= v != v;
  }
  float top = any(nan) ? NAN : hmax(m);
  for (; i < n; i++) top = larger(x[i], top);
  return top;
}

int first_of(const float* x, int v, float value) {
  for (int i = 0; i < v; i++)
    if (equals(x[i], value)) return i;
  return 0;
}

// The same with the help of the block maxima.
int first_at(const float* x, int v, float value, const float* maxima) {
  int b = 0;
  while (b * kBlock < v && !equals(maxima[b], value)) b++;
  return b * kBlock < v ? b * kBlock + first_of(x + b * kBlock, v - b * kBlock, value) : 0;
}

// A value that at least k logits reach: the k-th largest block maximum (by quickselect), if there are k
// blocks.
float reached_by(int k, const float* all, int blocks, float* maxima) {
  if (k > blocks) return -INFINITY;
  std::memcpy(maxima, all, sizeof(float) * blocks);
  int lo = 0, hi = blocks - 1, want = k - 1;
  while (lo < hi) {
    const float pivot = maxima[lo + (hi - lo) / 2];
    int i = lo, j = hi;
    while (i <= j) {
      while (maxima[i] > pivot) i++;
      while (maxima[j] < pivot) j--;
      if (i <= j) {
        const float t = maxima[i];
        maxima[i++] = maxima[j], maxima[j--] = t;
      }
    }
    if (want <= j)
      hi = j;
    else if (want >= i)
      lo = i;
    else
      break;
  }
  return maxima[want];
}

// weight = exp((logit - most) / temperature), and the sum of all, in lanes, then those of the last vector.
double weigh(const float* logit, int n, float most, float temperature, float* weight) {
  VF sums = {};
  int i = 0;
  for (; i + W <= n; i += W) {
    const VF w = vexp((load(logit + i) - most) / temperature);
    store(weight + i, w);
    sums += w;
  }
  double total = sum(sums);
  for (; i < n; i++) total += weight[i] = exp1((logit[i] - most) / temperature);
  return total;
}

// Sum by blocks, each block in the order of `weigh`, the blocks in double.
double block_sum(const float* w, int n) {
  VF s = {};
  int i = 0;
  for (; i + W <= n; i += W) s += load(w + i);
  double total = sum(s);
  for (; i < n; i++) total += w[i];
  return total;
}

// The logits of a row that is being sampled, with its largest one and that of each block.
struct Row {
  const float *logits, *maxima;
  int v;
  float most, temperature;
  int blocks() const { return (v + kBlock - 1) / kBlock; }
  int size(int block) const { return v - block * kBlock < kBlock ? v - block * kBlock : kBlock; }
  // Weights of tokens below this logit are zero.
  float floor() const { return most - 89.0f * temperature; }
  // A logit that every token of at least this weight reaches, whatever the rounding.
  float logit_of(double weight) const {
    if (!(weight > 1e-37)) return -INFINITY;
    return most + temperature * (log1(float(weight)) - 1e-3f) - std::fabs(most) * 1e-6f;
  }
};

// The sum of all weights, and that of each block, in the order of `weigh`. `keep` has room for a block's.
template <class Keep>
double sums_of(const Row& r, double* sums, Keep keep) {
  const VF most = set1(r.most), temperature = set1(r.temperature);
  const float floor = r.floor();
  double total = 0;
  for (int b = 0; b < r.blocks(); b++) {
    float* w = keep(b);
    if (r.size(b) < kBlock) {
      total += sums[b] = weigh(r.logits + b * kBlock, r.size(b), r.most, r.temperature, w);
      continue;
    }
    VF s = {};
    if (r.maxima[b] < floor) {
      std::memset(w, 0, sizeof(float) * kBlock);
    } else {
      PT_UNROLL
      for (int i = 0; i < kBlock; i += W) {
        const VF e = vexp((load(r.logits + b * kBlock + i) - most) / temperature);
        store(w + i, e);
        s += e;
      }
    }
    total += sums[b] = sum(s);
  }
  return total;
}

double total_of(const float* w, int n) {
  double total = 0;
  for (int b = 0; b < n; b += kBlock) total += block_sum(w + b, n - b < kBlock ? n - b : kBlock);
  return total;
}

// Adds n weights to `run` until it exceeds `target`, and tells whether it does; `last` is then the index of
// the last one added, else the last one above zero, if there is any.
bool run_over(const float* w, int n, double target, double& run, int& last) {
  for (int i = 0; i < n; i++) {
    if (w[i] > 0) last = i;
    run += w[i];
    if (run > target && w[i] > 0) return true;
  }
  return false;
}

// First index at which the running sum exceeds uniform * total.
int pick(const float* w, int n, float uniform) {
  const double target = double(uniform) * total_of(w, n);
  double run = 0;
  int b = 0, last = 0;
  for (; b + kBlock < n; b += kBlock) {
    const double next = run + block_sum(w + b, kBlock);
    if (next > target) break;
    run = next;
  }
  run_over(w + b, n - b, target, run, last);
  return b + last;
}

// The same over all tokens of a row.
int pick_any(const Row& r, float uniform, const SampleScratch& s) {
  alignas(64) float w[kBlock];
  const double target = double(uniform) * sums_of(r, s.mass, [&](int) { return w; });
  double run = 0;
  int b = 0, found = 0;
  for (; b + 1 < r.blocks() && run + s.mass[b] <= target; b++) run += s.mass[b];
  for (bool over = false; b < r.blocks() && !over; b++) {
    int last = -1;
    weigh(r.logits + b * kBlock, r.size(b), r.most, r.temperature, w);
    over = run_over(w, r.size(b), target, run, last);
    if (last >= 0) found = b * kBlock + last;
  }
  return found;
}

// Appends those of W tokens from `first` on whose logit reaches `bound`; there is room for all.
inline void append(Candidates& c, int first, const float* logits, const float* weights, float bound) {
#if defined(__AVX512VL__)
  const __m256 x = (__m256)load(logits);
  const __mmask8 reach = _mm256_cmp_ps_mask(x, _mm256_set1_ps(bound), _CMP_GE_OQ);
  const __m256i ids = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  _mm256_storeu_ps(c.logit + c.n, _mm256_maskz_compress_ps(reach, x));
  _mm256_storeu_ps(c.weight + c.n, _mm256_maskz_compress_ps(reach, (__m256)load(weights)));
  _mm256_storeu_si256((__m256i*)(c.id + c.n), _mm256_maskz_compress_epi32(reach, ids));
  c.n += __builtin_popcount(reach);
#else
  const VI reach = load(logits) >= bound;
#if defined(__AVX2__)
  if (!_mm256_movemask_ps((__m256)reach)) return;
#endif
  for (int i = 0; i < W; i++) {
    c.id[c.n] = first + i, c.logit[c.n] = logits[i], c.weight[c.n] = weights[i];
    c.n -= reach[i];
  }
#endif
}

// Tokens whose logit reaches `bound`, with what lies in `weights`, which may be where those of the candidates
// go: they move up.
Candidates reaching(const Row& r, const float* weights, float bound, const SampleScratch& s) {
  Candidates c{0, s.logit, s.weight, s.id};
  for (int b = 0; b < r.blocks(); b++) {
    if (!(r.maxima[b] >= bound)) continue;
    int i = b * kBlock;
    const int end = i + r.size(b);
    for (; i + W <= end; i += W) append(c, i, r.logits + i, weights + i, bound);
    for (; i < end; i++)
      if (r.logits[i] >= bound) c.id[c.n] = i, c.logit[c.n] = r.logits[i], c.weight[c.n++] = weights[i];
  }
  return c;
}

// The sum of the weights of tokens whose logit reaches `bound`, to about 1/2000.
double mass_above(const Row& r, const float* weights, float bound) {
  constexpr int kSums = 4;
  VF sums[kSums] = {};
  float rest = 0;
  for (int b = 0; b < r.blocks(); b++) {
    if (!(r.maxima[b] >= bound)) continue;
    int i = b * kBlock;
    const int end = i + r.size(b);
    for (; i + kSums * W <= end; i += kSums * W)
      for (int j = 0; j < kSums; j++)
        sums[j] += load(r.logits + i + j * W) >= bound ? load(weights + i + j * W) : VF{};
    for (; i < end; i++) rest += r.logits[i] >= bound ? weights[i] : 0.0f;
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

// A logit above which at least `mass` lies, but not far more. What is left out at most is less than as many
// tokens of one weight as there are; and above a logit lies at most what is in blocks that reach it.
float edge_of(const Row& r, const float* weights, const double* sums, double total, double mass) {
  const double left_out = total - mass;
  float low = r.logit_of(left_out / r.v * 0.999), high = r.most;
  for (int i = 0; i < kHalvings && low > -INFINITY; i++) {
    const float middle = low + (high - low) / 2;
    double within = 0;
    for (int b = 0; b < r.blocks(); b++) within += r.maxima[b] >= middle ? sums[b] : 0.0;
    const bool enough = within * 0.999 > mass && mass_above(r, weights, middle) > mass * 1.001;
    (enough ? low : high) = middle;
  }
  return low;
}

}  // namespace

void forbid(float* x, int n, const uint64_t* allowed) {
  static_assert(kBlock == 64);
  VI bits;
  for (int i = 0; i < W; i++) bits[i] = 1 << i;
  for (int first = 0; first < n; first += kBlock) {
    uint64_t word = allowed[first / kBlock];
    if (word == UINT64_MAX) continue;
    const int end = n - first < kBlock ? n : first + kBlock;
    int i = first;
    for (; i + W <= end; i += W, word >>= W)
      store(x + i, (bits & int32_t(uint32_t(word))) != 0 ? load(x + i) : set1(-INFINITY));
    for (; i < end; i++, word >>= 1)
      if (!(word & 1)) x[i] = -INFINITY;
  }
}

float maxima_of(const float* x, int v, float* maxima) {
  float most = -INFINITY;
  for (int b = 0; b * kBlock < v; b++) {
    const int first = b * kBlock;
    maxima[b] = largest(x + first, v - first < kBlock ? v - first : kBlock, -INFINITY);
    most = larger(maxima[b], most);
  }
  return most;
}

void best_of(const float* x, int n, int first_id, Best& best) {
  if (best.value != best.value) return;
  const float top = largest(x, n, best.value);
  if (!(top <= best.value)) best = {top, first_id + first_of(x, n, top)};
}

int sample(const float* logits, int v, const SampleParams& p, const float* maxima, const SampleScratch& s) {
  if (!maxima) maxima_of(logits, v, s.maxima), maxima = s.maxima;
  Row r{logits, maxima, v, -INFINITY, p.temperature};
  for (int b = 0; b < r.blocks(); b++) r.most = larger(maxima[b], r.most);
  if (p.temperature <= 0 || !(r.most > -INFINITY && r.most < INFINITY))
    return first_at(logits, v, r.most, maxima);
  const bool top_k = p.top_k > 0 && p.top_k < v, top_p = p.top_p < 1, min_p = p.min_p > 0;
  if (!top_k && !top_p && !min_p) return pick_any(r, p.uniform, s);
  Candidates c;
  double total = 0;
  if (top_k || min_p) {
    const float least = std::fmin(p.min_p, 1.0f);
    const float most_k = top_k ? reached_by(p.top_k, maxima, r.blocks(), s.weight) : -INFINITY;
    const float near = min_p ? r.logit_of(least) : -INFINITY;
    c = reaching(r, logits, most_k > near ? most_k : near, s);
    weigh(c.logit, c.n, r.most, p.temperature, c.weight);
    if (min_p) filter(c, [&](int i) { return c.weight[i] >= least; });
    if (top_k && p.top_k < c.n) keep(c, leading(c, p.top_k, [](int) { return 1.0; }, s));
    total = total_of(c.weight, c.n);
  } else {
    total = sums_of(r, s.mass, [&](int b) { return s.weight + b * kBlock; });
    c = reaching(r, s.weight, edge_of(r, s.weight, s.mass, total, p.top_p * total), s);
  }
  if (c.n == 0) return first_at(logits, v, r.most, maxima);
  if (top_p) keep(c, leading(c, p.top_p * total, [&](int i) { return double(c.weight[i]); }, s));
  return c.id[pick(c.weight, c.n, p.uniform)];
}

void top_logprobs(const float* logits, int v, int k, float* lse, int32_t* ids, float* logprobs,
                  const SampleScratch& s) {
  const Row r{logits, s.maxima, v, maxima_of(logits, v, s.maxima), 1.0f};
  if (!(r.most > -INFINITY && r.most < INFINITY)) {  // there is no order to tell, and no sum
    *lse = NAN;
    for (int i = 0; i < k; i++) ids[i] = 0, logprobs[i] = NAN;
    return;
  }
  alignas(64) float w[kBlock];
  const double log_total = log1(sums_of(r, s.mass, [&](int) { return w; })) + r.most;
  *lse = float(log_total);
  if (k == 0) return;
  Candidates c = reaching(r, logits, reached_by(k, s.maxima, r.blocks(), s.weight), s);
  if (k < c.n) keep(c, leading(c, k, [](int) { return 1.0; }, s));
  // Heap sort of the k that are left; a comes before b if its logit is larger, or equal and its id smaller.
  const auto before = [&](int a, int b) {
    return c.logit[a] > c.logit[b] || (c.logit[a] == c.logit[b] && c.id[a] < c.id[b]);
  };
  int32_t* heap = s.bucket;  // its root is the last of all
  const auto sink = [&](int at, int n) {
    for (int child; (child = 2 * at + 1) < n; at = child) {
      if (child + 1 < n && before(heap[child], heap[child + 1])) child++;
      if (!before(heap[at], heap[child])) break;
      const int32_t t = heap[at];
      heap[at] = heap[child], heap[child] = t;
    }
  };
  for (int i = 0; i < c.n; i++) heap[i] = i;
  for (int i = c.n / 2; i-- > 0;) sink(i, c.n);
  for (int n = c.n; n-- > 1;) {
    const int32_t t = heap[0];
    heap[0] = heap[n], heap[n] = t;
    sink(0, n);
  }
  for (int i = 0; i < k; i++) {
    const int at = i < c.n ? heap[i] : heap[0];
    ids[i] = c.id[at];
    logprobs[i] = float(double(c.logit[at]) - log_total);
  }
}

}  // namespace PT_ISA
}  // namespace pt
