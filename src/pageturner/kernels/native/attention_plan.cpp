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

// Every sequence and KV head in runs of `rows` tokens, those with most work first.
std::vector<AttnItem> whole_items(const Attention& a, const BatchView& b, int rows) {
  std::vector<AttnItem> items;
  for (int s = 0; s < b.sequences; s++)
    for (int r = b.query_start[s]; r < b.query_start[s + 1]; r += rows) {
      AttnItem item{s, 0, r, std::min(rows, b.query_start[s + 1] - r), 0, 0, 0, nullptr};
      const auto [low, high] = std::minmax_element(b.positions + r, b.positions + r + item.rows);
      item.seg0 = a.shape.first_seen(*low) / kSegment, item.seg1 = *high / kSegment + 1;
      item.work = work_of(a, item);
      for (; item.head < a.kv.kv_heads; item.head++) items.push_back(item);
    }
  std::stable_sort(items.begin(), items.end(),
                   [](const AttnItem& x, const AttnItem& y) { return x.work > y.work; });
  return items;
}

}  // namespace

void AttentionPlan::share(const Attention& a, const BatchView& b, int threads) {
  items.clear(), shares.clear(), merges.clear();
  const int pieces = threads * kPieces, most = rows_of(a) / a.group();
  const int rows = threads == 1 ? most : std::clamp(b.tokens * a.kv.kv_heads / pieces, 1, most);
  int64_t all = 0;
  const std::vector<AttnItem> whole = whole_items(a, b, rows);
  for (const AttnItem& item : whole) all += item.work;
  const int64_t enough = threads == 1 ? all : all / pieces;
  for (const AttnItem& item : whole) {
    const int segments = item.seg1 - item.seg0;
    if (item.work <= enough || segments == 1) {
      items.push_back(item);
      continue;
    }
    merges.push_back({int(items.size()), segments});
    for (int i = item.seg0; i < item.seg1; i++) {
      items.push_back(item);
      items.back().seg0 = i, items.back().seg1 = i + 1, items.back().work = work_of(a, items.back());
    }
  }
  int64_t taken = enough;
  for (int i = 0; i < int(items.size()); i++) {
    if (taken + items[i].work > enough) shares.push_back(i), taken = 0;
    taken += items[i].work;
  }
  shares.push_back(int(items.size()));
}

}  // namespace pt
