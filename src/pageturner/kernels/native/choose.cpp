// The output head with the choice of tokens, in one call: logits, their edits, tokens and what is to be told
// of them. Logits never leave here.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace pt {

// Rows in the order in which `choose` works on them, and what it knows of them.
struct ChooseRows {
  // Kept: the logits of the whole row are written down, because somebody draws from them, changes some or
  // wants to know more than the largest. Greedy: they are looked at while in cache, and forgotten. Few: only
  // the panels of the head that hold an allowed token are computed.
  enum { KeptFew, Kept, Greedy, GreedyFew };
  int count;
  int* order;
  int end[4] = {};          // where each kind ends
  AllowedView allowed;      // with what the edits say of it
  int pieces = 0;           // of the vocabulary
  Best* best = nullptr;     // [pieces, rows] of greedy rows
  float* logits = nullptr;  // [kept rows, vocabulary]
  float* maxima = nullptr;  // [kept rows, blocks]
  int vocabulary;
  int blocks() const { return (vocabulary + kMaxBlock - 1) / kMaxBlock; }
};

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

template <class Is>
bool any_edit(const EditsView& edits, int row, Is is) {
  if (!edits.list) return false;
  const EditView *e = edits.list + edits.starts[row], *end = edits.list + edits.starts[row + 1];
  return std::any_of(e, end, [&](const EditView& one) { return is(one.operation); });
}

// Whether something is told of a row that takes all of its raw logits.
bool reported(const ReportView& report, int row) {
  return report.top && (report.top[row] >= 0 || report.candidates[row] > 0);
}

ChooseRows sort_rows(const Choosing& c, int rows, int vocabulary, const AllowedView& allowed, Arena& arena) {
  const int panels = (vocabulary + kPanel - 1) / kPanel;
  ChooseRows w{.count = rows, .order = arena.take<int>(rows), .allowed = allowed, .vocabulary = vocabulary};
  int* kind = arena.take<int>(rows);
  for (int r = 0; r < rows; r++) {
    const bool told = reported(c.report, r), few = !told && allowed.bits && has_few(allowed.row(r), panels);
    const bool kept = told || c.draw.temperature[r] > 0 || any_edit(c.edits, r, changes_logits);
    kind[r] = kept ? (few ? ChooseRows::KeptFew : ChooseRows::Kept)
                   : (few ? ChooseRows::GreedyFew : ChooseRows::Greedy);
  }
  for (int k = 0, place = 0; k < 4; w.end[k++] = place)
    for (int r = 0; r < rows; r++)
      if (kind[r] == k) w.order[place++] = r;
  return w;
}

}  // namespace

// What each row may have: what was said from outside, less what its edits restrict.
AllowedView Engine::fold_edits(const Choosing& c, int rows, int vocabulary) {
  bool any = false;
  for (int r = 0; r < rows && !any; r++) any = any_edit(c.edits, r, restricts);
  if (!any) return c.allowed;
  const int words = (vocabulary + 63) / 64;
  uint64_t* bits = arena_.take<uint64_t>(size_t(rows) * words);
  uint64_t* scratch = arena_.take<uint64_t>(words);
  for (int r = 0; r < rows; r++) {
    uint64_t* row = bits + size_t(r) * words;
    if (c.allowed.bits)
      std::copy_n(c.allowed.row(r), words, row);
    else
      std::fill_n(row, words, UINT64_MAX);
    for (int e = c.edits.starts[r]; e < c.edits.starts[r + 1]; e++)
      if (restricts(c.edits.list[e].operation)) restrict_row(c.edits, c.edits.list[e], words, row, scratch);
  }
  return {bits, words};
}

// Kept rows come first. The logits of greedy rows pass through a buffer that stays in cache; each piece of
// the vocabulary keeps their best. Those of kept rows are written down, with their block maxima; what is not
// allowed is minus infinity, but in rows whose raw logits are wanted yet.
void Engine::head_logits(Rows x, const HeadView& head, const Choosing& c, ChooseRows& w) {
  const int rows = x.count, v = w.vocabulary, threads = pool_.size(), blocks = w.blocks();
  const int kept = w.end[ChooseRows::Kept], greedy = rows - kept;
  const int whole = w.end[ChooseRows::KeptFew],
            few = w.end[ChooseRows::Greedy];  // whole .. few-1: all panels
  const Acts in = take_acts(rows, x.cols, kernels_.form(head.matrix));
  float* h = arena_.take<float>(size_t(threads) * x.cols);
  pool_.split(rows, 1, [&](int i, int, int thread) {
    float* at = h + size_t(thread) * x.cols;
    normed(x.data + size_t(w.order[i]) * x.cols, head.norm, head.norm_bias, head.eps, x.cols, at);
    activate(in, i, at);
  });

  const int panels = head.matrix.panels(), units = (panels + kAligned - 1) / kAligned;
  const int grain = grain_of(units, threads);  // units of a piece
  const int chunk = kAligned * std::clamp(kTileFloats / kMaxBlock / std::max(rows, 1), 1, 16);
  w.pieces = (units + grain - 1) / grain;
  float* tiles = greedy ? arena_.take<float>(size_t(threads) * rows * chunk * kPanel) : nullptr;
  w.best = arena_.take<Best>(size_t(w.pieces) * rows);
  w.logits = arena_.take<float>(size_t(kept) * v);
  w.maxima = arena_.take<float>(size_t(kept) * blocks);
  pool_.split(w.pieces, 1, [&](int piece, int, int thread) {
    float* tile = tiles + size_t(thread) * rows * chunk * kPanel;
    Best* mine = w.best + size_t(piece) * rows;
    std::fill(mine, mine + rows, Best{-INFINITY, 0});
    const int end = std::min((piece + 1) * grain * kAligned, panels);
    for (int p0 = piece * grain * kAligned; p0 < end; p0 += chunk) {
      const Matrix part = slice(head.matrix, p0, std::min(p0 + chunk, end));
      if (part.n <= 0) break;  // nothing but padding
      const int first = p0 * kPanel;
      const Target written{w.logits + first, v}, seen{tile, chunk * kPanel};
      if (whole < kept) kernels_.gemm(part, in, whole, kept, 0, part.panels(), written);
      if (kept < few) kernels_.gemm(part, in, kept, few, 0, part.panels(), seen);
      for (int i = 0; i < rows; i++) {
        const Target& to = i < kept ? written : seen;
        float* row = to.out + size_t(i) * to.ld;
        const uint64_t* bits = w.allowed.row(w.order[i]);
        if (bits) bits += first / kMaxBlock;
        int computed = 0;
        for (int q = 0; (i < whole || i >= few) && q * kPanel < part.n; q++)
          if (any_of_panel(bits, q)) kernels_.gemm(part, in, i, i + 1, q, q + 1, to), computed++;
        if (i >= few && !computed) continue;
        if (head.soft_cap > 0) kernels_.soft_cap(row, head.soft_cap, part.n, row);
        if (reported(c.report, w.order[i])) continue;
        if (bits) kernels_.forbid(row, part.n, bits);
        if (i < kept)
          kernels_.maxima_of(row, part.n, w.maxima + size_t(i) * blocks + first / kMaxBlock);
        else
          kernels_.best_of(row, part.n, first, mine[i]);
      }
    }
  });
}

// The token of a kept row, or the candidates of a search. `raw` has room for a row.
void Engine::pick(const Choosing& c, const ChooseRows& w, int place, const SampleScratch& s, float* raw) {
  const int r = w.order[place], v = w.vocabulary, blocks = w.blocks();
  float* row = w.logits + size_t(place) * v;
  const uint64_t* bits = w.allowed.row(r);
  const bool told = reported(c.report, r), edited = any_edit(c.edits, r, changes_logits);
  const int candidates = told ? c.report.candidates[r] : 0, top = told ? c.report.top[r] : -1;
  float lse = 0;
  if (told) {
    const size_t at = size_t(r) * c.report.most_top;
    int32_t* ids = c.report.top_ids + at;
    kernels_.top_logprobs(row, v, std::max(top, 0), &lse, ids, c.report.top_logprobs + at, s);
    // the same subtraction as for the chosen token, so that it is told with one value, not two
    for (int i = 0; i < top; i++) c.report.top_logprobs[at + i] = row[ids[i]] - lse;
    c.report.lse[r] = lse;
    if (!candidates && (bits || edited)) std::copy_n(row, v, raw);
    for (int i = 0; candidates && i < v; i++) row[i] -= lse;
  }
  float* maxima = w.maxima + size_t(place) * blocks;
  if (edited) {
    uint64_t* touched = (uint64_t*)s.mass;
    std::fill_n(touched, (blocks + 63) / 64, 0);
    for (int e = c.edits.starts[r]; e < c.edits.starts[r + 1]; e++)
      if (changes_logits(c.edits.list[e].operation))
        change_row(c.edits, c.edits.list[e], bits, row, s.bucket, touched);
    for (int b = 0; b < blocks && !told; b++)
      if (is_set(touched, b))
        kernels_.maxima_of(row + b * kMaxBlock, std::min(v - b * kMaxBlock, kMaxBlock), maxima + b);
  }
  if (told && bits) kernels_.forbid(row, v, bits);
  if (candidates) {
    const size_t at = size_t(r) * c.report.most_candidates;
    int32_t* ids = c.report.candidate_ids + at;
    kernels_.top_logprobs(row, v, candidates, &lse, ids, c.report.candidate_logprobs + at, s);
    for (int i = 0; i < candidates; i++) c.report.candidate_logprobs[at + i] = row[ids[i]];
    c.ids[r] = ids[0];
  } else {
    const SampleRows& p = c.draw;
    const SampleParams params{p.temperature[r], p.top_p[r], p.min_p[r], p.uniform[r], p.top_k[r]};
    c.ids[r] = kernels_.sample(row, v, params, told ? nullptr : maxima, s);
    if (top >= 0) c.report.logprob[r] = (bits || edited ? raw : row)[c.ids[r]] - lse;
  }
  c.values[r] = row[c.ids[r]];
}

void Engine::choose(Rows x, const HeadView& head, const Choosing& c) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const int rows = x.count, v = head.matrix.n;
  ChooseRows w = sort_rows(c, rows, v, fold_edits(c, rows, v), arena_);
  head_logits(x, head, c, w);

  const int kept = w.end[ChooseRows::Kept];
  for (int i = kept; i < rows; i++) {
    Best found = w.best[i];
    for (int piece = 1; piece < w.pieces; piece++)
      if (w.best[size_t(piece) * rows + i].value > found.value) found = w.best[size_t(piece) * rows + i];
    c.ids[w.order[i]] = found.id, c.values[w.order[i]] = found.value;
  }
  const auto scratch = kept ? take_sample_scratch(v) : std::vector<SampleScratch>();
  float* raw = c.report.top ? arena_.take<float>(size_t(pool_.size()) * v) : nullptr;
  pool_.split(kept, 1, [&](int i, int, int thread) {
    pick(c, w, i, scratch[thread], raw ? raw + size_t(thread) * v : nullptr);
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
