// Packed matrices: their layouts, packing, unpacking of single rows (embedding), and the product.
//
// Layout of one panel (16 outputs), along k:
//   F32, F16, BF16   [k][16]
//   Q4, per group    [4][16 outputs][4 bytes]: byte j of step s holds k = 8s+j (low nibble) and 8s+4+j (high
//   nibble);
//                    then 16 fp16 scales and 16 fp16 mins: 320 bytes
//   Q8, per group    [k / kQ8Step][16 outputs][kQ8Step] int8, then 16 fp16 scales: 544 bytes
// Each output is summed over groups from the first to the last, by the same instructions for 1 row and for
// many.
#include "micro.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr size_t kQ4Bytes = 320, kQ8Bytes = 544;
// As many rows of activations stay within L2 while the panels pass.
constexpr int kRowBlockBytes = 128 * 1024;

}  // namespace

size_t panel_bytes(Kind kind, int k) {
  switch (kind) {
    case Kind::F32: return size_t(k) * kPanel * 4;
    case Kind::F16:
    case Kind::BF16: return size_t(k) * kPanel * 2;
    case Kind::Q8: return size_t(k / kGroup) * kQ8Bytes;
    case Kind::Q4: return size_t(k / kGroup) * kQ4Bytes;
  }
  return 0;
}

unsigned form(Kind kind) { return kind == Kind::Q4 ? kInt8 : kind == Kind::Q8 ? kQ8Form : kFloat; }

namespace {

template <class T>
void pack_float(const uint8_t* src, int n, int k, int p0, int p1, uint8_t* dst) {
  for (int p = p0; p < p1; p++) {
    T* out = (T*)dst + size_t(p) * k * kPanel;
    for (int o = 0; o < kPanel; o++) {
      const uint8_t* row = src + size_t(p * kPanel + o) * k * sizeof(T);
      bool real = p * kPanel + o < n;
      for (int i = 0; i < k; i++) {
        T v{};
        if (real) std::memcpy(&v, row + i * sizeof(T), sizeof(T));
        out[size_t(i) * kPanel + o] = v;
      }
    }
  }
}

// One group of 32 of one output: `qs` holds the 16 bytes of nibbles, GGML order (low: 0..15, high: 16..31).
void pack_q4_group(const uint8_t* qs, int o, uint8_t* out) {
  uint8_t q[kGroup];
  for (int j = 0; j < 16; j++) q[j] = qs[j] & 15, q[j + 16] = qs[j] >> 4;
  for (int s = 0; s < 4; s++)
    for (int j = 0; j < 4; j++) out[s * 64 + o * 4 + j] = uint8_t(q[8 * s + j] | q[8 * s + 4 + j] << 4);
}

void pack_q4(const uint8_t* src, bool has_min, int n, int k, int p0, int p1, uint8_t* dst) {
  const int groups = k / kGroup, bytes = has_min ? 20 : 18;
  for (int p = p0; p < p1; p++)
    for (int g = 0; g < groups; g++) {
      uint8_t* out = dst + (size_t(p) * groups + g) * kQ4Bytes;
      std::memset(out, 0, kQ4Bytes);
      for (int o = 0; o < kPanel && p * kPanel + o < n; o++) {
        const uint8_t* b = src + (size_t(p * kPanel + o) * groups + g) * bytes;
        f16 scale, min;
        std::memcpy(&scale, b, 2);
        if (has_min)
          std::memcpy(&min, b + 2, 2);
        else
          min = to_f16(-8.0f * to_float(scale));
        pack_q4_group(b + (has_min ? 4 : 2), o, out);
        std::memcpy(out + 256 + o * 2, &scale, 2);
        std::memcpy(out + 288 + o * 2, &min, 2);
      }
    }
}

size_t q8_offset(int o, int i) { return size_t(i / kQ8Step) * kQ8Step * kPanel + o * kQ8Step + i % kQ8Step; }

void pack_q8(const uint8_t* src, int n, int k, int p0, int p1, uint8_t* dst) {
  const int groups = k / kGroup;
  for (int p = p0; p < p1; p++)
    for (int g = 0; g < groups; g++) {
      uint8_t* out = dst + (size_t(p) * groups + g) * kQ8Bytes;
      std::memset(out, 0, kQ8Bytes);
      std::memset(out, kQ8Zero, 512);
      for (int o = 0; o < kPanel && p * kPanel + o < n; o++) {
        const uint8_t* b = src + (size_t(p * kPanel + o) * groups + g) * 34;
        for (int i = 0; i < kGroup; i++) out[q8_offset(o, i)] = uint8_t(b[2 + i] ^ kQ8Zero);
        std::memcpy(out + 512 + o * 2, b, 2);
      }
    }
}

}  // namespace

void pack(Source kind, const uint8_t* src, int n, int k, int p0, int p1, uint8_t* dst) {
  switch (kind) {
    case Source::F32: return pack_float<float>(src, n, k, p0, p1, dst);
    case Source::F16: return pack_float<f16>(src, n, k, p0, p1, dst);
    case Source::BF16: return pack_float<bf16>(src, n, k, p0, p1, dst);
    case Source::Q8_0: return pack_q8(src, n, k, p0, p1, dst);
    case Source::Q4_0: return pack_q4(src, false, n, k, p0, p1, dst);
    case Source::Q4_1: return pack_q4(src, true, n, k, p0, p1, dst);
  }
}

namespace {

template <class T>
void unpack_float(const T* panel, int o, int k, float* out) {
  for (int i = 0; i < k; i++) out[i] = to_float(panel[size_t(i) * kPanel + o]);
}

}  // namespace

void unpack_row(const Matrix& m, int row, float* out) {
  const uint8_t* panel = m.panel(row / kPanel);
  const int o = row % kPanel;
  if (m.kind == Kind::F32) return unpack_float((const float*)panel, o, m.k, out);
  if (m.kind == Kind::F16) return unpack_float((const f16*)panel, o, m.k, out);
  if (m.kind == Kind::BF16) return unpack_float((const bf16*)panel, o, m.k, out);
  for (int g = 0; g < m.k / kGroup; g++, out += kGroup) {
    if (m.kind == Kind::Q8) {
      const uint8_t* b = panel + g * kQ8Bytes;
      float scale = to_float(((const f16*)(b + 512))[o]);
      for (int i = 0; i < kGroup; i++) out[i] = scale * float(int8_t(b[q8_offset(o, i)] ^ kQ8Zero));
    } else {
      const uint8_t* b = panel + g * kQ4Bytes;
      float scale = to_float(((const f16*)(b + 256))[o]), min = to_float(((const f16*)(b + 288))[o]);
      for (int i = 0; i < kGroup; i++) {
        int byte = b[i / 8 * 64 + o * 4 + i % 4];
        out[i] = scale * float(i % 8 < 4 ? byte & 15 : byte >> 4) + min;
      }
    }
  }
}

namespace {

template <int R>
void tile(const Matrix& m, const Acts& x, int row, const uint8_t* panel, float* acc) {
  const int groups = m.k / kGroup;
  const size_t at = size_t(row) * x.k, group_at = size_t(row) * groups;
  switch (m.kind) {
    case Kind::F32: return tile_float<R>((const float*)panel, m.k, x.f32 + at, acc);
    case Kind::F16: return tile_float<R>((const f16*)panel, m.k, x.f32 + at, acc);
    case Kind::BF16: return tile_float<R>((const bf16*)panel, m.k, x.f32 + at, acc);
    case Kind::Q8:
      return tile_q8<R>(panel, groups, q8_acts(x) + at, x.scale + group_at, x.offset + group_at, acc);
    case Kind::Q4: return tile_q4<R>(panel, groups, x.q8 + at, x.scale + group_at, x.sum + group_at, acc);
  }
}

using Tile = void (*)(const Matrix&, const Acts&, int, const uint8_t*, float*);
constexpr Tile kTiles[kRowTile] = {tile<1>, tile<2>, tile<3>, tile<4>, tile<5>, tile<6>};

void write(const Target& t, int row, int col, int cols, const float* acc) {
  float* out = t.out + size_t(row) * t.ld + col;
  if (cols == kPanel && !t.bias) {
    for (int c = 0; c < kPanel; c += W) {
      VF v = load(acc + c);
      store(out + c, t.mode == Write::Add ? load(out + c) + v : v);
    }
    return;
  }
  for (int c = 0; c < cols; c++) {
    float v = t.bias ? acc[c] + t.bias[col + c] : acc[c];
    out[c] = t.mode == Write::Add ? out[c] + v : v;
  }
}

}  // namespace

void gemm(const Matrix& m, const Acts& x, int row0, int row1, int panel0, int panel1, const Target& target) {
  const int fit = kRowBlockBytes / (m.k * (m.kind >= Kind::Q8 ? 1 : 4));
  const int block = fit < 2 * kRowTile ? 2 * kRowTile : fit / kRowTile * kRowTile;
  alignas(64) float acc[kRowTile * kPanel];
  for (int b = row0; b < row1; b += block) {
    const int end = row1 < b + block ? row1 : b + block, tiles = (end - b + kRowTile - 1) / kRowTile;
    for (int p = panel0; p < panel1; p++) {
      const int col = p * kPanel, cols = m.n - col < kPanel ? m.n - col : kPanel;
      for (int i = 0, row = b; i < tiles; i++) {  // rows balanced among the tiles: 8 are 4 + 4, not 6 + 2
        const int next = b + int(int64_t(end - b) * (i + 1) / tiles);
        kTiles[next - row - 1](m, x, row, m.panel(p), acc);
        for (int r = row; r < next; r++) write(target, r, col, cols, acc + (r - row) * kPanel);
        row = next;
      }
    }
  }
}

}  // namespace PT_ISA
}  // namespace pt
