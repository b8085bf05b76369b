// Packed matrices: their layouts, packing, unpacking of single rows (embedding), and the product.
//
// Layout of one panel (16 outputs), along k:
//   F32, F16, BF16   [k][16]
//   F8, per group    [32][16], then 16 scales
//   Q4, Q5 per group [4][16 outputs][4 bytes]: byte j of step s holds k = 8s+j (low nibble) and 8s+4+j (high
//                    nibble); Q5: [8][16 outputs] times 4 bits, of k = 4s..4s+3; then 16 scales and 16 mins;
//                    Table4: then the 16 int8 that nibbles stand for, and 16 scales; Q6K: then [2][16
//                    outputs][4 bytes], two bits each of steps 4b..4b+3, and 32 scales
//   Q8, per group    [k / kQ8Step][16 outputs][kQ8Step] int8, then 16 scales; Q8Half: 16 of the second half
// Of quantised weights the groups of two panels lie in turns (Matrix::panel).
// Each output is summed over groups from the first to the last, by the same instructions for 1 row and for
// many.
#include <algorithm>
#include <cmath>

#include "micro.h"
#include "sources.h"
#include "tiles.h"

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
    default: return k / kGroup * group_bytes(kind) + k / kGroup / kBlock * head_bytes(kind);
  }
}

unsigned form(const Matrix& m) {
  if (m.kind < Kind::Q8) return kFloat;
  const unsigned finer = m.bits == 15 ? kFifteen : m.bits == 12 ? kTwelveForm : 0u;
  if (m.kind == Kind::Q6K) return kInt8 | kOffsets | finer;
  if (m.kind == Kind::Table4) return kInt8 | (kQ8Form & kOffsets) | finer;
  if (!nibbles(m.kind)) return kQ8Form | finer;
  return kInt8 | (m.k <= kWordsDepth ? kWordsForm : 0u) | finer;
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

size_t q8_offset(int o, int i) { return size_t(i / kQ8Step) * kQ8Step * kPanel + o * kQ8Step + i % kQ8Step; }

// Scale or min number i (16 of them, then the next 16) behind the integers of a group.
void write_scale(Kind kind, uint8_t* scales, int i, float value) {
  const f16 half = to_f16(value);
  half_scales(kind) ? std::memcpy(scales + i * 2, &half, 2) : std::memcpy(scales + i * 4, &value, 4);
}
float read_scale(Kind kind, const uint8_t* scales, int i) {
  return half_scales(kind) ? to_float(((const f16*)scales)[i]) : ((const float*)scales)[i];
}

// Small integers, and the units at the head of the block. Those of mins are turned, because they are taken
// away: min = -unit * integer.
void write_small(Kind kind, const Group& g, int o, uint8_t* head, uint8_t* scales) {
  scales[o] = g.small[0], scales[kPanel + o] = g.small[1];
  std::memcpy(head + o * 2, g.units[0], 2);
  if (kind == Kind::Q6K) return;
  const uint8_t turned[] = {g.units[1][0], uint8_t(g.units[1][1] ^ 0x80)};
  std::memcpy(head + (kPanel + o) * 2, turned, 2);
}

// What one output of a group has: its scale, that of its second half, its min.
struct Scales {
  float first, second, min;
};
Scales read_scales(Kind kind, const uint8_t* head, const uint8_t* scales, int o) {
  if (in_blocks(kind)) {
    const f16* units = (const f16*)head;
    const float unit = to_float(units[o]);
    if (kind == Kind::Q6K) {
      const int8_t* s = (const int8_t*)scales;
      return {unit * float(s[o]), unit * float(s[kPanel + o]), 0};
    }
    return {unit * float(scales[o]), 0, to_float(units[kPanel + o]) * float(scales[kPanel + o])};
  }
  const float scale = read_scale(kind, scales, o);
  if (symmetric(kind)) return {scale, scale, scale * (five_bits(kind) ? -16.0f : -8.0f)};
  const float other = one_scale(kind) ? 0 : read_scale(kind, scales, kPanel + o);
  return {scale, kind == Kind::Q8Half ? other : scale, nibbles(kind) ? other : 0};
}

uint32_t load4(const int8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

void write_group(Kind kind, const Group& g, int o, uint8_t* head, uint8_t* out) {
  if (kind == Kind::F8) {
    for (int i = 0; i < kGroup; i++) out[i * kPanel + o] = uint8_t(g.q[i]);
  } else if (nibbles(kind) || kind == Kind::Table4 || kind == Kind::Q6K) {
    for (int s = 0; s < 8; s += 2) {  // four elements at a time, one in each byte
      const uint32_t first = load4(g.q + 4 * s), second = load4(g.q + 4 * s + 4);
      const uint32_t packed = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
      std::memcpy(out + s * 32 + o * 4, &packed, 4);
      for (int i = 0; kind == Kind::Q6K && i < 2; i++) {
        uint8_t* high = out + 256 + s / 4 * 64 + o * 4;
        for (int j = 0; j < 4; j++) high[j] |= uint8_t(g.q[4 * (s + i) + j] >> 4 << (s + i) % 4 * 2);
      }
      if (!five_bits(kind)) continue;
      for (int i = 0; i < 2; i++) {  // the multiplication brings the four bits together
        const uint32_t bits = ((i ? second : first) >> 4 & 0x01010101) * 0x01020408u >> 24 & 15;
        out[256 + (s + i) * 8 + o / 2] |= uint8_t(bits << o % 2 * 4);
      }
    }
    if (kind == Kind::Table4)
      for (int i = 0; i < 16; i++) out[256 + i] = uint8_t(g.table[i]) ^ kQ8Zero;
  } else {
    uint8_t q[kGroup];
    for (int i = 0; i < kGroup; i++) q[i] = uint8_t(g.q[i]) ^ kQ8Zero;
    for (int i = 0; i < kGroup; i += kQ8Step) std::memcpy(out + q8_offset(o, i), q + i, kQ8Step);
  }
  uint8_t* scales = out + integer_bytes(kind);
  if (in_blocks(kind)) return write_small(kind, g, o, head, scales);
  write_scale(kind, scales, o, g.scale[0]);
  if (nibbles(kind) && !symmetric(kind)) write_scale(kind, scales, kPanel + o, g.min);
  if (kind == Kind::Q8Half) write_scale(kind, scales, kPanel + o, g.scale[1]);
}

void pack_quantised(Source source, const uint8_t* src, int n, int k, int p0, int p1, uint8_t* dst) {
  const SourceFormat f = kSources[int(source)];
  const int groups = k / kGroup, per_block = f.values / kGroup;
  const size_t row_bytes = size_t(k / f.values) * f.bytes;
  for (int p = p0; p < p1; p++)
    for (int g = 0; g < groups; g++) {
      uint8_t *both = dst + (p & ~1) * panel_bytes(f.kind, k), *head = both + head_at(f.kind, g, p & 1);
      uint8_t* out = both + group_at(f.kind, g, p & 1);
      if (f.kind == Kind::F8) out = dst + p * panel_bytes(f.kind, k) + g * group_bytes(f.kind);
      if (in_blocks(f.kind) && g % kBlock == 0) std::memset(head, 0, head_bytes(f.kind));
      std::memset(out, 0, group_bytes(f.kind));
      if (f.kind == Kind::Q8 || f.kind == Kind::Q8Half) std::memset(out, kQ8Zero, 512);
      for (int o = 0; o < kPanel && p * kPanel + o < n; o++) {
        const uint8_t* block = src + (p * kPanel + o) * row_bytes + size_t(g / per_block) * f.bytes;
        Group group{};
        read_group(source, block, g % per_block, group);
        write_group(f.kind, group, o, head, out);
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
  const int o = row % kPanel, which = row / kPanel & 1;
  const uint8_t *panel = m.panel(row / kPanel), *both = panel - which * m.panel_bytes;
  if (m.kind == Kind::F32) return unpack_float((const float*)panel, o, m.k, out);
  if (m.kind == Kind::F16) return unpack_float((const f16*)panel, o, m.k, out);
  if (m.kind == Kind::BF16) return unpack_float((const bf16*)panel, o, m.k, out);
  for (int g = 0; g < m.k / kGroup; g++, out += kGroup) {
    const uint8_t* b =
        m.kind == Kind::F8 ? panel + g * group_bytes(m.kind) : both + group_at(m.kind, g, which);
    const auto [scale, second, min] =
        read_scales(m.kind, both + head_at(m.kind, g, which), b + integer_bytes(m.kind), o);
    for (int i = 0; i < kGroup; i++) {
      const int nibble = b[i / 8 * 64 + o * 4 + i % 4] >> i / 4 % 2 * 4 & 15;
      if (nibbles(m.kind)) {
        const int fifth = five_bits(m.kind) ? b[256 + i / 4 * 8 + o / 2] >> (o % 2 * 4 + i % 4) & 1 : 0;
        out[i] = scale * float(nibble | fifth << 4) + min;
      } else if (m.kind == Kind::Q6K) {
        const int high = b[256 + i / 16 * 64 + o * 4 + i % 4] >> i / 4 % 4 * 2 & 3;
        out[i] = (i < 16 ? scale : second) * float((nibble | high << 4) - 32);
      } else if (m.kind == Kind::Table4) {
        out[i] = scale * float(int8_t(b[256 + nibble] ^ kQ8Zero));
      } else if (m.kind == Kind::F8) {
        out[i] = scale * to_float(f8{b[i * kPanel + o]});
      } else {
        out[i] = (i < 16 ? scale : second) * float(int8_t(b[q8_offset(o, i)] ^ kQ8Zero)) + min;
      }
    }
  }
}

namespace {

// The sums of squares of 16 outputs in one part of a group, as integers.
template <Kind kind>
void squares_of(const uint8_t* b, int s0, int s1, float* out) {
  int32_t lanes[4 * kPanel] = {};
  for (int s = s0; s < s1; s++)
    for (int i = 0; i < 4 * kPanel; i++) {
      int q;
      if constexpr (kind == Kind::Q6K)
        q = ((b[s / 2 * 64 + i] >> s % 2 * 4 & 15) | (b[256 + s / 4 * 64 + i] >> s % 4 * 2 & 3) << 4) - 32;
      else
        q = int8_t(b[s * 64 + i] ^ kQ8Zero);
      lanes[i] += q * q;
    }
  for (int o = 0; o < kPanel; o++) {
    int32_t sum = 0;
    for (int j = 0; j < 4; j++)
      sum += lanes[kQ8Step == 4 || kind == Kind::Q6K ? o * 4 + j : j / 2 * 32 + o * 2 + j % 2];
    out[o] = float(sum);
  }
}

template <Kind kind>
void lengths_of(const Matrix& m, int p, float* out) {
  const int parts = two_scales(kind) ? 2 : 1;
  const uint8_t* both = m.panel(p & ~1);
  double all[kPanel] = {};  // squares of small scales are nothing as floats
  for (int g = 0; g < m.k / kGroup; g++) {
    const uint8_t *b = both + group_at(kind, g, p & 1), *head = both + head_at(kind, g, p & 1);
    for (int part = 0; part < parts; part++) {
      float squares[kPanel];
      squares_of<kind>(b, part * 8 / parts, (part + 1) * 8 / parts, squares);
      for (int o = 0; o < kPanel; o++) {
        const Scales s = read_scales(kind, head, b + integer_bytes(kind), o);
        const float scale = part ? s.second : s.first;
        all[o] += double(scale) * scale * squares[o];
      }
    }
  }
  for (int o = 0; o < kPanel; o++) out[o] = float(std::sqrt(all[o]));
}

}  // namespace

void lengths(const Matrix& m, int panel0, int panel1, float* out) {
  for (int p = panel0; p < panel1; p++, out += kPanel) switch (m.kind) {
      case Kind::Q8: lengths_of<Kind::Q8>(m, p, out); break;
      case Kind::Q8Half: lengths_of<Kind::Q8Half>(m, p, out); break;
      case Kind::Q6K: lengths_of<Kind::Q6K>(m, p, out); break;
      default: __builtin_unreachable();
    }
}

namespace {

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

// What the tiles of one matrix do with these activations: several matrices may share some that are finer than
// one of them asks for.
const RowsTile* tiles_for(const Matrix& m, const Acts& x) {
  if (m.kind < Kind::Q8 || m.bits == 8 || x.bits == 8) return tiles_of<8>(m.kind);
  if constexpr (kTwelveForm == kTwelve)
    if (x.bits == 12) return tiles_of<12>(m.kind);
  return tiles_of<15>(m.kind);
}

// Rows from .. end - 1 of a tile, of which those before `row` were another's already.
struct TileRange {
  int from, row, end;
  int rows() const { return end - from; }
};

// f(rows, first panel) for all tiles: blocks of rows that stay in cache, for each the panels in pairs, for
// each pair the rows balanced among tiles: 8 are 4 + 4, not 6 + 2. Tall tiles have all their rows, some of
// them made twice, or are left to low ones.
template <class F>
void each_tile(int row_bytes, bool tall, int row0, int row1, int panel0, int panel1, const F& f) {
  const int largest = tall ? kTallRows : kTileRows, fit = kRowBlockBytes / row_bytes;
  const int block = std::max(fit / largest * largest, tall ? kWordsFrom : 2 * kTileRows);
  for (int b = row0; b < row1; b += block) {
    const int end = row1 < b + block ? row1 : b + block;
    int low = end - b;  // rows of low tiles, behind those of tall ones
    if (tall && low >= kWordsFrom) low = low % kTallRows <= kTileRows ? low % kTallRows : 0;
    const int middle = end - low;
    const int count = (low + kTileRows - 1) / kTileRows;
    const int each = count ? low / count : 0, larger = count ? low % count : 0;
    for (int p = panel0 & ~1; p < panel1; p += 2) {
      for (int row = b; row < middle;) {
        const int next = std::min(row + kTallRows, middle);
        f(TileRange{next - kTallRows, row, next}, p);
        row = next;
      }
      for (int i = 0, row = middle; i < count; i++) {
        const int next = row + each + (i < larger);
        f(TileRange{row, row, next}, p);
        row = next;
      }
    }
  }
}

// Words are of all bits that activations have.
bool tall(const Matrix& m, const Acts& x) {
  return x.words && nibbles(m.kind) && (m.bits != 8 || x.bits == 8);
}

// What tiles leave in this thread.
void end_all_tiles() {
#if defined(PT_AMX)
  end_tiles<8>(), end_tiles<12>(), end_tiles<15>();
#endif
}

int row_bytes(const Matrix& m, const Acts& x) { return m.k * (m.kind < Kind::Q8 ? 4 : x.terms()); }

}  // namespace

void gemm(const Matrix& m, const Acts& x, int row0, int row1, int panel0, int panel1, const Target& target) {
  const RowsTile* tiles = tiles_for(m, x);
  alignas(64) float acc[2][kTallRows * kPanel];
  each_tile(row_bytes(m, x), tall(m, x), row0, row1, panel0, panel1, [&](TileRange t, int pair) {
    tiles[t.rows() - 1](m, 0, x, t.from, pair, acc[0]);
    for (int p = std::max(pair, panel0); p < std::min(pair + 2, panel1); p++) {
      const int col = p * kPanel, cols = m.n - col < kPanel ? m.n - col : kPanel;
      write(target, t.row, t.end, col, cols, acc[p - pair] + (t.row - t.from) * kPanel);
    }
  });
  end_all_tiles();
}

// Two panels of each matrix are a group of what comes out, which is rounded before it leaves the cache.
void hidden(const Hidden& h, const Acts& x, int row0, int row1, int panel0, int panel1, const Acts& out) {
  static_assert(kGroup == 2 * kPanel);
  const Matrix* matrices[] = {h.up, h.gate};
  const RowsTile* tiles[] = {tiles_for(*h.up, x), tiles_for(h.gate ? *h.gate : *h.up, x)};
  const bool both_tall = tall(*h.up, x) && (!h.gate || tall(*h.gate, x));
  alignas(64) float acc[2][kTallRows * kPanel], lines[2][kTallRows * kGroup];
  each_tile(row_bytes(*h.up, x), both_tall, row0, row1, panel0, panel1, [&](TileRange t, int p) {
    const int row = t.row, end = t.end, rows = end - row, col = p * kPanel;
    const int cols = std::min(h.up->n - col, kGroup), all = rows * kGroup;
    for (int m = 0; m < 2; m++)  // what another thread may have written, while the products are made
      for (int r = row; h.more[m] && r < end; r++)
        if (const float* more = h.more[m][r])
          __builtin_prefetch(more + col), __builtin_prefetch(more + col + kPanel);
    for (int m = 0; m < (h.gate ? 2 : 1); m++) {
      tiles[m][t.rows() - 1](*matrices[m], m, x, t.from, p, acc[0]);
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++)
          std::memcpy(lines[m] + r * kGroup + i * kPanel, acc[i] + (row - t.from + r) * kPanel,
                      sizeof(float) * kPanel);
    }
    float *up = lines[0], *gate = lines[1];
    for (int m = 0; m < 2; m++)
      for (int r = 0; h.more[m] && r < rows; r++)
        if (const float* more = h.more[m][row + r]) {
          float* line = lines[m] + r * kGroup;
          if (cols == kGroup)
            add(line, more + col, kGroup, line);
          else
            for (int c = 0; c < cols; c++) line[c] += more[col + c];
        }
    for (int r = 0; h.bias && r < rows; r++)
      for (int c = 0; c < cols; c++) up[r * kGroup + c] += h.bias[col + c];
    for (int r = 0; h.gate_bias && r < rows; r++)
      for (int c = 0; c < cols; c++) gate[r * kGroup + c] += h.gate_bias[col + c];
    if (!h.gate) {
      activate(h.act, up, all, up);
    } else if (h.act == Act::ClampedSwiglu) {
      clamped_swiglu(gate, up, all, up);
    } else if (h.act == Act::Silu) {
      silu_mul(gate, up, all, up);
    } else {
      activate(h.act, gate, all, gate);
      mul(gate, up, all, up);
    }
    for (int r = 0; out.f32 && r < rows; r++)
      std::memcpy(const_cast<float*>(out.f32) + size_t(row + r) * out.k + col, up + r * kGroup,
                  sizeof(float) * cols);
    if (out.scale) quantise_group(up, out, row, rows, p / 2);
  });
  end_all_tiles();
}

}  // namespace PT_ISA
}  // namespace pt
