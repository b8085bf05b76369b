// A whole step in two calls: the layers, then the head with the choice of tokens.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace pt {

// -- layers
// ---------------------------------------------------------------------------------------------------

void Engine::embed_rows(const StackView& s, const int32_t* tokens, const int32_t* positions, Rows x) {
  float* more = step_arena_.take<float>(size_t(pool_.size()) * x.cols);
  pool_.split(x.count, grain_of(x.count, pool_.size()), [&](int t0, int t1, int thread) {
    float* at = more + size_t(thread) * x.cols;
    for (int t = t0; t < t1; t++) {
      float* row = x.data + size_t(t) * x.cols;
      kernels_.unpack_row(*s.embed, tokens[t], row);
      if (s.scale != 1)
        for (int i = 0; i < x.cols; i++) row[i] *= s.scale;
      if (s.positions) {
        kernels_.unpack_row(*s.positions, positions[t], at);
        kernels_.add(row, at, x.cols, row);
      }
      if (s.norm) normed(row, s.norm, s.norm_bias, s.eps, x.cols, row);
    }
  });
}

// Runs of wanted rows of one sequence become a sequence each.
Wanted Engine::take_wanted(const BatchView& b, const int32_t* rows, Rows out) {
  const int count = out.count;
  auto* positions = step_arena_.take<int32_t>(count);
  auto* starts = step_arena_.take<int32_t>(count + 1);
  auto* table = step_arena_.take<int32_t>(size_t(count) * b.table_width);
  int runs = 0, owner = -1;
  for (int i = 0; i < count; i++) {
    const int s =
        int(std::upper_bound(b.query_start, b.query_start + b.sequences + 1, rows[i]) - b.query_start) - 1;
    positions[i] = b.positions[rows[i]];
    if (s == owner) continue;
    owner = s, starts[runs] = i;
    std::copy_n(b.table + size_t(s) * b.table_width, b.table_width, table + size_t(runs++) * b.table_width);
  }
  starts[runs] = count;
  return {rows, {positions, starts, table, nullptr, count, runs, b.table_width}, out.data};
}

void Engine::hidden(const StackView& s, const int32_t* tokens, const Pages& whole, const Pages* recent,
                    const int32_t* wanted, Rows out) {
  std::lock_guard lock(one_call_);
  step_arena_.reset();
  const int count = whole.batch.tokens, last = int(s.layers.size()) - 1;
  bool all = count == out.count;
  for (int i = 0; i < out.count && all; i++) all = wanted[i] == i;
  const Rows x{all ? out.data : step_arena_.take<float>(size_t(count) * out.cols), count, out.cols};
  embed_rows(s, tokens, whole.batch.positions, x);
  int indexes[2] = {0, 0};  // layers so far that see everything, and that have a window
  for (int i = 0; i <= last; i++) {
    const LayerView& l = *s.layers[i];
    const bool mine = recent && l.shape.window > 0;
    const Pages& pages = mine ? *recent : whole;
    if (i < last || all) {
      attend(x, l, pages.kv, indexes[mine]++, pages.batch, nullptr);
      feed_forward(x, l);
      continue;
    }
    for (int r = 0; r < out.count; r++)
      std::copy_n(x.data + size_t(wanted[r]) * x.cols, x.cols, out.data + size_t(r) * x.cols);
    const Wanted only = take_wanted(pages.batch, wanted, out);
    attend(x, l, pages.kv, indexes[mine]++, pages.batch, &only);
    feed_forward(out, l);
  }
}

// -- choosing
// -------------------------------------------------------------------------------------------------

namespace {

// The outputs of panels p0 .. p1-1 as a matrix of their own.
Matrix slice(const Matrix& m, int p0, int p1) {
  Matrix part = m;
  part.n = std::min(m.n, p1 * kPanel) - p0 * kPanel, part.data = m.panel(p0);
  return part;
}

constexpr int kAligned = kMaxBlock / kPanel;  // panels that hold whole blocks of maxima
constexpr int kTileFloats = 8192;             // logits of greedy rows that are looked at while in L1
constexpr int kFewPanels = 8;  // a row that may have tokens in one of so many panels has few: see `choose`

// The bits of panel p.
inline bool any_of_panel(const uint64_t* bits, int p) {
  return uint16_t(bits[p / kAligned] >> (p % kAligned * kPanel));
}

bool has_few(const uint64_t* bits, int panels) {
  const int most = panels / kFewPanels;
  int some = 0;
  for (int p = 0; p < panels && some <= most; p++)
    if (bits[p / kAligned]) some += any_of_panel(bits, p);
  return some <= most;
}

// Rows in the order in which `choose` works on them, and where each kind of them ends.
struct Kinds {
  enum { SampledFew, Sampled, Greedy, GreedyFew };
  int* order;
  int end[4] = {};
};

Kinds kinds_of(int rows, const SampleRows& p, const AllowedView& allowed, int panels, Arena& arena) {
  Kinds kinds{arena.take<int>(rows)};
  int* kind = arena.take<int>(rows);
  for (int r = 0; r < rows; r++) {
    const bool few = allowed.bits && has_few(allowed.bits + size_t(r) * allowed.words, panels);
    kind[r] = p.temperature[r] > 0 ? (few ? Kinds::SampledFew : Kinds::Sampled)
                                   : (few ? Kinds::GreedyFew : Kinds::Greedy);
  }
  for (int k = 0, place = 0; k < 4; kinds.end[k++] = place)
    for (int r = 0; r < rows; r++)
      if (kind[r] == k) kinds.order[place++] = r;
  return kinds;
}

}  // namespace

// Rows that are sampled come first. The logits of greedy rows pass through a buffer that stays in cache; each
// piece of the vocabulary keeps their best. Those of sampled rows are written down, with their block maxima.
// Of rows that may have few tokens only the panels that hold one of them are computed.
void Engine::choose(Rows x, const float* norm, float eps, const Matrix& head, const SampleRows& p,
                    const AllowedView& allowed, int32_t* ids, float* values) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const int rows = x.count, v = head.n, threads = pool_.size(), blocks = (v + kMaxBlock - 1) / kMaxBlock;
  const auto [order, ends] = kinds_of(rows, p, allowed, (v + kPanel - 1) / kPanel, arena_);
  const int sampled = ends[Kinds::Sampled], greedy = rows - sampled;
  const int whole = ends[Kinds::SampledFew], few = ends[Kinds::Greedy];  // rows whole .. few-1: all panels

  const Acts in = take_acts(rows, x.cols, kernels_.form(head));
  float* h = arena_.take<float>(size_t(threads) * x.cols);
  pool_.split(rows, 1, [&](int i, int, int thread) {
    float* at = h + size_t(thread) * x.cols;
    kernels_.norm(x.data + size_t(order[i]) * x.cols, norm, eps, x.cols, at);
    activate(in, i, at);
  });

  const int units = (head.panels() + kAligned - 1) / kAligned;  // of which a piece takes some
  const int grain = grain_of(units, threads), pieces = (units + grain - 1) / grain;
  const int chunk = kAligned * std::clamp(kTileFloats / kMaxBlock / std::max(rows, 1), 1, 16);
  float* tiles = greedy ? arena_.take<float>(size_t(threads) * rows * chunk * kPanel) : nullptr;
  Best* best = arena_.take<Best>(size_t(pieces) * rows);
  float* logits = arena_.take<float>(size_t(sampled) * v);
  float* maxima = arena_.take<float>(size_t(sampled) * blocks);
  pool_.split(pieces, 1, [&](int piece, int, int thread) {
    float* tile = tiles + size_t(thread) * rows * chunk * kPanel;
    Best* mine = best + size_t(piece) * rows;
    std::fill(mine, mine + rows, Best{-INFINITY, 0});
    const int end = std::min((piece + 1) * grain * kAligned, head.panels());
    for (int p0 = piece * grain * kAligned; p0 < end; p0 += chunk) {
      const Matrix part = slice(head, p0, std::min(p0 + chunk, end));
      if (part.n <= 0) break;  // nothing but padding
      const int first = p0 * kPanel;
      const Target kept{logits + first, v}, seen{tile, chunk * kPanel};
      if (whole < sampled) kernels_.gemm(part, in, whole, sampled, 0, part.panels(), kept);
      if (sampled < few) kernels_.gemm(part, in, sampled, few, 0, part.panels(), seen);
      for (int i = 0; i < rows; i++) {
        const Target& to = i < sampled ? kept : seen;
        float* row = to.out + size_t(i) * to.ld;
        if (allowed.bits) {
          const uint64_t* bits = allowed.bits + size_t(order[i]) * allowed.words + first / kMaxBlock;
          int computed = 0;
          for (int q = 0; (i < whole || i >= few) && q * kPanel < part.n; q++)
            if (any_of_panel(bits, q)) kernels_.gemm(part, in, i, i + 1, q, q + 1, to), computed++;
          if (i >= few && !computed) continue;
          kernels_.forbid(row, part.n, bits);
        }
        if (i < sampled)
          kernels_.maxima_of(row, part.n, maxima + size_t(i) * blocks + first / kMaxBlock);
        else
          kernels_.best_of(row, part.n, first, mine[i]);
      }
    }
  });

  for (int i = sampled; i < rows; i++) {
    Best found = best[i];
    for (int piece = 1; piece < pieces; piece++)
      if (best[size_t(piece) * rows + i].value > found.value) found = best[size_t(piece) * rows + i];
    ids[order[i]] = found.id, values[order[i]] = found.value;
  }
  const auto scratch = sampled ? take_sample_scratch(v) : std::vector<SampleScratch>();
  pool_.split(sampled, 1, [&](int i, int, int thread) {
    const int r = order[i];
    const float* row = logits + size_t(i) * v;
    const SampleParams params{p.temperature[r], p.top_p[r], p.min_p[r], p.uniform[r], p.top_k[r]};
    ids[r] = kernels_.sample(row, v, params, maxima + size_t(i) * blocks, scratch[thread]);
    values[r] = row[ids[r]];
  });
}

std::vector<SampleScratch> Engine::take_sample_scratch(int v) {
  std::vector<SampleScratch> list;
  for (int i = 0; i < pool_.size(); i++) {
    SampleScratch s;
    s.logit = arena_.take<float>(v);
    s.weight = arena_.take<float>(v);
    s.maxima = arena_.take<float>(v);
    s.id = arena_.take<int32_t>(v);
    s.bucket = arena_.take<int32_t>(v);
    s.mass = arena_.take<double>(std::max(4096, v / kMaxBlock + 1));
    list.push_back(s);
  }
  return list;
}

void Engine::top_logprobs(Rows x, int k, float* lse, int32_t* ids, float* logprobs) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const auto scratch = take_sample_scratch(x.cols);
  pool_.split(x.count, 1, [&](int r, int, int thread) {
    kernels_.top_logprobs(x.data + size_t(r) * x.cols, x.cols, k, lse + r, ids + size_t(r) * k,
                          logprobs + size_t(r) * k, scratch[thread]);
  });
}

void Engine::sample(Rows x, const SampleRows& p, int32_t* out) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const auto scratch = take_sample_scratch(x.cols);
  pool_.split(x.count, 1, [&](int r, int, int thread) {
    const SampleParams params{p.temperature[r], p.top_p[r], p.min_p[r], p.uniform[r], p.top_k[r]};
    out[r] = kernels_.sample(x.data + size_t(r) * x.cols, x.cols, params, nullptr, scratch[thread]);
  });
}

}  // namespace pt
