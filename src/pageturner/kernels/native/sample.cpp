// Choosing tokens from logits, one row at a time, without sorting the vocabulary.
//
// The order of tokens is (logit descending, id ascending). The leading tokens that hold a wanted count
// (top-k) or a wanted mass (top-p) are found by radix selection on the bits of the logits: a histogram of the
// highest 12 bits, then of the next 12 and the last 8 within the one bucket where the boundary lies.
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kBlock = 64;  // ids whose maximum is kept together
constexpr int kBuckets = 4096;

uint32_t order_key(float x) {  // larger float, larger key; -0 counts as 0
  const uint32_t u = float_to_bits(x + 0.0f);
  return u & 0x80000000 ? ~u : u | 0x80000000;
}

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

// Maximum of each block of ids, and of all.
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
float reached_by(int k, float* maxima, int blocks) {
  if (k > blocks) return -INFINITY;
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

// Tokens whose value in x is at least `bound`, with their logits.
Candidates at_least(const float* x, float bound, const float* logits, int v, const SampleScratch& s) {
  Candidates c{0, s.logit, s.weight, s.id};
  for (int i = 0; i < v; i++) {
    c.id[c.n] = i;
    c.n += x[i] >= bound;
  }
  // Upwards, for x may be c.weight itself: id[i] >= i.
  for (int i = 0; i < c.n; i++) c.weight[i] = x[c.id[i]], c.logit[i] = logits[c.id[i]];
  return c;
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
double total_of(const float* w, int n) {
  double total = 0;
  for (int b = 0; b < n; b += kBlock) total += block_sum(w + b, n - b < kBlock ? n - b : kBlock);
  return total;
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
  for (int i = b; i < n; i++) {
    if (w[i] > 0) last = i;
    run += w[i];
    if (run > target && w[i] > 0) return i;
  }
  return last;
}

}  // namespace

int sample(const float* logits, int v, const SampleParams& p, const SampleScratch& s) {
  const float most = maxima_of(logits, v, s.maxima);
  if (p.temperature <= 0 || !(most > -INFINITY && most < INFINITY))
    return first_at(logits, v, most, s.maxima);
  const bool top_k = p.top_k > 0 && p.top_k < v, top_p = p.top_p < 1, min_p = p.min_p > 0;
  if (!top_k && !top_p && !min_p) {
    weigh(logits, v, most, p.temperature, s.weight);
    return pick(s.weight, v, p.uniform);
  }
  Candidates c;
  double total = 0;
  if (top_k) {
    c = at_least(logits, reached_by(p.top_k, s.maxima, (v + kBlock - 1) / kBlock), logits, v, s);
    weigh(c.logit, c.n, most, p.temperature, c.weight);
  } else {
    weigh(logits, v, most, p.temperature, s.weight);
    total = total_of(s.weight, v);
    // All tokens below this weight together do not hold the mass that top-p leaves out.
    const double rest = (1 - double(p.top_p)) * total / v * 0.999;
    c = at_least(s.weight, min_p ? 0.0f : float(rest), logits, v, s);
  }
  if (min_p) {
    int n = 0;
    for (int i = 0; i < c.n; i++)
      if (c.weight[i] >= std::fmin(p.min_p, 1.0f))
        c.logit[n] = c.logit[i], c.weight[n] = c.weight[i], c.id[n++] = c.id[i];
    c.n = n;
    total = total_of(c.weight, c.n);
  }
  if (c.n == 0) return first_of(logits, v, most);  // NaN among the logits
  if (top_k && p.top_k < c.n) keep(c, leading(c, p.top_k, [](int) { return 1.0; }, s));
  if (top_k) total = total_of(c.weight, c.n);
  if (top_p) keep(c, leading(c, p.top_p * total, [&](int i) { return double(c.weight[i]); }, s));
  return c.id[pick(c.weight, c.n, p.uniform)];
}

void top_logprobs(const float* logits, int v, int k, float* lse, int32_t* ids, float* logprobs,
                  const SampleScratch& s) {
  const float most = maxima_of(logits, v, s.maxima);
  weigh(logits, v, most, 1.0f, s.weight);
  const double log_total = log1(total_of(s.weight, v)) + most;
  *lse = float(log_total);
  if (k == 0) return;
  Candidates c = at_least(logits, reached_by(k, s.maxima, (v + kBlock - 1) / kBlock), logits, v, s);
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
