// Recurrent layers (gated delta net, Mamba2, short convolutions): their storage and what their kernels are
// given. kernels/recurrent.py has the formulas and the layout; nothing here may change the order of a sum.
#pragma once
#include <vector>

#include "kernels.h"

namespace pt {

constexpr int kChunk = 32;         // tokens, from position 0
constexpr int kStateColumns = 16;  // of a state that lie together
constexpr int kMaxConv = 8;        // positions of a convolution

// The slots and blocks of RecurrentCache, and where the parts of a layer lie in them.
struct RecurrentView {
  uint8_t *states, *tail;
  int slots, blocks, layers, channels, kernel, key_heads, value_heads, key_dim, value_dim, element;
  static size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }
  size_t head() const { return size_t(key_dim) * value_dim; }  // floats of a state
  size_t state_size() const { return padded(4 * value_heads * head()); }
  size_t slot_layer() const { return state_size() + padded(size_t(kernel - 1) * channels * element); }
  size_t g_size() const { return padded(size_t(4) * value_heads * kChunk); }
  size_t k_size() const { return padded(size_t(key_heads) * key_dim * kChunk * element); }
  size_t u_size() const { return padded(size_t(value_heads) * value_dim * kChunk * element); }
  size_t block_layer() const {
    return g_size() + k_size() + u_size() + padded(size_t(kChunk) * channels * element);
  }
  uint8_t* slot(int layer, int n) const { return states + (size_t(n) * layers + layer) * slot_layer(); }
  uint8_t* block(int layer, int n) const { return tail + (size_t(n) * layers + layer) * block_layer(); }
  float* state(int layer, int n, int h) const { return (float*)slot(layer, n) + h * head(); }
  uint8_t* past(int layer, int n) const { return slot(layer, n) + state_size(); }
  float* g(int layer, int n, int h) const { return (float*)block(layer, n) + size_t(h) * kChunk; }
  uint8_t* k(int layer, int n, int h) const {
    return block(layer, n) + g_size() + size_t(h) * key_dim * kChunk * element;
  }
  uint8_t* u(int layer, int n, int h) const {
    return block(layer, n) + g_size() + k_size() + size_t(h) * value_dim * kChunk * element;
  }
  uint8_t* x(int layer, int n) const { return block(layer, n) + g_size() + k_size() + u_size(); }
};

// Rows of one sequence in one chunk: `count` from `row` of the batch on, the first at `offset` of the chunk.
// block: of the tail, or -1. write: the slot of the state behind the chunk, or -1.
struct ChunkRows {
  int row, count, offset, block, write;
  size_t work;  // where the products of its key heads begin in Linear::work
  int end() const { return offset + count; }
  bool single() const { return count == 1 && block >= 0; }  // its keys are read in the tail
};

// The pieces first .. last-1 of one sequence. read: its slot, or -1.
struct RecurrentSequence {
  int first, last, read;
};

// What a step does in one layer, in the order of its rows.
struct RecurrentPlan {
  RecurrentView view;
  KVType type;
  int layer, rows;
  std::vector<ChunkRows> chunks;
  std::vector<RecurrentSequence> sequences;
};

// Rows of activations, of which `ld` lie from one to the next.
struct Strided {
  const float* data;
  size_t ld;
  const float* row(int r) const { return data + size_t(r) * ld; }
};

struct ConvRows {
  RecurrentView view;
  int layer;
  KVType type;
  const ChunkRows* pieces;
  Strided x;
  const float *weight, *bias;
  bool silu;
  float* out;  // [rows, channels]
};

struct Gates {
  const float *decay, *dt_bias;
  float low, high;
  int heads;
};

struct GatedNorm {
  const float* weight;
  float eps;
  int group, weights, columns;
  bool gate_first, silu;
};

struct Linear {
  RecurrentView view;
  int layer;
  KVType type;
  bool delta, tiled;
  const float* skip;  // of each value head, or null
  const ChunkRows* pieces;
  Strided q, k, v;
  const float *g, *beta;  // [rows, value heads]
  float* out;             // [rows, value heads * value_dim]
  float* work;            // of each piece and key head work_floats
  const float* zeros;     // a state
  int key_head(int h) const {
    return tiled ? h % view.key_heads : int(int64_t(h) * view.key_heads / view.value_heads);
  }
  // One row: its key, and its products with all keys. More rows: keys and queries with the tokens as
  // neighbours, and a product for each token and row. A tile of rows may read a little more.
  size_t work_floats(const ChunkRows& p) const {
    const size_t dim = view.key_dim;
    return p.single() ? (dim + 15) / 16 * 16 + 2 * kChunk : 2 * (dim * kChunk + 64) + 2 * kChunk * kChunk;
  }
  float* work_of(const ChunkRows& p, int key_head) const { return work + p.work + key_head * work_floats(p); }
};

// Columns 16 * block0 .. 16 * block1-1 of one value head of a sequence; next: the state that is read behind
// them.
struct LinearItem {
  RecurrentSequence sequence;
  int head, block0, block1;
  const float* next;
};

constexpr int kRowStride = kChunk + 8;  // of products: tiles of rows may go beyond the chunk

struct LinearScratch {
  float* state;    // [value_dim / 16][key_dim][16]
  float* weighed;  // [key_dim][kChunk]
  static size_t floats(const RecurrentView& v) { return v.head() + size_t(v.key_dim) * kChunk; }
};

}  // namespace pt
