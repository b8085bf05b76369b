// Packed matrices: their layouts, packing, unpacking of single rows (embedding), and the product.
//
// Layout of one panel (16 outputs), along k:
//   F32, F16, BF16   [k][16]
//   Q4, Q5 per group [4][16 outputs][4 bytes]: byte j of step s holds k = 8s+j (low nibble) and 8s+4+j (high
//                    nibble); Q5: [8][16 outputs] times 4 bits, of k = 4s..4s+3; then 16 scales and 16 mins
//   Q8, per group    [k / kQ8Step][16 outputs][kQ8Step] int8, then 16 scales; Q8Half: 16 of the second half
// Each output is summed over groups from the first to the last, by the same instructions for 1 row and for
// many.
#include <algorithm>
#include <utility>

#include "micro.h"

namespace pt {
namespace PT_ISA {
namespace {

// As many rows of activations stay within L2 while the panels pass.
constexpr int kRowBlockBytes = 128 * 1024;

}  // namespace

size_t panel_bytes(Kind kind, int k) {
  switch (kind) {
    case Kind::F32: return size_t(k) * kPanel * 4;
    case Kind::F16:
    case Kind::BF16: return size_t(k) * kPanel * 2;
    default: return size_t(k / kGroup) * group_bytes(kind);
  }
}

unsigned form(const Matrix& m) {
  if (m.kind < Kind::Q8) return kFloat;
  return (nibbles(m.kind) ? kInt8 : kQ8Form) | (m.fine ? kFine : 0u);
}

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

// 32 elements of one output: value = scale * q + min; the second scale is that of the last 16.
struct Group {
  int8_t q[kGroup];
  float scale[2], min;
};

float half_at(const uint8_t* p) {
  f16 h;
  std::memcpy(&h, p, 2);
  return to_float(h);
}

// Nibbles of 16 bytes, as GGML has them: low ones are elements 0..15, high ones 16..31. `fifth`: 32 more
// bits.
void read_nibbles(const uint8_t* qs, const uint8_t* fifth, int8_t* q) {
  uint32_t high = 0;
  if (fifth) std::memcpy(&high, fifth, 4);
  for (int j = 0; j < 16; j++) {
    q[j] = int8_t((qs[j] & 15) | (high >> j & 1) << 4);
    q[j + 16] = int8_t((qs[j] >> 4) | (high >> (j + 16) & 1) << 4);
  }
}

// Group i of 8 in a Q4_K or Q5_K block: d, e, 12 bytes of 6-bit scales and mins, [32 bytes of fifth bits],
// nibbles.
void read_k_group(const uint8_t* b, bool five, int i, Group& out) {
  const uint8_t *p = b + 4, *qs = b + (five ? 48 : 16) + i / 2 * 32;
  const int s = i < 4 ? p[i] & 63 : (p[i + 4] & 15) | (p[i - 4] >> 6 << 4);
  const int m = i < 4 ? p[i + 4] & 63 : p[i + 4] >> 4 | (p[i] >> 6 << 4);
  out.scale[0] = half_at(b) * float(s);
  out.min = -(half_at(b + 2) * float(m));
  for (int j = 0; j < kGroup; j++) {
    const int fifth = five ? b[16 + j] >> i & 1 : 0;
    out.q[j] = int8_t((i & 1 ? qs[j] >> 4 : qs[j] & 15) | fifth << 4);
  }
}

// Group i of 8 in a Q6_K block: 128 bytes of nibbles, 64 of two high bits, 16 int8 scales, d.
void read_q6_group(const uint8_t* b, int i, Group& out) {
  const uint8_t *low = b + i / 4 * 64 + i % 2 * 32, *high = b + 128 + i / 4 * 32;
  for (int j = 0; j < kGroup; j++) {
    const int nibble = i % 4 < 2 ? low[j] & 15 : low[j] >> 4;
    out.q[j] = int8_t((nibble | (high[j] >> (i % 4 * 2) & 3) << 4) - 32);
  }
  for (int h = 0; h < 2; h++) out.scale[h] = half_at(b + 208) * float(int8_t(b[192 + 2 * i + h]));
}

// Group i of the block b.
void read_group(Source source, const uint8_t* b, int i, Group& out) {
  out.scale[0] = out.scale[1] = half_at(b), out.min = 0;
  switch (source) {
    case Source::Q8_0: std::memcpy(out.q, b + 2, kGroup); break;
    case Source::Q4_0: read_nibbles(b + 2, nullptr, out.q), out.min = -8.0f * out.scale[0]; break;
    case Source::Q4_1: read_nibbles(b + 4, nullptr, out.q), out.min = half_at(b + 2); break;
    case Source::Q5_0: read_nibbles(b + 6, b + 2, out.q), out.min = -16.0f * out.scale[0]; break;
    case Source::Q5_1: read_nibbles(b + 8, b + 4, out.q), out.min = half_at(b + 2); break;
    case Source::Q4_K: read_k_group(b, false, i, out); break;
    case Source::Q5_K: read_k_group(b, true, i, out); break;
    case Source::Q6_K: read_q6_group(b, i, out); break;
    default: break;
  }
}

size_t q8_offset(int o, int i) { return size_t(i / kQ8Step) * kQ8Step * kPanel + o * kQ8Step + i % kQ8Step; }

// Scale or min number i (16 of them, then the next 16) behind the integers of a group.
void write_scale(Kind kind, uint8_t* scales, int i, float value) {
  const f16 half = to_f16(value);
  half_scales(kind) ? std::memcpy(scales + i * 2, &half, 2) : std::memcpy(scales + i * 4, &value, 4);
}
float read_scale(Kind kind, const uint8_t* scales, int i) {
  return half_scales(kind) ? to_float(((const f16*)scales)[i]) : ((const float*)scales)[i];
}

uint32_t load4(const int8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

void write_group(Kind kind, const Group& g, int o, uint8_t* out) {
  if (nibbles(kind)) {
    for (int s = 0; s < 8; s += 2) {  // four elements at a time, one in each byte
      const uint32_t first = load4(g.q + 4 * s), second = load4(g.q + 4 * s + 4);
      const uint32_t packed = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
      std::memcpy(out + s * 32 + o * 4, &packed, 4);
      if (!five_bits(kind)) continue;
      for (int i = 0; i < 2; i++) {  // the multiplication brings the four bits together
        const uint32_t bits = ((i ? second : first) >> 4 & 0x01010101) * 0x01020408u >> 24 & 15;
        out[256 + (s + i) * 8 + o / 2] |= uint8_t(bits << o % 2 * 4);
      }
    }
  } else {
    uint8_t q[kGroup];
    for (int i = 0; i < kGroup; i++) q[i] = uint8_t(g.q[i]) ^ kQ8Zero;
    for (int i = 0; i < kGroup; i += kQ8Step) std::memcpy(out + q8_offset(o, i), q + i, kQ8Step);
  }
  uint8_t* scales = out + integer_bytes(kind);
  write_scale(kind, scales, o, g.scale[0]);
  if (nibbles(kind)) write_scale(kind, scales, kPanel + o, g.min);
  if (kind == Kind::Q8Half) write_scale(kind, scales, kPanel + o, g.scale[1]);
}

void pack_quantised(Source source, const uint8_t* src, int n, int k, int p0, int p1, uint8_t* dst) {
  const SourceFormat f = kSources[int(source)];
  const int groups = k / kGroup, per_block = f.values / kGroup;
  const size_t row_bytes = size_t(k / f.values) * f.bytes;
  for (int p = p0; p < p1; p++)
    for (int g = 0; g < groups; g++) {
      uint8_t* out = dst + (size_t(p) * groups + g) * group_bytes(f.kind);
      std::memset(out, 0, group_bytes(f.kind));
      if (!nibbles(f.kind)) std::memset(out, kQ8Zero, 512);
      for (int o = 0; o < kPanel && p * kPanel + o < n; o++) {
        const uint8_t* block = src + (p * kPanel + o) * row_bytes + size_t(g / per_block) * f.bytes;
        Group group{};
        read_group(source, block, g % per_block, group);
        write_group(f.kind, group, o, out);
      }
    }
}

}  // namespace

void pack(Source kind, const uint8_t* src, int n, int k, int p0, int p1, uint8_t* dst) {
  switch (kind) {
    case Source::F32: return pack_float<float>(src, n, k, p0, p1, dst);
    case Source::F16: return pack_float<f16>(src, n, k, p0, p1, dst);
    case Source::BF16: return pack_float<bf16>(src, n, k, p0, p1, dst);
    default: return pack_quantised(kind, src, n, k, p0, p1, dst);
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
    const uint8_t *b = panel + g * group_bytes(m.kind), *scales = b + integer_bytes(m.kind);
    const float scale = read_scale(m.kind, scales, o);
    const float second = m.kind == Kind::Q8Half ? read_scale(m.kind, scales, kPanel + o) : scale;
    const float min = nibbles(m.kind) ? read_scale(m.kind, scales, kPanel + o) : 0.0f;
    for (int i = 0; i < kGroup; i++) {
      if (nibbles(m.kind)) {
        const int nibble = b[i / 8 * 64 + o * 4 + i % 4] >> i / 4 % 2 * 4 & 15;
        const int fifth = five_bits(m.kind) ? b[256 + i / 4 * 8 + o / 2] >> (o % 2 * 4 + i % 4) & 1 : 0;
        out[i] = scale * float(nibble | fifth << 4) + min;
      } else {
        out[i] = (i < 16 ? scale : second) * float(int8_t(b[q8_offset(o, i)] ^ kQ8Zero)) + min;
      }
    }
  }
}

namespace {

// R rows of `Terms` integer rows each, by one panel: acc[R][16].
template <int R, int Terms, Kind kind>
void tile_of(const Matrix& m, const Acts& x, int row, const uint8_t* panel, float* acc) {
  if constexpr (kind < Kind::Q8) {
    using T = std::conditional_t<kind == Kind::F32, float, std::conditional_t<kind == Kind::F16, f16, bf16>>;
    tile_float<R>((const T*)panel, m.k, x.f32 + size_t(row) * x.k, acc);
  } else {
    tile_quantised<R, Terms, kind>(panel, m.k / kGroup, x, row, acc);
  }
}

using Tile = void (*)(const Matrix&, const Acts&, int, const uint8_t*, float*);
struct Tiles {
  const Tile* of_rows;  // [rows - 1]
  int most;             // rows
};
template <int Terms, Kind kind, int... R>
Tiles tiles_up_to(std::integer_sequence<int, R...>) {
  static constexpr Tile list[] = {tile_of<R + 1, Terms, kind>...};
  return {list, sizeof...(R)};
}
template <int Terms, Kind kind>
Tiles tiles_of() {
  return tiles_up_to<Terms, kind>(std::make_integer_sequence < int, kind<Kind::Q8 ? 6 : kTileRows>());
}

template <int Terms>
Tiles tiles_of(Kind kind) {
  switch (kind) {
    case Kind::F32: return tiles_of<1, Kind::F32>();
    case Kind::F16: return tiles_of<1, Kind::F16>();
    case Kind::BF16: return tiles_of<1, Kind::BF16>();
    case Kind::Q8: return tiles_of<Terms, Kind::Q8>();
    case Kind::Q8Half: return tiles_of<Terms, Kind::Q8Half>();
    case Kind::Q4: return tiles_of<Terms, Kind::Q4>();
    case Kind::Q4Wide: return tiles_of<Terms, Kind::Q4Wide>();
    case Kind::Q5: return tiles_of<Terms, Kind::Q5>();
    case Kind::Q5Wide: return tiles_of<Terms, Kind::Q5Wide>();
  }
  __builtin_unreachable();
}

// Rows row..end-1 of a panel, from acc[R][16].
inline void write(const Target& t, int row, int end, int col, int cols, const float* acc) {
  float* out = t.out + size_t(row) * t.ld + col;
  if (cols == kPanel && !t.bias) {
    for (; row < end; row++, out += t.ld, acc += kPanel)
      for (int c = 0; c < kPanel; c += W) {
        const VF v = load(acc + c);
        store(out + c, t.mode == Write::Add ? load(out + c) + v : v);
      }
    return;
  }
  for (; row < end; row++, out += t.ld, acc += kPanel)
    for (int c = 0; c < cols; c++) {
      const float v = t.bias ? acc[c] + t.bias[col + c] : acc[c];
      out[c] = t.mode == Write::Add ? out[c] + v : v;
    }
}

// What the tiles of one matrix do with these activations.
Tiles tiles_for(const Matrix& m, const Acts& x) {
  return m.fine && x.terms == 2 ? tiles_of<2>(m.kind) : tiles_of<1>(m.kind);
}

// f(first row, end, first panel) for all tiles: blocks of rows that stay in cache, for each all panels,
// `step` at a time, for each the rows balanced among tiles of at most `most`: 16 are 8 + 8, not 12 + 4.
template <class F>
void each_tile(int row_bytes, int most, int row0, int row1, int panel0, int panel1, int step, const F& f) {
  const int fit = kRowBlockBytes / row_bytes;
  const int block = fit < 2 * most ? 2 * most : fit / most * most;
  for (int b = row0; b < row1; b += block) {
    const int end = row1 < b + block ? row1 : b + block, count = (end - b + most - 1) / most;
    const int each = (end - b) / count, larger = (end - b) % count;
    for (int p = panel0; p < panel1; p += step)
      for (int i = 0, row = b; i < count; i++) {
        const int next = row + each + (i < larger);
        f(row, next, p);
        row = next;
      }
  }
}

int row_bytes(const Matrix& m, const Acts& x) { return m.k * (m.kind < Kind::Q8 ? 4 : m.fine ? x.terms : 1); }

}  // namespace

void gemm(const Matrix& m, const Acts& x, int row0, int row1, int panel0, int panel1, const Target& target) {
  const Tiles tiles = tiles_for(m, x);
  alignas(64) float acc[kTileRows * kPanel];
  each_tile(row_bytes(m, x), tiles.most, row0, row1, panel0, panel1, 1, [&](int row, int end, int p) {
    const int col = p * kPanel, cols = m.n - col < kPanel ? m.n - col : kPanel;
    tiles.of_rows[end - row - 1](m, x, row, m.panel(p), acc);
    write(target, row, end, col, cols, acc);
  });
}

// Two panels of each matrix are a group of what comes out, which is rounded before it leaves the cache.
void hidden(const Hidden& h, const Acts& x, int row0, int row1, int panel0, int panel1, const Acts& out) {
  static_assert(kGroup == 2 * kPanel);
  const Matrix* matrices[] = {h.up, h.gate};
  const Tiles tiles[] = {tiles_for(*h.up, x), tiles_for(h.gate ? *h.gate : *h.up, x)};
  const int most = std::min(tiles[0].most, tiles[1].most);
  alignas(64) float acc[2][2][kTileRows * kPanel], line[2][kGroup];
  each_tile(row_bytes(*h.up, x), most, row0, row1, panel0, panel1, 2, [&](int row, int end, int p) {
    for (int m = 0; m < (h.gate ? 2 : 1); m++)
      for (int i = 0; i < 2; i++)
        tiles[m].of_rows[end - row - 1](*matrices[m], x, row, matrices[m]->panel(p + i), acc[m][i]);
    const int col = p * kPanel, cols = std::min(h.up->n - col, kGroup);
    for (int r = 0; r < end - row; r++) {
      for (int m = 0; m < (h.gate ? 2 : 1); m++)
        for (int i = 0; i < 2; i++)
          std::memcpy(line[m] + i * kPanel, acc[m][i] + r * kPanel, sizeof(float) * kPanel);
      float *up = line[0], *gate = line[1];
      for (int c = 0; h.bias && c < cols; c++) up[c] += h.bias[col + c];
      if (!h.gate) {
        activate(h.act, up, kGroup, up);
      } else if (h.act == Act::Silu) {
        silu_mul(gate, up, kGroup, up);
      } else {
        activate(h.act, gate, kGroup, gate);
        mul(gate, up, kGroup, up);
      }
      if (out.f32)
        std::memcpy(const_cast<float*>(out.f32) + size_t(row + r) * out.k + col, up, sizeof(float) * cols);
      if (out.scale) quantise(up, out, row + r, col, col + kGroup);
    }
  });
}

}  // namespace PT_ISA
}  // namespace pt
