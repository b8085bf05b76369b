// Kernels with all that they need to run: packed weights, rounded activations, a filled KV cache.
#pragma once
#include <memory>
#include <numeric>

#include "../../src/pageturner/kernels/native/ops.h"
#include "plain.h"

namespace fixture {

inline std::unique_ptr<pt::Weight> packed(pt::Engine& e, const plain::Weights& w, int bits = 8) {
  return e.pack(w.source, w.bytes.data(), w.n, w.k, bits);
}

// Rows of activations in every form, as Engine has them for one call.
struct Activations {
  std::vector<int8_t> q8;
  std::vector<int16_t> q16;
  std::vector<float> scale, sum, whole;
  std::vector<int32_t> offset, half;
  std::vector<uint16_t> words;
  pt::Acts acts;

  Activations(const pt::Kernels& kernels, const std::vector<float>& x, int k, int bits) {
    acts.k = k, acts.rows = int(x.size()) / k, acts.bits = bits, acts.f32 = x.data();
    if (k % pt::kGroup) return;
    acts.stride = acts.rows * acts.terms() + 3;
    const size_t places = size_t(acts.stride) * (k / pt::kGroup);
    q8.resize(places * pt::kGroup), q16.resize(places * pt::kGroup), scale.resize(places), sum.resize(places);
    offset.resize(places), half.resize(places);
    acts.q8 = q8.data(), acts.q16 = q16.data(), acts.scale = scale.data(), acts.sum = sum.data();
    acts.offset = offset.data(), acts.half = half.data();
    words.resize(acts.words_at(0, k / pt::kGroup)), whole.resize(places);
    acts.words = words.data(), acts.whole = whole.data();
    for (int r = 0; r < acts.rows; r++) kernels.quantise(x.data() + size_t(r) * k, acts, r, 0, k);
  }
  // What the integers of column c of a row stand for.
  double value(int row, int c) const {
    double v = 0;
    if (acts.bits == 12) {
      const size_t at = acts.at(row, c / pt::kGroup);
      const int i = c % pt::kGroup, rest = q8[(at + acts.rows) * pt::kGroup + i / 8 * 4 + i % 4];
      return double(scale[at]) * (q8[at * pt::kGroup + i] * 256 + rest * (i % 8 < 4 ? 1 : 16));
    }
    for (int t = 0; t < acts.terms(); t++) {
      const size_t at = acts.at(t * acts.rows + row, c / pt::kGroup);
      v += double(scale[at]) * q8[at * pt::kGroup + c % pt::kGroup];
    }
    return v;
  }
};

// Sequences that see `context` tokens each and compute the last `rows` of them, on blocks in random places.
struct Sequences {
  std::vector<int32_t> positions, query_start{0}, table, slots;
  int width = 0, blocks = 0;

  Sequences(const std::vector<std::pair<int, int>>& runs, int block_size, uint64_t seed = 1) {
    for (const auto& [context, rows] : runs) width = std::max(width, (context + block_size - 1) / block_size);
    blocks = width * int(runs.size());
    table.resize(size_t(blocks));
    std::iota(table.begin(), table.end(), 0);
    plain::Random dice(seed);
    for (int i = blocks - 1; i > 0; i--) std::swap(table[i], table[dice.bits() % (i + 1)]);
    for (size_t s = 0; s < runs.size(); s++) {
      for (int p = runs[s].first - runs[s].second; p < runs[s].first; p++) {
        positions.push_back(p);
        slots.push_back(table[s * width + p / block_size] * block_size + p % block_size);
      }
      query_start.push_back(int32_t(positions.size()));
    }
  }
  pt::BatchView view() const {
    return {positions.data(),      query_start.data(),          table.data(), slots.data(),
            int(positions.size()), int(query_start.size()) - 1, width};
  }
};

inline std::unique_ptr<pt::KVStore> storage(int blocks, int block_size, int heads, int dim, pt::KVType type) {
  auto kv = std::make_unique<pt::KVStore>();
  kv->view = {nullptr, 1, blocks, block_size, heads, dim, type};
  kv->memory = pt::Buffer(kv->view.nbytes() + pt::kOverread);
  kv->view.data = kv->memory.data();
  std::memset(kv->view.data, 0xff, kv->memory.size());  // NaN: whatever is read unwritten shows
  return kv;
}

}  // namespace fixture
