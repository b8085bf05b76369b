// Adapters in memory, and their products in a step: rows grouped by adapter, pieces for the threads.
#include "adapters.h"

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace pt {
namespace {

constexpr int kRowBlock = 48;  // rows of a piece: so many inputs stay within L2

// pairs: as bf16 lies in panels; else, and where depth is k, step by step.
template <class T>
void pack_rows(const Factor* list, int count, int panels, int depth, bool pairs, T* out) {
  const int k = list[0].k;
  std::fill_n(out, size_t(panels) * depth * kPanel, T{});
  int place = 0;  // of a row among those of all factors
  for (int f = 0; f < count; f++)
    for (int r = 0; r < list[f].n; r++, place++) {
      const T* row = (const T*)list[f].data + size_t(r) * k;
      T* to = out + size_t(place / kPanel) * depth * kPanel;
      const int o = place % kPanel;
      for (int i = 0; i < k; i++)
        to[pairs ? size_t(i / 2) * 2 * kPanel + 2 * o + i % 2 : size_t(i) * kPanel + o] = row[i];
    }
}

int rows_of(const Factor* list, int count) {
  int rows = 0;
  for (int f = 0; f < count; f++) rows += list[f].n;
  return rows;
}

size_t packed(Kind kind, int rows, int k) {
  return round_up(size_t(rows + kPanel - 1) / kPanel * kPanel * padded_depth(k) * bytes_of(kind), 64);
}

}  // namespace

size_t Adapter::room(Kind kind, const LoraPair* const* pairs) {
  size_t bytes = 0;
  int ranks = 0, k = 0;
  for (int i = 0; i < kLoraOutputs; i++)
    if (const LoraPair* p = pairs[i]) {
      ranks += p->a.n, k = p->a.k;
      bytes += packed(kind, p->b.n, p->b.k);
    }
  return bytes + packed(kind, ranks, k) + round_up(packed(Kind::F32, ranks, 1), 64);
}

size_t Adapter::embed_room(Kind kind, const LoraPair& p) {
  // matrices have an even number of panels
  return packed(kind, int(round_up(size_t(p.a.n), 2 * kPanel)), p.a.k) + packed(kind, p.b.n, p.b.k);
}

uint8_t* Adapter::take(size_t bytes) {
  uint8_t* at = memory_.data() + used_;
  used_ += round_up(bytes, 64);
  if (used_ > memory_.size()) throw std::bad_alloc();
  return at;
}

const uint8_t* Adapter::pack(const Factor* list, int count) {
  const int rows = rows_of(list, count), panels = (rows + kPanel - 1) / kPanel;
  uint8_t* to = take(packed(view_.kind, rows, list[0].k));
  const int depth = padded_depth(list[0].k);
  if (view_.kind == Kind::F32)
    pack_rows(list, count, panels, depth, false, (float*)to);
  else
    pack_rows(list, count, panels, depth, view_.kind == Kind::BF16, (uint16_t*)to);
  return to;
}

LoraOutput Adapter::second(const LoraPair& p, int first) { return {pack(&p.b, 1), p.b.n, p.b.k, first}; }

void Adapter::add(int layer, LoraInput input, const LoraPair* const* pairs) {
  LoraProduct& product = layer < 0 ? view_.head : view_.layers[size_t(layer)].of[int(input)];
  Factor first[kLoraOutputs];
  int count = 0;
  for (int i = 0; i < kLoraOutputs; i++)
    if (pairs[i]) first[count++] = pairs[i]->a;
  if (!count) return;
  product.k = first[0].k, product.ranks = rows_of(first, count);
  product.a = pack(first, count);
  float* scale = (float*)take(packed(Kind::F32, product.ranks, 1));
  product.scale = scale;
  int place = 0;
  for (int i = 0; i < kLoraOutputs; i++)
    if (const LoraPair* p = pairs[i]) {
      product.out[i] = second(*p, place);
      std::fill_n(scale + place, p->a.n, p->scale);
      place += p->a.n;
    }
}

void Adapter::add_embed(const LoraPair& p) {
  const size_t rows = round_up(size_t(p.a.n), 2 * kPanel);
  uint8_t* to = take(packed(view_.kind, int(rows), p.a.k));
  if (view_.kind == Kind::F32)
    pack_rows(&p.a, 1, int(rows / kPanel), p.a.k, false, (float*)to);
  else
    pack_rows(&p.a, 1, int(rows / kPanel), p.a.k, false, (uint16_t*)to);
  view_.embed = {view_.kind, false, p.a.n, p.a.k, size_t(p.a.k) * kPanel * bytes_of(view_.kind), to};
  view_.embed_out = second(p, 0), view_.embed_scale = p.scale;
}

void Segments::build() {
  list.clear(), rows.clear();
  std::vector<int> owner(of_row.size(), -1);
  int last = -1;
  for (size_t r = 0; r < of_row.size(); r++) {
    const AdapterView* a = of_row[r];
    if (!a) continue;
    if (last < 0 || list[size_t(last)].adapter != a) {
      const auto found =
          std::find_if(list.begin(), list.end(), [&](const Segment& s) { return s.adapter == a; });
      last = int(found - list.begin());
      if (found == list.end()) list.push_back({a, 0, 0});
    }
    owner[r] = last, list[size_t(last)].count++;
  }
  int at = 0;
  for (Segment& s : list) s.first = at, at += s.count, s.count = 0;
  rows.resize(size_t(at));
  for (size_t r = 0; r < of_row.size(); r++)
    if (owner[r] >= 0) {
      Segment& s = list[size_t(owner[r])];
      rows[size_t(s.first + s.count++)] = int(r);
    }
}

void Lora::measure() {
  width = 0;
  if (who)
    for (const Segment& s : who->list) width = std::max(width, of(*s.adapter).panels() * kPanel);
}

// f(product, its adapter's type, rows of a piece, how many, piece, pieces) for all segments: many segments
// are a piece each, few are cut into `pieces` together.
template <class F>
void Lora::each_piece(int pieces, const F& f) const {
  int blocks = 0;
  for (const Segment& s : who->list)
    if (of(*s.adapter).a) blocks += (s.count + kRowBlock - 1) / kRowBlock;
  if (!blocks) return;
  const int cuts = (pieces + blocks - 1) / blocks;
  for (const Segment& s : who->list) {
    const LoraProduct& p = of(*s.adapter);
    if (!p.a) continue;
    const int *begin = who->rows.data() + s.first, *end = begin + s.count;
    begin = std::lower_bound(begin, end, first_row), end = std::lower_bound(begin, end, first_row + rows);
    for (; begin < end; begin += kRowBlock)
      f(p, s.adapter->kind, begin, int(std::min<ptrdiff_t>(end - begin, kRowBlock)), cuts);
  }
}

void Lora::first(const float* x, int ldx, int pieces, std::vector<LoraItem>& items) const {
  if (!width) return;
  each_piece(pieces, [&](const LoraProduct& p, Kind kind, const int* list, int count, int cuts) {
    const int panels = p.panels(), each = (panels + cuts - 1) / cuts;
    for (int at = 0; at < panels; at += each)
      items.push_back({kind,
                       false,
                       p.a + size_t(at) * padded_depth(p.k) * kPanel * bytes_of(kind),
                       p.scale + at * kPanel,
                       p.k,
                       std::min(each, panels - at) * kPanel,
                       false,
                       {list, count, first_row, x, ldx, h + at * kPanel, width}});
  });
}

void Lora::second(int out, float* y, int ldy, bool add, int pieces, std::vector<LoraItem>& items) const {
  if (!width) return;
  each_piece(pieces, [&](const LoraProduct& p, Kind kind, const int* list, int count, int cuts) {
    const LoraOutput& o = p.out[out];
    if (!o.b) return;
    const int panels = (o.n + kPanel - 1) / kPanel, each = std::max((panels + cuts - 1) / cuts, 4);
    for (int at = 0; at < panels; at += each)
      items.push_back({kind,
                       true,
                       o.b + size_t(at) * padded_depth(o.rank) * kPanel * bytes_of(kind),
                       nullptr,
                       o.rank,
                       std::min(each * kPanel, o.n - at * kPanel),
                       add,
                       {list, count, first_row, h + o.first, width, y + at * kPanel, ldy}});
  });
}

// -- in a step

Lora Engine::take_lora(const Segments* who, int layer, LoraInput input, int first_row, int rows) {
  Lora found{who, layer, input, first_row, rows};
  found.measure();
  if (found.width) found.h = arena_.take<float>(size_t(rows) * found.width);
  return found;
}

// In the order of memory, so that a thread reads what several products have of an adapter as one stream.
int Engine::order_items() {
  std::sort(items_.begin(), items_.end(), [](const LoraItem& a, const LoraItem& b) { return a.w < b.w; });
  return grain_of(int(items_.size()), pool_.size());
}

// Run number `piece` of so many items. The next of a thread are those behind what the others take now.
void Engine::run_piece(int piece, int grain) {
  const int begin = piece * grain, count = int(items_.size()), end = std::min(begin + grain, count);
  for (int n = begin; n < end; n++) {
    LoraItem& i = items_[size_t(n)];
    const int next = n + 1 < end ? n + 1 : n + 1 + (pool_.size() - 1) * grain;
    if (next < count) i.rows.next = items_[size_t(next)].w;
    i.second ? kernels_.lora_second(i.kind, i.w, i.depth, i.columns, i.add, i.rows)
             : kernels_.lora_first(i.kind, i.w, i.scale, i.depth, i.columns / kPanel, i.rows);
  }
}

void Engine::run_items() {
  const int grain = order_items(), pieces = (int(items_.size()) + grain - 1) / grain;
  pool_.split(pieces, 1, [&](int i, int, int) { run_piece(i, grain); });
  items_.clear();
}

void Engine::first(const Lora& l, const float* x, int ldx) {
  l.first(x, ldx, pool_.size() * kPieces, items_);
}

void Engine::second(const Lora& l, int out, float* y, int ldy) {
  l.second(out, y, ldy, true, pool_.size() * kPieces, items_);
}

// What rows of an embedding get from their adapters, before anything else is done to them.
void Engine::add_embedded(const AdapterView& a, int token, float* scratch, float* row) const {
  if (!a.embed_out.b) return;
  kernels_.unpack_row(a.embed, token, scratch);
  for (int i = 0; i < a.embed.k; i++) scratch[i] *= a.embed_scale;
  const int only = 0;
  kernels_.lora_second(a.kind, a.embed_out.b, a.embed_out.rank, a.embed_out.n, true,
                       {&only, 1, 0, scratch, 0, row, 0});
}

// For each row of the MLP that has an adapter there, what is to be added to gate and up before the
// activation; null for others.
Engine::Deltas Engine::take_deltas(const Lora& l, int inner) {
  Deltas d;
  if (!l.width) return d;
  const auto rows = size_t(l.rows);
  for (int m = 0; m < 2; m++) {
    bool some = false;
    const float** list = arena_.take<const float*>(rows);
    float* values = arena_.take<float>(rows * size_t(inner));
    std::fill_n(list, rows, nullptr);
    for (size_t r = 0; r < rows; r++) {
      const AdapterView* a = l.who->of_row[size_t(l.first_row) + r];
      if (a && l.of(*a).out[m].b) list[r] = values + r * size_t(inner), some = true;
    }
    if (!some) continue;
    d.of[m] = list;
    l.second(m, values, inner, false, pool_.size() * kPieces, items_);
  }
  return d;
}

}  // namespace pt
