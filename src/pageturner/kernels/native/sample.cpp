// Choosing tokens from logits, one row at a time, without sorting the vocabulary.
//
// The order of tokens is (logit descending, id ascending). The leading tokens that hold a wanted count
// (top-k) or a wanted mass (top-p) are found by radix selection on the bits of the logits: a histogram of the
// highest 12 bits, then of the next 12 and the last 8 within the one bucket where the boundary lies.
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kBlock = kMaxBlock;

uint32_t order_key(float x) {  // larger float, larger key; -0 counts as 0
  const uint32_t u = float_to_bits(x + 0.0f);
  return u & 0x80000000 ? ~u : u | 0x80000000;
}

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
  int n = c.n;
  if (!(target > 0)) target = 1e-300;  // the leading set is never empty
  double above = 0;
  uint32_t prefix = 0;
  for (int shift = 20, bits = 12; n > 0; shift = shift == 20 ? 8 : 0, bits = shift ? 12 : 8) {
    const uint32_t mask = (1u << bits) - 1;
    std::memset(s.mass, 0, sizeof(double) << bits);
    const bool all = shift == 20;
    for (int i = 0; i < n; i++) {
      const int at = all ? i : s.bucket[i];
      s.mass[order_key(c.logit[at]) >> shift & mask] += mass(at);
    }
    int b = int(mask);
    for (; b > 0 && above + s.mass[b] < target; b--) above += s.mass[b];
    prefix |= uint32_t(b) << shift;
    int kept = 0;
    for (int i = 0; i < n; i++) {
      const int at = all ? i : s.bucket[i];
      if ((order_key(c.logit[at]) >> shift & mask) == uint32_t(b)) s.bucket[kept++] = at;
    }
    n = kept;
    if (shift == 0) break;
  }
  int equal = 0;
  while (equal < n && above < target) above += mass(s.bucket[equal++]);
  return {prefix, equal};
}

void keep(Candidates& c, Cut cut) {
  int n = 0, equal = 0;
  for (int i = 0; i < c.n; i++) {
    const uint32_t key = order_key(c.logit[i]);
    if (key < cut.key || (key == cut.key && equal++ >= cut.equal)) continue;
    c.logit[n] = c.logit[i], c.weight[n] = c.weight[i], c.id[n++] = c.id[i];
  }
  c.n = n;
}

int first_of(const float* x, int v, float value) {
  for (int i = 0; i < v; i++)
    if (x[i] == value) return i;
  return 0;  // nothing but NaN
}

// The same with the help of the block maxima.
int first_at(const float* x, int v, float value, const float* maxima) {
  int b = 0;
  while (b * kBlock < v && maxima[b] != value) b++;
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

// weight = exp((logit - most) / temperature); the array has room for a whole vector at its end.
void weigh(const float* logit, int n, float most, float temperature, float* weight) {
  int i = 0;
  for (; i + W <= n; i += W) store(weight + i, vexp((load(logit + i) - most) / temperature));
  for (; i < n; i++) weight[i] = exp1((logit[i] - most) / temperature);
}

// Sum by blocks, each block in lanes, the blocks in double.
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
  // Whether all weights of the block round to zero.
  bool nothing(int block) const { return (maxima[block] - most) / temperature < -88.0f; }
  // A logit that every token of at least this weight reaches, whatever the rounding.
  float logit_of(double weight) const {
    if (!(weight > 1e-37)) return -INFINITY;
    return most + temperature * (log1(float(weight)) - 1e-3f) - std::fabs(most) * 1e-6f;
  }
};

// The sum of all weights, and that of each block, in the order of block_sum. `keep` gets the weights.
template <class Keep>
double sums_of(const Row& r, double* sums, Keep keep) {
  double total = 0;
  for (int b = 0; b < r.blocks(); b++) {
    sums[b] = 0;
    float* w = keep(b);
    if (r.nothing(b)) {
      std::memset(w, 0, sizeof(float) * r.size(b));
      continue;
    }
    weigh(r.logits + b * kBlock, r.size(b), r.most, r.temperature, w);
    total += sums[b] = block_sum(w, r.size(b));
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

// Tokens whose logit reaches `bound`, without their weights.
Candidates reaching(const Row& r, float bound, const SampleScratch& s) {
  Candidates c{0, s.logit, s.weight, s.id};
  for (int b = 0; b < r.blocks(); b++) {
    if (!(r.maxima[b] >= bound)) continue;
    const float* x = r.logits + b * kBlock;
    for (int i = 0; i < r.size(b); i++) {
      c.id[c.n] = b * kBlock + i, c.logit[c.n] = x[i];
      c.n += x[i] >= bound;
    }
  }
  return c;
}

// Sum of the weights of tokens whose logit reaches `bound`.
double mass_above(const Row& r, const float* weights, float bound) {
  double total = 0;
  for (int b = 0; b < r.blocks(); b++) {
    if (!(r.maxima[b] >= bound)) continue;
    const float *x = r.logits + b * kBlock, *w = weights + b * kBlock;
    VF sums = {};
    int i = 0;
    for (; i + W <= r.size(b); i += W) sums += load(x + i) >= bound ? load(w + i) : VF{};
    total += sum(sums);
    for (; i < r.size(b); i++) total += x[i] >= bound ? w[i] : 0.0f;
  }
  return total;
}

// The tokens that reach some logit, few of them, that hold at least this share of all weights; `total` is
// set.
Candidates holding(const Row& r, double share, const SampleScratch& s, double& total) {
  total = sums_of(r, s.mass, [&](int b) { return s.weight + b * kBlock; });
  // All tokens below this weight together do not hold the mass that is left out.
  float low = r.logit_of((1 - share) * total / r.v * 0.999), high = r.most;
  for (int i = 0; i < kHalvings && low > -INFINITY; i++) {
    const float middle = low + (high - low) / 2;
    (mass_above(r, s.weight, middle) > share * total * (1 + 1e-5) ? low : high) = middle;
  }
  Candidates c = reaching(r, low, s);
  // Upwards, for the weights lie where they were: id[i] >= i.
  for (int i = 0; i < c.n; i++) c.weight[i] = s.weight[c.id[i]];
  return c;
}

}  // namespace

float maxima_of(const float* x, int v, float* maxima) {
  float most = -INFINITY;
  for (int b = 0; b * kBlock < v; b++) {
    const int end = b * kBlock + kBlock < v ? b * kBlock + kBlock : v;
    int i = b * kBlock;
    VF m = set1(-INFINITY);
    for (; i + W <= end; i += W) m = vmax(load(x + i), m);
    float top = hmax(m);
    for (; i < end; i++) top = x[i] > top ? x[i] : top;
    maxima[b] = top;
    most = top > most ? top : most;
  }
  return most;
}

void best_of(const float* x, int n, int first_id, Best& best) {
  VF m = set1(best.value);
  int i = 0;
  for (; i + W <= n; i += W) m = vmax(load(x + i), m);
  float top = hmax(m);
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  if (top > best.value) best = {top, first_id + first_of(x, n, top)};
}

int sample(const float* logits, int v, const SampleParams& p, const float* maxima, const SampleScratch& s) {
  if (!maxima) maxima_of(logits, v, s.maxima), maxima = s.maxima;
  Row r{logits, maxima, v, -INFINITY, p.temperature};
  for (int b = 0; b < r.blocks(); b++) r.most = maxima[b] > r.most ? maxima[b] : r.most;
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
    c = reaching(r, most_k > near ? most_k : near, s);
    weigh(c.logit, c.n, r.most, p.temperature, c.weight);
    if (min_p) {
      int n = 0;
      for (int i = 0; i < c.n; i++)
        if (c.weight[i] >= least) c.logit[n] = c.logit[i], c.weight[n] = c.weight[i], c.id[n++] = c.id[i];
      c.n = n;
    }
    if (top_k && p.top_k < c.n) keep(c, leading(c, p.top_k, [](int) { return 1.0; }, s));
    total = total_of(c.weight, c.n);
  } else {
    c = holding(r, p.top_p, s, total);
  }
  if (c.n == 0) return first_of(logits, v, r.most);  // NaN among the logits
  if (top_p) keep(c, leading(c, p.top_p * total, [&](int i) { return double(c.weight[i]); }, s));
  return c.id[pick(c.weight, c.n, p.uniform)];
}

void top_logprobs(const float* logits, int v, int k, float* lse, int32_t* ids, float* logprobs,
                  const SampleScratch& s) {
  const Row r{logits, s.maxima, v, maxima_of(logits, v, s.maxima), 1.0f};
  alignas(64) float w[kBlock];
  const double log_total = log1(sums_of(r, s.mass, [&](int) { return w; })) + r.most;
  *lse = float(log_total);
  if (k == 0) return;
  Candidates c = reaching(r, reached_by(k, s.maxima, r.blocks(), s.weight), s);
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
