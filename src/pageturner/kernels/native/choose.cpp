// The output head with the choice of tokens, in one call: logits, their edits, tokens and their
// logprobs. Logits never leave here.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace pt {

// Rows in the order in which `choose` works on them, and what it knows of them.
struct ChooseRows {
  // Kept: the logits of the whole row are written down, because the token is drawn from all of them or more
  // is asked than the largest. Greedy: only the largest is asked, so that each piece is looked at while it is
  // in cache and then forgotten. Few: of the head only the panels that hold an allowed token are computed.
  // Coarse: greedy, and nothing but the product makes their logits; see `coarse` below.
  enum { KeptFew, Kept, Greedy, Coarse, GreedyFew };
  int count, vocabulary;
  int* order = nullptr;
  int end[5] = {};                     // where each kind ends
  const uint64_t** allowed = nullptr;  // of each row of the call, with what its edits say; null: all tokens
  ReadyEdits edits{};                  // those that change logits
  uint8_t* special = nullptr;          // by place: whether anything but the product makes its logits
  int pieces = 0;                      // of the vocabulary
  Best* best = nullptr;                // [pieces, rows] of greedy rows
  float* logits = nullptr;             // [kept rows, vocabulary]
  float* maxima = nullptr;             // [kept rows, blocks]
  Lora lora{};                         // what adapters add to the head, by place
  // Coarse rows are multiplied in 8 bits first. Such a logit is off by at most `slack` times the length of
  // its weights, so that most blocks cannot hold the largest; those that can are multiplied again in full.
  Acts coarse{};
  float* slack = nullptr;          // by place
  float* coarse_maxima = nullptr;  // [coarse rows, blocks]
  int blocks() const { return (vocabulary + kMaxBlock - 1) / kMaxBlock; }
};

// Some of the vocabulary, and where its logits go: those of row i to row i of a target.
struct Piece {
  const Matrix& part;
  const Acts& in;
  int first;  // id
  Target kept, seen;
  int* at;  // where each edit goes on
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
constexpr int kCoarseFrom = 32;               // rows: fewer wait for weights, not for products
constexpr int kFewPanels = 8;  // a row with allowed tokens in at most one of so many panels has few

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

// Whether one piece of the vocabulary beats those before it; NaN beats every number.
bool larger(const Best& one, const Best& before) {
  return !(one.value <= before.value) && before.value == before.value;
}

// Whether all raw logits of a row are needed, for logprobs.
bool wants_raw(const LogprobsView& wanted, int row) {
  return wanted.top && (wanted.top[row] >= 0 || wanted.candidates[row] > 0);
}

bool adapts_head(const AdapterView* const* adapters, int row) {
  return adapters && adapters[row] && adapters[row]->head.a;
}

void sort_rows(const Choosing& c, bool all_special, bool may_be_coarse, const AdapterView* const* adapters,
               ChooseRows& w, Arena& arena) {
  const int panels = (w.vocabulary + kPanel - 1) / kPanel;
  int *kind = arena.take<int>(w.count), coarse = 0;
  w.order = arena.take<int>(w.count);
  const auto special = [&](int r) {
    return all_special || w.allowed[r] || wants_raw(c.logprobs, r) || w.edits.of(r) ||
           adapts_head(adapters, r);
  };
  for (int r = 0; r < w.count; r++) {
    const bool raw = wants_raw(c.logprobs, r), kept = raw || c.draw.temperature[r] > 0;
    const bool few = !raw && w.allowed[r] && !adapts_head(adapters, r) && has_few(w.allowed[r], panels);
    kind[r] = kept                           ? (few ? ChooseRows::KeptFew : ChooseRows::Kept)
              : few                          ? ChooseRows::GreedyFew
              : may_be_coarse && !special(r) ? ChooseRows::Coarse
                                             : ChooseRows::Greedy;
    coarse += kind[r] == ChooseRows::Coarse;
  }
  if (coarse < kCoarseFrom)
    std::replace(kind, kind + w.count, int(ChooseRows::Coarse), int(ChooseRows::Greedy));
  for (int k = 0, place = 0; k < 5; w.end[k++] = place)
    for (int r = 0; r < w.count; r++)
      if (kind[r] == k) w.order[place++] = r;
  w.special = arena.take<uint8_t>(w.count);
  for (int i = 0; i < w.count; i++) w.special[i] = special(w.order[i]);
}

// The same matrix for activations of 8 bits.
Matrix coarser(Matrix m) {
  m.bits = 8;
  return m;
}

// An upper bound of how far a product with a row of `coarse` is from that with the same row of `exact`, for
// weights of length 1: the length of the difference, and what both products round off while they sum.
float slack_of(const Acts& exact, const Acts& coarse, int row) {
  double apart = 0, whole = 0;
  const int groups = exact.k / kGroup;
  for (int g = 0; g < groups; g++) {
    const size_t at = exact.at(row, g), second = at + exact.rows, own = coarse.at(row, g);
    const int8_t *a = exact.q8 + at * kGroup, *c = exact.q8 + second * kGroup, *q = coarse.q8 + own * kGroup;
    const double unit = exact.scale[exact.bits == 15 ? second : at];  // of 256ths of a step
    for (int i = 0; i < kGroup; i++) {
      const int rest = exact.bits == 15 ? c[i] : i & 4 ? c[i / 8 * 4 + i % 4] * 16 : c[i / 8 * 4 + i % 4];
      const double x = unit * (256 * a[i] + rest), y = double(coarse.scale[own]) * q[i];
      apart += (x - y) * (x - y), whole += x * x + y * y;
    }
  }
  constexpr double unit = 0x1p-24, more = 1.001;  // of one rounding; for those of lengths and of bounds
  return float(more * (std::sqrt(apart) + (4 * groups + 16) * unit * std::sqrt(whole)));
}

}  // namespace

// What each row may have: what was said from outside, as its edits restrict it. Null: all tokens.
const uint64_t** Engine::take_allowed(const Choosing& c, int rows, int vocabulary) {
  const int words = (vocabulary + 63) / 64;
  const uint64_t** allowed = arena_.take<const uint64_t*>(rows);
  uint64_t* scratch = nullptr;
  for (int r = 0; r < rows; r++) {
    const uint64_t* given = c.allowed.bits ? c.allowed.bits + size_t(r) * c.allowed.words : nullptr;
    if (given && std::all_of(given, given + words, [](uint64_t word) { return word == UINT64_MAX; }))
      given = nullptr;
    allowed[r] = given;
    if (!any_edit(c.edits, r, restricts)) continue;
    uint64_t* row = arena_.take<uint64_t>(words);
    if (!scratch) scratch = arena_.take<uint64_t>(words);
    given ? std::copy_n(given, words, row) : std::fill_n(row, words, UINT64_MAX);
    for (int e = c.edits.starts[r]; e < c.edits.starts[r + 1]; e++)
      if (restricts(c.edits.list[e].operation)) restrict_row(c.edits, c.edits.list[e], words, row, scratch);
    allowed[r] = row;
  }
  return allowed;
}

// The edits that change logits.
ReadyEdits Engine::ready_edits(const Choosing& c, int rows, int vocabulary) {
  if (!c.edits.list) return {};
  int32_t* starts = arena_.take<int32_t>(rows + 1);
  starts[0] = 0;
  for (int r = 0; r < rows; r++) {
    const EditView *e = c.edits.list + c.edits.starts[r], *end = c.edits.list + c.edits.starts[r + 1];
    starts[r + 1] =
        starts[r] +
        int(std::count_if(e, end, [](const EditView& one) { return changes_logits(one.operation); }));
  }
  if (!starts[rows]) return {};
  ReadyEdit* list = arena_.take<ReadyEdit>(starts[rows]);
  int32_t* ids = arena_.take<int32_t>(c.edits.ids_count);
  int32_t* times = arena_.take<int32_t>(c.edits.ids_count);
  std::vector<EditScratch> scratch;
  for (int i = 0; i < pool_.size(); i++)
    scratch.push_back({arena_.take<uint64_t>((vocabulary + 63) / 64), arena_.take<int32_t>(vocabulary)});
  pool_.split(rows, grain_of(rows, pool_.size()), [&](int r0, int r1, int thread) {
    for (int r = r0; r < r1; r++) {
      const EditView* before = nullptr;
      ReadyEdit* ready = list + starts[r];
      for (int i = c.edits.starts[r]; i < c.edits.starts[r + 1]; i++) {
        const EditView& e = c.edits.list[i];
        if (!changes_logits(e.operation)) continue;
        if (before && before->first == e.first && before->count == e.count && e.count) {
          *ready = ready[-1];  // of the same ids
          ready->operation = e.operation, ready->value = c.edits.values[e.first_value];
        } else {
          *ready = make_ready(c.edits, e, vocabulary, ids + e.first, times + e.first, scratch[thread]);
        }
        before = &e, ready++;
      }
    }
  });
  return {list, starts};
}

// Makes of the products of a piece of a special row its logits, as they are to be chosen from. False: there
// is nothing to look at, because nothing of it may be chosen or because all raw logits are wanted first.
bool Engine::finish(const Choosing& c, const HeadView& head, const ChooseRows& w, const Piece& piece, int i) {
  const int r = w.order[i], first = piece.first, n = piece.part.n;
  const Target& to = i < w.end[ChooseRows::Kept] ? piece.kept : piece.seen;
  float* row = to.out + size_t(i) * to.ld;
  const uint64_t* bits = w.allowed[r] ? w.allowed[r] + first / kMaxBlock : nullptr;
  if (i < w.end[ChooseRows::KeptFew] || i >= w.end[ChooseRows::Coarse]) {
    int computed = 0;
    for (int q = 0; q * kPanel < n; q++)
      if (any_of_panel(bits, q)) kernels_.gemm(piece.part, piece.in, i, i + 1, q, q + 1, to), computed++;
    if (i >= w.end[ChooseRows::Coarse] && !computed) return false;
  }
  if (const AdapterView* a = w.lora.width ? w.lora.who->of_row[size_t(i)] : nullptr; a && a->head.a) {
    const LoraOutput& o = a->head.out[0];
    const size_t skipped = size_t(first) * padded_depth(o.rank) * bytes_of(a->kind);
    kernels_.lora_second(a->kind, o.b + skipped, o.rank, n, true,
                         {&i, 1, i, w.lora.h + size_t(i) * w.lora.width, 0, row, 0});
  }
  if (head.soft_cap > 0) kernels_.soft_cap(row, head.soft_cap, n, row);
  if (wants_raw(c.logprobs, r)) return false;
  for (int e = 0; e < w.edits.of(r); e++) {
    const int index = w.edits.starts[r] + e;
    const ReadyEdit& edit = w.edits.list[index];
    if (edit.is_due(piece.at[index], first + n)) change_logits(edit, first, first + n, piece.at[index], row);
  }
  if (bits) kernels_.forbid(row, n, bits);
  return true;
}

// Kept rows come first. The logits of greedy rows pass through a buffer that stays in cache; each piece of
// the vocabulary keeps their best. Those of kept rows are written down, with their block maxima. Edits are
// done to each piece while it is in cache, but not in rows whose raw logits are wanted first.
void Engine::head_logits(Rows x, const HeadView& head, const Choosing& c, ChooseRows& w,
                         const AdapterView* const* adapters) {
  const int rows = x.count, v = w.vocabulary, threads = pool_.size(), blocks = w.blocks();
  const int kept = w.end[ChooseRows::Kept], greedy = rows - kept;
  const int whole = w.end[ChooseRows::KeptFew], coarse = w.end[ChooseRows::Greedy],
            few = w.end[ChooseRows::Coarse];  // whole .. few-1: all panels
  if (adapters) {
    auto* of_place = arena_.take<const AdapterView*>(size_t(rows));
    for (int i = 0; i < rows; i++) of_place[i] = adapters[w.order[i]];
    w.lora = take_lora(group(segments_, of_place, rows), -1, LoraInput::Qkv, 0, rows);
  }
  const Acts in = take_acts(rows, x.cols, kernels_.form(head.matrix) | (w.lora.width ? kFloat : 0u));
  if (coarse < few) ready_coarse(head, w);
  float* h = arena_.take<float>(size_t(threads) * x.cols);
  pool_.split(rows, 1, [&](int i, int, int thread) {
    float* at = h + size_t(thread) * x.cols;
    normed(x.data + size_t(w.order[i]) * x.cols, head.norm, head.norm_bias, head.eps, x.cols, at);
    activate(in, i, at);
    if (i < coarse || i >= few) return;
    activate(w.coarse, i, at);
    w.slack[i] = slack_of(in, w.coarse, i);
  });
  first(w.lora, in.f32, x.cols);
  run_items();

  const int panels = head.matrix.panels(), units = (panels + kAligned - 1) / kAligned;
  const int grain = grain_of(units, threads);  // units of a piece
  const int chunk = kAligned * std::clamp(kTileFloats / kMaxBlock / std::max(rows, 1), 1, 16);
  const int edits = w.edits.list ? w.edits.starts[rows] : 0;
  w.pieces = (units + grain - 1) / grain;
  float* tiles = greedy ? arena_.take<float>(size_t(threads) * rows * chunk * kPanel) : nullptr;
  int* places = arena_.take<int>(size_t(threads) * edits);
  w.best = arena_.take<Best>(size_t(w.pieces) * rows);
  w.logits = arena_.take<float>(size_t(kept) * v);
  w.maxima = arena_.take<float>(size_t(kept) * blocks);
  pool_.split(w.pieces, 1, [&](int number, int, int thread) {
    const int piece = piece_of(number, w.pieces, rows, threads);
    int* at = places + size_t(thread) * edits;
    for (int i = 0; i < edits; i++) at[i] = first_from(w.edits.list[i], piece * grain * kMaxBlock);
    float* tile = tiles + size_t(thread) * rows * chunk * kPanel;
    Best* mine = w.best + size_t(piece) * rows;
    std::fill(mine, mine + rows, Best{-INFINITY, 0});
    const int end = std::min((piece + 1) * grain * kAligned, panels);
    for (int p0 = piece * grain * kAligned; p0 < end; p0 += chunk) {
      const Matrix part = slice(head.matrix, p0, std::min(p0 + chunk, end));
      if (part.n <= 0) break;  // nothing but padding
      const int first = p0 * kPanel;
      const Piece here{part, in, first, {w.logits + first, v}, {tile, chunk * kPanel}, at};
      if (whole < kept) kernels_.gemm(part, in, whole, kept, 0, part.panels(), here.kept);
      if (kept < coarse) kernels_.gemm(part, in, kept, coarse, 0, part.panels(), here.seen);
      if (coarse < few) kernels_.gemm(coarser(part), w.coarse, coarse, few, 0, part.panels(), here.seen);
      for (int i = 0; i < rows; i++) {
        if (w.special[i] && !finish(c, head, w, here, i)) continue;
        if (i < kept)
          kernels_.maxima_of(here.kept.out + size_t(i) * v, part.n,
                             w.maxima + size_t(i) * blocks + first / kMaxBlock);
        else if (i >= coarse && i < few)
          kernels_.maxima_of(tile + size_t(i) * chunk * kPanel, part.n,
                             w.coarse_maxima + size_t(i - coarse) * blocks + first / kMaxBlock);
        else
          kernels_.best_of(tile + size_t(i) * chunk * kPanel, part.n, first, mine[i]);
      }
    }
  });
  if (coarse < few) rescore(head, w, in, grain, tiles);
}

void Engine::ready_coarse(const HeadView& head, ChooseRows& w) {
  const int first = w.end[ChooseRows::Greedy], rows = w.end[ChooseRows::Coarse] - first;
  w.coarse = take_acts(w.count, head.matrix.k, kernels_.form(coarser(head.matrix)));
  w.slack = arena_.take<float>(w.count);
  w.coarse_maxima = arena_.take<float>(size_t(rows) * w.blocks());
  if (!head.longest.empty()) return;
  head.longest.resize(size_t(w.blocks()));
  pool_.split(w.blocks(), grain_of(w.blocks(), pool_.size()), [&](int b0, int b1, int) {
    float lengths[kMaxBlock];
    for (int b = b0; b < b1; b++) {
      const Matrix part = slice(head.matrix, b * kAligned, (b + 1) * kAligned);
      kernels_.lengths(part, 0, part.panels(), lengths);
      float& longest = head.longest[size_t(b)] = 0;
      for (int i = 0; i < part.n; i++)
        if (!(lengths[i] <= longest)) longest = lengths[i];  // NaN stays, as nothing is said of it
    }
  });
}

// The best of coarse rows: of each, the blocks whose largest logit may be above what the largest of all is at
// least. Comparisons are such that what is not a number rules nothing out.
void Engine::rescore(const HeadView& head, ChooseRows& w, const Acts& exact, int grain, float* tiles) {
  const int from = w.end[ChooseRows::Greedy], end = w.end[ChooseRows::Coarse], blocks = w.blocks();
  const auto maxima = [&](int i) { return w.coarse_maxima + size_t(i - from) * blocks; };
  const float* longest = head.longest.data();
  float* least = arena_.take<float>(w.count);
  pool_.split(end - from, 1, [&](int i, int, int) {
    float found = -INFINITY;
    for (int b = 0; b < blocks; b++)
      found = std::max(found, maxima(i + from)[b] - w.slack[i + from] * longest[b]);
    least[i + from] = found < INFINITY ? found : -INFINITY;
  });
  pool_.split(w.pieces, 1, [&](int piece, int, int thread) {
    float* tile = tiles + size_t(thread) * w.count * kMaxBlock;
    Best* mine = w.best + size_t(piece) * w.count;
    for (int b = piece * grain; b < std::min((piece + 1) * grain, blocks); b++) {
      const auto may_hold = [&](int i) { return !(maxima(i)[b] + w.slack[i] * longest[b] < least[i]); };
      const Matrix part = slice(head.matrix, b * kAligned, (b + 1) * kAligned);
      for (int i = from, next; i < end; i = next + 1) {
        for (next = i; next < end && may_hold(next);) next++;
        if (i == next) continue;
        kernels_.gemm(part, exact, i, next, 0, part.panels(), {tile, kMaxBlock, nullptr, Write::Store});
        for (int row = i; row < next; row++)
          kernels_.best_of(tile + size_t(row) * kMaxBlock, part.n, b * kMaxBlock, mine[row]);
      }
    }
  });
}

// The token of a kept row, or the candidates of a search. `raw` has room for a row.
void Engine::pick(const Choosing& c, const ChooseRows& w, int place, const SampleScratch& s, float* raw) {
  const int r = w.order[place], v = w.vocabulary;
  float* row = w.logits + size_t(place) * v;
  const SampleRows& p = c.draw;
  const SampleParams params{p.temperature[r], p.top_p[r], p.min_p[r], p.uniform[r], p.top_k[r]};
  if (!wants_raw(c.logprobs, r)) {
    c.ids[r] = kernels_.sample(row, v, params, w.maxima + size_t(place) * w.blocks(), s);
    c.values[r] = row[c.ids[r]];
    return;
  }
  const LogprobsView& wanted = c.logprobs;
  const int top = wanted.top[r], candidates = wanted.candidates[r];
  const size_t at = size_t(r) * wanted.most_top, best = size_t(r) * wanted.most_candidates;
  float lse = 0;
  kernels_.top_logprobs(row, v, std::max(top, 0), &lse, wanted.top_ids + at, wanted.top_logprobs + at, s);
  // the same subtraction as for the chosen token, so that it is told with one value, not two
  for (int i = 0; i < top; i++) wanted.top_logprobs[at + i] = row[wanted.top_ids[at + i]] - lse;
  wanted.lse[r] = lse;
  const bool changes = w.allowed[r] || w.edits.of(r);
  if (candidates)
    for (int i = 0; i < v; i++) row[i] -= lse;
  else if (changes)
    std::copy_n(row, v, raw);

  for (int i = 0; i < w.edits.of(r); i++) {
    int begin = 0;
    change_logits(w.edits.list[w.edits.starts[r] + i], 0, v, begin, row);
  }
  if (w.allowed[r]) kernels_.forbid(row, v, w.allowed[r]);
  if (candidates) {
    int32_t* ids = wanted.candidate_ids + best;
    kernels_.top_logprobs(row, v, candidates, &lse, ids, wanted.candidate_logprobs + best, s);
    for (int i = 0; i < candidates; i++) wanted.candidate_logprobs[best + i] = row[ids[i]];
    c.ids[r] = ids[0];
  } else {
    c.ids[r] = kernels_.sample(row, v, params, nullptr, s);
    wanted.logprob[r] = (changes ? raw : row)[c.ids[r]] - lse;
  }
  c.values[r] = row[c.ids[r]];
}

void Engine::choose(Rows x, const HeadView& head, const Choosing& c, const AdapterView* const* adapters) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const int rows = x.count, v = head.matrix.n;
  ChooseRows w{.count = rows, .vocabulary = v};
  w.allowed = take_allowed(c, rows, v), w.edits = ready_edits(c, rows, v);
  const unsigned form = kernels_.form(head.matrix);
  const bool finer = form & kInt8 && head.matrix.bits != 8;  // 16 bits are one product already
  sort_rows(c, head.soft_cap > 0, finer && measurable(head.matrix.kind), adapters, w, arena_);
  head_logits(x, head, c, w, adapters);

  const int kept = w.end[ChooseRows::Kept];
  for (int i = kept; i < rows; i++) {
    Best found = w.best[i];
    for (int piece = 1; piece < w.pieces; piece++)
      if (larger(w.best[size_t(piece) * rows + i], found)) found = w.best[size_t(piece) * rows + i];
    c.ids[w.order[i]] = found.id, c.values[w.order[i]] = found.value;
  }
  const auto scratch = kept ? take_sample_scratch(v) : std::vector<SampleScratch>();
  float* raw = c.logprobs.top ? arena_.take<float>(size_t(pool_.size()) * v) : nullptr;
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
