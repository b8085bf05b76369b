// How the attention of one batch is divided among threads: items, long ones cut into their segments, and
// shares of items of about the same work. Knows nothing of how an item is computed.
#include <algorithm>

#include "ops.h"

namespace pt {
namespace {

constexpr int kStart = 32;  // what beginning an item costs, in tokens

// The tokens that the rows of an item see in its segments, about, and its beginning, times its rows.
int work_of(const Attention& a, const AttnItem& i) {
  const int first = a.shape.first_seen(a.positions[i.row0]), last = a.positions[i.row0 + i.rows - 1];
  const int from = std::max(first, i.seg0 * kSegment), to = std::min(last + 1, i.seg1 * kSegment);
  return i.rows * (std::max(to - from, 0) + kStart);
}

// Sequences first .. last-1 of a batch, whose KV is the same blocks in the segments seg0 .. shared-1.
struct Family {
  int first, last, seg0, shared;
};

// Where the segments end, from seg0 on, that two sequences see whole and have in the same blocks.
int shared_segments(const Attention& a, const BatchView& b, int one, int other, int seg0) {
  const int seen = std::min(b.positions[b.query_start[one]], b.positions[b.query_start[other]]) + 1;
  const int32_t *x = a.table + size_t(one) * a.table_width, *y = a.table + size_t(other) * a.table_width;
  int end = seg0;
  for (int i = seg0 * kSegment / a.kv.block_size; end < seen / kSegment; end++)
    for (; i * a.kv.block_size < (end + 1) * kSegment; i++)
      if (x[i] != y[i]) return end;
  return end;
}

// Neighbours that share, as long as all their rows are at most `most`: those with more fill items of their
// own.
std::vector<Family> families(const Attention& a, const BatchView& b, int most) {
  std::vector<Family> found;
  for (int s = 0; s < b.sequences; s++) {
    if (b.query_start[s + 1] == b.query_start[s]) continue;
    const int seg0 = a.shape.first_seen(b.positions[b.query_start[s]]) / kSegment;
    if (!found.empty()) {
      Family& f = found.back();
      const bool fits = b.query_start[s + 1] - b.query_start[f.first] <= most && seg0 >= f.seg0;
      const int shared = fits ? shared_segments(a, b, f.first, s, f.seg0) : f.seg0;
      if (shared > f.seg0 && (f.last == f.first + 1 || shared >= f.shared)) {
        f.shared = f.last == f.first + 1 ? shared : f.shared;
        f.last = s + 1;
        continue;
      }
    }
    found.push_back({s, s + 1, seg0, seg0});
  }
  return found;
}

// An item before it is cut; `shared`, if not -1, is the one with the segments before it.
struct Unit {
  AttnItem item;
  int shared;
};

// Every sequence and KV head in runs of `rows` tokens; and the beginnings that families share.
std::vector<Unit> units_of(const Attention& a, const BatchView& b, int rows, int most) {
  std::vector<Unit> units;
  const auto add = [&](AttnItem item, int shared) {
    item.work = work_of(a, item);
    for (int head = 0; head < a.kv.kv_heads; head++) {
      item.head = head;
      units.push_back({item, shared < 0 ? -1 : shared + head});
    }
  };
  for (const Family& f : families(a, b, most)) {
    int shared = -1;
    if (f.last > f.first + 1) {
      const int r = b.query_start[f.first];
      shared = int(units.size());
      add({f.first, 0, r, b.query_start[f.last] - r, f.seg0, f.shared, 0, nullptr}, -1);
    }
    for (int s = f.first; s < f.last; s++)
      for (int r = b.query_start[s]; r < b.query_start[s + 1]; r += rows) {
        AttnItem item{s, 0, r, std::min(rows, b.query_start[s + 1] - r), 0, 0, 0, nullptr};
        const auto [low, high] = std::minmax_element(b.positions + r, b.positions + r + item.rows);
        item.seg0 = shared < 0 ? a.shape.first_seen(*low) / kSegment : f.shared;
        item.seg1 = *high / kSegment + 1;
        add(item, shared);
      }
  }
  return units;
}

}  // namespace

void AttentionPlan::share(const Attention& a, const BatchView& b, int threads) {
  items.clear(), shares.clear(), merges.clear();
  const int pieces = threads * kPieces, most = rows_of(a) / a.group();
  const int rows = threads == 1 ? most : std::clamp(b.tokens * a.kv.kv_heads / pieces, 1, most);
  const std::vector<Unit> units = units_of(a, b, rows, most);
  std::vector<int> order(units.size());  // those with most work first
  for (int i = 0; i < int(order.size()); i++) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int x, int y) { return units[x].item.work > units[y].item.work; });
  int64_t all = 0;
  for (const Unit& unit : units) all += unit.item.work;
  const int64_t enough = threads == 1 ? all : all / pieces;
  std::vector<bool> begins(units.size());  // what others go on from
  for (const Unit& unit : units)
    if (unit.shared >= 0) begins[unit.shared] = true;
  std::vector<Run> runs(units.size());
  for (const int u : order) {
    const auto& [item, shared] = units[u];
    const int segments = item.seg1 - item.seg0;
    runs[u] = {int(items.size()), 1};
    if (segments <= 1 || (shared < 0 && item.work <= enough)) {
      items.push_back(item);
      continue;
    }
    runs[u].count = segments;
    for (int i = item.seg0; i < item.seg1; i++) {
      items.push_back(item);
      items.back().seg0 = i, items.back().seg1 = i + 1, items.back().work = work_of(a, items.back());
    }
  }
  for (int u = 0; u < int(units.size()); u++) {
    if (begins[u] || (units[u].shared < 0 && runs[u].count == 1)) continue;
    merges.push_back({units[u].shared < 0 ? Run{0, 0} : runs[units[u].shared], runs[u]});
  }
  int64_t taken = enough;
  for (int i = 0; i < int(items.size()); i++) {
    if (taken + items[i].work > enough) shares.push_back(i), taken = 0;
    taken += items[i].work;
  }
  shares.push_back(int(items.size()));
}

}  // namespace pt
